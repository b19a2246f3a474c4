"""What is shown while a run goes on: one line that renews itself on a terminal, else a line now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import TextIO

from .progress import Progress
from .settings import BenchSettings

TERMINAL_PERIOD_S = 0.5
PLAIN_PERIOD_S = 5.0
ERASE_LINE = "\r\x1b[2K"


class ProgressView:
    """Shows a run's progress on `out`; nothing if `quiet`."""

    def __init__(self, out: TextIO, settings: BenchSettings, quiet: bool = False) -> None:
        self._out = out
        self._settings = settings
        self._quiet = quiet

    @asynccontextmanager
    async def __call__(self, progress: Progress) -> AsyncIterator[None]:
        """Show `progress` for as long as this is entered."""
        if self._quiet:
            yield
            return
        task = asyncio.create_task(self._show(progress))
        try:
            yield
        finally:
            task.cancel()
            if self._out.isatty():
                self._write(ERASE_LINE)

    async def _show(self, progress: Progress) -> None:
        terminal = self._out.isatty()
        before_chunks, before_s = 0, 0.0
        while True:
            await asyncio.sleep(TERMINAL_PERIOD_S if terminal else PLAIN_PERIOD_S)
            chunks, now_s = progress.num_chunks, progress.elapsed_s
            line = progress_line(progress, self._settings, (chunks - before_chunks) / (now_s - before_s))
            self._write(f"{ERASE_LINE}{line}" if terminal else f"{line}\n")
            before_chunks, before_s = chunks, now_s

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def progress_line(progress: Progress, settings: BenchSettings, chunks_per_s: float) -> str:
    """Running, done, failed, speed since the last line, and the recent TTFT."""
    wanted = f"/{settings.num_requests}" if settings.num_requests is not None else ""
    until = f"/{settings.duration_s:g}" if settings.duration_s is not None else ""
    parts = [
        f"{progress.elapsed_s:.0f}{until} s",
        f"{progress.num_running} running",
        f"{progress.num_ok}{wanted} done",
        *([f"{progress.num_failed} failed"] if progress.num_failed else []),
        f"{chunks_per_s:.1f} chunks/s",
    ]
    if progress.recent_ttft_s:
        parts.append(f"TTFT p50 {median(progress.recent_ttft_s) * 1000:.0f} ms")
    return "  ".join(parts)
