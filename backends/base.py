"""The one interface that the gateway knows: messages in, events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from .types import BackendStats, BackendStatus, Event, GenerateRequest, ModelCard, SchedulerView


class Backend(Protocol):
    """Something that serves models.

    Life: `await start()` once, then any number of concurrent `generate`, then `await stop()`.
    """

    @property
    def models(self) -> Sequence[ModelCard]:
        """The models served here."""

    @property
    def status(self) -> BackendStatus:
        """Whether requests can be taken now."""

    @property
    def stats(self) -> BackendStats:
        """A snapshot for metrics; cheap, callable from the event loop at any time."""

    @property
    def scheduler(self) -> SchedulerView:
        """Who waits and who runs, as of the last step; cheap, callable from the event loop at any time."""

    def forget_outputs(self, flow: str) -> None:
        """Drop what was kept of a flow's earlier outputs to draft from; no later step uses it."""

    async def start(self) -> None:
        """Begin to make the backend ready; returns when it is, raises if it cannot be."""

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones go on for up to `drain_s`, end them, release everything."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request: `Started`, then `PromptEcho` and `Chunk`s, then `Finished`.

        An async generator. Closing it (`aclose`) or cancelling its consumer aborts the request: its cache
        blocks are free after the engine's next step. Errors are raised as `BackendError`; those of the
        request itself before `Started`.
        """
