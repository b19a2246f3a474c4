"""Speculation in a step: drafts in, what was accepted out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ..cost_model import CostModel
from ..promise import pace_limit_s
from ..sampler import Sampled
from ..scheduler import ScheduledChunk, shape_of
from ..sequence import Sequence
from .base import Draft, Proposer
from .controller import Controller, StepBounds
from .counters import SpeculationCounters
from .lengths import StepCost
from .ngram import NgramProposer
from .prediction import PredictionProposer
from .settings import SpeculationSettings
from .suffix import SuffixProposer
from .synthetic import SyntheticAcceptance


class Speculator:
    """Asks the proposers of each sequence's plan, in their order, and keeps what the controller says pays."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self.controller = Controller(settings)
        self.suffix = SuffixProposer()
        proposers: list[Proposer] = [NgramProposer(), PredictionProposer(), self.suffix]
        self._proposers: Mapping[str, Proposer] = {proposer.name: proposer for proposer in proposers}
        self._synthetic = (
            None
            if settings.synthetic_acceptance is None
            else SyntheticAcceptance(settings.synthetic_acceptance)
        )
        self.counters = SpeculationCounters()

    def draft(
        self, chunks: Seq[ScheduledChunk], max_rows: int, costs: CostModel, now_s: float
    ) -> dict[Sequence, Draft]:
        """Drafts, of at least one token each, for those of a step's chunks that they pay for.

        The step has at most `max_rows` rows, its drafts included.
        """
        begun_s = time.perf_counter()
        decoding = [chunk.sequence for chunk in chunks if chunk.sequence.is_decoding]
        drafts = [(seq, draft) for seq in decoding if (draft := self._propose(seq)) is not None]
        if not drafts:
            return {}
        shape = shape_of(chunks)
        context = sum(seq.num_committed for seq, _ in drafts) / len(drafts)

        def cost(count: int) -> float:
            return costs.predict(
                shape.num_rows + count,
                shape.num_sequences + count,
                shape.num_context_tokens + round(count * context),
            )

        bounds = StepBounds(
            num_sampled=sum(chunk.samples for chunk in chunks),
            max_rows=max_rows - shape.num_rows,
            max_step_s=_limit_s(decoding, now_s, cost),
        )
        choice = self.controller.choose(drafts, bounds, cost)
        self.counters.expect(choice, bounds.num_sampled, cost(0), time.perf_counter() - begun_s)
        return {
            seq: draft.cut(length)
            for (seq, draft), length in zip(drafts, choice.lengths, strict=True)
            if length
        }

    def verify(self, chunk: ScheduledChunk, sampled: list[Sampled | Exception]) -> list[Sampled | Exception]:
        """The tokens that a chunk gets, and learning from it.

        `sampled[j]` is what sampling gives after the first j tokens of the draft: the draft is right as long
        as that is its next token. The first that is not ends the result, as does a fault.
        """
        if chunk.draft is None:
            return sampled
        if self._synthetic is not None:
            sampled = self._synthetic.judge(chunk, sampled)
        num_accepted = 0
        for token_id, result in zip(chunk.draft.token_ids, sampled, strict=False):
            if isinstance(result, Exception) or result.token_id != token_id:
                break
            num_accepted += 1
        self.controller.acceptance.observe(chunk.sequence, chunk.draft, num_accepted)
        self.counters.count(chunk.sequence, chunk.draft, num_accepted)
        return sampled[: num_accepted + 1]

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over."""
        for proposer in self._proposers.values():
            proposer.finish(sequence)
        self.controller.acceptance.finish(sequence)

    def _propose(self, sequence: Sequence) -> Draft | None:
        max_tokens = self.controller.max_tokens(sequence)
        if max_tokens == 0:
            return None
        if self._synthetic is not None:
            return self._synthetic.propose(sequence, max_tokens)
        for name in sequence.request.message.plan.speculation.proposers:
            proposer = self._proposers.get(name)
            if proposer is not None and (draft := proposer.propose(sequence, max_tokens)) is not None:
                return draft
        return None


def _limit_s(decoding: Seq[Sequence], now_s: float, cost: StepCost) -> float | None:
    """How long the step may get for what was promised; None where that is broken already, or nothing was."""
    limit_s = pace_limit_s(decoding, now_s)
    return None if limit_s == math.inf or limit_s < cost(0) else limit_s
