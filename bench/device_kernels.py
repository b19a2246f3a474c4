"""How fast kernels are: attention in useful bytes or operations a second, and linear layers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backends.engine.device import capture_on
from surefoot.kernels.base import Ops
from surefoot.kernels.layout import FORMATS, CacheFormat

from .device_loads import DecodeLoad, Shape, decode_load
from .device_model import layer_matrices
from .device_rows import Fault, Ratio, Row, Timing
from .device_setup import Setup

ROUNDS = 7
"""Timings of which the median counts."""

BAR_BYTES = 256 << 20
"""A call that reads fewer is over before a GPU's memory runs at its full rate: it is only reported."""

LEAST_SHARE = {16: 0.85, 8: 0.70, 4: 0.70}
"""Of a copy's rate that decoding should reach, by the bits of a number of K."""

LEAST_PREFILL = 0.9
"""Of the rate of torch's own attention."""


def copy_rate(setup: Setup) -> float:
    """Bytes read and written a second by a copy within the device's memory."""
    source = torch.ones(setup.shape.copy_bytes, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    return 2 * setup.shape.copy_bytes / measure(lambda: target.copy_(source), setup.device)


def time_decoding(setup: Setup) -> Iterator[Row]:
    """Attention over the past per context, batch and format, beside a copy."""
    shape, ops, rate = setup.shape, setup.ops(), copy_rate(setup)
    yield Timing(
        name="copy, read and written",
        seconds=2 * shape.copy_bytes / rate,
        amount=2 * shape.copy_bytes,
        unit="B",
        baseline=rate,
    )
    for context in shape.contexts:
        for batch in shape.batches:
            for own in FORMATS:
                name = decoding_name(context, batch, own)
                try:
                    load = decode_load(shape, own, batch, context, setup.device)
                    seconds = measure(partial(_decode, ops, shape, load), setup.device)
                except torch.OutOfMemoryError as error:
                    yield Fault(name=name, what=str(error).splitlines()[0])
                    continue
                yield Timing(
                    name=name,
                    seconds=seconds,
                    amount=load.useful_bytes,
                    unit="B",
                    baseline=rate,
                    least=LEAST_SHARE[own.k_bits] if load.layer_bytes >= BAR_BYTES else None,
                )


def decoding_name(context: int, batch: int, own: CacheFormat) -> str:
    """Of a row."""
    return f"decode {context} x {batch}, ({own.k_bits}, {own.v_bits})"


def time_prefill(setup: Setup) -> Iterator[Row]:
    """Causal attention of one prompt among itself, beside torch's."""
    shape, ops, device = setup.shape, setup.ops(), setup.device
    for length in shape.prompts:
        q = torch.randn(length, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
        k, v = torch.randn(2, length, shape.num_kv_heads, shape.head_dim, dtype=q.dtype, device=device)
        cu_rows = torch.tensor([0, length], dtype=torch.int32, device=device)
        operations = 2 * length * (length + 1) * shape.num_heads * shape.head_dim
        torch_s = measure(partial(_attend_in_torch, *(x.transpose(0, 1)[None] for x in (q, k, v))), device)
        ours_s = measure(partial(_attend, ops, q, k, v, cu_rows, shape.scale), device)
        for who, seconds in (("torch", torch_s), ("ours", ours_s)):
            yield Timing(
                name=f"prefill {length}, {who}",
                seconds=seconds,
                amount=operations,
                unit="FLOP",
                baseline=operations / torch_s,
                least=LEAST_PREFILL if who == "ours" else None,
            )


def time_linear(setup: Setup) -> Iterator[Row]:
    """The matrix products of one of the served model's layers, by the library and batch-invariant: what that
    costs. Enough copies of each matrix are read that no cache holds them.
    """
    shape, ops = setup.shape, setup.ops()
    kinds = {"library": ops, "batch-invariant": setup.invariant_ops() or ops}
    totals = dict.fromkeys(product(shape.rows, kinds), 0.0)
    for name, size in layer_matrices(setup.load.config).items():
        copies = -(-shape.min_bytes // (math.prod(size) * shape.dtype.itemsize))
        matrices = torch.randn(copies, *size, dtype=shape.dtype, device=setup.device)
        weights = [ops.prepare_linear(matrix) for matrix in matrices]
        for rows in shape.rows:
            x = torch.randn(rows, size[1], dtype=shape.dtype, device=setup.device)
            amount = 2.0 * rows * math.prod(size)
            seconds = {
                who: measure(partial(_multiply, own, x, weights), setup.device) / copies
                for who, own in kinds.items()
            }
            for who, own_s in seconds.items():
                totals[rows, who] += own_s
                yield Timing(
                    name=f"{name} of {rows} rows, {who}",
                    seconds=own_s,
                    amount=amount,
                    unit="FLOP",
                    baseline=amount / seconds["library"],
                )
    for rows in shape.rows:
        ratio = totals[rows, "library"] / totals[rows, "batch-invariant"]
        yield Ratio(name=f"layer of {rows} rows, batch-invariant", ratio=ratio)


def measure(run: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of one call, the median of some; on a GPU replayed from a graph, so that launches are free."""
    program = capture_on(device)(run)
    if device.type != "cuda":
        return statistics.median(_wall_s(program.replay) for _ in range(ROUNDS))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    program.replay()
    marks[0].record()
    for mark in marks[1:]:
        program.replay()
        mark.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return statistics.median(milliseconds) / 1000.0


def _decode(ops: Ops, shape: Shape, load: DecodeLoad) -> Tensor:
    for layer in load.cache:
        out, _ = ops.past_attention(load.q, load.cu_rows, layer, shape.layout, load.past, shape.scale)
    return out


def _multiply(ops: Ops, x: Tensor, weights: list[Any]) -> Tensor:
    for weight in weights:
        out = ops.linear(x, weight)
    return out


def _attend(ops: Ops, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, scale: float) -> Tensor:
    return ops.present_attention(q, k, v, cu_rows, scale)[0]


def _attend_in_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _wall_s(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
