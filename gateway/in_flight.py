"""Which requests are being served now, by the ids that backends know them under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .record import RequestRecord


class InFlight:
    """The records of requests that have been admitted and have not ended."""

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}

    @contextmanager
    def holding(self, completion_id: str, record: RequestRecord) -> Iterator[None]:
        """Know a request within the block."""
        self._records[completion_id] = record
        try:
            yield
        finally:
            del self._records[completion_id]

    def find(self, backend_request_id: str) -> RequestRecord | None:
        """The record behind a backend's request (see `backend_request_id`)."""
        return self._records.get(backend_request_id.rpartition("-")[0])


def backend_request_id(completion_id: str, prompt: int) -> str:
    """What a backend calls one prompt of a request. Not the client's request id, which it may use twice."""
    return f"{completion_id}-{prompt}"
