"""Replayed steps give the bits of steps that are run op by op."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.backends.engine.model import Model
from surefoot.backends.engine.runner import ModelRunner, past_part
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.step_input import StepInput
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.kernels.base import Ops, Program
from surefoot.kernels.cpu.launch import Launcher
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.layout import BLOCK_TOKENS

from .tiny_models import SHAPE, VARIANTS, load_folder, tiny_hf_model


class Pair:
    """Two runners over one model, with caches of the same content: one replays what it can, one nothing."""

    def __init__(self, model: Model, ops: Ops, dtype: torch.dtype) -> None:
        settings = EngineSettings(cache_bytes=16 << 20, max_batched_tokens=512)
        self.replaying, self.eager = (ModelRunner(model, ops, settings, dtype) for _ in range(2))
        self.eager._replay.run = lambda step: None  # type: ignore[method-assign]  # as for steps of another kind
        self._random = random.Random(1)
        self._free = list(range(self.eager.num_blocks))
        self._random.shuffle(self._free)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def forget(self, sequence: int) -> None:
        """Preempt it: its blocks are free, and others will take them."""
        self._free += self._tables.pop(sequence)
        del self._lengths[sequence]
        self._random.shuffle(self._free)

    def step(self, rows: dict[int, int], commits: bool = True) -> None:
        """Run `rows[s]` new rows of each sequence s through both, and compare the logits. A shape is recorded
        when it comes again.
        """
        step = self._step(rows)
        self.replaying.run(step)
        got = self.replaying.run(step).clone()
        want = self.eager.run(step)
        assert got.shape == (step.num_rows, SHAPE["vocab_size"])
        assert torch.equal(got, want)
        assert got.isfinite().all()
        if commits:
            for runner in (self.replaying, self.eager):
                runner.commit(step)
            assert torch.equal(self.replaying._cache, self.eager._cache)
            for sequence, count in rows.items():
                self._lengths[sequence] += count

    @property
    def programs(self) -> dict[tuple[int, int], Program | None]:
        """What the replaying runner has recorded."""
        programs = self.replaying._replay._programs
        return {(shape.num_rows, shape.num_sequences): program for shape, program in programs.items()}

    def _step(self, rows: dict[int, int]) -> StepInput:
        token_ids, positions, cu_rows = [], [], [0]
        for sequence, count in rows.items():
            past = self._lengths.setdefault(sequence, 0)
            table = self._tables.setdefault(sequence, [])
            while len(table) * BLOCK_TOKENS < past + count:
                table.append(self._free.pop())
            token_ids += [self._random.randrange(SHAPE["vocab_size"]) for _ in range(count)]
            positions += range(past, past + count)
            cu_rows.append(len(positions))
        tables = [self._tables[sequence] for sequence in rows]
        owners = [sequence for sequence, count in rows.items() for _ in range(count)]
        places = list(zip(owners, positions, strict=True))
        return StepInput(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            cu_rows=torch.tensor(cu_rows, dtype=torch.int32),
            past=(past_part(tables, [self._lengths[s] for s in rows]),),
            logit_rows=torch.arange(len(positions)),
            logit_spans=[],
            blocks=_int32(self._tables[s][p // BLOCK_TOKENS] for s, p in places),
            slots=_int32(p % BLOCK_TOKENS for _, p in places),
        )


def _int32(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)  # type: ignore[call-overload]  # an iterable of int


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def ops(request: pytest.FixtureRequest, cache_dir: Path) -> CpuOps:
    """The CPU op set on one thread and on two."""
    return CpuOps(Launcher(cache_dir, request.param))


def tiny_model(
    name: str, ops: Ops, folder: Path, mode: WeightMode = WeightMode.INT8, **changes: object
) -> Model:
    """A variant with heads wide enough for the kernels."""
    tiny_hf_model(name, **{"head_dim": 32, **changes}).save_pretrained(folder)
    return load_folder(folder, mode, ops)


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_replays_to_the_same_bits(name: str, ops: CpuOps, tmp_path: Path) -> None:
    """Every family decodes to the same bits in batches that grow and shrink, and replays all of it."""
    pair = Pair(tiny_model(name, ops, tmp_path), ops, torch.bfloat16)
    sizes = (1, 2, 1, 5, 4, 5, 2, 1)
    for size in sizes:
        pair.step(dict.fromkeys(range(size), 1))
    assert set(pair.programs) == {(size, size) for size in sizes}
    assert None not in pair.programs.values()


@pytest.mark.parametrize("mode", WeightMode)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_form_of_weights_and_cache(
    mode: WeightMode, dtype: torch.dtype, ops: CpuOps, tmp_path: Path
) -> None:
    """Weights and cache of every element type replay to the same bits, between prefills of any length."""
    pair = Pair(tiny_model("llama-tied", ops, tmp_path, mode), ops, dtype)
    pair.step({0: 200})
    for size in (1, 3, 1):
        pair.step(dict.fromkeys(range(size), 1))
    assert set(pair.programs) == {(1, 1), (3, 3)}


@pytest.mark.parametrize("size", [7, 8, 9, 16, 33, 64])
def test_large_batches(size: int, ops: CpuOps, tmp_path: Path) -> None:
    """Batches of every tile's height and beyond replay to the same bits, across the ends of blocks."""
    pair = Pair(tiny_model("llama", ops, tmp_path), ops, torch.bfloat16)
    for sequence in range(size):
        pair.step({sequence: 1 + sequence % 19})
    for _ in range(4):
        pair.step(dict.fromkeys(range(size), 1))
    assert pair.programs[size, size] is not None


def test_several_rows_a_sequence(ops: CpuOps, tmp_path: Path) -> None:
    """One recording serves every way to cut its rows into its sequences, committed or not."""
    pair = Pair(tiny_model("llama", ops, tmp_path), ops, torch.bfloat16)
    pair.step({0: 140})
    for rows in ((4, 1, 3), (1, 6, 1), (2, 2, 4), (6, 1, 1)):
        pair.step(dict(enumerate(rows)), commits=False)
        pair.step(dict(enumerate(rows)))
    assert list(pair.programs) == [(8, 3)]


def test_pasts_may_outgrow_the_table(ops: CpuOps, tmp_path: Path) -> None:
    """When a past has more blocks than the recordings took, they are made anew and give the same bits."""
    pair = Pair(tiny_model("llama", ops, tmp_path, max_position_embeddings=4096), ops, torch.bfloat16)
    pair.step({0: 3, 1: 1})
    for length in (480, 511, 512, 300, 500):
        pair.step({0: length})
        for _ in range(3):
            pair.step({0: 1, 1: 1})
    before = pair.programs[2, 2]
    pair.step({0: 1, 1: 1})
    assert pair.programs[2, 2] is before


def test_a_shape_is_recorded_when_it_comes_again(ops: CpuOps, tmp_path: Path) -> None:
    """A step of a shape that came once left no recording, and gave the bits of the recorded one."""
    pair = Pair(tiny_model("llama", ops, tmp_path), ops, torch.bfloat16)
    step = pair._step({0: 1, 1: 3})
    first = pair.replaying.run(step).clone()
    assert not pair.programs
    assert torch.equal(pair.replaying.run(step), first)
    assert list(pair.programs) == [(4, 2)]


def test_blocks_of_a_preempted_sequence(ops: CpuOps, tmp_path: Path) -> None:
    """Sequences that give their blocks up and come back in other blocks replay to the same bits."""
    pair = Pair(tiny_model("llama", ops, tmp_path), ops, torch.bfloat16)
    pair.step({0: 40, 1: 17, 2: 100})
    for lost in (1, 0, 2, 1):
        pair.step(dict.fromkeys(range(3), 1))
        pair.forget(lost)
        pair.step(dict.fromkeys({0, 1, 2} - {lost}, 1))
        pair.step({lost: 50})


def test_steps_of_another_kind_are_not_recorded(ops: CpuOps, tmp_path: Path) -> None:
    """A step with rows that need no logits, or with very many rows, is run op by op."""
    pair = Pair(tiny_model("llama", ops, tmp_path), ops, torch.bfloat16)
    pair.step({0: 200})
    whole = pair._step({1: 9})
    last = StepInput(
        whole.token_ids,
        whole.positions,
        whole.cu_rows,
        whole.past,
        torch.tensor([8]),
        [],
        whole.blocks,
        whole.slots,
    )
    assert torch.equal(pair.replaying.run(last)[0], pair.eager.run(whole)[8])
    assert not pair.programs
