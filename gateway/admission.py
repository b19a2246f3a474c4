"""A request's time at the backend: counted against its tenant's limits, and known by its id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from surefoot.backends.types import GenerateRequest

from .in_flight import InFlight
from .observer import estimate_tokens
from .rate_limits import Quotas
from .record import RequestRecord
from .tenants import Tenant


class Admission:
    """Lets requests in."""

    def __init__(self, quotas: Quotas, in_flight: InFlight) -> None:
        self._quotas = quotas
        self._in_flight = in_flight

    @contextmanager
    def of(
        self, tenant: Tenant, requests: Sequence[GenerateRequest], record: RequestRecord
    ) -> Iterator[None]:
        """Hold one HTTP request's requests within the block. Raises `TooManyRequests`."""
        num_estimated = sum(estimate_tokens(each.prompt) for each in requests)
        quota = self._quotas.of(tenant)
        with (
            quota.admitted(num_estimated, lambda: record.num_tokens),
            self._in_flight.holding([each.request_id for each in requests], record),
        ):
            yield
