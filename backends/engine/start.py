"""Puts an engine together: device, threads, dtype, ops and cache size are decided here, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import Struct

from surefoot.kernels.reference import ReferenceOps

from .backend import EngineBackend, EngineParts
from .limits import available_memory_bytes, cpu_count
from .prepare import load_model
from .settings import EngineSettings

Progress = Callable[[str], None]

AUTO_CACHE_SHARE = 0.25
"""How much of the memory that is still available the cache may take if nobody says."""


class EngineOptions(Struct, frozen=True, kw_only=True):
    """An operator's choices, None for `auto`. `dtype` is torch's name for it; `cache_dir` holds weights."""

    model: Path
    model_id: str
    cache_dir: Path
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    cache_bytes: int | None = None
    max_model_len: int | None = None
    max_sequences: int = 64
    max_batched_tokens: int = 512
    max_prefill_chunk: int | None = None
    max_waiting: int = 1024
    watchdog_s: float = 120.0


def make_backend(options: EngineOptions, progress: Progress) -> EngineBackend:
    """The backend, not yet started; `progress` gets a sentence before each slow stage."""
    return EngineBackend(options.model_id, lambda: load_parts(options, progress), engine_settings(options))


def engine_settings(options: EngineOptions) -> EngineSettings:
    """The engine's limits. Without a cache size it gets a share of the memory that is available now."""
    return EngineSettings(
        cache_bytes=options.cache_bytes or int(available_memory_bytes() * AUTO_CACHE_SHARE),
        max_model_len=options.max_model_len,
        max_sequences=options.max_sequences,
        max_batched_tokens=options.max_batched_tokens,
        max_prefill_chunk=options.max_prefill_chunk,
        max_waiting=options.max_waiting,
        watchdog_s=options.watchdog_s,
    )


def load_parts(options: EngineOptions, progress: Progress) -> EngineParts:
    """Everything slow: prepare the weights if that has not been done, and load them."""
    torch.set_num_threads(options.threads or cpu_count())
    ops = ReferenceOps()
    loaded = load_model(
        options.model,
        dtype=getattr(torch, options.dtype or "bfloat16"),
        ops=ops,
        cache_dir=options.cache_dir,
        progress=progress,
        max_model_len=options.max_model_len,
    )
    return EngineParts(loaded=loaded, ops=ops, cache_dtype=torch.bfloat16)
