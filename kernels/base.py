"""The interface of an op set. `reference.py` is the meaning; other sets must agree with it.

Shapes: N rows (tokens of a step), B sequences, H query heads, G KV heads, D head_dim, V vocabulary,
L layers. Activations are float32 on the CPU. `cu_rows` `[B + 1]` (int32) says which rows belong to which
sequence: sequence b owns rows `cu_rows[b]:cu_rows[b + 1]`, in order of position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct
from torch import Tensor

from .layout import FULL, BlockLayout, CacheFormat
from .weights import GroupWeight

AnyWeight = Tensor | GroupWeight
"""A `[out, in]` weight: 16- or 32-bit, or in groups of 32."""


class Past(Struct, frozen=True, kw_only=True):
    """The committed tokens of a step's sequences that lie in blocks of one format.

    `block_table` int32 `[B, max_blocks]`, padded with 0; `lengths` int32 `[B]`: tokens committed, 0 for none.
    All blocks of a sequence but the last are full.
    """

    block_table: Tensor
    lengths: Tensor
    format: CacheFormat = FULL


AnyPast = Past | Sequence[Past]
"""The committed tokens: at most one `Past` per format, in any order."""


def in_fold_order(past: AnyPast) -> list[Past]:
    """The parts of a past in the order in which attention folds them: fewest bits first, whatever order they
    came in.
    """
    pasts = [past] if isinstance(past, Past) else list(past)
    if len({p.format for p in pasts}) < len(pasts):
        raise ValueError(f"a past has one block list per format, not {[p.format for p in pasts]}")
    return sorted(pasts, key=lambda p: (p.format.k_bits, p.format.v_bits))


class Slots(Struct, frozen=True, kw_only=True):
    """Where R tokens lie, in every layer: `blocks` and `slots` int32 `[R]`."""

    blocks: Tensor
    slots: Tensor
    format: CacheFormat


class Observed(Struct, frozen=True, kw_only=True):
    """Rows whose attention is observed: `rows` int32 `[O]`, and the log-sum-exp `[N, H]` over all that the
    step's rows saw, past and present.
    """

    rows: Tensor
    lse: Tensor


class SampleRows(Struct, frozen=True, kw_only=True):
    """How R rows of logits are sampled. One entry a row, tensors on the logits' device.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` (int64, read as 64 bits),
    `choice` and `position` key the noise. Penalties, biases and bans arrive as sparse additions and
    scalings that the caller has already applied (`engine/sampler.py`).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor


class Program(Protocol):
    """A function of tensors as an op set noted it down: which kernels it ran, on which memory."""

    def replay(self) -> Tensor:
        """Run the kernels on what the memory holds now. The result is good until anything is replayed or
        recorded.
        """


class Ops(Protocol):
    """One implementation of every op."""

    name: str

    head_dims: range
    """The head dimensions that attention can take."""

    row_tile: int
    """Rows that share one reading of a linear layer's weights: one more costs more than the others did. 0
    where no such number is known.
    """

    is_asynchronous: bool
    """Whether ops return before they are done, as on a GPU: to look at a number is then to wait."""

    def prepare_linear(self, weight: AnyWeight | Sequence[AnyWeight], bias: Tensor | None = None) -> Any:
        """Turn a `[out, in]` weight (and `[out]` bias) into what this set's `linear` takes; done once, at
        load.

        Several weights of one input width, of any formats, become one layer: their outputs follow one
        another.
        """

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """`x` `[N, in]` -> `[N, out]` in its dtype."""

    def embed(self, numbers: Tensor, weight: Any) -> Tensor:
        """Rows of the matrix that `prepare_linear` was given: `numbers` int64 `[N]` -> float32 `[N, in]`."""

    def take(self, table: Tensor, numbers: Tensor) -> Tensor:
        """Rows of a float32 table `[R, width]`: `numbers` int64 `[N]` -> `[N, width]`."""

    def finite_rows(self, x: Tensor) -> Tensor:
        """Whether all numbers in each row of `x` `[N, width]` are finite: bool `[N]`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place, return the normed sum."""

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """`rms_norm` of each head of `x` `[N, heads, D]`, in place; `weight` is `[D]`."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding, half-split form: `x` `[N, heads, D]`, `cos` and `sin` `[N, rotary_dim / 2]`."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`gate_up` `[N, 2 * I]` -> `silu(gate) * up` `[N, I]`."""

    def rotate(self, x: Tensor) -> Tensor:
        """The Hadamard transform of `codes.rotate` over the last dimension of `x` `[N, heads, D]`."""

    def rotate_heads(self, x: Tensor) -> None:
        """`rotate` in place; rows and heads may be strided."""

    def past_attention(
        self, q: Tensor, cu_rows: Tensor, layer: Tensor, layout: BlockLayout, past: AnyPast, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of `q` `[N, H, D]` over each sequence's committed tokens, no mask.

        `layer` is uint8 `[num_blocks, block_bytes]`. Returns the normalised output `[N, H, D]` and the
        log-sum-exp `[N, H]`; where nothing is committed the output is 0 and the log-sum-exp -inf.
        """

    def present_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of a step's rows among their own sequence's rows: `k` and `v` `[N, G, D]`."""

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
        """Combine two partial attentions by their log-sum-exp; an empty part has -inf."""

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
        """Past and present attention, merged: `[N, H, D]`. One call where an op set can save the passes
        between. `lse` `[N, H]`, if given, receives the merged log-sum-exp. `max_rows`, if the caller knows
        how many rows a sequence has at most, may save work.
        """

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
        """The share of attention that committed tokens received from each observed row, summed over the
        query heads of a KV head: float32 `[O, G, max_blocks * capacity]`, in order of the block list, 0
        beyond the row's sequence.
        """

    def present_mass(self, q: Tensor, k: Tensor, cu_rows: Tensor, scale: float, observed: Observed) -> Tensor:
        """The same for the step's own rows: float32 `[O, G, max_rows]`, entry r for row r of the observed
        row's sequence; 0 for later rows. `max_rows` is that of the longest sequence.
        """

    def keep(self, k: Tensor, v: Tensor, kept_k: Tensor, kept_v: Tensor) -> None:
        """Round rows of `k` and `v` `[N, G, D]` to the dtype of `kept_k` and `kept_v`, in place, and copy
        them there.
        """

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
        """Write rows of `k` and `v` `[L, R, G, D]` to `cache` `[L, num_blocks, block_bytes]`, row r at
        (blocks[r], slots[r]). Rows are rounded to the layout's dtype first, then quantised: the same bytes as
        `demote` gives later.
        """

    def demote(self, cache: Tensor, layout: BlockLayout, source: Slots, target: Slots) -> None:
        """Write the tokens at `source` to `target`, in its format; between equal formats bytes are moved as
        they are. All are read before any is written, so blocks may be compacted in place.
        """

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Token ids `[R]` (int64) of processed `logits` `[R, V]` float32 by the Gumbel rule."""

    def record(self, forward: Callable[[], Tensor], *, known: bool = False) -> Program | None:
        """Note down what `forward` does, without doing it. It may call ops and take views, and it must read
        and write memory that stays where it is; what it computes may depend on the memory's content.

        None where this op set or this function cannot be recorded. To see whether it can takes several times
        as long as recording it; `known` says that it was seen already: the same code was recorded before, on
        other sizes.
        """
