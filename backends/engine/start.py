"""Puts an engine together: threads, weights, ops and cache size are decided here, once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from msgspec import Struct
from msgspec.structs import replace

from surefoot.kernels.base import Ops
from surefoot.kernels.select import select_ops

from .backend import EngineBackend, EngineParts
from .device import CPU, device_name
from .engine import Engine
from .first_come import FirstComeScheduler
from .limits import available_memory_bytes, cpu_count
from .prepare import LoadedModel, load_model
from .process_memory import give_back_freed_memory, let_go_of_library_pages
from .promise_scheduler import PromiseScheduler
from .scheduler import MakeScheduler
from .settings import EngineSettings
from .speculation.vocabulary import check_vocabularies
from .weight_mode import WeightMode

Progress = Callable[[str], None]

SLOW_START_S = 10.0
"""A start that takes longer says what it was that did."""

SCHEDULERS: Mapping[str, MakeScheduler] = {
    "promise": PromiseScheduler,
    "first-come": FirstComeScheduler,
}
"""By the name that a setting has."""

AUTO_CACHE_SHARE = 0.25
"""How much of the memory that is still available the cache may take if nobody says."""


class EngineOptions(Struct, frozen=True, kw_only=True):
    """An operator's choices, None for `auto`; a GPU as `device` is one that is there. `cache_dir` holds
    prepared weights and compiled kernels. `settings` may leave the cache's size open on a CPU too.
    `batch_invariant` is for GPUs: a CPU's matrix products are so anyway.

    A `draft_model` (None: there is none) is kept in the same form of weights.
    """

    model: Path
    model_id: str
    cache_dir: Path
    settings: EngineSettings = EngineSettings(cache_bytes=None)
    device: torch.device = CPU
    weights: WeightMode = WeightMode.NATIVE
    batch_invariant: bool = False
    threads: int | None = None
    scheduler: Literal["promise", "first-come"] = "promise"
    draft_model: Path | None = None


def make_backend(options: EngineOptions, progress: Progress) -> EngineBackend:
    """The backend, not yet started; `progress` gets a sentence before each slow stage."""
    return EngineBackend(
        options.model_id,
        lambda: load_parts(options, progress),
        engine_settings(options),
        make_engine=partial(Engine, make_scheduler=SCHEDULERS[options.scheduler]),
    )


def engine_settings(options: EngineOptions) -> EngineSettings:
    """The engine's limits. Without a cache size it gets a share of the memory that is available now; a GPU's
    is measured when the weights are there.
    """
    if options.settings.cache_bytes is not None or options.device.type != "cpu":
        return options.settings
    return replace(options.settings, cache_bytes=int(available_memory_bytes() * AUTO_CACHE_SHARE))


def load_parts(options: EngineOptions, progress: Progress) -> EngineParts:
    """Everything slow: prepare the weights if that has not been done, and load them.

    Raises `ModelError`, also where the vocabulary of a model that drafts is another one.
    """
    begun_s = time.monotonic()
    num_threads = options.threads or cpu_count()
    ops = select_ops(
        options.device,
        dtype=torch.float32 if options.weights is WeightMode.FLOAT32 else torch.bfloat16,
        batch_invariant=options.batch_invariant,
        cache_dir=options.cache_dir,
        num_threads=num_threads,
        progress=_compile_progress(progress),
    )
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    where = threads if options.device == CPU else device_name(options.device)
    progress(f"Computing with the op set {ops.name} on {where}.")
    if options.device != CPU:
        progress("Kernels are compiled as they are met and kept: a first start takes longer than others.")
    compiled_s = time.monotonic()
    loaded = _load(options.model, options, ops, progress)
    draft = None
    if options.draft_model is not None:
        draft = _load(options.draft_model, options, ops, progress)
        check_vocabularies(loaded.tokenizer, draft.tokenizer, options.model.name, options.draft_model.name)
    give_back_freed_memory()
    let_go_of_library_pages()
    loaded_s = time.monotonic()
    if loaded_s - begun_s > SLOW_START_S:
        progress(
            f"Kernels took {compiled_s - begun_s:.0f} s and weights {loaded_s - compiled_s:.0f} s; later"
            " starts find both done unless the model, its form, the processor or this program changes."
        )
    # What is left to torch is small; its threads would only take the cores from those of the kernels.
    torch.set_num_threads(1)
    return EngineParts(
        loaded=loaded,
        ops=ops,
        cache_dtype=torch.bfloat16,
        cost_file=cost_file(options),
        draft=draft,
    )


def _load(path: Path, options: EngineOptions, ops: Ops, progress: Progress) -> LoadedModel:
    return load_model(
        path,
        mode=options.weights,
        ops=ops,
        cache_dir=options.cache_dir,
        progress=progress,
        device=options.device,
        max_model_len=options.settings.max_model_len,
    )


def cost_file(options: EngineOptions) -> Path:
    """Where the cost of a model's steps on this machine is kept, beside the prepared weights."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", options.model_id)
    where = options.threads or cpu_count() if options.device == CPU else options.device.type
    products = "-batch-invariant" if options.batch_invariant else ""
    return options.cache_dir / f"step-cost-{name}-{options.weights}-{where}{products}.json"


def _compile_progress(progress: Progress) -> Callable[[str, int, int], None]:
    """A sentence per second while kernels are compiled; loading them again is too quick for one."""
    last_s = time.monotonic()

    def report(kernel: str, num_done: int, num_kernels: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > 1.0:
            progress(f"Compiling kernels, which is done once: {num_done} of {num_kernels}.")
            last_s = time.monotonic()

    return report
