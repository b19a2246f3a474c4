"""Which requests may share prefix blocks: those of one salt, and each salt belongs to one tenant.

A salt is a keyed hash of the tenant (as its key proved it) and of the request's `prompt_cache_key`. The
secret is drawn anew by each process and never leaves it, so no client can aim at another tenant's salt.
"""

from __future__ import annotations

import hashlib
import secrets


class Salts:
    """Makes salts from one secret."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def salt(self, tenant_id: str, cache_key: str | None) -> str:
        """Requests of one tenant share if their `prompt_cache_key` is the same, or neither has one."""
        # A tenant's id has no line break, so no key can make two tenants' texts the same.
        group = "" if cache_key is None else "\n" + cache_key
        return hashlib.blake2b((tenant_id + group).encode(), digest_size=16, key=self._secret).hexdigest()
