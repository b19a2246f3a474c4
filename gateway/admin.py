"""Who may use the admin endpoints: whoever has the key whose hash the settings name."""

from __future__ import annotations

import hmac
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from .errors import InvalidKey
from .tenants import bearer_key, hash_key


class AdminKey:
    """The one key of operators. Without a hash (None) the endpoints are closed to everybody.

    `label` names its holder in the audit log.
    """

    def __init__(self, key_hash: str | None, label: str = "admin") -> None:
        self._key_hash = key_hash
        self._label = label

    @property
    def exists(self) -> bool:
        """Whether there is such a key."""
        return self._key_hash is not None

    def opens(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header has the key."""
        try:
            self.check(authorization)
        except InvalidKey:
            return False
        return True

    def check(self, authorization: str | None) -> str:
        """The label of the key in an `Authorization` header. Raises `InvalidKey`."""
        if self._key_hash is None:
            raise InvalidKey("This server has no admin key: the setting 'admin_key_hash' gives it one.")
        if not hmac.compare_digest(hash_key(bearer_key(authorization)), self._key_hash):
            raise InvalidKey("Incorrect admin key.")
        return self._label

    def guard(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        """For Litestar: let only the key's holder pass, and note their label as `state["admin"]`."""
        connection.scope["state"]["admin"] = self.check(connection.headers.get("authorization"))
