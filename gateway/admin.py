"""The operators' key: whoever has the key whose hash the settings name."""

from __future__ import annotations

import hmac

from .errors import InvalidKey
from .tenants import bearer_key, hash_key


class AdminKey:
    """The one key of operators. None has it without a hash (None).

    `label` names its holder in the audit log.
    """

    def __init__(self, key_hash: str | None, label: str = "admin") -> None:
        self._key_hash = key_hash
        self.label = label

    @property
    def exists(self) -> bool:
        """Whether there is such a key."""
        return self._key_hash is not None

    def opens(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header has the key."""
        if self._key_hash is None:
            return False
        try:
            return hmac.compare_digest(hash_key(bearer_key(authorization)), self._key_hash)
        except InvalidKey:
            return False
