"""Whether steps of a model, and an engine's answers, come out on a device as they should."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import torch
from msgspec.structs import replace
from torch import Tensor

from surefoot.backends.engine.device import Called, capture_on
from surefoot.backends.engine.device_runner import DeviceRunner
from surefoot.backends.engine.engine import Engine, EngineCounters
from surefoot.backends.engine.runner import ModelRunner
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.types import (
    CachePlan,
    Chunk,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    SpeculationPlan,
    TokenPrompt,
)
from surefoot.kernels.reference import ReferenceOps

from .device_loads import verification_step
from .device_model import RandomWeights, random_model
from .device_rows import Check
from .device_setup import Setup

SAME = 1e-3
"""Of logits whose steps differ in nothing but being replayed: libraries choose as they like."""

ALIKE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of a model's logits beside those in float32: each of some 20 ops in a row rounds to its own dtype."""

NUM_TOKENS = 40
"""Of an answer."""


def check_steps(setup: Setup) -> Iterator[Check]:
    """Logits of replayed steps beside those of the same steps as they are, and of the plain ops; and how many
    replayed steps the host waited in. Each kind of step comes three times: as it is, captured, replayed.
    """
    dtype, device, ops = setup.shape.dtype, setup.device, setup.ops()
    weights = RandomWeights(setup.checked, torch.device("cpu"), dtype)
    model = random_model(setup.checked, ops, device, dtype, weights=weights).model
    right = random_model(setup.checked, ReferenceOps(), weights.device, torch.float32, weights=weights).model
    settings = EngineSettings(cache_bytes=4 << 20, max_sequences=4, max_batched_tokens=64)
    replaying = DeviceRunner(model, ops, settings, dtype, capture_on(device))
    plain = DeviceRunner(model, ops, settings, dtype, Called)
    exact = ModelRunner(right, ReferenceOps(), settings, dtype)
    replayed, rounded, num_waits, lengths = 0.0, 0.0, 0, [0, 0, 0]
    for number, rows in enumerate(([1], [1, 1, 1], [2, 1, 3]) * 3):
        step = verification_step(lengths, rows)
        expected = plain.run(step).clone()
        plain.commit(step)
        rounded = max(rounded, _error(expected, exact.run(step)))
        exact.commit(step)
        try:
            with _no_waits(device if number >= 6 else torch.device("cpu")):
                logits = replaying.run(step)
                replaying.commit(step)
        except RuntimeError:
            num_waits += 1
            logits = replaying.run(step)
        replayed = max(replayed, _error(logits, expected))
        lengths = [length + more for length, more in zip_longest(lengths, rows, fillvalue=0)]
    yield Check(name="graphs of steps", error=replayed, limit=SAME)
    yield Check(name="steps of a model", error=rounded, limit=ALIKE[dtype])
    yield Check(name="waits in steps", error=float(num_waits), limit=0.0)
    plain.run_largest()
    yield Check(name="the largest step", error=float(plain.run(step).isnan().sum()), limit=0.0)


def check_engine(setup: Setup) -> Iterator[Check]:
    """How many tokens of answers are missing: in full precision and demoted, with drafts, log-probabilities
    and filters, prompts in chunks.
    """
    dtype, device, ops = setup.shape.dtype, setup.device, setup.ops()
    settings = EngineSettings(
        cache_bytes=64 << 20,
        max_model_len=256,
        max_sequences=8,
        max_batched_tokens=64,
        speculation=SpeculationSettings(max_draft=4, synthetic_acceptance=(0.7,)),
    )
    loaded = random_model(setup.checked, ops, device, dtype)
    counters, clock = EngineCounters(), time.monotonic
    engine = Engine(loaded, ops, settings, cache_dtype=dtype, counters=counters, clock=clock)
    messages = [_message(number) for number in range(6)]
    for key, message in enumerate(messages):
        assert isinstance(message.prompt, TokenPrompt)
        engine.submit(message, message.prompt.token_ids, key=key)
    num_tokens = 0
    while engine.has_work:
        chunks = (output.event for output in engine.step() if isinstance(output.event, Chunk))
        num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
    yield Check(name="missing tokens", error=float(len(messages) * NUM_TOKENS - num_tokens), limit=0.0)
    num_demoted = sum(counters.num_demoted_tokens.values())
    yield Check(name="engines that demoted nothing", error=float(num_demoted == 0), limit=0.0)


def _message(number: int) -> GenerateRequest:
    """The requests' kinds in turn."""
    cache = CachePlan(format="k4v4", sinks=4, recent=32) if number % 2 else CachePlan()
    drafts = SpeculationPlan(max_draft=4, proposers=("ngram",)) if number % 3 else SpeculationPlan()
    params = SamplingParams(
        temperature=0.8 * (number % 3),
        ignore_eos=True,
        max_tokens=NUM_TOKENS,
        logprobs=2 if number == 2 else None,
    )
    return GenerateRequest(
        request_id=str(number),
        model="",
        prompt=TokenPrompt(tuple((7 * i + number) % 300 for i in range(60 + 20 * number))),
        params=replace(params, top_k=20 * (number % 2), top_p=0.9 if number == 4 else 1.0, seed=number),
        plan=ServingPlan(name="check", cache=cache, speculation=drafts),
    )


@contextmanager
def _no_waits(device: torch.device) -> Iterator[None]:
    """On a GPU, `RuntimeError` where torch would wait for it, as far as torch can tell."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.cpu().double()
    return float((actual.cpu().double() - expected).norm() / expected.norm())
