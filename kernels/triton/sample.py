"""Choosing tokens: the argmax of logits / T + Gumbel noise over what the filters leave (`../noise.py` defines
the noise, `ReferenceOps.sample` the filters).

A row is cut into `SPLIT` tokens a program. Its largest scaled logit is found first, then the filters' cuts.
As unsigned integers, floats have the order of their bits, so a cut is found by radix, 4 bits a launch:
programs measure their tokens under each of the 16 continuations of what is known of the cut, and the next
launch adds those parts up. 8 launches find top-k's cut by the number of tokens above it, 8 more top-p's by
their mass among what top-k leaves; one counts the tokens equal to that, of which the first few stay. Programs
of rows without such a filter return at once. Then each program adds noise to what the cuts leave and keeps
its best token, and the last launch picks the row's. All is summed in an order that V alone decides: a row
draws the same token in any batch.

Bytes: without top-k and top-p a row is read twice (the minimum is once); with both 19 times, all but the
first from the level-2 cache, where even 150,000 float32 take 600 kB a row. Operations: about 80 per token
that stays, for the noise; about 50 per launch and token that still fits what is known of a cut.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base import SampleRows
from .aot import AotCase
from .tiles import FLOATS

SPLIT = 4096
"""Tokens of a program: a vocabulary of 150,000 makes 37, so that a row alone is spread over processors."""

TILE = 512
"""Tokens at once. Times 16 continuations that is 64 numbers a thread, which still fit in registers."""

NUM_WARPS = 4

DIGITS = tl.constexpr(8)
"""Launches for a cut: 32 bits, 4 at a time."""

LAUNCHES = 2 * DIGITS.value + 1
"""Both cuts, and the count of what equals the second."""

STATE = tl.constexpr(4)
"""What is known of a row's cuts at a launch: the current cut's leading bits, the measure of all tokens above
those, the measure that must be reached, and top-k's cut. In float64, which holds them all exactly.
"""

BINS = tl.constexpr(16)


@triton.jit
def _scaled(logits, token, vocabulary, temperature):
    """logits / T, -inf outside the vocabulary; a greedy row's (T = 0) as they are."""
    x = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    # Exact, as the reference's division is: a cut is a token's own number.
    return tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def _key(x):
    """Unsigned integers in the order of the floats; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _number(key):
    """The float of a key."""
    return tl.where((key >> 31) == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _best(
    logits,  # [R, vocabulary]
    temperature,  # float32 [R]
    best,  # float32 [R, splits]: each program's largest
    stride,
    vocabulary,
    splits,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, vocabulary), TILE):
        token = first + tl.arange(0, TILE)
        top = tl.maximum(top, _scaled(logits + row * stride, token, vocabulary, heat))
    tl.store(best + row * splits + split, tl.max(top, 0))


@triton.jit
def _row_best(best, row, splits, BLOCK_SPLITS: tl.constexpr):
    split = tl.arange(0, BLOCK_SPLITS)
    return tl.max(tl.load(best + row * splits + split, mask=split < splits, other=float("-inf")), 0)


@triton.jit
def _advance(state, parts, splits, launch, top_p, BLOCK_SPLITS: tl.constexpr):
    """A row's state after the launch that left `state` and `parts` `[splits, BINS]`."""
    split, digit = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BINS)
    at = parts + split[:, None] * BINS + digit[None, :]
    measure = tl.sum(tl.load(at, mask=(split < splits)[:, None], other=0.0), 0)  # [BINS]
    known, above, enough = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    if launch == DIGITS + 1:
        enough = top_p * tl.sum(measure, 0)
    higher = digit[None, :] > digit[:, None]
    over = above + tl.sum(tl.where(higher, measure[None, :], 0.0), 1)  # [BINS]: above each continuation
    # Where rounding keeps the measure from being reached at all, the lowest continuation keeps every token.
    found = tl.max(tl.where(over + measure >= enough, digit, 0), 0)
    above = tl.sum(tl.where(digit == found, over, 0.0), 0)
    return known * BINS + found, above, enough, tl.load(state + 3)


@triton.jit(do_not_specialize=["launch", "rows"])
def _look(
    logits,  # [R, vocabulary]
    temperature,  # float32 [R]
    top_k,  # int64 [R]
    top_p,  # float32 [R]
    best,  # float32 [R, splits]
    states,  # float64 [LAUNCHES, R, STATE]
    parts,  # float64 [2, R, splits, BINS]: what this launch and the one before measured
    launch,
    rows,
    stride,
    vocabulary,
    splits,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One launch of the search: update a row's state, measure this program's tokens."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, most, nucleus = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    by_rank = (heat > 0.0) & (most > 0) & (most < vocabulary)
    by_mass = (heat > 0.0) & (nucleus < 1.0)
    ranks = launch < DIGITS
    if (ranks & ~by_rank) | ((launch > DIGITS) & ~by_mass):
        return

    zero = (row * 0).to(tl.float64)
    known, above, enough, floor = zero, zero, most.to(tl.float64), zero
    if (launch > 0) & (by_rank | (launch > DIGITS)):
        old_state = states + ((launch - 1) * rows + row) * STATE
        old_parts = parts + ((launch + 1) % 2 * rows + row) * splits * BINS
        known, above, enough, floor = _advance(
            old_state, old_parts, splits, launch, nucleus.to(tl.float64), BLOCK_SPLITS
        )
    if launch == DIGITS:
        # What is known is all of top-k's cut (0 without one, which is below every number's).
        floor, known, above = known, zero, zero
    if split == 0:
        state = states + (launch * rows + row) * STATE
        tl.store(state, known)
        tl.store(state + 1, above)
        tl.store(state + 2, enough)
        tl.store(state + 3, floor)
    if (launch == DIGITS) & ~by_mass:
        return

    top = _row_best(best, row, splits, BLOCK_SPLITS)
    is_count = ranks | (launch == 2 * DIGITS)
    # The count of ties compares whole keys, and is kept in the first bin.
    shift = tl.where(launch == 2 * DIGITS, 0, 28 - launch % DIGITS * 4).to(tl.uint32)
    rest = tl.where(launch == 2 * DIGITS, 0, 4).to(tl.uint32)
    prefix, least = known.to(tl.int64).to(tl.uint32), floor.to(tl.int64).to(tl.uint32)
    digit = tl.arange(0, BINS)[None, :]
    measure = tl.zeros((BINS,), tl.float64)
    for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, vocabulary), TILE):
        token = first + tl.arange(0, TILE)
        x = _scaled(logits + row * stride, token, vocabulary, heat)
        key = _key(x)
        fits = (token < vocabulary) & (key >= least) & ((key >> shift >> rest) == prefix)
        if tl.max(fits.to(tl.int32), 0) > 0:
            weight = tl.where(is_count, 1.0, tl.exp(x - top))
            own = tl.where(rest == 0, 0, (key >> shift & 15).to(tl.int32))
            counted = fits[:, None] & (own[:, None] == digit)  # [TILE, BINS]
            measure += tl.sum(tl.where(counted, weight[:, None], 0.0), 0).to(tl.float64)
    at = parts + ((launch % 2 * rows + row) * splits + split) * BINS
    tl.store(at + tl.arange(0, BINS), measure)


@triton.jit
def _gumbel(seed, choice, position, first, TILE: tl.constexpr):
    """Noise of the tokens `first` (a multiple of 4) and on: `[TILE]`."""
    block = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zero = block & 0
    key, high_key = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32 & 0xFFFFFFFF).to(tl.uint32)
    position, choice = (position & 0xFFFFFFFF).to(tl.uint32), (choice & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox_impl(block, zero + position, zero + choice, zero, zero + key, zero + high_key)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE,))
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["rows"])
def _choose(
    logits,  # [R, vocabulary]
    temperature,  # float32 [R]
    top_k,  # int64 [R]
    top_p,  # float32 [R]
    min_p,  # float32 [R]
    seed,  # int64 [R]
    choice,  # int64 [R]
    position,  # int64 [R]
    best,  # float32 [R, splits]
    states,  # float64 [LAUNCHES, R, STATE]
    parts,  # float64 [2, R, splits, BINS]
    values,  # out: float32 [R, splits], each program's largest noised logit
    tokens,  # out: int32 [R, splits], where it is
    rows,
    stride,
    vocabulary,
    splits,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, nucleus, share = tl.load(temperature + row), tl.load(top_p + row), tl.load(min_p + row)
    by_mass = (heat > 0.0) & (nucleus < 1.0)
    top = _row_best(best, row, splits, BLOCK_SPLITS)
    # A greedy row has no floor either: it keeps every token.
    least = float("-inf")
    if (heat > 0.0) & (share > 0.0):
        least = top + tl.log(share.to(tl.float64)).to(tl.float32)
    floor = tl.load(states + (DIGITS * rows + row) * STATE + 3).to(tl.int64).to(tl.uint32)
    wanted = (row * 0).to(tl.float64)
    cut, before = floor, wanted
    if by_mass:
        state = states + (2 * DIGITS * rows + row) * STATE
        cut = tl.load(state).to(tl.int64).to(tl.uint32)
        weight = tl.exp(_number(cut) - top).to(tl.float64)
        wanted = tl.ceil((tl.load(state + 2) - tl.load(state + 1)) / weight)
        at = tl.arange(0, BLOCK_SPLITS)
        ties = tl.load(parts + (row * splits + at) * BINS, mask=at < split, other=0.0)
        before = tl.sum(ties, 0)

    lane = tl.arange(0, TILE)
    highest = tl.full((TILE,), float("-inf"), tl.float32)
    where_highest = split * SPLIT + lane
    for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, vocabulary), TILE):
        token = first + lane
        x = _scaled(logits + row * stride, token, vocabulary, heat)
        key = _key(x)
        kept = (token < vocabulary) & (key >= floor) & (x >= least)
        if by_mass:
            tie = (key == cut).to(tl.int32)
            rank = before + tl.cumsum(tie, 0)
            kept = kept & ((key > cut) | ((tie == 1) & (rank <= wanted)))
            before += tl.sum(tie, 0)
        if tl.max(kept.to(tl.int32), 0) > 0:
            if heat > 0.0:
                x += _gumbel(tl.load(seed + row), tl.load(choice + row), tl.load(position + row), first, TILE)
            better = kept & (x > highest)
            highest, where_highest = tl.where(better, x, highest), tl.where(better, token, where_highest)
    value = tl.max(highest, 0)
    tl.store(values + row * splits + split, value)
    nearest = tl.min(tl.where(highest == value, where_highest, vocabulary), 0)
    tl.store(tokens + row * splits + split, nearest)


@triton.jit
def _pick(
    values,  # float32 [R, splits]
    tokens,  # int32 [R, splits]
    out,  # int64 [R]
    splits,
    BLOCK_SPLITS: tl.constexpr,
):
    """The largest value's token, the lowest of equal ones."""
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_SPLITS)
    value = tl.load(values + row * splits + split, mask=split < splits, other=float("-inf"))
    token = tl.load(tokens + row * splits + split, mask=split < splits, other=0x7FFFFFFF)
    tl.store(out + row, tl.min(tl.where(value == tl.max(value, 0), token, 0x7FFFFFFF), 0).to(tl.int64))


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """Token ids `[R]` (int64) of `logits` `[R, V]`, float in rows of any stride; see `Ops.sample`."""
    num_rows, vocabulary = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _assert_rows(logits, rows)
    if num_rows == 0:
        return out
    splits = triton.cdiv(vocabulary, SPLIT)
    shape, grid = (num_rows, splits), (num_rows, splits)
    best, values = (logits.new_empty(shape, dtype=torch.float32) for _ in range(2))
    tokens = logits.new_empty(shape, dtype=torch.int32)
    states = logits.new_empty(LAUNCHES, num_rows, STATE.value, dtype=torch.float64)
    parts = logits.new_empty(2, *shape, BINS.value, dtype=torch.float64)
    sizes = logits.stride(0), vocabulary, splits
    heat, most, nucleus = rows.temperature, rows.top_k, rows.top_p
    cuts: dict[str, Any] = _constants(splits) | {"num_warps": NUM_WARPS}
    _best[grid](logits, heat, best, *sizes, SPLIT=SPLIT, TILE=TILE, num_warps=NUM_WARPS)
    for launch in range(LAUNCHES):
        _look[grid](logits, heat, most, nucleus, best, states, parts, launch, num_rows, *sizes, **cuts)
    noise = rows.seed, rows.choice, rows.position
    found = best, states, parts, values, tokens
    _choose[grid](logits, heat, most, nucleus, rows.min_p, *noise, *found, num_rows, *sizes, **cuts)
    _pick[(num_rows,)](values, tokens, out, splits, BLOCK_SPLITS=cuts["BLOCK_SPLITS"], num_warps=1)
    return out


def _assert_rows(logits: Tensor, rows: SampleRows) -> None:
    assert logits.dtype in FLOATS
    assert logits.stride(1) == 1
    assert 0 < logits.shape[1] < 1 << 30
    for name in ("temperature", "top_p", "min_p"):
        assert getattr(rows, name).dtype == torch.float32, name
    for name in ("top_k", "seed", "choice", "position"):
        assert getattr(rows, name).dtype == torch.int64, name
    for name in rows.__struct_fields__:
        value = getattr(rows, name)
        assert value.shape == (len(logits),), name
        assert value.is_contiguous(), name
        assert value.device == logits.device, name


def _constants(splits: int) -> dict[str, int]:
    return {"SPLIT": SPLIT, "TILE": TILE, "BLOCK_SPLITS": triton.next_power_of_2(splits)}


def aot_cases() -> list[AotCase]:
    """Llama-3.1-8B's vocabulary of 128,256."""
    constants = _constants(triton.cdiv(128256, SPLIT))
    types = {
        "logits": "*fp32",
        "best": "*fp32",
        "values": "*fp32",
        "tokens": "*i32",
        "out": "*i64",
        "states": "*fp64",
        "parts": "*fp64",
        "launch": "i32",
        "rows": "i32",
        "stride": "i32:16",
        "vocabulary": "i32:16",
        "splits": "i32",
        **dict.fromkeys(("temperature", "top_p", "min_p"), "*fp32"),
        **dict.fromkeys(("top_k", "seed", "choice", "position"), "*i64"),
    }
    return [
        AotCase(
            name=f"sample, {what}",
            kernel=kernel,
            signature={name: types[name] for name in kernel.arg_names if name in types},
            constexprs={name: value for name, value in constants.items() if name in kernel.arg_names},
            num_warps=num_warps,
            num_stages=1,
            decode=True,
        )
        for what, kernel, num_warps in (
            ("largest", _best, NUM_WARPS),
            ("cuts", _look, NUM_WARPS),
            ("noise", _choose, NUM_WARPS),
            ("winner", _pick, 1),
        )
    ]
