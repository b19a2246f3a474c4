"""What the HTTP side is started with."""

from __future__ import annotations

from msgspec import Struct

from .sla import Classes


class HttpSettings(Struct, frozen=True, kw_only=True):
    """Limits of the HTTP side, and its SLA classes.

    A stream gets a comment line after `keep_alive_s` seconds of silence. `admin_key_hash` has the form of
    `tenants.hash_key`; None means that there is no operator's key.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    keep_alive_s: float = 10.0
    classes: Classes = Classes()
    admin_key_hash: str | None = None
