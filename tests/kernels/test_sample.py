"""Choosing tokens: the Gumbel rule and the filters, the same token in every op set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Ops, SampleRows
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.reference import ReferenceOps

VOCABULARY = 49152
FILTERS = (
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.02},
    {"top_k": 10**6, "top_p": 1.0},
)


def _rows(
    count: int, *, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SampleRows:
    index = torch.arange(count)
    return SampleRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seed=index * 0x1234567890ABCDE - 5,
        choice=index % 3,
        position=index * 7 + 1,
    )


def _logits(count: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(count, vocabulary) * 3


def test_greedy_takes_the_first_of_the_largest(ops: Ops) -> None:
    """Temperature 0 is the argmax; of equal logits the lowest token wins."""
    logits = _logits(5)
    logits[0, [7, 1000, 40000]] = 50.0
    logits[1, VOCABULARY - 1] = 50.0
    logits[2] = 1.0
    tokens = ops.sample(logits, _rows(5, temperature=0.0))
    assert tokens.tolist() == [7, VOCABULARY - 1, 0, int(logits[3].argmax()), int(logits[4].argmax())]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 63, 111, VOCABULARY])
def test_tokens_equal_the_references(cpu: CpuOps, filters: dict[str, float], vocabulary: int) -> None:
    """With the same seed, choice and position every op set draws the same token, under any filters."""
    logits, rows = _logits(12, vocabulary), _rows(12, **filters)
    assert torch.equal(cpu.sample(logits, rows), ReferenceOps().sample(logits, rows))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tied_logits_are_filtered_alike(cpu: CpuOps, filters: dict[str, float]) -> None:
    """Logits with many equal values are cut at the same token by every op set."""
    logits, rows = _logits(12, 1000).round(), _rows(12, **filters)
    assert torch.equal(cpu.sample(logits, rows), ReferenceOps().sample(logits, rows))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_banned_tokens_are_never_drawn(ops: Ops, filters: dict[str, float]) -> None:
    """A logit of -inf excludes a token whatever the filters."""
    logits = torch.full((16, 1000), -torch.inf)
    logits[:, 500:510] = torch.randn(16, 10)
    tokens = ops.sample(logits, _rows(16, temperature=1.5, **filters))
    assert ((tokens >= 500) & (tokens < 510)).all()


def test_draws_follow_the_distribution(ops: Ops) -> None:
    """Over many positions tokens are drawn as often as their probabilities say."""
    count = 4000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(count, 4).contiguous()
    drawn = torch.bincount(ops.sample(logits, _rows(count, temperature=1.0)), minlength=4) / count
    assert (drawn - logits[0].softmax(-1)).abs().max() < 0.03


def test_tokens_do_not_depend_on_the_batch(cpu: CpuOps, cpu_threads: CpuOps) -> None:
    """A row draws the same token alone, among others, and on any number of threads."""
    logits, rows = _logits(9), _rows(9, top_p=0.9)
    together = cpu_threads.sample(logits, rows)
    assert torch.equal(cpu.sample(logits, rows), together)
    for r in (0, 8):
        own = SampleRows(**{name: getattr(rows, name)[r : r + 1] for name in rows.__struct_fields__})
        assert int(cpu.sample(logits[r : r + 1], own)) == int(together[r])
