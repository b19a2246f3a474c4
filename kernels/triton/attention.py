"""`past_attention`, `present_attention` and `attention`: which kernels run for which rows.

A sequence of at most `FEW_ROWS` rows is attended to by `splits.py` and `fold.py`, a longer one by `rows.py`:
which one depends on its own rows alone. Where a step may have both kinds, both are launched and each leaves
the other's rows alone. The host never asks the device how long anything is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from ..base import AnyPast, Past, in_fold_order
from ..layout import FORMATS, FULL, INT4, INT8, K8V4, BlockLayout, CacheFormat
from .aot import AotCase
from .fold import FOLD_SPLITS, FOLD_WARPS, fold_splits
from .rows import BLOCK_M, ROWS_OPTIONS, ROWS_STAGES, ROWS_WARPS, TILE_KEYS, attend_rows
from .splits import (
    FEW_ROWS,
    MAX_PROGRAMS,
    MAX_SPLITS,
    SPLIT_BLOCKS,
    SPLIT_STAGES,
    SPLIT_WARPS,
    TILE_TOKENS,
    TILE_WORDS,
    attend_splits,
    split_options,
)
from .tiles import (
    FLOATS,
    Pool,
    Window,
    check_queries,
    in_base_2,
    launch_options,
    padded,
    part_of,
    past_args,
    pool_of,
    window_args,
)


class _Committed(Struct, frozen=True, kw_only=True):
    layout: BlockLayout
    pool: Pool
    pasts: list[Past]


class _Call(Struct, frozen=True, kw_only=True):
    """What the kernels of one call share. `present`: k and v of the step's rows. `max_rows`: no sequence has
    more.
    """

    q: Tensor
    cu_rows: Tensor
    scale: float
    group: int
    committed: _Committed | None
    present: tuple[Tensor, Tensor] | None
    window: Window | None
    max_rows: int
    out: Tensor
    lse: Tensor | None

    @property
    def num_sequences(self) -> int:
        """Sequences of the step, those without rows included."""
        return len(self.cu_rows) - 1

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.q.shape[1] // self.group


def past_attention(
    q: Tensor,
    cu_rows: Tensor,
    layer: Tensor,
    layout: BlockLayout,
    past: AnyPast,
    scale: float,
    *,
    window: Window | None = None,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `Ops.past_attention` has it; the output in q's dtype, the log-sum-exp in float32. `max_rows`, if the
    caller knows how many rows a sequence has at most, saves launches.
    """
    lse = torch.empty(q.shape[:2], device=q.device)
    committed = _Committed(layout=layout, pool=pool_of(layer, layout), pasts=in_fold_order(past))
    return _attend(q, cu_rows, scale, layout.num_kv_heads, committed, None, window, max_rows, lse), lse


def present_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_rows: Tensor,
    scale: float,
    *,
    window: Window | None = None,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `Ops.present_attention` has it."""
    lse = torch.empty(q.shape[:2], device=q.device)
    return _attend(q, cu_rows, scale, k.shape[1], None, (k, v), window, max_rows, lse), lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_rows: Tensor,
    layer: Tensor,
    layout: BlockLayout,
    past: AnyPast,
    scale: float,
    lse: Tensor | None = None,
    *,
    window: Window | None = None,
    max_rows: int | None = None,
) -> Tensor:
    """As `Ops.attention` has it: past and present in one softmax, nothing rounded between them."""
    committed = _Committed(layout=layout, pool=pool_of(layer, layout), pasts=in_fold_order(past))
    return _attend(q, cu_rows, scale, layout.num_kv_heads, committed, (k, v), window, max_rows, lse)


def _attend(
    q: Tensor,
    cu_rows: Tensor,
    scale: float,
    num_kv_heads: int,
    committed: _Committed | None,
    present: tuple[Tensor, Tensor] | None,
    window: Window | None,
    max_rows: int | None,
    lse: Tensor | None,
) -> Tensor:
    group = check_queries(q, cu_rows, num_kv_heads)
    for own in present or ():
        assert own.dtype in FLOATS
        assert own.shape == (q.shape[0], num_kv_heads, q.shape[2])
        assert own.stride(2) == 1
    assert lse is None or (lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == q.shape[:2])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    most = q.shape[0] if max_rows is None else min(max_rows, q.shape[0])
    call = _Call(
        q=q,
        cu_rows=cu_rows,
        scale=in_base_2(scale),
        group=group,
        committed=committed,
        present=present,
        window=window,
        max_rows=most,
        out=out,
        lse=lse,
    )
    if most > 0:
        _attend_few(call)
    if most > FEW_ROWS:
        _attend_many(call)
    return out


def _attend_few(call: _Call) -> None:
    """Rows of short sequences: splits of the past, then one program per row and query head."""
    q, committed, few = call.q, call.committed, min(FEW_ROWS, call.max_rows)
    widths = [p.block_table.shape[1] for p in committed.pasts] if committed else []
    num_splits = sum(min(triton.cdiv(w, SPLIT_BLOCKS), MAX_SPLITS) for w in widths)
    rows = call.num_sequences * few
    # Rows of a long sequence beside short ones need no place: by sequence there are fewer, then.
    part_stride = few if rows < q.shape[0] else 0
    shape = (min(rows, q.shape[0]), q.shape[1], num_splits)
    parts_out = torch.empty((*shape, q.shape[2]), device=q.device)
    parts_lse = torch.empty(shape, device=q.device)
    assert parts_lse.numel() < 1 << 31  # registers are too dear for more
    if committed is not None and num_splits > 0:
        constants = _split_constants(committed.layout, call.group)
        tiles = triton.cdiv(few, constants["BLOCK_M"] // call.group)
        others = tiles * call.num_kv_heads * call.num_sequences
        turns = max(1, min(num_splits, MAX_PROGRAMS // others))
        attend_splits[(tiles, turns, call.num_sequences * call.num_kv_heads)](
            q=q,
            cu_rows=call.cu_rows,
            full=committed.pool.full,
            words=committed.pool.words,
            shorts=committed.pool.shorts,
            codes=committed.pool.codes,
            **past_args(committed.pasts, call.num_sequences),
            **window_args(call.window),
            parts_out=parts_out,
            parts_lse=parts_lse,
            q_row_stride=q.stride(0),
            q_head_stride=q.stride(1),
            num_splits=num_splits,
            part_stride=part_stride,
            scale=call.scale,
            PARTS=_parts(call),
            **constants,
            **launch_options(
                SPLIT_WARPS,
                SPLIT_STAGES,
                split_options([p.format.v_bits for p in committed.pasts], q.shape[2]),
            ),
        )
    args = _shared_args(call)
    # Triton refuses arguments that a kernel does not have; its interpreter would not.
    del args["tables"], args["slot_positions"], args["position_width"]
    fold_splits[(rows, q.shape[1])](
        **args,
        parts_out=parts_out,
        parts_lse=parts_lse,
        num_splits=num_splits,
        part_stride=part_stride,
        grid_rows=few,
        PARTS=_parts(call),
        **_fold_constants(q.shape[2], call.group, call.num_kv_heads),
        num_warps=FOLD_WARPS,
        num_stages=1,
    )


def _attend_many(call: _Call) -> None:
    """Rows of long sequences."""
    committed, head_dim = call.committed, call.q.shape[2]
    # Without a past nothing is read through these.
    pool = committed.pool if committed else Pool(*[call.q] * 5)
    bits = 8 * call.q.dtype.itemsize
    constants = _rows_constants(head_dim, call.group, call.num_kv_heads, bits)
    tiles = call.q.shape[0] // (constants["M"] // call.group) + call.num_sequences
    attend_rows[(tiles, call.num_kv_heads)](
        **_shared_args(call),
        full=pool.full,
        codes=pool.codes,
        halves=pool.halves,
        num_sequences=call.num_sequences,
        PARTS=_parts(call),
        BLOCK_BYTES=committed.layout.block_bytes if committed else 0,
        HEAD_BYTES=committed.layout.head_bytes if committed else 0,
        **constants,
        **launch_options(ROWS_WARPS, ROWS_STAGES[bits], ROWS_OPTIONS[bits]),
    )


def _parts(call: _Call) -> tuple[tuple[int, ...], ...]:
    if call.committed is None:
        return ()
    return tuple(part_of(call.committed.layout, p.format) for p in call.committed.pasts)


def _shared_args(call: _Call) -> dict[str, Any]:
    """Arguments that `fold_splits` and `attend_rows` name alike."""
    k, v = call.present or (None, None)
    strides = {
        f"{name}_{axis}_stride": t.stride(i) if t is not None else 0
        for name, t in (("q", call.q), ("k", k), ("v", v))
        for i, axis in enumerate(("row", "head"))
    }
    past = past_args(call.committed.pasts if call.committed else [], call.num_sequences)
    return {
        "q": call.q,
        "k": k,
        "v": v,
        "cu_rows": call.cu_rows,
        **past,
        **window_args(call.window),
        "out": call.out,
        "lse": call.lse,
        **strides,
        "scale": call.scale,
    }


def _split_constants(layout: BlockLayout, group: int) -> dict[str, Any]:
    return {
        "HEAD_DIM": layout.head_dim,
        "GROUP": group,
        "NUM_HEADS": group * layout.num_kv_heads,
        "BLOCK_BYTES": layout.block_bytes,
        "HEAD_BYTES": layout.head_bytes,
        "MAX_ROWS": FEW_ROWS,
        "BLOCK_M": padded(group),
        "D": padded(layout.head_dim),
        "TOKENS": TILE_TOKENS,
        "WORDS": TILE_WORDS,
        "SPLIT": SPLIT_BLOCKS,
        "MAX_SPLITS": MAX_SPLITS,
    }


def _fold_constants(head_dim: int, group: int, num_kv_heads: int) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "NUM_HEADS": group * num_kv_heads,
        "MAX_ROWS": FEW_ROWS,
        "D": triton.next_power_of_2(head_dim),
        "FOLD": FOLD_SPLITS,
        "SPLIT": SPLIT_BLOCKS,
        "MAX_SPLITS": MAX_SPLITS,
    }


def _rows_constants(head_dim: int, group: int, num_kv_heads: int, bits: int) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "NUM_HEADS": group * num_kv_heads,
        "MIN_ROWS": FEW_ROWS,
        "M": max(BLOCK_M[bits], padded(group)),
        "D": padded(head_dim),
        "T": TILE_KEYS[bits],
    }


def aot_cases() -> list[AotCase]:
    """The heads of Llama-3.1-8B and of SmolLM2-135M in bfloat16, and the mixes of formats that plans make."""
    llama = BlockLayout(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    small = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    return [
        *(_split_case(llama, 4, (own,)) for own in FORMATS),
        *(_split_case(llama, 4, (*lower, FULL)) for lower in ((INT8,), (K8V4,), (INT4,), (INT4, K8V4))),
        *(_split_case(small, 3, (f,)) for f in (FULL, INT4)),
        _fold_case(llama, 4, (INT4, FULL)),
        _fold_case(small, 3, (FULL,)),
        *(_rows_case(llama, 4, formats) for formats in ((), (FULL,), (INT4, FULL))),
        _rows_case(small, 3, (FULL,)),
        _rows_case(llama, 4, (INT4, FULL), bits=32),
    ]


def _case_name(kernel: str, layout: BlockLayout, formats: tuple[CacheFormat, ...]) -> str:
    past = " + ".join(f"({f.k_bits}, {f.v_bits})" for f in formats) or "no past"
    return f"{kernel}, heads of {layout.head_dim}, {past}"


def _signature(formats: tuple[CacheFormat, ...], *names: str) -> dict[str, Any]:
    """Types of arguments by name."""
    every: dict[str, Any] = {
        "cu_rows": "*i32",
        "words": "*i32",
        "shorts": "*i16",
        "codes": "*u8",
        "halves": "*fp16",
        "parts_out": "*fp32",
        "parts_lse": "*fp32",
        "lse": "*fp32",
        **dict.fromkeys(("num_splits", "part_stride", "grid_rows"), "i32"),
        "num_sequences": "i32",
        "scale": "fp32",
        "tables": ("*i32",) * len(formats),
        "lengths": ("*i32",) * len(formats),
        "widths": ("i32:16",) * len(formats),
    }
    return {n: every.get(n, "i32:16" if n.endswith("_stride") else "*bf16") for n in names}


def _case(
    name: str,
    kernel: Any,
    formats: tuple[CacheFormat, ...],
    constexprs: dict[str, Any],
    launch: tuple[int, int, dict[str, dict[str, int]]],
    decode: bool,
) -> AotCase:
    names = [n for n in kernel.arg_names if n not in constexprs]
    return AotCase(
        name=name,
        kernel=kernel,
        signature=_signature(formats, *names),
        constexprs=constexprs,
        num_warps=launch[0],
        num_stages=launch[1],
        options=launch[2],
        decode=decode,
    )


def _split_case(layout: BlockLayout, group: int, formats: tuple[CacheFormat, ...]) -> AotCase:
    parts = {"PARTS": tuple(part_of(layout, f) for f in formats)}
    return _case(
        _case_name("attend_splits", layout, formats),
        attend_splits,
        formats,
        window_args(None) | parts | _split_constants(layout, group),
        (SPLIT_WARPS, SPLIT_STAGES, split_options([f.v_bits for f in formats], layout.head_dim)),
        decode=True,
    )


def _fold_case(layout: BlockLayout, group: int, formats: tuple[CacheFormat, ...]) -> AotCase:
    parts = {"PARTS": tuple(part_of(layout, f) for f in formats)}
    no_window = {"row_positions": None, "window": None}
    return _case(
        _case_name("fold_splits", layout, formats),
        fold_splits,
        formats,
        no_window | parts | _fold_constants(layout.head_dim, group, layout.num_kv_heads),
        (FOLD_WARPS, 1, {}),
        decode=True,
    )


def _rows_case(layout: BlockLayout, group: int, formats: tuple[CacheFormat, ...], bits: int = 16) -> AotCase:
    parts = {"PARTS": tuple(part_of(layout, f) for f in formats)}
    sizes = {"BLOCK_BYTES": layout.block_bytes, "HEAD_BYTES": layout.head_bytes}
    constants = _rows_constants(layout.head_dim, group, layout.num_kv_heads, bits)
    case = _case(
        _case_name("attend_rows", layout, formats),
        attend_rows,
        formats,
        window_args(None) | parts | sizes | constants,
        (ROWS_WARPS, ROWS_STAGES[bits], ROWS_OPTIONS[bits]),
        decode=False,
    )
    if bits == 16:
        return case
    # The cache stays in 16 bits.
    in_32 = dict.fromkeys(("q", "k", "v", "out"), "*fp32")
    return replace(case, name=f"{case.name}, float32", signature={**case.signature, **in_32})
