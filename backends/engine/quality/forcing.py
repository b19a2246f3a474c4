"""Teacher forcing: a text is read in full precision up to a point, and predicted from there under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.kernels.layout import FULL, BlockLayout

from ..cache_rule import BOUNDARY_TOKENS
from .branch import Branch
from .importance import EVERY, PROMPT_QUERIES, Importance, watch
from .plans import FULL_PRECISION, QualityPlan
from .reader import Piece, Reader


class Prompt(Struct, frozen=True):
    """What was read in full precision, and how much its last queries cared for which token."""

    branch: Branch
    importance: Importance


class Forced(Struct, frozen=True, kw_only=True):
    """A plan against full precision on one continuation, per predicted token.

    `loss` is the log-probability lost on the text's own token; `divergence` is Kullback and Leibler's, from
    full precision's distribution, in nats. `tokens_per_byte` is a multiple of full precision's, in whole
    blocks, the mean of what is held right after boundaries and right before them.
    """

    loss: float
    divergence: float
    equal_argmax: float
    tokens_per_byte: float


def read_prompt(reader: Reader, branch: Branch, token_ids: Sequence[int]) -> Prompt:
    """Read on in a branch. The last queries are observed."""
    head, tail = token_ids[:-PROMPT_QUERIES], token_ids[-PROMPT_QUERIES:]
    reader.read(branch, head)
    importance = Importance()
    watch(reader, Piece(branch, tail), importance, range(len(tail)))
    return Prompt(branch, importance)


@contextmanager
def forked(prompt: Prompt) -> Iterator[Prompt]:
    """A copy that may be demoted and continued; its blocks are given back."""
    with prompt.branch.fork() as branch:
        yield Prompt(branch, prompt.importance.copy())


def demote(prompt: Prompt, plan: QualityPlan) -> None:
    """What happens at a boundary."""
    branch = prompt.branch
    branch.move(plan.targets(branch, prompt.importance.scores(branch.length)))


def force(
    reader: Reader, prompt: Prompt, plan: QualityPlan, token_ids: Sequence[int]
) -> Iterator[tuple[Tensor, float]]:
    """Log-probabilities `[n, vocab]` of what follows each of `token_ids`, from boundary to boundary, and the
    tokens per byte.
    """
    layout = reader.store.layout
    with forked(prompt) as own:
        for begin in range(0, len(token_ids), BOUNDARY_TOKENS):
            demote(own, plan)
            after = tokens_per_byte(own.branch, layout)
            piece = Piece(own.branch, token_ids[begin : begin + BOUNDARY_TOKENS])
            rows = [row for row in range(len(piece.token_ids)) if (own.branch.length + row) % EVERY == 0]
            hidden = watch(reader, piece, own.importance, rows)
            yield (
                reader.logits(hidden).log_softmax(-1),
                (after + tokens_per_byte(own.branch, layout)) / 2,
            )


def tokens_per_byte(branch: Branch, layout: BlockLayout) -> float:
    """How many times as many tokens as full precision has in the same blocks, dropped ones counted."""
    return -(-branch.length // layout.capacity(FULL)) / branch.num_blocks


def compare(
    reader: Reader, prompt: Prompt, plans: Sequence[QualityPlan], token_ids: Sequence[int]
) -> list[Forced]:
    """Each plan against full precision, on the tokens that follow a prompt; the first predicts the second."""
    inputs, wanted = token_ids[:-1], torch.tensor(token_ids[1:])
    exact = torch.cat([logprobs for logprobs, _ in force(reader, prompt, FULL_PRECISION, inputs)])
    found = []
    for plan in plans:
        sums, held, begin = torch.zeros(3, dtype=torch.float64), 0.0, 0
        for logprobs, multiple in force(reader, prompt, plan, inputs):
            end = begin + len(logprobs)
            sums += _differences(exact[begin:end], logprobs, wanted[begin:end])
            held += multiple * len(logprobs)
            begin = end
        loss, divergence, equal = (sums / begin).tolist()
        found.append(
            Forced(loss=loss, divergence=divergence, equal_argmax=equal, tokens_per_byte=held / begin)
        )
    return found


def _differences(exact: Tensor, logprobs: Tensor, wanted: Tensor) -> Tensor:
    """Sums over tokens: log-probability lost, divergence, equal argmax."""
    lost = (exact - logprobs).gather(1, wanted[:, None]).double().sum()
    divergence = (exact.exp() * (exact - logprobs)).sum(-1).double().sum()
    equal = (exact.argmax(-1) == logprobs.argmax(-1)).double().sum()
    return torch.stack((lost, divergence, equal))
