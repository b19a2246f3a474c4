"""How likely a draft token is to be accepted, learnt from what was.

Every draft token whose predecessors were all accepted is one trial: it was accepted or it was not. A fully
accepted window is that many successes and no failure, so that it says "at least so many"; tokens behind a
rejected one say nothing. (The mean accepted length, which other controllers average, cannot tell a window
that was too short from a draft that was too bad.)
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from ..sequence import Sequence
from .base import STRENGTHS, Draft

FIRST_GUESS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""By strength, until anything is known: hopeful, since hope costs a few rows and despair learns nothing."""

GUESS_TRIALS = 4.0
"""How many trials the first guess counts for."""

KIND_MEMORY = 1000.0
"""Trials after which a kind's older ones count 1/e: ten steps of 32 streams with three draft tokens each."""

REQUEST_MEMORY = 40.0
"""The same for a request: its own text changes faster than its kind."""

PATIENCE = 200.0
"""Steps after which what is known of a request counts 1/e if its drafts were passed over in all of them:
otherwise one that was given up would learn nothing, and never be tried again.
"""

KIND_TRIALS = 40.0
"""How many trials of its own a request needs to count as much as its kind's estimate: with fewer, luck passes
for a difference.
"""

LEAST_SURVIVAL = 0.02
"""A row that is accepted less often pays on no machine, and is not worth being looked at."""

MAX_KINDS = 4096

LEAST_TRIALS = 20.0
"""With fewer, a kind's rate says little."""


class _Trials(Struct):
    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: bool, memory: float) -> None:
        self.fade(memory)
        self.accepted += accepted
        self.tried += 1.0

    def fade(self, memory: float) -> None:
        keep = 1.0 - 1.0 / memory
        self.accepted *= keep
        self.tried *= keep

    def estimate(self, prior: float, weight: float) -> float:
        return (self.accepted + prior * weight) / (self.tried + weight)


class Acceptance:
    """Estimates per proposer and strength: a request's own trials over a prior of its flow and kind."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], dict[tuple[str, int], _Trials]] = OrderedDict()
        self._requests: dict[Sequence, dict[tuple[str, int], _Trials]] = {}
        self._priors: dict[tuple[str, str, str], list[float]] = {}
        """By flow, kind and proposer, until something is observed of one."""

    @property
    def num_requests(self) -> int:
        """Sequences that something of their own is known of."""
        return len(self._requests)

    def rates(self) -> dict[str, dict[str, float]]:
        """By flow and kind, the share of its latest trials that were accepted, whoever proposed."""
        rates: dict[str, dict[str, float]] = {}
        for (flow, kind), by_source in self._kinds.items():
            tried = sum(trials.tried for trials in by_source.values())
            if tried >= LEAST_TRIALS:
                accepted = sum(trials.accepted for trials in by_source.values())
                rates.setdefault(flow, {})[kind] = accepted / tried
        return rates

    def restart(self) -> None:
        """Forget all sequences, and keep what was learnt from them."""
        self._requests.clear()

    def survival(self, sequence: Sequence, draft: Draft) -> list[float]:
        """The probability of each token of the draft to be accepted together with all before it.

        Ends before one that is less than `LEAST_SURVIVAL`, but is never empty: what is given up can still be
        probed.
        """
        together = 1.0
        survival: list[float] = []
        priors, own = self._priors_of(sequence, draft.proposer), self._requests.get(sequence, {})
        estimates: list[float | None] = [None] * STRENGTHS
        for strength in draft.strengths:
            estimate = estimates[strength]
            if estimate is None:
                prior, trials = priors[strength], own.get((draft.proposer, strength))
                estimate = prior if trials is None else trials.estimate(prior, KIND_TRIALS)
                estimates[strength] = estimate
            together *= estimate
            if survival and together < LEAST_SURVIVAL:
                break
            survival.append(together)
        return survival

    def observe(self, sequence: Sequence, draft: Draft, num_accepted: int) -> None:
        """Learn from a verified draft."""
        kind, own = self._kind(sequence), self._requests.setdefault(sequence, {})
        self._priors.clear()
        for j in range(min(num_accepted + 1, len(draft))):
            source = (draft.proposer, draft.strengths[j])
            kind.setdefault(source, _Trials()).add(j < num_accepted, KIND_MEMORY)
            own.setdefault(source, _Trials()).add(j < num_accepted, REQUEST_MEMORY)

    def pass_over(self, sequence: Sequence) -> None:
        """A step left its draft out."""
        for trials in self._requests.get(sequence, {}).values():
            trials.fade(PATIENCE)

    def finish(self, sequence: Sequence) -> None:
        """Forget what was kept for the sequence."""
        self._requests.pop(sequence, None)

    def _priors_of(self, sequence: Sequence, proposer: str) -> list[float]:
        """Those of its kind, computed once for all sequences of a step."""
        message = sequence.request.message
        name = (message.flow, message.kind, proposer)
        priors = self._priors.get(name)
        if priors is None:
            priors = self._priors[name] = _priors_of_kind(self._kind(sequence), proposer)
        return priors

    def _kind(self, sequence: Sequence) -> dict[tuple[str, int], _Trials]:
        """Of the sequence's flow and kind; the ones seen least recently are forgotten."""
        name = (sequence.request.message.flow, sequence.request.message.kind)
        kind = self._kinds.setdefault(name, {})
        self._kinds.move_to_end(name)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return kind


def _priors_of_kind(kind: dict[tuple[str, int], _Trials], proposer: str) -> list[float]:
    """A kind's estimates by strength. More evidence is not worse: what is not known of a grade is guessed
    from the one below, or long drafts would stay untried because short ones are all that was tried.
    """
    priors: list[float] = []
    for strength, guess in enumerate(FIRST_GUESS):
        trials = kind.get((proposer, strength), _Trials())
        priors.append(trials.estimate(max([guess, *priors[-1:]]), GUESS_TRIALS))
    return priors
