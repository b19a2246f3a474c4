"""Speculation in a step: drafts in, what was accepted out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from msgspec.structs import replace

from surefoot.backends.types import SpeculationStats

from ..cost_model import CostModel
from ..cost_model import StepCost as MachineCost
from ..sampler import Sampled
from ..scheduler import ScheduledChunk, shape_of
from ..sequence import Sequence
from ..step_plan import pace_limit_s
from .base import Draft, Proposer
from .controller import Controller, StepBounds
from .counters import SpeculationCounters
from .draft_model import DraftModel
from .drafting import Prospect
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
        self._max_draft = settings.max_draft
        self.draft_model: DraftModel | None = None
        """The proposer `draft`, which an engine adds that has one."""
        self.suffix = SuffixProposer()
        self._proposers = self._new_proposers()
        self._synthetic = (
            None
            if settings.synthetic_acceptance is None
            else SyntheticAcceptance(settings.synthetic_acceptance)
        )
        self.counters = SpeculationCounters()

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names of what a plan may ask for here; what it names beside these is not asked."""
        own = () if self.draft_model is None else (self.draft_model.name,)
        return (*self._proposers, *own)

    @property
    def stats(self) -> SpeculationStats:
        """What it did and learnt so far, as a copy for other threads."""
        counted = self.counters.stats(
            self.controller.acceptance.rates(), is_synthetic=self._synthetic is not None
        )
        return replace(counted, max_draft=self._max_draft, proposers=self.proposers)

    def restart(self) -> None:
        """The engine is gone, its sequences and draft model with it: keep only what was learnt."""
        self.draft_model = None
        self._proposers = self._new_proposers()
        self.controller.acceptance.restart()

    def _new_proposers(self) -> Mapping[str, Proposer]:
        """Without a sequence; the index of earlier outputs stays."""
        proposers: list[Proposer] = [NgramProposer(), PredictionProposer(), self.suffix]
        return {proposer.name: proposer for proposer in proposers}

    def draft(
        self, chunks: Seq[ScheduledChunk], max_rows: int, costs: CostModel, now_s: float
    ) -> dict[Sequence, Draft]:
        """Drafts, of at least one token each, for those of a step's chunks that they pay for.

        The step has at most `max_rows` rows, its drafts included.
        """
        if self.controller.rests():
            return {}
        begun_s = time.perf_counter()
        decoding = [chunk.sequence for chunk in chunks if chunk.sequence.is_decoding]
        drafts, prospects = self._propose(decoding)
        shape = shape_of(chunks)
        if not drafts and not prospects:
            plain_s = costs.predict(shape.num_rows, shape.num_sequences, shape.num_context_tokens)
            self.controller.rest(time.perf_counter() - begun_s, plain_s)
            return {}
        asked = [*(seq for seq, _ in drafts), *(prospect.sequence for prospect in prospects)]
        context = sum(seq.num_committed for seq in asked) / len(asked)

        def cost(count: int) -> float:
            return costs.predict_corrected(
                shape.num_rows + count,
                shape.num_sequences + count,
                shape.num_context_tokens + round(count * context),
            )

        bounds = StepBounds(
            num_sampled=sum(chunk.samples for chunk in chunks),
            max_rows=max_rows - shape.num_rows,
            least_row_s=costs.cost.least_row_s,
            max_step_s=_limit_s(decoding, costs.cost, now_s, cost(0)),
            ends_s=now_s + cost(0),
        )
        if self.draft_model is not None and prospects:
            drafts += self._run_ahead(self.draft_model, prospects, bounds, cost)
            bounds = bounds.after(time.perf_counter() - begun_s)
        choice = self.controller.choose(drafts, bounds, cost)
        looking_s = time.perf_counter() - begun_s
        self.counters.expect(choice, bounds.num_sampled, cost(0), looking_s)
        if not prospects:
            token_s = cost(0) / bounds.num_sampled
            saved_s = choice.num_tokens * (token_s - 1.0 / choice.tokens_per_s)
            self.controller.rest(looking_s - saved_s, cost(0))
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
        if self.draft_model is not None:
            self.draft_model.finish(sequence)
        self.controller.acceptance.finish(sequence)

    def _propose(self, decoding: Seq[Sequence]) -> tuple[list[tuple[Sequence, Draft]], list[Prospect]]:
        """Drafts of whoever is asked one by one, and the sequences that it is the draft model's turn for."""
        drafts: list[tuple[Sequence, Draft]] = []
        prospects: list[Prospect] = []
        for sequence in decoding:
            max_tokens = self.controller.max_tokens(sequence)
            if max_tokens == 0:
                continue
            if self._synthetic is not None:
                drafts.append((sequence, self._synthetic.propose(sequence, max_tokens)))
                continue
            names = sequence.request.message.plan.speculation.proposers
            turn = self._turn_of_model(names)
            if (draft := self._first_idea(sequence, names[:turn], max_tokens)) is not None:
                drafts.append((sequence, draft))
            elif self.draft_model is not None and turn < len(names):
                if (prospect := self.draft_model.prospect(sequence, max_tokens)) is not None:
                    prospects.append(prospect)
                elif (draft := self._first_idea(sequence, names[turn:], max_tokens)) is not None:
                    drafts.append((sequence, draft))
        return drafts, prospects

    def _run_ahead(
        self, model: DraftModel, prospects: Seq[Prospect], bounds: StepBounds, cost: StepCost
    ) -> list[tuple[Sequence, Draft]]:
        """What the draft model proposes, as far as asking it is expected to pay, and others instead of it."""
        drafting = self.controller.plan_drafting(prospects, bounds, cost, model.costs.cost)
        proposed = model.propose_all(drafting.wanted, drafting.max_catch_up)
        by_sequence = dict(zip((sequence for sequence, _ in drafting.wanted), proposed, strict=True))
        drafts: list[tuple[Sequence, Draft]] = []
        for prospect in prospects:
            sequence = prospect.sequence
            draft = by_sequence.get(sequence)
            if draft is None:
                names = sequence.request.message.plan.speculation.proposers
                draft = self._first_idea(sequence, names[self._turn_of_model(names) :], prospect.max_tokens)
            if draft is not None:
                drafts.append((sequence, draft))
        return drafts

    def _turn_of_model(self, names: tuple[str, ...]) -> int:
        """How many are asked before the draft model is."""
        if self.draft_model is None or self.draft_model.name not in names:
            return len(names)
        return names.index(self.draft_model.name)

    def _first_idea(self, sequence: Sequence, names: tuple[str, ...], max_tokens: int) -> Draft | None:
        for name in names:
            proposer = self._proposers.get(name)
            if proposer is not None and (draft := proposer.propose(sequence, max_tokens)) is not None:
                return draft
        return None


def _limit_s(decoding: Seq[Sequence], machine: MachineCost, now_s: float, plain_s: float) -> float | None:
    """How long the step may get for what was promised; None where that is broken already, or nothing was."""
    limit_s = pace_limit_s(decoding, machine, now_s)
    return None if limit_s == math.inf or limit_s < plain_s else limit_s
