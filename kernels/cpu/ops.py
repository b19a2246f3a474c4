"""The CPU op set: tensors in, addresses to kernels, tensors out."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ..base import AnyPast, AnyWeight, Observed, Past, SampleRows, Slots, in_fold_order
from ..codes import rotation_size
from ..layout import BLOCK_TOKENS, FULL, BlockLayout, CacheFormat
from . import activations, attention, linear, lookup, mass, pack, quantised, rowwise, sample, states
from . import cache as cache_kernels
from . import present as packed_present
from .forms import host_form
from .launch import Launcher, Progress, Stage
from .program import LaunchesOnly, NotLaunches, Program, Workspace

FEW_ROWS = 4
"""Up to here a row-wise op is done before another thread has woken."""

LINEAR_PIECES = 4
"""Pieces of a linear layer's panels for each thread: one has some tens of microseconds at 8 rows."""

_ELEMENT_KINDS = {
    torch.float32: packed_present.F32_,
    torch.bfloat16: packed_present.BF16,
    torch.float16: packed_present.F16,
}

_TAPES = {
    "linear_few": (Stage(activations.quantise_rows, False), Stage(linear.linear)),
    "linear": (Stage(activations.quantise_rows), Stage(linear.linear, pieces=LINEAR_PIECES)),
    "dense": (Stage(linear.linear, pieces=LINEAR_PIECES),),
    "embed": (Stage(lookup.embed),),
    "embed_few": (Stage(lookup.embed, False),),
    "take": (Stage(lookup.take, False),),
    "finite_rows": (Stage(rowwise.finite_rows),),
    "rms_norm_few": (Stage(rowwise.rms_norm, False),),
    "rms_norm": (Stage(rowwise.rms_norm),),
    "add_rms_norm_few": (Stage(rowwise.add_rms_norm, False),),
    "add_rms_norm": (Stage(rowwise.add_rms_norm),),
    "norm_heads_few": (Stage(rowwise.norm_heads, False),),
    "norm_heads": (Stage(rowwise.norm_heads),),
    "rotate_few": (Stage(rowwise.rotate, False),),
    "rotate": (Stage(rowwise.rotate),),
    "rope_few": (Stage(rowwise.rope, False),),
    "rope": (Stage(rowwise.rope),),
    "silu_mul_few": (Stage(rowwise.silu_mul, False),),
    "silu_mul": (Stage(rowwise.silu_mul),),
    "merge_few": (Stage(rowwise.merge, False),),
    "merge": (Stage(rowwise.merge),),
    "past_few": (Stage(attention.attend), Stage(attention.fold, False)),
    "past": (Stage(attention.attend), Stage(attention.fold)),
    "present_few": (
        Stage(packed_present.pack_present, False),
        Stage(attention.attend, False),
        Stage(attention.fold, False),
    ),
    "present": (Stage(packed_present.pack_present), Stage(attention.attend), Stage(attention.fold)),
    "attention_few": (
        Stage(packed_present.pack_present, False),
        Stage(attention.attend),
        Stage(attention.fold, False),
    ),
    "past_mass": (Stage(mass.past_mass),),
    "present_mass": (Stage(mass.present_mass),),
    "keep_few": (Stage(cache_kernels.keep, False),),
    "keep": (Stage(cache_kernels.keep),),
    "commit": (Stage(cache_kernels.commit),),
    "demote": (Stage(cache_kernels.demote),),
    "sample": (Stage(sample.sample),),
}
"""What each op runs; `_few` is for few rows."""


class _Cached:
    """The past as the attention kernels take it; keep it as long as they run. Built for every layer of a
    step, so it does no more than it must.
    """

    def __init__(self, layer: Tensor, layout: BlockLayout, past: AnyPast) -> None:
        table = table_bytes = lengths = self.codes_address = self.max_partitions = 0
        codes: list[int] = []
        for p in [past] if isinstance(past, Past) else in_fold_order(past):
            words = _past_args(layout, p)
            partition = states.PARTITION // words[2] * words[2]
            self.max_partitions += -(-p.block_table.shape[1] * words[2] // partition)
            if p.format.is_full:
                table, table_bytes, lengths = words[5:]
            else:
                codes += words
        element, kind = layout.dtype.itemsize, _ELEMENT_KINDS[layout.dtype]
        self.full_args = layer.data_ptr(), layer.stride(0), element, kind, table, table_bytes, lengths
        if codes:
            # Not a tensor: those cannot be made while a program is recorded. numpy's takes 2 us longer.
            self._words = array("q", [len(codes) // quantised.PAST_WORDS, *codes])
            self.codes_address = self._words.buffer_info()[0]


class CpuOps:
    """The ops on float32 CPU tensors, by compiled kernels. Rows may be strided; the last dimension is
    contiguous.
    """

    head_dims = range(attention.MIN_HEAD_DIM, attention.MAX_HEAD_DIM + 1, 8)
    is_asynchronous = False

    def __init__(self, launcher: Launcher, progress: Progress | None = None) -> None:
        self.name = f"cpu-{host_form().name}"
        self.row_tile = host_form().linear_rows
        launcher.compile((s.kernel for stages in _TAPES.values() for s in stages), progress)
        self._launcher = launcher
        self._run: Callable[..., None] = launcher.run
        self._empty: Callable[..., Tensor] = torch.empty
        self._workspace = Workspace()
        self._kept: list[_Cached] | None = None
        """While a program is recorded, what its kernels will read beside tensors."""
        self._tapes = {name: launcher.tape(stages) for name, stages in _TAPES.items()}
        self._at = {name: int(tape.ctypes.data) for name, tape in self._tapes.items()}

    def prepare_linear(
        self, weight: AnyWeight | Sequence[AnyWeight], bias: Tensor | None = None
    ) -> pack.PackedLinear:
        """Pack into panels; neighbours of one format become one weight."""
        return pack.pack_layer(weight, bias)

    def linear(self, x: Tensor, weight: pack.PackedLinear) -> Tensor:
        """Group formats quantise the activations per row and group of 32."""
        rows = x.shape[0]
        assert x.dtype == torch.float32
        assert x.shape[1] == weight.num_in
        assert x.stride(1) == 1
        out = self._empty(rows, weight.num_out)
        for part in weight.parts:
            tail = (
                part.panels.data_ptr(),
                part.panel_bytes,
                part.num_out,
                0 if part.bias is None else part.bias.data_ptr(),
                out.data_ptr() + 4 * part.first_out,
                4 * weight.num_out,
                part.kind,
            )
            source, stride = x.data_ptr(), 4 * x.stride(0)
            if not part.grouped:
                self._run(self._at["dense"], source, stride, rows, part.width, 0, 0, *tail)
                continue
            group_bytes = activations.group_bytes(rows)
            quantised = self._empty(part.width * group_bytes, dtype=torch.uint8)
            tape = self._at["linear_few" if rows <= FEW_ROWS else "linear"]
            self._run(tape, source, stride, rows, part.width, quantised.data_ptr(), group_bytes, *tail)
        return out

    def embed(self, numbers: Tensor, weight: pack.PackedLinear) -> Tensor:
        """Read from the panels, so that no second copy of the matrix is needed."""
        (part,) = weight.parts
        assert numbers.dtype == torch.int64
        rows, out = len(numbers), self._empty(len(numbers), weight.num_in)
        self._run(
            self._at["embed_few" if rows <= FEW_ROWS else "embed"],
            numbers.data_ptr(),
            rows,
            part.panels.data_ptr(),
            part.panel_bytes,
            part.kind,
            part.width,
            out.data_ptr(),
            4 * weight.num_in,
        )
        return out

    def take(self, table: Tensor, numbers: Tensor) -> Tensor:
        """Rows are contiguous."""
        assert table.is_contiguous()
        assert numbers.dtype == torch.int64
        rows, width = len(numbers), table.shape[1]
        out = self._empty(rows, width)
        args = table.data_ptr(), 4 * width, numbers.data_ptr(), rows, out.data_ptr()
        self._run(self._at["take"], *args)
        return out

    def finite_rows(self, x: Tensor) -> Tensor:
        """One pass."""
        rows, width = x.shape
        out = self._empty(rows, dtype=torch.bool)
        self._run(self._at["finite_rows"], x.data_ptr(), 4 * x.stride(0), rows, width, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over rows of a matrix."""
        rows, width = x.shape
        out = self._empty(rows, width)
        tape = self._at["rms_norm_few" if rows <= FEW_ROWS else "rms_norm"]
        self._run(
            tape, x.data_ptr(), 4 * x.stride(0), weight.data_ptr(), out.data_ptr(), rows, width, value=eps
        )
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One pass over each row."""
        rows, width = x.shape
        out = self._empty(rows, width)
        self._run(
            self._at["add_rms_norm_few" if rows <= FEW_ROWS else "add_rms_norm"],
            residual.data_ptr(),
            4 * residual.stride(0),
            x.data_ptr(),
            4 * x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            value=eps,
        )
        return out

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Rows may be strided."""
        rows, heads, head_dim = x.shape
        assert x.stride(1) == head_dim
        tape = self._at["norm_heads_few" if rows <= FEW_ROWS else "norm_heads"]
        args = x.data_ptr(), 4 * x.stride(0), weight.data_ptr(), rows, heads, head_dim
        self._run(tape, *args, value=eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rows and heads may be strided, so queries and keys can be rotated in one call on the fused
        projection.
        """
        rows, heads, head_dim = x.shape
        out = self._empty(rows, heads, head_dim)
        self._run(
            self._at["rope_few" if rows <= FEW_ROWS else "rope"],
            x.data_ptr(),
            4 * x.stride(0),
            4 * x.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            4 * cos.stride(0),
            out.data_ptr(),
            rows,
            heads,
            head_dim,
            cos.shape[1],
        )
        return out

    def rotate(self, x: Tensor) -> Tensor:
        """Rows and heads may be strided."""
        out = self._empty(*x.shape)
        self._rotate(x, out)
        return out

    def rotate_heads(self, x: Tensor) -> None:
        """The kernel writes over what it has read."""
        self._rotate(x, x)

    def _rotate(self, x: Tensor, out: Tensor) -> None:
        rows, heads, head_dim = x.shape
        assert head_dim % 8 == 0
        assert x.stride(2) == 1
        tape = self._at["rotate_few" if rows <= FEW_ROWS else "rotate"]
        places = [(y.data_ptr(), 4 * y.stride(0), 4 * y.stride(1)) for y in (x, out)]
        self._run(tape, *places[0], *places[1], rows, heads, head_dim, rotation_size(head_dim))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Gate and up lie side by side in each row."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(rows, width)
        tape = self._at["silu_mul_few" if rows <= FEW_ROWS else "silu_mul"]
        self._run(tape, gate_up.data_ptr(), 4 * gate_up.stride(0), out.data_ptr(), rows, width)
        return out

    def past_attention(
        self, q: Tensor, cu_rows: Tensor, layer: Tensor, layout: BlockLayout, past: AnyPast, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Partitions of some 256 tokens, whatever the batch."""
        out, lse = self._empty(*q.shape), self._empty(*q.shape[:2])
        cached = _Cached(layer, layout, past)
        tape = "past_few" if q.shape[0] <= FEW_ROWS else "past"
        self._attend(tape, q, cu_rows, layout.num_kv_heads, scale, out, lse, past=cached)
        return out, lse

    def present_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Keys and values are laid out in float32 blocks first; then it is the same arithmetic as over the
        past.
        """
        out, lse = self._empty(*q.shape), self._empty(*q.shape[:2])
        tape = "present_few" if q.shape[0] <= FEW_ROWS else "present"
        self._attend(tape, q, cu_rows, k.shape[1], scale, out, lse, present=(k, v))
        return out, lse

    def attention(
        self,
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
        max_rows: int | None = None,
    ) -> Tensor:
        """Past and present in one go, with the same bits wherever the one in full precision ends and the
        other begins.
        """
        out, cached = self._empty(*q.shape), _Cached(layer, layout, past)
        tape = "attention_few" if q.shape[0] <= FEW_ROWS else "present"
        self._attend(tape, q, cu_rows, k.shape[1], scale, out, lse, past=cached, present=(k, v))
        return out

    def past_mass(
        self,
        q: Tensor,
        cu_rows: Tensor,
        layer: Tensor,
        layout: BlockLayout,
        past: Past,
        scale: float,
        observed: Observed,
    ) -> Tensor:
        """A row and KV head a thread."""
        size = past.block_table.shape[1] * layout.capacity(past.format)
        sequences = _sequences(cu_rows, observed)
        out = torch.zeros(len(observed.rows), layout.num_kv_heads, size)
        args = (
            *_observed_args(q, observed, sequences, layout.num_kv_heads),
            layer.data_ptr(),
            layer.stride(0),
            _ELEMENT_KINDS[layout.dtype],
            observed.lse.data_ptr(),
            out.data_ptr(),
            4 * size,
            *_past_args(layout, past),
        )
        self._run(self._at["past_mass"], *args, value=scale)
        return out

    def present_mass(self, q: Tensor, k: Tensor, cu_rows: Tensor, scale: float, observed: Observed) -> Tensor:
        """A row and KV head a thread."""
        size, k = int(cu_rows.diff().max()), k.float()
        sequences = _sequences(cu_rows, observed)
        out = torch.zeros(len(observed.rows), k.shape[1], size)
        args = (
            *_observed_args(q, observed, sequences, k.shape[1]),
            k.data_ptr(),
            4 * k.stride(0),
            cu_rows.data_ptr(),
            observed.lse.data_ptr(),
            out.data_ptr(),
            4 * size,
        )
        self._run(self._at["present_mass"], *args, value=scale)
        return out

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
        """All contiguous."""
        out = self._empty(*out_a.shape)
        rows, heads, head_dim = out_a.shape
        tape = self._at["merge_few" if rows <= FEW_ROWS else "merge"]
        parts = [t.contiguous() for t in (out_a, lse_a, out_b, lse_b)]
        a, a_lse, b, b_lse = (t.data_ptr() for t in parts)
        self._run(tape, a, a_lse, b, b_lse, out.data_ptr(), rows * heads, head_dim)
        return out

    def keep(self, k: Tensor, v: Tensor, kept_k: Tensor, kept_v: Tensor) -> None:
        """Rows may be strided; the kept ones follow one another."""
        rows, width = k.shape[0], k.shape[1] * k.shape[2]
        assert k.stride(1) == v.stride(1) == k.shape[2]
        assert kept_k.is_contiguous()
        assert kept_v.is_contiguous()
        self._run(
            self._at["keep_few" if rows <= FEW_ROWS else "keep"],
            k.data_ptr(),
            4 * k.stride(0),
            v.data_ptr(),
            4 * v.stride(0),
            kept_k.data_ptr(),
            kept_v.data_ptr(),
            width * kept_k.itemsize,
            rows,
            width,
            _ELEMENT_KINDS[kept_k.dtype],
        )

    def commit(
        self,
        cache: Tensor,
        layout: BlockLayout,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        slots: Tensor,
        cache_format: CacheFormat = FULL,
    ) -> None:
        """Rows are rounded by torch, then quantised."""
        k, v = (_rows_in_one_piece(rows.to(layout.dtype)) for rows in (k, v))
        assert k.stride(0) == v.stride(0)
        at = Slots(blocks=blocks.to(torch.int32), slots=slots.to(torch.int32), format=cache_format)
        rows = k.data_ptr(), v.data_ptr(), k.stride(0) * k.itemsize
        args = (*_cache_args(cache, layout, len(blocks)), *rows, *_slots_args(layout, at))
        self._run(self._at["commit"], *args)

    def demote(self, cache: Tensor, layout: BlockLayout, source: Slots, target: Slots) -> None:
        """Records of a head's tokens are held in scratch memory."""
        tokens = len(source.blocks)
        assert len(target.blocks) == tokens
        assert not target.format.is_full or source.format.is_full
        size = self._launcher.num_threads * tokens * cache_kernels.record_bytes(layout.head_dim)
        records = self._empty(size, dtype=torch.uint8)
        places = (*_slots_args(layout, source), *_slots_args(layout, target))
        args = (*_cache_args(cache, layout, tokens), *places, records.data_ptr())
        self._run(self._at["demote"], *args)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """A row a thread."""
        num_rows, vocabulary = logits.shape
        out = self._empty(num_rows, dtype=torch.int64)
        scratch_bytes = sample.scratch_bytes(vocabulary)
        scratch = self._empty(self._launcher.num_threads * scratch_bytes, dtype=torch.uint8)
        reals = [t.float().contiguous() for t in (rows.top_p, rows.min_p)]
        integers = [t.long().contiguous() for t in (rows.top_k, rows.seed, rows.choice, rows.position)]
        temperature = rows.temperature.float().contiguous()
        top_k, seed, choice, position = (t.data_ptr() for t in integers)
        self._run(
            self._at["sample"],
            logits.data_ptr(),
            4 * logits.stride(0),
            num_rows,
            vocabulary,
            temperature.data_ptr(),
            top_k,
            reals[0].data_ptr(),
            reals[1].data_ptr(),
            seed,
            choice,
            position,
            out.data_ptr(),
            scratch.data_ptr(),
            scratch_bytes,
        )
        return out

    def record(self, forward: Callable[[], Tensor], *, known: bool = False) -> Program | None:
        """Launches are noted down instead of run; outputs lie in memory that is kept for replays."""
        program = Program(self._launcher)
        self._workspace.release()
        run, self._run, self._empty = self._run, program.add, self._workspace.empty
        self._kept = program.kept
        try:
            with nullcontext() if known else LaunchesOnly():
                program.finish(forward)
        except NotLaunches:
            return None
        finally:
            self._run, self._empty, self._kept = run, torch.empty, None
        return program

    def _attend(
        self,
        tape: str,
        q: Tensor,
        cu_rows: Tensor,
        num_kv_heads: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        past: _Cached | None = None,
        present: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Hand the kernels what there is; `out` and `lse` are filled."""
        rows, heads, head_dim = q.shape
        sequences = cu_rows.shape[0] - 1
        assert q.stride(1) == head_dim
        assert cu_rows.dtype == torch.int32
        assert head_dim in self.head_dims
        packed, present_args = None, (0, 0, 0, 0)
        packed_at = 0
        if present is not None:
            k, v = (t.float() for t in present)
            num_blocks = packed_present.num_packed_blocks(rows, sequences)
            packed = self._empty(num_blocks * num_kv_heads * head_dim * 2 * BLOCK_TOKENS)
            packed_at = packed.data_ptr()
            present_args = (k.data_ptr(), 4 * k.stride(0), v.data_ptr(), 4 * v.stride(0))
        if past is not None and self._kept is not None:
            self._kept.append(past)
        max_parts = 0 if past is None else past.max_partitions
        split_rows = min(rows, sequences * (states.UNIT_VECTORS * num_kv_heads // heads))
        num_states = (split_rows * max_parts + 2 * rows) * heads
        state_floats = num_states * (states.STATE_HEAD + head_dim)
        scratch_floats = self._launcher.num_threads * attention.scratch_bytes(head_dim) // 4
        scratch = self._empty(state_floats + scratch_floats)
        self._run(
            self._at[tape],
            q.data_ptr(),
            4 * q.stride(0),
            cu_rows.data_ptr(),
            sequences,
            heads,
            num_kv_heads,
            head_dim,
            scratch.data_ptr(),
            *((0, 0, 0, 0, 0, 0, 0) if past is None else past.full_args),
            packed_at,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            *present_args,
            scratch.data_ptr() + 4 * state_floats,
            0 if past is None else past.codes_address,
            value=scale,
        )


def _cache_args(cache: Tensor, layout: BlockLayout, tokens: int) -> tuple[int, ...]:
    return (
        cache.data_ptr(),
        cache.stride(0),
        layout.block_bytes,
        cache.shape[0],
        tokens,
        layout.num_kv_heads,
        layout.head_dim,
        _ELEMENT_KINDS[layout.dtype],
    )


def _rows_in_one_piece(rows: Tensor) -> Tensor:
    """`[L, R, G, D]` with each layer's part contiguous."""
    return rows if rows[0].is_contiguous() else rows.contiguous()


def _slots_args(layout: BlockLayout, at: Slots) -> tuple[int, ...]:
    assert at.blocks.dtype == at.slots.dtype == torch.int32
    assert at.blocks.is_contiguous()
    assert at.slots.is_contiguous()
    return (*_format_args(layout, at.format), at.blocks.data_ptr(), at.slots.data_ptr())


@functools.cache
def _format_args(layout: BlockLayout, cache_format: CacheFormat) -> tuple[int, ...]:
    return (
        cache_format.k_bits,
        cache_format.v_bits,
        layout.capacity(cache_format),
        layout.v_offset(cache_format),
        layout.pairs_offset(cache_format),
    )


def _past_args(layout: BlockLayout, past: Past) -> tuple[int, ...]:
    """The `quantised.PAST_WORDS` of a past in any format."""
    table = past.block_table
    assert table.dtype == past.lengths.dtype == torch.int32
    assert table.stride(1) == 1
    return (
        *_format_args(layout, past.format),
        table.data_ptr(),
        4 * table.stride(0),
        past.lengths.data_ptr(),
    )


def _observed_args(q: Tensor, observed: Observed, sequences: Tensor, num_kv_heads: int) -> tuple[int, ...]:
    assert observed.rows.dtype == torch.int32
    assert observed.lse.dtype == torch.float32
    assert observed.lse.is_contiguous()
    assert q.stride(1) == q.shape[2]
    return (
        q.data_ptr(),
        4 * q.stride(0),
        observed.rows.data_ptr(),
        sequences.data_ptr(),
        len(observed.rows),
        q.shape[1],
        num_kv_heads,
        q.shape[2],
    )


def _sequences(cu_rows: Tensor, observed: Observed) -> Tensor:
    """The sequence that each observed row belongs to."""
    return torch.searchsorted(cu_rows, observed.rows, right=True, out_int32=True) - 1
