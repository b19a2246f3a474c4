"""End to end: a random model served by the whole engine, beside the least that a step must read."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch
from msgspec import Struct
from msgspec.structs import replace

from surefoot.backends.engine.engine import Engine, EngineCounters
from surefoot.backends.engine.model_config import ModelConfig
from surefoot.backends.engine.prepare import LoadedModel
from surefoot.backends.engine.sequence import Sequence
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.engine.warm_up import Shape as WarmUpShape
from surefoot.backends.engine.warm_up import warm_up_requests
from surefoot.backends.types import ServingPlan, SpeculationPlan
from surefoot.kernels.base import Ops
from surefoot.kernels.layout import BLOCK_TOKENS

from .device_model import LLAMA_8B, TINY, random_model, step_bytes
from .device_transformers import seconds_per_token

ACCEPTANCE = (0.8,)
"""Every draft token is right with this probability, if those before it are."""

MAX_DRAFT = 8


class EngineLoad(Struct, frozen=True, kw_only=True):
    """Batches of equal requests: random weights, so that what they say does not matter."""

    config: ModelConfig = LLAMA_8B
    batches: tuple[int, ...] = (1, 32)
    num_prompt_tokens: int = 512
    num_output_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def max_model_len(self) -> int:
        """Of prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens + MAX_DRAFT

    @property
    def max_batched_tokens(self) -> int:
        """Half of the largest batch's prompts."""
        return max(self.num_prompt_tokens, max(self.batches) * self.num_prompt_tokens // 2)

    def step_bytes(self, batch: int) -> int:
        """In the middle of the answers."""
        context = self.num_prompt_tokens + self.num_output_tokens // 2
        return step_bytes(self.config, batch, context, self.dtype)


SMALL_LOAD = EngineLoad(
    config=TINY, batches=(1, 2), num_prompt_tokens=20, num_output_tokens=60, dtype=torch.float32
)
"""What a CPU does in a moment."""


class TokenTime(Struct, frozen=True):
    """Seconds from one token of a sequence to its next, with the batch and who served it."""

    who: str
    batch: int
    seconds: float


def time_engine(ops: Ops, device: torch.device, load: EngineLoad) -> Iterator[TokenTime]:
    """The engine without drafts, and with drafts that are right at a given rate, then transformers."""
    for who, rates in (("engine", None), ("engine with drafts", ACCEPTANCE)):
        loaded = random_model(load.config, ops, device, load.dtype)
        engine = _engine(loaded, ops, device, load, rates)
        for batch in load.batches:
            _serve(engine, load, batch, drafts=rates is not None)  # captures what it meets
            yield TokenTime(who, batch, _serve(engine, load, batch, drafts=rates is not None))
        del engine, loaded
        _free(device)
    for batch, seconds in seconds_per_token(
        load.config, device, load.dtype, load.batches, load.num_prompt_tokens, load.num_output_tokens
    ):
        yield TokenTime("transformers", batch, seconds)
    _free(device)


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


def _free(device: torch.device) -> None:
    """Give a model's memory back before the next one comes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
