"""Traffic whose draft tokens are accepted at a given rate, in virtual time: what a controller makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable

from surefoot.backends.types import GenerateRequest, ServingPlan, SpeculationPlan, TokenPrompt

from ..cost_model import CostModel
from ..sequence import Request, Sequence
from ..simulator import without_text
from .base import Draft, strength_of_match
from .controller import Controller, StepBounds

TableStep = Callable[[int, int], float]
"""Seconds of a step of so many sequences that verify so many rows in all."""

MAX_DRAFT = 16
REQUEST_TOKENS = 400
"""After so many tokens a sequence ends and a new one takes its place, of which nothing is known yet."""
FIRST_MATCH = 4
"""The repetition that drafts begin after."""
NUM_CONTEXT_TOKENS = 200


class Tally:
    """Tokens that were to be expected of the chosen lengths, and the time of their steps.

    Expected ones, since the real ones differ from them by luck alone.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self.seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of all steps so far."""
        return self.tokens / self.seconds


class Replay:
    """Sequences that decode together; `controller` sees what it would see in an engine.

    It decides by `costs`, which learn from every step as an engine's do, and the step then takes what
    `step_s` says.
    """

    def __init__(self, controller: Controller, costs: CostModel, step_s: TableStep, seed: int) -> None:
        self.controller = controller
        self.costs = costs
        self._step_s = step_s
        self._random = random.Random(seed)
        self._kind = ""
        self._sequences: list[Sequence] = []
        self._keys = 0

    def switch(self, kind: str) -> None:
        """From here on all sequences are new ones, of a kind of traffic that may have been seen before."""
        self._kind = kind
        self._resize(0)

    def run(self, batch: int, rate: float, num_steps: int) -> Tally:
        """So many steps of `batch` sequences, each draft token of which is accepted at `rate`."""
        tally = Tally()
        for _ in range(num_steps):
            self.step(batch, rate, tally)
        return tally

    def step(self, batch: int, rate: float, tally: Tally) -> None:
        """One step, added to the tally."""
        self._resize(batch)
        drafts = [(each, _draft(self.controller.max_tokens(each))) for each in self._sequences]
        drafts = [(each, draft) for each, draft in drafts if len(draft)]

        def cost(count: int) -> float:
            rows = batch + count
            return self.costs.predict_corrected(rows, rows, rows * NUM_CONTEXT_TOKENS)

        bounds = StepBounds(num_sampled=batch, max_rows=batch * MAX_DRAFT)
        choice = self.controller.choose(drafts, bounds, cost)
        rows = batch + sum(choice.lengths)
        seconds = self._step_s(batch, rows)
        self.costs.observe(rows, rows, rows * NUM_CONTEXT_TOKENS, seconds)
        tally.seconds += seconds
        tally.tokens += batch + sum(expected_tokens(rate, length) for length in choice.lengths)
        for (sequence, draft), length in zip(drafts, choice.lengths, strict=True):
            self._advance(sequence, draft.cut(length), rate)

    def _advance(self, sequence: Sequence, draft: Draft, rate: float) -> None:
        length = len(draft)
        accepted = next((j for j in range(length) if self._random.random() >= rate), length)
        if length:
            self.controller.acceptance.observe(sequence, draft, accepted)
        for _ in range(1 + accepted):
            sequence.append(0)
        if sequence.num_output_tokens >= REQUEST_TOKENS:
            self._end(sequence)

    def _resize(self, batch: int) -> None:
        while len(self._sequences) > batch:
            self._end(self._sequences[0])
        while len(self._sequences) < batch:
            self._sequences.append(self._new())

    def _end(self, sequence: Sequence) -> None:
        self.controller.acceptance.finish(sequence)
        self._sequences.remove(sequence)

    def _new(self) -> Sequence:
        self._keys += 1
        message = GenerateRequest(
            request_id="replay",
            model="",
            prompt=TokenPrompt((0,)),
            plan=ServingPlan(name="replay", speculation=SpeculationPlan(max_draft=MAX_DRAFT)),
            kind=self._kind,
        )
        request = Request(
            message, (0,), key=self._keys, max_tokens=REQUEST_TOKENS + 2 * MAX_DRAFT, seed=0, arrived_s=0.0
        )
        return request.branch(without_text(1))[0]


def expected_tokens(rate: float, length: int) -> float:
    """Of a draft's tokens, those that are accepted on average: all before the first that is not."""
    return sum(rate**j for j in range(1, length + 1))


def fixed_tokens_per_s(step_s: TableStep, batch: int, rate: float, length: int) -> float:
    """What drafts of one length for every sequence bring."""
    return batch * (1.0 + expected_tokens(rate, length)) / step_s(batch, batch * (1 + length))


def _draft(length: int) -> Draft:
    strengths = tuple(strength_of_match(FIRST_MATCH + j) for j in range(length))
    return Draft("ngram", (0,) * length, strengths)
