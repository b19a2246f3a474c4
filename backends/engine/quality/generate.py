"""Text that a model writes under a plan, and how much of it repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from surefoot.kernels.base import SampleRows

from ..cache_rule import BOUNDARY_TOKENS
from .forcing import Prompt, demote, forked
from .plans import QualityPlan
from .reader import Piece, Reader

GRAM = 4
TEMPERATURE = 0.7


def generate(
    reader: Reader,
    prompts: Sequence[Prompt],
    plan: QualityPlan,
    last_ids: Sequence[int],
    number: int,
    seed: int,
) -> list[list[int]]:
    """`number` tokens after each prompt and the token that follows it, one of `last_ids`. Prompts are of one
    length. The noise is the engine's, a function of seed, prompt and position: plans share it.
    """
    written: list[list[int]] = [[last] for last in last_ids]
    with ExitStack() as stack:
        owns = [stack.enter_context(forked(prompt)) for prompt in prompts]
        for place in range(number):
            if place % BOUNDARY_TOKENS == 0:
                for own in owns:
                    demote(own, plan)
            pieces = [Piece(own.branch, text[-1:]) for own, text in zip(owns, written, strict=True)]
            logits = reader.logits(reader.run(pieces))
            tokens = reader.sample(logits, _rows(len(owns), owns[0].branch.length, seed))
            for text, token in zip(written, tokens, strict=True):
                text.append(token)
    return [text[1:] for text in written]


def repetition(token_ids: Sequence[int]) -> float:
    """The share of a text's runs of 4 tokens that it had before; 0 for a text without any."""
    grams = [tuple(token_ids[at : at + GRAM]) for at in range(len(token_ids) - GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _rows(number: int, position: int, seed: int) -> SampleRows:
    return SampleRows(
        temperature=torch.full((number,), TEMPERATURE),
        top_k=torch.zeros(number, dtype=torch.int64),
        top_p=torch.ones(number),
        min_p=torch.zeros(number),
        seed=torch.full((number,), seed, dtype=torch.int64),
        choice=torch.arange(number),
        position=torch.full((number,), position),
    )
