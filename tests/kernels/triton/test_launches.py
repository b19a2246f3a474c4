"""What Triton would compile, and when: a kernel that is first met while serving is a pause of seconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from surefoot.backends.engine.device import Called
from surefoot.backends.engine.device_runner import DeviceRunner
from surefoot.backends.engine.runner import past_part
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.step_input import StepInput
from surefoot.bench.device_model import TINY, random_model
from surefoot.kernels.base import Observed, Past, SampleRows, Slots
from surefoot.kernels.layout import FORMATS, FULL, INT4, INT8, BlockLayout, CacheFormat
from surefoot.kernels.triton.linear import DenseLinear
from surefoot.kernels.triton.ops import TritonOps
from surefoot.kernels.triton.splits import split_options
from surefoot.kernels.triton.tiles import launch_options

from .launches import noted_compilations

LAYOUT = BlockLayout(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
HEADS = 6


def step_of(
    rows: list[int], width: int, formats: tuple[CacheFormat, ...], num_rotated: int, *, is_prefill: bool
) -> StepInput:
    """Some rows for each sequence, which have block lists of `width` blocks."""
    total = sum(rows)
    return StepInput(
        token_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.arange(total) % TINY.max_position_embeddings,
        cu_rows=torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32),
        past=tuple(past_part([[0] * width] * len(rows), [0] * len(rows), own) for own in formats),
        logit_rows=torch.arange(len(rows) if is_prefill else total),
        logit_spans=[],
        blocks=torch.zeros(total, dtype=torch.int32),
        slots=torch.zeros(total, dtype=torch.int32),
        num_rotated=num_rotated,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["library", "batch-invariant"])
def runner(request: pytest.FixtureRequest) -> DeviceRunner:
    """Of a tiny model in bfloat16, with either kind of matrix products."""
    ops, device = TritonOps(batch_invariant=request.param), torch.device("cpu")
    with noted_compilations():
        model = random_model(TINY, ops, device, torch.bfloat16).model
    settings = EngineSettings(cache_bytes=1 << 20, max_sequences=64, max_batched_tokens=512)
    return DeviceRunner(model, ops, settings, torch.bfloat16, Called)


@pytest.mark.parametrize("formats", [(FULL,), (FULL, INT4)])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_sizes_compile_nothing(
    runner: DeviceRunner, formats: tuple[CacheFormat, ...], is_prefill: bool
) -> None:
    """One step of a kind compiles each of its kernels once; a second has others only for the norm alone. No
    number of rows, sequences or blocks, no bucket and no row that is left out compiles another.
    """
    longest = 64 if is_prefill else 1
    with noted_compilations() as compiled:
        for rows in ([longest], [longest, 3], [longest] + [1] * 15, [longest, *range(1, 18)], [longest] * 5):
            for width in (1, 16, 17):
                rotated = rows[-1] if len(formats) > 1 else 0
                step = step_of(rows, width, formats, rotated, is_prefill=is_prefill)
                runner.run(step)
                runner.commit(step)
                runner.commit(step, list(range(0, sum(rows), 2)))
    most = {"_rms_norm": 2}
    assert {name: n for name, n in Counter(compiled).items() if n > most.get(name, 1)} == {}
    assert {"attend_splits", "fold_splits", "_commit"} <= set(compiled)
    assert ("attend_rows" in compiled) == is_prefill
    assert ("_rotate" in compiled) == (len(formats) > 1)


def test_sampling_and_demotion_compile_nothing_new() -> None:
    """Whatever number of rows is sampled from or demoted."""
    ops = TritonOps()
    cache = torch.zeros(2, 64, LAYOUT.block_bytes, dtype=torch.uint8)
    with noted_compilations() as compiled:
        for count in (1, 2, 16, 33):
            real = dict.fromkeys(("temperature", "top_p", "min_p"), torch.zeros(count))
            whole = dict.fromkeys(("top_k", "seed", "choice", "position"), real["top_p"].long())
            ops.sample(torch.zeros(count, 5000), SampleRows(**real, **whole))
            numbers = torch.arange(count, dtype=torch.int32)
            source, target = (Slots(blocks=numbers, slots=numbers, format=own) for own in (FULL, INT8))
            ops.demote(cache, LAYOUT, source, target)
    # Demotion is two launches: into the target's format, and as it is.
    assert Counter(compiled) == {"_best": 1, "_look": 1, "_choose": 1, "_pick": 1, "_move": 2}


@pytest.mark.parametrize("rows", [3, 40])
def test_every_op_is_launched(rows: int) -> None:
    """Triton takes the arguments of each launch of each op, with every format: it refuses what a kernel does
    not have, which its interpreter would drop.
    """
    ops = TritonOps(batch_invariant=True)
    layer = torch.zeros(8, LAYOUT.block_bytes, dtype=torch.uint8)
    q = torch.zeros(rows, HEADS, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, rows, 2, 64, dtype=torch.bfloat16)
    cu_rows = torch.tensor([0, rows], dtype=torch.int32)
    table, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    pasts = [Past(block_table=table, lengths=lengths, format=own) for own in FORMATS]
    wide, angle = torch.zeros(rows, 64, dtype=torch.bfloat16), torch.zeros(rows, 32)
    with noted_compilations() as compiled:
        ops.linear(wide, ops.prepare_linear(torch.zeros(96, 64, dtype=torch.bfloat16)))
        ops.norm_heads(q, torch.ones(64), 1e-5)
        ops.add_rms_norm(torch.zeros(rows, 64), wide, torch.ones(64), 1e-5)
        ops.rope(q, angle, angle)
        ops.silu_mul(wide)
        ops.rotate_heads(q)
        for past in (*([own] for own in pasts), pasts, []):
            out, lse = ops.past_attention(q, cu_rows, layer, LAYOUT, past, 0.125)
            ops.attention(q, k, v, cu_rows, layer, LAYOUT, past, 0.125, lse)
        ops.merge(out, lse, *ops.present_attention(q, k, v, cu_rows, 0.125))
        observed = Observed(rows=torch.zeros(1, dtype=torch.int32), lse=lse)
        for past in pasts:
            ops.past_mass(q, cu_rows, layer, LAYOUT, past, 0.125, observed)
        ops.present_mass(q, k, cu_rows, 0.125, observed)
    assert set(compiled) == {
        *("_invariant_linear", "_rms_norm", "_rope", "_silu_mul", "_rotate", "merge_parts"),
        *("attend_splits", "fold_splits", "observe_past", "observe_present"),
        *(("attend_rows",) if rows > 32 else ()),
    }


@pytest.mark.parametrize(("capability", "most"), [((8, 6), 255), ((9, 0), None)])
def test_options_are_those_of_the_gpus_generation(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], most: int | None
) -> None:
    """What one generation needs so that nothing spills, the others are not launched with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    options = split_options([8, 16], 128)
    assert launch_options(4, 3, options).get("maxnreg") == most
    assert launch_options(4, 3, split_options([4, 16], 128))["maxnreg"] == 255


ROWS, ANGLE = torch.zeros(3, 6, 64), torch.zeros(3, 32)
LINEAR = DenseLinear(weight=torch.zeros(96, 64), bias=None)
CU_ROWS, ROW = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
LAYER = torch.zeros(8, LAYOUT.block_bytes, dtype=torch.uint8)
CACHE, KEYS = LAYER[None], torch.zeros(1, 3, 2, 64)
PAST = Past(block_table=torch.zeros(1, 16, dtype=torch.int32), lengths=ROW)
LSE, NUMBERS = torch.zeros(3, 6), torch.arange(3, dtype=torch.int32)
SAMPLE_ROWS = SampleRows(
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.zeros(3)),
    **dict.fromkeys(("top_k", "seed", "choice", "position"), torch.zeros(3, dtype=torch.int64)),
)


def _past(**fields: Tensor) -> tuple[Any, ...]:
    return ROWS, CU_ROWS, LAYER, LAYOUT, replace(PAST, **fields), 0.125


REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "doubles": ("rotate", (ROWS.double(),)),
    "numbers apart": ("rotate", (ROWS.transpose(1, 2),)),
    "whole numbers": ("silu_mul", (torch.zeros(3, 64, dtype=torch.int32),)),
    "an odd width": ("silu_mul", (torch.zeros(3, 63),)),
    "angles of other rows": ("rope", (ROWS, ANGLE[:2], ANGLE[:2])),
    "angles in 16 bits": ("rope", (ROWS, ANGLE.half(), ANGLE.half())),
    "a short weight": ("rms_norm", (ROWS[0], torch.zeros(32), 1e-5)),
    "a residual in 16 bits": ("add_rms_norm", (ROWS[0].half(), ROWS[0], torch.zeros(64), 1e-5)),
    "an input of another width": ("linear", (torch.zeros(3, 63), LINEAR)),
    "a short bias": ("linear", (torch.zeros(3, 64), replace(LINEAR, bias=torch.zeros(95)))),
    "parts of two dtypes": ("merge", (ROWS, LSE, ROWS.half(), LSE)),
    "a log-sum-exp in 16 bits": ("merge", (ROWS, LSE.half(), ROWS, LSE)),
    "long row numbers": ("present_attention", (ROWS, *KEYS, *KEYS, CU_ROWS.long(), 0.125)),
    "keys of other heads": ("present_attention", (ROWS, ROWS[:, :4], ROWS[:, :4], CU_ROWS, 0.125)),
    "long block lists": ("past_attention", _past(block_table=PAST.block_table.long())),
    "block lists apart": ("past_attention", _past(block_table=PAST.block_table.expand(2, 16).T[:1])),
    "lengths of other sequences": ("past_attention", _past(lengths=torch.zeros(2, dtype=torch.int32))),
    "a block that is cut": ("past_attention", (ROWS, CU_ROWS, LAYER[:, 16:], LAYOUT, PAST, 0.125)),
    "long observed rows": ("past_mass", (*_past(), Observed(rows=ROW.long(), lse=LSE))),
    "a short log-sum-exp": ("present_mass", (ROWS, *KEYS, CU_ROWS, 0.125, Observed(rows=ROW, lse=LSE[:2]))),
    "a cache of floats": ("commit", (CACHE.float(), LAYOUT, KEYS, KEYS, NUMBERS, NUMBERS)),
    "places of other rows": ("commit", (CACHE, LAYOUT, KEYS, KEYS, NUMBERS[:2], NUMBERS[:2])),
    "keys of doubles": ("commit", (CACHE, LAYOUT, KEYS.double(), KEYS.double(), NUMBERS, NUMBERS)),
    "more targets": (
        "demote",
        (
            CACHE,
            LAYOUT,
            Slots(blocks=NUMBERS[:2], slots=NUMBERS[:2], format=FULL),
            Slots(blocks=NUMBERS, slots=NUMBERS, format=INT8),
        ),
    ),
    "logits of doubles": ("sample", (torch.zeros(3, 64).double(), SAMPLE_ROWS)),
    "a short seed": ("sample", (torch.zeros(3, 64), replace(SAMPLE_ROWS, seed=SAMPLE_ROWS.seed.int()))),
    "parameters of other rows": ("sample", (torch.zeros(2, 64), SAMPLE_ROWS)),
}
"""By what is wrong: an op and its arguments."""


@pytest.mark.parametrize("wrong", REFUSED)
def test_launchers_refuse(wrong: str) -> None:
    """No kernel runs on shapes, strides or dtypes that it was not written for."""
    name, arguments = REFUSED[wrong]
    with noted_compilations() as compiled, pytest.raises(AssertionError):
        getattr(TritonOps(torch.float32, batch_invariant=True), name)(*arguments)
    assert compiled == []
