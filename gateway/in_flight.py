"""Which requests are being served now, by the ids that backends know them under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .record import RequestRecord


class InFlight:
    """The records of requests that have been admitted and have not ended."""

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}

    @contextmanager
    def holding(self, backend_ids: Sequence[str], record: RequestRecord) -> Iterator[None]:
        """Know a request within the block, by the id of each of its prompts."""
        self._records.update(dict.fromkeys(backend_ids, record))
        try:
            yield
        finally:
            for each in backend_ids:
                del self._records[each]

    def find(self, backend_id: str) -> RequestRecord | None:
        """The record of a backend's request; None if it is not one of ours, or has ended."""
        return self._records.get(backend_id)
