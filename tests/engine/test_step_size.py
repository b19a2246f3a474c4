"""Steps on their way to a GPU: to what sizes they are padded, and what of them arrives."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from surefoot.backends.engine.step_input import StepInput
from surefoot.backends.engine.step_size import (
    MAX_ROWS,
    MAX_WINDOW,
    StepSize,
    bucket_of,
    decode_buckets,
    fill,
    largest,
    size_of,
    views,
)
from surefoot.kernels.base import Past
from surefoot.kernels.layout import FULL, INT4, K8V4


def step_of(rows: list[int], num_rotated: int = 0, widths: tuple[int, ...] = (3,)) -> StepInput:
    """Sequences of so many rows, all numbers different."""
    count, starts = sum(rows), [sum(rows[:i]) for i in range(len(rows) + 1)]
    number = torch.arange(count)
    return StepInput(
        token_ids=number + 100,
        positions=number + 200,
        cu_rows=torch.tensor(starts, dtype=torch.int32),
        past=tuple(
            Past(
                block_table=torch.arange(1, len(rows) * width + 1, dtype=torch.int32).view(-1, width),
                lengths=torch.arange(1, len(rows) + 1, dtype=torch.int32) * width,
                format=cache_format,
            )
            for cache_format, width in zip((INT4, FULL, K8V4), widths, strict=False)
        ),
        logit_rows=number,
        logit_spans=[],
        blocks=(number + 300).int(),
        slots=(number % 16).int(),
        num_rotated=num_rotated,
    )


@pytest.mark.parametrize(
    ("rows", "num_rotated", "bucket"),
    [
        ([1], 0, (1, 0, 1, 1)),
        ([1] * 3, 0, (4, 0, 4, 1)),
        ([1] * 9, 9, (0, 16, 16, 1)),
        ([1] * 63, 1, (64, 1, 64, 1)),
        ([1] * 65, 0, (96, 0, 96, 1)),
        ([3, 1, 5], 5, (4, 8, 4, 8)),
        ([17], 0, (24, 0, 1, 32)),
        ([MAX_WINDOW], 0, (32, 0, 1, 32)),
    ],
)
def test_a_bucket_holds_its_steps(
    rows: list[int], num_rotated: int, bucket: tuple[int, int, int, int]
) -> None:
    """Rows of both kinds, sequences and rows a sequence are rounded up, each by itself."""
    found = bucket_of(size_of(step_of(rows, num_rotated)), MAX_ROWS)
    assert found is not None
    assert found[:4] == bucket
    assert found.table_width == 64


def test_few_buckets_serve_all_batches() -> None:
    """Decoding up to 256 sequences takes 17 sizes, and no step runs twice the rows that it has."""
    sizes = [bucket_of(size_of(step_of([1] * batch)), MAX_ROWS) for batch in range(1, MAX_ROWS + 1)]
    kinds = set(sizes)
    assert None not in kinds
    assert len(kinds) == 17
    assert {each._replace(formats=(FULL,)) for each in kinds if each} == set(
        decode_buckets(MAX_ROWS, MAX_ROWS)
    )
    for batch, size in enumerate(sizes, start=1):
        assert size is not None
        assert batch <= size.num_rows < 2 * batch
    assert decode_buckets(100, 100)[0].num_rows == 96


@pytest.mark.parametrize(
    "step",
    [
        replace(step_of([1, 40]), logit_rows=torch.tensor([0, 40])),
        step_of([MAX_WINDOW + 1]),
        step_of([2] * 129),
    ],
    ids=["prefill", "many rows of one", "many rows"],
)
def test_other_steps_have_no_bucket(step: StepInput) -> None:
    """Steps with rows that need no logits, with long runs of rows, or with many rows run as they are."""
    assert bucket_of(size_of(step), MAX_ROWS) is None


def test_tables_widen_by_powers_of_two() -> None:
    """A context of any length finds one of few widths."""
    wide = bucket_of(size_of(step_of([1, 1], widths=(65, 3))), MAX_ROWS)
    assert wide is not None
    assert wide.table_width == 128


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [[1], [2, 5, 1], [1] * 11])
@pytest.mark.parametrize("num_rotated", [0, 1])
def test_a_step_arrives(rows: list[int], num_rotated: int, padded: bool) -> None:
    """All that is said of rows and sequences is found in the copy, from the first row on; what pads it has no
    rows and no past. Parts begin at multiples of 16 bytes.
    """
    step = step_of(rows, num_rotated, widths=(3, 5))
    size = size_of(step)
    bucket = bucket_of(size, MAX_ROWS) if padded else size
    assert bucket is not None
    first = bucket.num_plain - size.num_plain
    words = torch.zeros(bucket.num_words, dtype=torch.int32)
    arrived = views(words, bucket)
    fill(arrived, step, first)
    own = slice(first, first + step.num_rows)
    for name in ("token_ids", "positions", "blocks", "slots"):
        tensor = getattr(arrived, name)
        assert torch.equal(tensor[own], getattr(step, name)), name
        assert tensor.count_nonzero() == getattr(step, name).count_nonzero(), name
    assert torch.equal(arrived.cu_rows[: len(rows) + 1] - first, step.cu_rows)
    assert set(arrived.cu_rows[len(rows) :].tolist()) == {first + step.num_rows}
    assert torch.equal(arrived.logit_rows, step.logit_rows if not padded else step.logit_rows[:0])
    assert bucket.num_rows - bucket.num_rotated == first + step.num_rows - num_rotated
    for past in step.past:
        (copy,) = (each for each in arrived.past if each.format == past.format)
        assert torch.equal(copy.block_table[: len(rows), : past.block_table.shape[1]], past.block_table)
        assert copy.block_table.is_contiguous()
        assert copy.lengths.tolist() == past.lengths.tolist() + [0] * (len(copy.lengths) - len(rows))
    tensors = [arrived.token_ids, arrived.positions, arrived.logit_rows, arrived.cu_rows, arrived.blocks]
    tensors += [t for past in arrived.past for t in (past.block_table, past.lengths)]
    assert all((t.data_ptr() - words.data_ptr()) % 16 == 0 for t in tensors)


def test_nothing_is_larger_than_the_largest() -> None:
    """The memory for steps holds every step that the limits allow, padded or not."""
    limit = largest(max_rows=300, max_sequences=20, table_width=100).num_words
    for rows in ([1] * 20, [12] * 20, [300], [15] * 20):
        size = size_of(step_of(rows, widths=(100, 100, 100)))
        for each in (size, bucket_of(size, MAX_ROWS)):
            assert each is None or StepSize(*each).num_words <= limit
