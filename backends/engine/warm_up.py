"""Steps of different shapes before the first request: first-time costs are met, and step costs measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from msgspec import Struct

from surefoot.backends.types import GenerateRequest, SamplingParams, TokenPrompt

from .cost_model import StepCost, StepSample, fit
from .sequence import Request

MAX_SECONDS = 0.7
"""No further shape is begun after so long: a slow machine is not made slower to start."""


class Shape(Struct, frozen=True):
    """Prompts that are prefilled together, and then decode together."""

    num_sequences: int
    num_prompt_tokens: int
    num_decodes: int


SHAPES = (Shape(1, 1, 3), Shape(1, 16, 3), Shape(8, 8, 3), Shape(1, 192, 2), Shape(9, 24, 2))
"""The first one is not measured: it meets what is slow once."""


def warm_up_requests(
    shape: Shape, *, max_sequences: int, max_model_len: int, num_cache_tokens: int, now_s: float
) -> Iterator[Request]:
    """A shape's requests, or fewer and shorter ones where cache or context are small."""
    num_sequences = min(shape.num_sequences, max_sequences)
    room = min(max_model_len, num_cache_tokens // num_sequences)
    max_tokens = max(min(shape.num_decodes + 1, room - 1), 1)
    num_prompt_tokens = max(min(shape.num_prompt_tokens, room - max_tokens), 1)
    for number in range(num_sequences):
        prompt = (0,) * num_prompt_tokens
        message = GenerateRequest(
            request_id="warm-up",
            model="",
            prompt=TokenPrompt(prompt),
            params=SamplingParams(ignore_eos=True, max_tokens=max_tokens),
            salt=f"warm-up {number} {now_s}",  # or they would find one another's tokens in the prefix cache
        )
        yield Request(message, prompt, key=-1 - number, max_tokens=max_tokens, seed=0, arrived_s=now_s)


def run_shapes(
    run: Callable[[Shape], list[StepSample]], clock: Callable[[], float], max_s: float = MAX_SECONDS
) -> list[StepSample]:
    """Run the shapes until they are done or the time is up; the samples of all but the first."""
    begun_s = clock()
    samples: list[StepSample] = []
    for number, shape in enumerate(SHAPES):
        if clock() - begun_s > max_s:
            break
        steps = run(shape)
        samples += steps if number else []
    return samples


def measured_cost(
    run: Callable[[Shape], list[StepSample]],
    clock: Callable[[], float],
    default: StepCost,
    *,
    compiles_late: bool,
) -> StepCost:
    """What steps cost, by running some; `default` decides what they say nothing about.

    Where kernels are compiled when they are first launched, all shapes run once before they are measured.
    """
    if compiles_late:
        run_shapes(run, clock, max_s=math.inf)
    return fit(run_shapes(run, clock), default)
