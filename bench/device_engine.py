"""End to end: a random model served by the whole engine, beside the least that a step must read."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from msgspec.structs import replace

from surefoot.backends.engine.engine import Engine, EngineCounters
from surefoot.backends.engine.prepare import LoadedModel
from surefoot.backends.engine.sequence import Sequence
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.engine.warm_up import Shape as WarmUpShape
from surefoot.backends.engine.warm_up import warm_up_requests
from surefoot.backends.types import ServingPlan, SpeculationPlan
from surefoot.kernels.base import Ops
from surefoot.kernels.layout import BLOCK_TOKENS

from .device_kernels import copy_rate
from .device_loads import MAX_DRAFT, EngineLoad
from .device_model import random_model
from .device_rows import Timing
from .device_setup import Setup
from .device_transformers import seconds_per_token

ACCEPTANCE = (0.8,)
"""Every draft token is right with this probability, if those before it are."""

ROUNDS = 3
"""Answers are timed so often, the best counts: sizes of steps that are met late are captured on the way."""

LEAST_SHARE = 0.8
"""Of the rate at which a step's bytes can be read: a token may take 1.25 times as long."""


def time_engine(setup: Setup) -> Iterator[Timing]:
    """The engine without drafts."""
    yield from _time(setup, "engine", None)


def time_drafts(setup: Setup) -> Iterator[Timing]:
    """The engine with drafts that are right at a given rate."""
    yield from _time(setup, "engine with drafts", ACCEPTANCE)


def time_transformers(setup: Setup) -> Iterator[Timing]:
    """`generate` of transformers."""
    load = setup.load
    sizes = load.batches, load.num_prompt_tokens, load.num_output_tokens
    rate = copy_rate(setup)
    for batch, seconds in seconds_per_token(load.config, setup.device, load.dtype, *sizes):
        yield _timing(load, "transformers", batch, seconds, rate)


def token_name(who: str, batch: int) -> str:
    """Of a row."""
    return f"{who} x {batch}, token to token"


def _time(setup: Setup, who: str, rates: tuple[float, ...] | None) -> Iterator[Timing]:
    load, rate = setup.load, copy_rate(setup)
    loaded = random_model(load.config, setup.ops(), setup.device, load.dtype)
    engine = _engine(loaded, setup.ops(), setup.device, load, rates)
    for batch in load.batches:
        seconds = min(_serve(engine, load, batch, drafts=rates is not None) for _ in range(ROUNDS))
        yield _timing(load, who, batch, seconds, rate, None if rates else LEAST_SHARE)


def _timing(
    load: EngineLoad, who: str, batch: int, seconds: float, rate: float, least: float | None = None
) -> Timing:
    """A share is that of the rate at which a step without drafts could be read."""
    return Timing(
        name=token_name(who, batch),
        seconds=seconds,
        amount=load.step_bytes(batch),
        unit="B",
        baseline=rate,
        least=least,
    )


def _engine(
    loaded: LoadedModel, ops: Ops, device: torch.device, load: EngineLoad, rates: tuple[float, ...] | None
) -> Engine:
    """As `surefoot serve` builds it: on a GPU the cache is what a profiling pass leaves."""
    settings = EngineSettings(
        cache_bytes=None if device.type == "cuda" else 16 << 20,
        max_model_len=load.max_model_len,
        max_sequences=max(load.batches),
        # Prompts are soon through, and then all decode for most of their answers, drafts or not.
        max_batched_tokens=load.max_batched_tokens,
        headroom=0.0,
        prefix_cache=False,
        speculation=SpeculationSettings(max_draft=MAX_DRAFT, synthetic_acceptance=rates),
    )
    engine = Engine(
        loaded,
        ops,
        settings,
        cache_dtype=load.dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
    )
    engine.warm_up()
    return engine


def _serve(engine: Engine, load: EngineLoad, batch: int, *, drafts: bool) -> float:
    """Seconds per token of a sequence while all of a batch decode and nothing else runs."""
    shape = WarmUpShape(batch, load.num_prompt_tokens, load.num_output_tokens)
    plan = SpeculationPlan(max_draft=MAX_DRAFT, proposers=("ngram",)) if drafts else SpeculationPlan()
    requests = list(
        warm_up_requests(
            shape,
            max_sequences=batch,
            max_model_len=engine.max_model_len,
            num_cache_tokens=engine.pool.num_blocks * BLOCK_TOKENS,
            now_s=time.monotonic(),
        )
    )
    for request in requests:
        request.message = replace(request.message, plan=ServingPlan(name="bench", speculation=plan))
        engine.add(request)
    sequences = [request.sequences[0] for request in requests]
    while not all(sequence.num_output_tokens for sequence in sequences):
        engine.step()
    begun_s, before = time.perf_counter(), _count(sequences)
    while len(engine.keys) == batch:
        engine.step()
    seconds, num_tokens = time.perf_counter() - begun_s, _count(sequences) - before
    while engine.has_work:
        engine.step()
    return seconds * batch / num_tokens


def _count(sequences: list[Sequence]) -> int:
    return sum(sequence.num_output_tokens for sequence in sequences)
