"""Which backend serves a model."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.backends.base import Backend
from surefoot.backends.errors import NotReady, UnknownModel
from surefoot.backends.types import BackendState, ModelCard

from .errors import shortened
from .tenants import Tenant


class Router:
    """Knows the backends by the models they name."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def models(self, tenant: Tenant) -> list[ModelCard]:
        """The models that a tenant may use."""
        return [card for backend in self._backends for card in backend.models if tenant.may_use(card.id)]

    def model(self, model_id: str, tenant: Tenant) -> ModelCard:
        """One model. Raises `UnknownModel`, also for one that the tenant may not use."""
        for card in self.models(tenant):
            if card.id == model_id:
                return card
        raise UnknownModel(f"The model '{shortened(model_id)}' does not exist, or you have no access to it.")

    def backend(self, model_id: str, tenant: Tenant) -> Backend:
        """A backend that can take requests for a model. Raises `UnknownModel` or `NotReady`."""
        loading = [b for b in self._backends if not b.models and b.status.state is not BackendState.READY]
        if loading:
            raise NotReady(f"The server is not ready: {loading[0].status.detail}")
        card = self.model(model_id, tenant)
        backend = next(b for b in self._backends if card in b.models)
        if backend.status.state is not BackendState.READY:
            raise NotReady(f"The model '{model_id}' is not ready: {backend.status.detail}")
        return backend
