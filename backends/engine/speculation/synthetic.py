"""Acceptance at given rates, whatever the model says: for benchmarks, whose outputs are then meaningless."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from ..sampler import Sampled
from ..scheduler import ScheduledChunk
from ..sequence import Sequence
from .base import STRENGTHS, Draft


class SyntheticAcceptance:
    """Proposes nonsense, and accepts position j of it with probability `rates[j]` (beyond: the last one)."""

    name = "synthetic"

    def __init__(self, rates: Seq[float]) -> None:
        self._rates = rates

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        """As many tokens as may be had."""
        strengths = tuple(min(j, STRENGTHS - 1) for j in range(max_tokens))
        return Draft(self.name, (sequence.token_ids[-1],) * max_tokens, strengths)

    def judge(self, chunk: ScheduledChunk, sampled: list[Sampled | Exception]) -> list[Sampled | Exception]:
        """What sampling would have given had the draft been as good as the rates say.

        The same request draws the same numbers at the same places.
        """
        sequence, judged = chunk.sequence, list(sampled)
        for j, token_id in enumerate(chunk.draft_token_ids):
            position = len(sequence.token_ids) + j
            draw = random.Random(f"{sequence.request.seed} {sequence.choice} {position}").random()
            result = judged[j]
            if isinstance(result, Exception):
                break
            if draw < self._rates[min(j, len(self._rates) - 1)]:
                judged[j] = Sampled(token_id, result.logprob)
            else:
                # One that differs from the draft, so that the two are never equal by chance.
                judged[j] = Sampled(token_id - 1 if token_id else 1, result.logprob)
                break
        return judged
