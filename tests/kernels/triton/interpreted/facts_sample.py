"""Choosing tokens: the reference's token under every filter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import SampleRows
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton import sample as sample_module
from surefoot.kernels.triton.sample import sample

SEVERAL_SPLITS = 1700
FILTERS: tuple[dict[str, float], ...] = (
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


@pytest.fixture(autouse=True)
def few_tokens_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of 2 tiles of 512, so that a vocabulary that the interpreter can take makes several."""
    monkeypatch.setattr(sample_module, "SPLIT", 1024)


def _rows(filters: list[dict[str, float]], temperature: float = 0.8) -> SampleRows:
    """A row per filter."""
    index = torch.arange(len(filters))
    return SampleRows(
        temperature=torch.full((len(filters),), temperature),
        top_k=torch.tensor([int(f.get("top_k", 0)) for f in filters]),
        top_p=torch.tensor([f.get("top_p", 1.0) for f in filters]),
        min_p=torch.tensor([f.get("min_p", 0.0) for f in filters]),
        seed=index * 0x1234567890ABCDE - 5,
        choice=index % 3,
        position=index * 7 + 1,
    )


def _check(logits: Tensor, rows: SampleRows) -> None:
    assert sample(logits, rows).tolist() == ReferenceOps().sample(logits, rows).tolist()


@pytest.mark.parametrize(
    ("vocabulary", "filters"),
    [(1, FILTERS[6:8]), (63, FILTERS[::2]), (111, FILTERS[1::2]), (SEVERAL_SPLITS, FILTERS)],
)
def test_tokens_equal_the_references(vocabulary: int, filters: tuple[dict[str, float], ...]) -> None:
    """With the same seed, choice and position the reference's token is drawn, under any filters."""
    _check(torch.randn(len(filters), vocabulary) * 3, _rows(list(filters)))


def test_tied_logits_are_filtered_alike() -> None:
    """Logits with many equal values are cut at the reference's token, across programs too."""
    _check((torch.randn(len(FILTERS), SEVERAL_SPLITS) * 3).round(), _rows(list(FILTERS)))


def test_zeros_of_both_signs_are_equal() -> None:
    """A cut at zero keeps zeros of either sign alike."""
    logits = torch.where(torch.arange(300) % 2 == 0, 0.0, -0.0).repeat(4, 1)
    logits[:, ::7] = -1.0
    _check(logits, _rows([{"top_k": 40}, {"top_p": 0.33}, {"min_p": 0.9}, {"top_k": 40, "top_p": 0.31}]))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_banned_tokens_are_never_drawn(temperature: float) -> None:
    """A logit of -inf excludes a token whatever the filters; where all are banned it is the first token."""
    filters: list[dict[str, float]] = [{}, {"top_k": 40}, {"top_k": 50, "top_p": 0.7, "min_p": 0.02}]
    logits = torch.full((6, 1100), -torch.inf)
    logits[:3, 1014:1034] = torch.randn(3, 20)
    tokens = sample(logits, _rows(filters * 2, temperature))
    assert torch.equal(tokens, ReferenceOps().sample(logits, _rows(filters * 2, temperature)))
    assert tokens[3:].tolist() == [0, 0, 0]


def test_greedy_takes_the_first_of_the_largest() -> None:
    """Temperature 0 is the argmax, whatever the filters; of equal logits the lowest token wins."""
    logits = torch.randn(5, SEVERAL_SPLITS) * 3
    logits[0, [7, 1000, 1600]] = 50.0
    logits[1, SEVERAL_SPLITS - 1] = 50.0
    logits[2] = 1.0
    rows = _rows([{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {}], temperature=0.0)
    expected = [7, SEVERAL_SPLITS - 1, 0, int(logits[3].argmax()), int(logits[4].argmax())]
    assert sample(logits, rows).tolist() == expected


def test_greedy_and_sampled_rows_share_a_call() -> None:
    """Rows of all kinds, strided and in 16 bits, draw what they draw alone, and again."""
    wide = (torch.randn(4, 1300) * 3).bfloat16()
    logits, rows = wide[:, :1100], _rows([{}, {"top_p": 0.9}, {"top_k": 5}, {}])
    rows.temperature[3] = 0.0
    together = sample(logits, rows)
    assert torch.equal(together, sample(logits, rows))
    assert torch.equal(together, ReferenceOps().sample(logits.float(), rows))
    for r in (1, 3):
        own = SampleRows(**{name: getattr(rows, name)[r : r + 1] for name in rows.__struct_fields__})
        assert int(sample(logits[r : r + 1], own)) == int(together[r])


def test_extreme_seeds_and_positions() -> None:
    """All 64 bits of a seed key the noise."""
    rows = _rows([{}] * 4)
    rows.seed[:] = torch.tensor([-1, -(2**63), 2**63 - 1, 0])
    rows.position[:] = torch.tensor([2**31 - 1, 0, 1, 2**20])
    _check(torch.zeros(4, 777), rows)
