"""`past_mass` and `present_mass`: the share of attention that each token received from observed rows.

Per observed row every key is read again, without its value: `head_dim * k_bits / 8` bytes and 4 of pairs per
token and KV head, and 4 written: the minimum for a row alone. Rows of one sequence each read it for
themselves, from the second-level cache where it fits: few rows are observed (every n-th, and a prompt's last
16). Operations: `2 * head_dim` per query head and token, on a tile of 16 query vectors, most of which stay
empty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base import Observed, Past
from ..layout import FORMATS, BlockLayout, CacheFormat
from .aot import AotCase
from .tiles import (
    FLOATS,
    LOG2_E,
    Window,
    check_queries,
    in_base_2,
    locate,
    padded,
    part_of,
    past_args,
    past_scores,
    pool_of,
    sequence_of,
    window_args,
)

TILE_TOKENS = 64
"""Tokens of a program."""


@triton.jit
def _queries(
    q,
    lse,
    row,
    head,
    q_row_stride,
    q_head_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """A row's queries of a KV head `[M, D]`, and their log-sum-exp `[M]` in base 2, +inf for none."""
    vector, dims = tl.arange(0, M), tl.arange(0, D)
    query_head = head * GROUP + vector % GROUP
    mask = (vector < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    at = row.to(tl.int64) * q_row_stride + (query_head * q_head_stride)[:, None] + dims[None, :]
    own = tl.load(lse + row.to(tl.int64) * NUM_HEADS + query_head, mask=vector < GROUP, other=float("inf"))
    return tl.load(q + at, mask=mask, other=0.0), own.to(tl.float32) * LOG2_E


@triton.jit(do_not_specialize=["width", "num_sequences"])
def observe_past(
    q,
    lse,
    rows,
    cu_rows,
    full,
    codes,
    halves,
    table,
    lengths,
    width,
    row_positions,
    slot_positions,
    position_width,
    window,
    mass,
    q_row_stride,
    q_head_stride,
    num_sequences,
    scale,
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """Grid: tiles of the block list, observed rows, KV heads. `mass` `[O, G, width * capacity]`."""
    row = tl.load(rows + tl.program_id(1))
    head = tl.program_id(2)
    first = tl.program_id(0) * T
    size = width * PART[2]
    b = sequence_of(cu_rows, row, num_sequences, 0)
    length = tl.load(lengths + b)
    tokens = first + tl.arange(0, T)
    target = (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + head) * size + tokens
    if first >= length:
        tl.store(mass + target, tl.zeros((T,), tl.float32), mask=tokens < size)
        return
    own_q, own_lse = _queries(
        q, lse, row, head, q_row_stride, q_head_stride, HEAD_DIM, GROUP, NUM_HEADS, M, D
    )
    live = tokens < length
    block, slots, base = locate(
        table + tl.cast(b, tl.int64) * width, tokens, length, head, PART, BLOCK_BYTES, HEAD_BYTES
    )
    q_sum = tl.sum(own_q.to(tl.float32), 1)
    dims = tl.arange(0, D)
    scores = past_scores(own_q, q_sum, full, codes, halves, base, tokens, length, dims, PART, HEAD_DIM)
    seen = live
    if window is not None:
        position = tl.load(slot_positions + block.to(tl.int64) * position_width + slots, mask=live, other=0)
        seen = seen & (position > tl.load(row_positions + row) - window)
    shares = tl.where(seen[None, :], tl.exp2(scores * scale - own_lse[:, None]), 0.0)
    tl.store(mass + target, tl.sum(shares, 0), mask=tokens < size)


@triton.jit(do_not_specialize=["size", "num_sequences"])
def observe_present(
    q,
    k,
    lse,
    rows,
    cu_rows,
    row_positions,
    window,
    mass,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    num_sequences,
    size,
    scale,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """Grid: tiles of a sequence's rows, observed rows, KV heads. `mass` `[O, G, size]`."""
    row = tl.load(rows + tl.program_id(1))
    head = tl.program_id(2)
    start = tl.load(cu_rows + sequence_of(cu_rows, row, num_sequences, 0))
    key = tl.program_id(0) * T + tl.arange(0, T)
    target = (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + head) * size + key
    seen = start + key <= row
    if window is not None:
        position = tl.load(row_positions + start + key, mask=seen, other=0)
        seen = seen & (position > tl.load(row_positions + row) - window)
    own_q, own_lse = _queries(
        q, lse, row, head, q_row_stride, q_head_stride, HEAD_DIM, GROUP, NUM_HEADS, M, D
    )
    dims = tl.arange(0, D)
    at = (start + key).to(tl.int64)[None, :] * k_row_stride + head * k_head_stride + dims[:, None]  # [D, T]
    keys = tl.load(k + at, mask=(dims < HEAD_DIM)[:, None] & seen[None, :], other=0.0)
    scores = tl.dot(own_q, keys.to(own_q.dtype), input_precision="ieee") * scale
    shares = tl.where(seen[None, :], tl.exp2(scores - own_lse[:, None]), 0.0)
    tl.store(mass + target, tl.sum(shares, 0), mask=key < size)


def _check_observed(q: Tensor, observed: Observed) -> None:
    assert observed.rows.dtype == torch.int32
    assert observed.rows.is_contiguous()
    assert observed.lse.dtype == torch.float32
    assert observed.lse.shape == q.shape[:2]
    assert observed.lse.is_contiguous()
    assert q.shape[0] > 0 or len(observed.rows) == 0


def past_mass(
    q: Tensor,
    cu_rows: Tensor,
    layer: Tensor,
    layout: BlockLayout,
    past: Past,
    scale: float,
    observed: Observed,
    window: Window | None = None,
) -> Tensor:
    """As `Ops.past_mass` has it."""
    group = check_queries(q, cu_rows, layout.num_kv_heads)
    _check_observed(q, observed)
    pool, table = pool_of(layer, layout), past.block_table
    past_args([past], len(cu_rows) - 1)
    size = table.shape[1] * layout.capacity(past.format)
    mass = torch.empty(len(observed.rows), layout.num_kv_heads, size, device=q.device)
    if mass.numel() == 0:
        return mass
    observe_past[(triton.cdiv(size, TILE_TOKENS), len(observed.rows), layout.num_kv_heads)](
        q=q,
        lse=observed.lse,
        rows=observed.rows,
        cu_rows=cu_rows,
        full=pool.full,
        codes=pool.codes,
        halves=pool.halves,
        table=table,
        lengths=past.lengths,
        width=table.shape[1],
        **window_args(window),
        mass=mass,
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        num_sequences=len(cu_rows) - 1,
        scale=in_base_2(scale),
        **_past_constants(layout, past.format, group),
        num_warps=4,
        num_stages=1,
    )
    return mass


def _past_constants(layout: BlockLayout, cache_format: CacheFormat, group: int) -> dict[str, object]:
    return {
        "PART": part_of(layout, cache_format),
        "BLOCK_BYTES": layout.block_bytes,
        "HEAD_BYTES": layout.head_bytes,
        **_constants(layout.head_dim, group, layout.num_kv_heads),
    }


def _constants(head_dim: int, group: int, num_kv_heads: int) -> dict[str, object]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "NUM_HEADS": group * num_kv_heads,
        "M": padded(group),
        "D": padded(head_dim),
        "T": TILE_TOKENS,
    }


def present_mass(
    q: Tensor,
    k: Tensor,
    cu_rows: Tensor,
    scale: float,
    observed: Observed,
    max_rows: int | None = None,
    window: Window | None = None,
) -> Tensor:
    """As `Ops.present_mass` has it. `max_rows`: rows of the longest sequence, else read from the device."""
    group = check_queries(q, cu_rows, k.shape[1])
    _check_observed(q, observed)
    assert k.dtype in FLOATS
    assert k.stride(2) == 1
    assert (k.shape[0], k.shape[2]) == (q.shape[0], q.shape[2])
    size = int(cu_rows.diff().max()) if max_rows is None else max_rows
    mass = torch.empty(len(observed.rows), k.shape[1], size, device=q.device)
    if mass.numel() == 0:
        return mass
    own = window_args(window)
    observe_present[(triton.cdiv(size, TILE_TOKENS), len(observed.rows), k.shape[1])](
        q=q,
        k=k,
        lse=observed.lse,
        rows=observed.rows,
        cu_rows=cu_rows,
        row_positions=own["row_positions"],
        window=own["window"],
        mass=mass,
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        k_row_stride=k.stride(0),
        k_head_stride=k.stride(1),
        num_sequences=len(cu_rows) - 1,
        size=size,
        scale=in_base_2(scale),
        **_constants(q.shape[2], group, k.shape[1]),
        num_warps=4,
        num_stages=1,
    )
    return mass


def aot_cases() -> list[AotCase]:
    """Llama-3.1-8B's heads, each format; not in a plain decoding step."""
    layout = BlockLayout(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    rows = {"q": "*bf16", "lse": "*fp32", "rows": "*i32", "cu_rows": "*i32", "mass": "*fp32"}
    strides = dict.fromkeys(("q_row_stride", "q_head_stride"), "i32:16")
    scalars = {"num_sequences": "i32", "scale": "fp32"}
    past = {"full": "*bf16", "codes": "*u8", "halves": "*fp16", "table": "*i32", "lengths": "*i32"}
    present = {"k": "*bf16", "size": "i32", "k_row_stride": "i32:16", "k_head_stride": "i32:16"}
    no_window = window_args(None)
    cases = [
        AotCase(
            name=f"observe_past k{cache_format.k_bits}v{cache_format.v_bits}",
            kernel=observe_past,
            signature=rows | strides | scalars | past | {"width": "i32"},
            constexprs=no_window | _past_constants(layout, cache_format, 4),
            num_warps=4,
            num_stages=1,
            decode=False,
        )
        for cache_format in FORMATS
    ]
    return [
        *cases,
        AotCase(
            name="observe_present",
            kernel=observe_present,
            signature=rows | strides | scalars | present,
            constexprs={"row_positions": None, "window": None, **_constants(128, 4, 8)},
            num_warps=4,
            num_stages=1,
            decode=False,
        ),
    ]
