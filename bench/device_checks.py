"""Whether every op on a device agrees with its plain form on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.backends.engine.device import Called, capture_on
from surefoot.backends.engine.device_runner import DeviceRunner
from surefoot.backends.engine.settings import EngineSettings
from surefoot.kernels.base import Ops, Past, SampleRows
from surefoot.kernels.layout import FORMATS, INT4, CacheFormat
from surefoot.kernels.reference import ReferenceOps

from .device_loads import Shape, on, slots_of, verification_step
from .device_model import TINY, random_model

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest norm of an error over the norm of the result, as the kernels' tests have it."""

TOKENS = 111
"""Of the sequence that is checked: no format's blocks are full."""


class Check(Struct, frozen=True, kw_only=True):
    """One comparison: the error found, and the largest allowed."""

    name: str
    error: float
    limit: float

    @property
    def is_good(self) -> bool:
        """Whether the error is within the limit; what is no number is not."""
        return self.error <= self.limit


def run_checks(ops: Ops, device: torch.device, shape: Shape) -> Iterator[Check]:
    """Every op, with small random inputs."""
    torch.manual_seed(0)
    yield from _rowwise(ops, device, shape.dtype)
    for cache_format in FORMATS:
        yield from _cache(ops, device, shape, cache_format)
    yield _sample(ops, device)
    yield from _steps(ops, device, shape.dtype)


def _rowwise(ops: Ops, device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    plain, x, weight = ReferenceOps(), torch.randn(63, 256).to(dtype), torch.rand(256) + 0.5
    angle, matrix = torch.rand(63, 32), torch.randn(96, 256).to(dtype)
    cos, sin, there, wide = angle.cos(), angle.sin(), x.to(device), x.float()
    heads, wide_heads = there.view(63, 4, 64), wide.view(63, 4, 64)
    for name, actual, expected in (
        ("rms_norm", ops.rms_norm(there, weight.to(device), 1e-5), plain.rms_norm(wide, weight, 1e-5)),
        ("silu_mul", ops.silu_mul(there), plain.silu_mul(wide)),
        ("rope", ops.rope(heads, cos.to(device), sin.to(device)), plain.rope(wide_heads, cos, sin)),
        ("rotate", ops.rotate(heads), plain.rotate(wide_heads)),
        ("linear", ops.linear(there, ops.prepare_linear(matrix.to(device))), wide @ matrix.float().T),
    ):
        yield Check(name=name, error=_error(actual, expected), limit=MAX_ERROR[dtype])


def _cache(ops: Ops, device: torch.device, shape: Shape, cache_format: CacheFormat) -> Iterator[Check]:
    """Bytes that commit and demote write, and attention over them."""
    layout, plain = shape.layout, ReferenceOps()
    k, v = torch.randn(2, 1, TOKENS, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
    at = slots_of(layout, cache_format, torch.arange(TOKENS), first_block=0)
    lower = slots_of(layout, INT4, torch.arange(TOKENS), first_block=8)
    cache = torch.zeros(1, 16, layout.block_bytes, dtype=torch.uint8)
    there = cache.to(device)
    placed = on(at, device)
    plain.commit(cache, layout, k, v, at.blocks, at.slots, cache_format)
    ops.commit(there, layout, k.to(device), v.to(device), placed.blocks, placed.slots, cache_format)
    plain.demote(cache, layout, at, lower)
    ops.demote(there, layout, placed, on(lower, device))
    bits = f"({cache_format.k_bits}, {cache_format.v_bits})"
    yield Check(name=f"bytes of {bits}", error=float((there.cpu() != cache).sum()), limit=0.0)

    rows = 3
    q = torch.randn(rows, shape.num_heads, shape.head_dim).to(shape.dtype)
    cu_rows, new = torch.tensor([0, rows], dtype=torch.int32), slice(0, rows)
    past = Past(
        block_table=torch.arange(8, dtype=torch.int32)[None],
        lengths=torch.tensor([TOKENS], dtype=torch.int32),
        format=cache_format,
    )
    k, v = k[0, new], v[0, new]
    q_, k_, v_, cu_rows_ = (x.to(device) for x in (q, k, v, cu_rows))
    actual = ops.attention(q_, k_, v_, cu_rows_, there[0], layout, on(past, device), shape.scale)
    expected = plain.attention(q.float(), k, v, cu_rows, cache[0], layout, past, shape.scale)
    yield Check(name=f"attention over {bits}", error=_error(actual, expected), limit=MAX_ERROR[shape.dtype])


def _sample(ops: Ops, device: torch.device) -> Check:
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
    logits = torch.randn(9, 20000) * 3
    actual = ops.sample(logits.to(device), on(rows, device)).cpu()
    return Check(name="sample", error=float((actual != ReferenceOps().sample(logits, rows)).sum()), limit=0.0)


def _steps(ops: Ops, device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Logits of steps that are replayed beside those of the same steps as they are, and how many replayed
    ones the host waited in. Each kind of step comes three times: as it is, captured, replayed.
    """
    loaded = random_model(TINY, ops, device, dtype)
    settings = EngineSettings(cache_bytes=1 << 20, max_sequences=4, max_batched_tokens=64)
    replaying = DeviceRunner(loaded.model, ops, settings, dtype, capture_on(device))
    plain = DeviceRunner(loaded.model, ops, settings, dtype, Called)
    error, num_waits, lengths = 0.0, 0, [0, 0, 0]
    for number, rows in enumerate(([1], [1, 1, 1], [2, 1, 3]) * 3):
        step = verification_step(lengths, rows)
        expected = plain.run(step).cpu()
        plain.commit(step)
        try:
            with _no_waits(device if number >= 6 else torch.device("cpu")):
                logits = replaying.run(step)
                replaying.commit(step)
        except RuntimeError:
            num_waits += 1
            logits = replaying.run(step)
        error = max(error, _error(logits, expected))
        lengths = [length + more for length, more in zip_longest(lengths, rows, fillvalue=0)]
    yield Check(name="graphs of steps", error=error, limit=MAX_ERROR[dtype])
    yield Check(name="waits in steps", error=float(num_waits), limit=0.0)


@contextmanager
def _no_waits(device: torch.device) -> Iterator[None]:
    """On a GPU, `RuntimeError` where torch would wait for it, as far as torch can tell."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu().double() - expected.double()).norm() / expected.double().norm())
