"""A tenant's own earlier outputs: what most often followed these tokens in them.

After SuffixDecoding (arXiv 2411.04975): frequencies of continuations in earlier outputs; here over runs of a
few fixed lengths, so that adding and forgetting an output are exact and cost the same at any size. Only the
outputs of one flow are looked at, and only requests whose plan names this proposer add to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from ..sequence import Sequence
from .base import Draft

ORDERS = (8, 5, 3, 2)
"""Lengths of the runs whose continuations are counted, the most telling first."""

HALF_LIFE = 200
"""Outputs after which an old one counts half as much as a new one."""

_RESCALE_AT = 2.0**40
_SHARES = (0.4, 0.6, 0.8, 0.95)
"""A continuation with a greater share of its run's occurrences is a grade stronger."""


class _Output(Struct, frozen=True):
    token_ids: tuple[int, ...]
    weight: float


class SuffixIndex:
    """Counts of what followed each run, in the latest outputs of one flow."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._outputs: deque[_Output] = deque()
        self._counts: dict[tuple[int, ...], dict[int, float]] = {}
        self._weight = 1.0
        self.num_tokens = 0

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Count an output, and forget the oldest ones beyond the bound."""
        output = _Output(token_ids[: self._max_tokens], self._weight)
        for run, following in _runs(output.token_ids):
            counts = self._counts.setdefault(run, {})
            counts[following] = counts.get(following, 0.0) + output.weight
        self._outputs.append(output)
        self.num_tokens += len(output.token_ids)
        while self.num_tokens > self._max_tokens:
            self._forget_oldest()
        self._weight *= 2 ** (1 / HALF_LIFE)
        if self._weight > _RESCALE_AT:
            self._rebuild()

    def likeliest(self, context: list[int]) -> tuple[int, float] | None:
        """The token that follows the longest known run that `context` ends with, and its share."""
        for order in ORDERS:
            if len(context) >= order and (counts := self._counts.get(tuple(context[-order:]))):
                token_id = max(counts, key=counts.__getitem__)
                return token_id, counts[token_id] / sum(counts.values())
        return None

    def _forget_oldest(self) -> None:
        output = self._outputs.popleft()
        self.num_tokens -= len(output.token_ids)
        for run, following in _runs(output.token_ids):
            counts = self._counts[run]
            counts[following] -= output.weight
            # What is left of a count after a subtraction may be a rounding error, never half a weight.
            if counts[following] < output.weight / 2:
                del counts[following]
                if not counts:
                    del self._counts[run]

    def _rebuild(self) -> None:
        """Weights grow with time instead of shrinking, and must start again before they overflow."""
        outputs, scale = list(self._outputs), 1 / self._weight
        self._outputs.clear()
        self._counts.clear()
        self.num_tokens = 0
        for output in outputs:
            self._weight = output.weight * scale
            self.add(output.token_ids)
        self._weight = 1.0


class SuffixProposer:
    """Keeps an index per flow, bounded in tokens; the flow that was used least recently goes first."""

    name = "suffix"

    def __init__(self, *, max_tokens: int = 50_000, max_flows: int = 64) -> None:
        self._max_tokens = max_tokens
        self._max_flows = max_flows
        self._indices: dict[str, SuffixIndex] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """Follow the likeliest continuation, a token at a time."""
        index = self._indices.get(sequence.request.message.flow)
        if index is None:
            return None
        context = sequence.token_ids[-ORDERS[0] :]
        token_ids: list[int] = []
        strengths: list[int] = []
        while len(token_ids) < max_tokens and (found := index.likeliest(context)):
            token_id, share = found
            token_ids.append(token_id)
            strengths.append(sum(share > limit for limit in _SHARES))
            context = [*context[-ORDERS[0] + 1 :], token_id]
        return Draft(self.name, tuple(token_ids), tuple(strengths)) if token_ids else None

    def finish(self, sequence: Sequence) -> None:
        """Learn the output, if the sequence's plan takes part."""
        message = sequence.request.message
        if self.name not in message.plan.speculation.proposers or not message.plan.speculation.max_draft:
            return
        index = self._indices.pop(message.flow, None) or SuffixIndex(self._max_tokens)
        index.add(tuple(sequence.token_ids[sequence.num_prompt_tokens :]))
        self._indices[message.flow] = index
        while len(self._indices) > self._max_flows:
            del self._indices[next(iter(self._indices))]

    def purge(self, flow: str) -> None:
        """Forget a flow's outputs."""
        self._indices.pop(flow, None)


def _runs(token_ids: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    for end in range(ORDERS[-1], len(token_ids)):
        for order in ORDERS:
            if end >= order:
                yield token_ids[end - order : end], token_ids[end]
