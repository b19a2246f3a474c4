"""What the HTTP side is started with."""

from __future__ import annotations

from msgspec import Struct

from .sla import Classes


class HttpSettings(Struct, frozen=True, kw_only=True):
    """Limits of the HTTP side, and its SLA classes.

    A stream gets a comment line after `keep_alive_s` seconds of silence.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    keep_alive_s: float = 10.0
    classes: Classes = Classes()
