"""Whether every op on a device agrees with its plain form on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from surefoot.kernels.base import Observed, SampleRows
from surefoot.kernels.layout import FORMATS, FULL, INT4, CacheFormat
from surefoot.kernels.reference import ReferenceOps

from .device_loads import on, slots_of
from .device_rows import Check
from .device_scene import Scene
from .device_sections import Section
from .device_setup import Setup
from .device_step_checks import check_engine, check_steps

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest norm of an error over the norm of the result, as the kernels' tests have it."""

TOKENS = 111
"""Of a sequence that is checked: no format's blocks are full."""

PROMPT = 63
"""Rows that go the way of prompts."""


def check_rowwise(setup: Setup) -> Iterator[Check]:
    """Ops on rows alone, and linear layers."""
    ops, plain, device, dtype = setup.ops(), ReferenceOps(), setup.device, setup.shape.dtype
    x, weight, residual = torch.randn(63, 256).to(dtype), torch.rand(256) + 0.5, torch.randn(63, 256)
    angle, matrix = torch.rand(63, 32), torch.randn(96, 256).to(dtype)
    cos, sin, there, wide = angle.cos(), angle.sin(), x.to(device), x.float()
    weight_, summed = weight.to(device), residual.clone().to(device)
    heads, wide_heads = there.view(63, 4, 64), wide.view(63, 4, 64)
    for name, actual, expected in (
        ("rms_norm", ops.rms_norm(there, weight_, 1e-5), plain.rms_norm(wide, weight, 1e-5)),
        (
            "add_rms_norm",
            ops.add_rms_norm(summed, there, weight_, 1e-5),
            plain.rms_norm(residual + wide, weight, 1e-5),
        ),
        ("sum of add_rms_norm", summed, residual + wide),
        ("silu_mul", ops.silu_mul(there), plain.silu_mul(wide)),
        ("rope", ops.rope(heads, cos.to(device), sin.to(device)), plain.rope(wide_heads, cos, sin)),
        ("rotate", ops.rotate(heads[:, 1:]), plain.rotate(wide_heads[:, 1:])),
        ("linear", ops.linear(there, ops.prepare_linear(matrix.to(device))), wide @ matrix.float().T),
    ):
        yield _close(name, actual, expected, dtype)
    if (invariant := setup.invariant_ops()) is not None:
        prepared = invariant.prepare_linear(matrix.to(device))
        together = invariant.linear(there, prepared)
        yield _close("linear, batch-invariant", together, wide @ matrix.float().T, dtype)
        alone = torch.cat([invariant.linear(row, prepared) for row in there[:3].split(1)])
        yield Check(name="bits of linear alone", error=_num_different(together[:3], alone), limit=0.0)


def check_cache(setup: Setup, cache_format: CacheFormat) -> Iterator[Check]:
    """Bytes that commit and demote write, and attention of few rows over them."""
    shape, ops, plain, device = setup.shape, setup.ops(), ReferenceOps(), setup.device
    layout, bits = shape.layout, f"({cache_format.k_bits}, {cache_format.v_bits})"
    k, v = torch.randn(2, 2, TOKENS, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
    at = slots_of(layout, cache_format, torch.arange(TOKENS), first_block=0)
    lower = slots_of(layout, INT4, torch.arange(TOKENS), first_block=8)
    cache = torch.zeros(2, 16, layout.block_bytes, dtype=torch.uint8)
    there, placed = cache.to(device), on(at, device)
    plain.commit(cache, layout, k, v, at.blocks, at.slots, cache_format)
    ops.commit(there, layout, k.to(device), v.to(device), placed.blocks, placed.slots, cache_format)
    plain.demote(cache, layout, at, lower)
    ops.demote(there, layout, placed, on(lower, device))
    yield Check(name=f"bytes of {bits}", error=_num_different(there, cache), limit=0.0)
    yield from _attention(setup, f"attention over {bits}", [3], {cache_format: [shape.long]})
    yield from _past_alone(setup, f"past of {bits}", cache_format)


def check_mixed(setup: Setup) -> Iterator[Check]:
    """Two formats in one call, and a row's bits alone, again, and among rows of others."""
    long = setup.shape.long
    rows, lengths = [1, 9, 0, 17], {FULL: [TOKENS, long, 0, 0], INT4: [long, 0, 0, TOKENS]}
    yield from _attention(setup, "attention over two formats", rows, lengths)
    scene, ops = Scene.random(setup.shape, rows, lengths).on(setup.device), setup.ops()
    together, again = (scene.attention(ops) for _ in range(2))
    yield Check(name="bits again", error=_num_different(together, again), limit=0.0)
    alone = torch.cat([scene.alone(b).attention(ops) for b in range(2)])
    yield Check(name="bits alone", error=_num_different(together[: len(alone)], alone), limit=0.0)


def check_prompt(setup: Setup, formats: Sequence[CacheFormat]) -> Iterator[Check]:
    """Attention of a prompt's chunk beside a sequence that decodes."""
    name = " and ".join(f"({own.k_bits}, {own.v_bits})" for own in formats) or "nothing"
    lengths = {own: [TOKENS, setup.shape.long] for own in formats}
    yield from _attention(setup, f"prompt over {name}", [PROMPT, 1], lengths)
    if not formats:
        scene = Scene.random(setup.shape, [PROMPT, 5], {})
        expected = scene.float().present(ReferenceOps())
        found = scene.on(setup.device).present(setup.ops())
        for part, actual, right in zip(("present", "lse of present"), found, expected, strict=True):
            yield _close(part, actual, right, setup.shape.dtype)


def check_mass(setup: Setup) -> Iterator[Check]:
    """The share of attention that tokens received."""
    ops, plain = setup.ops(), ReferenceOps()
    for own in (FULL, INT4):
        scene = Scene.random(setup.shape, [3, PROMPT], {own: [TOKENS, 0]})
        there = scene.on(setup.device)
        lse = scene.float().lse(plain)
        observed = Observed(rows=torch.tensor([0, 2, 40], dtype=torch.int32), lse=lse)
        past, present = there.masses(ops, on(observed, setup.device))
        right_past, right_present = scene.float().masses(plain, observed)
        bits = f"({own.k_bits}, {own.v_bits})"
        yield _close(f"mass over {bits}", past, right_past, setup.shape.dtype)
        yield _close(f"mass beside {bits}", present, right_present, setup.shape.dtype)


def check_sampling(setup: Setup) -> Iterator[Check]:
    """How many rows draw another token, with filters and without."""
    index = torch.arange(9)
    rows = SampleRows(
        temperature=(index > 0).float() * 0.8,
        top_k=index % 2 * 40,
        top_p=1.0 - index % 3 * 0.1,
        min_p=index % 4 * 0.01,
        seed=index * 0x1234567890ABCDE - 5,
        choice=index,
        position=index * 7,
    )
    logits = torch.randn(9, setup.load.config.vocab_size) * 3
    actual = setup.ops().sample(logits.to(setup.device), on(rows, setup.device))
    expected = ReferenceOps().sample(logits, rows)
    yield Check(name="sample", error=_num_different(actual, expected), limit=0.0)


CHECKS = (
    Section("rows and linear layers", check_rowwise),
    *(
        Section(f"cache of {own.k_bits}, {own.v_bits}", partial(check_cache, cache_format=own))
        for own in FORMATS
    ),
    Section("mixed formats", check_mixed),
    Section("prompt", partial(check_prompt, formats=())),
    Section("prompt over a past", partial(check_prompt, formats=(FULL,))),
    Section("prompt over two", partial(check_prompt, formats=(FULL, INT4))),
    Section("mass", check_mass),
    Section("sampling", check_sampling),
    Section("steps", check_steps),
    Section("engine", check_engine),
)
"""All at once, the largest kernels among the first: what they take is mostly compiling."""


def _attention(
    setup: Setup, name: str, rows: list[int], lengths: dict[CacheFormat, list[int]]
) -> Iterator[Check]:
    scene = Scene.random(setup.shape, rows, lengths)
    expected = scene.float().attention(ReferenceOps())
    yield _close(name, scene.on(setup.device).attention(setup.ops()), expected, setup.shape.dtype)


def _past_alone(setup: Setup, name: str, cache_format: CacheFormat) -> Iterator[Check]:
    """The past's part with its log-sum-exp, and merged with the present's."""
    scene = Scene.random(setup.shape, [2, 1], {cache_format: [setup.shape.long, 0]})
    plain, there, ops = ReferenceOps(), scene.on(setup.device), setup.ops()
    out, lse = there.past(ops)
    right_out, right_lse = scene.float().past(plain)
    yield _close(name, out, right_out, setup.shape.dtype)
    yield _close(f"lse of {name}", lse[:2], right_lse[:2], setup.shape.dtype)
    merged = ops.merge(out, lse, *there.present(ops))
    yield _close(f"{name}, merged", merged, scene.float().attention(plain), setup.shape.dtype)


def _close(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Check:
    error = (actual.cpu().double() - expected.double()).norm() / expected.double().norm()
    return Check(name=name, error=float(error), limit=MAX_ERROR[dtype])


def _num_different(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu() != expected.cpu()).sum())
