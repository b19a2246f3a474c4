"""Choosing tokens: the argmax of logits / T + Gumbel noise over what the filters leave (`../noise.py` defines
the noise).

All three filters come down to one cut: a token stays if its scaled logit is above `cut`, or equal to it and
its index at most `last`. Top-k and top-p find theirs by a histogram of the distance to the best logit and by
sorting one bucket.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ..noise import KEY_STEPS, MULTIPLIERS
from .forms import FLOAT, INT32, INT64, LANES, Emitter
from .vector import (
    ADDRESS,
    F32,
    I32,
    add,
    compiled,
    div,
    exp,
    keep_first,
    load_part,
    log,
    max_lanes,
    maximum,
    op,
    read,
    read_f64,
    read_i64,
    splat,
    stack,
    store,
    store_part,
    sub,
    words,
    write_f64,
    write_i32,
    write_i64,
    zero,
)

BUCKETS = 2048
BUCKETS_PER_UNIT = 64.0
"""Buckets reach 32 below the best logit; what lies deeper (a probability under 1e-13 each) shares the last
one.
"""

_INFINITY = np.float32(math.inf)


@op(types.none, ADDRESS, types.int64, types.int64, types.int64, types.int64)
def _store_words(e: Emitter, out: Any, first: Any, seed: Any, choice: Any, position: Any) -> None:
    """The Philox words of 64 tokens from `first` (a multiple of 4) on: 16 blocks side by side."""
    b = e.b
    lane = ir.Constant(I32.llvm, list(range(LANES)))
    index = b.add(e.splat(b.trunc(b.lshr(first, INT64(2)), INT32)), lane)
    c = [index, e.splat(b.trunc(position, INT32)), e.splat(b.trunc(choice, INT32)), e.constant(INT32, 0)]
    key = [e.splat(b.trunc(seed, INT32)), e.splat(b.trunc(b.lshr(seed, INT64(32)), INT32))]
    for _ in range(10):
        high0, low0 = _wide_product(e, c[0], MULTIPLIERS[0])
        high1, low1 = _wide_product(e, c[2], MULTIPLIERS[1])
        c = [b.xor(b.xor(high1, c[1]), key[0]), low1, b.xor(b.xor(high0, c[3]), key[1]), low0]
        key = [b.add(k, e.constant(INT32, step)) for k, step in zip(key, KEY_STEPS, strict=True)]
    pairs = e.concat([e.concat(c[:2]), e.concat(c[2:])])  # word-major, 4 * 16
    order = [LANES * word + block for block in range(LANES) for word in range(4)]
    for part in range(4):
        index = ir.Constant(I32.llvm, order[LANES * part : LANES * (part + 1)])
        e.store(out, b.shuffle_vector(pairs, ir.Constant(pairs.type, ir.Undefined), index), 64 * part)


def _wide_product(e: Emitter, x: Any, factor: int) -> tuple[Any, Any]:
    """High and low words of 32 x 32 bits."""
    wide = ir.VectorType(INT64, LANES)
    product = e.b.mul(e.b.zext(x, wide), e.constant(INT64, factor))
    return e.b.trunc(e.b.lshr(product, e.constant(INT64, 32)), I32.llvm), e.b.trunc(product, I32.llvm)


@op(F32, ADDRESS)
def _uniform(e: Emitter, words_: Any) -> Any:
    """16 words -> numbers in (0, 1): 23 bits and a half."""
    bits = e.b.lshr(e.load(words_, I32.llvm), e.constant(INT32, 9))
    return e.b.fmul(e.b.fadd(e.b.uitofp(bits, F32.llvm), e.constant(FLOAT, 0.5)), e.constant(FLOAT, 2.0**-23))


@op(types.none, ADDRESS, F32, types.int64)
def _challenge(e: Emitter, best: Any, values: Any, first: Any) -> None:
    """Keep, per lane, the larger value and its index (at `best`: 16 float32, 16 int32); the earlier one on a
    tie.
    """
    b = e.b
    old, old_index = e.load(best, F32.llvm), e.load(best, I32.llvm, 64)
    index = b.add(e.splat(b.trunc(first, INT32)), ir.Constant(I32.llvm, list(range(LANES))))
    better = b.fcmp_ordered(">", values, old)
    e.store(best, b.select(better, values, old))
    e.store(best, b.select(better, index, old_index), 64)


@op(F32, F32, types.int64, types.float32, types.int64)
def _keep(e: Emitter, scaled: Any, first: Any, cut: Any, last: Any) -> Any:
    """-inf in the lanes that the cut drops."""
    b = e.b
    index = b.add(e.splat(b.trunc(first, INT32)), ir.Constant(I32.llvm, list(range(LANES))))
    tied = b.and_(
        b.fcmp_ordered("==", scaled, e.splat(cut)), b.icmp_signed("<=", index, e.splat(b.trunc(last, INT32)))
    )
    kept = b.or_(b.fcmp_ordered(">", scaled, e.splat(cut)), tied)
    return b.select(kept, scaled, e.constant(FLOAT, -math.inf))


@op(types.int64, ADDRESS)
def _winner(e: Emitter, best: Any) -> Any:
    """The index of the largest value of all lanes, the lowest on a tie."""
    b = e.b
    values, index = e.load(best, F32.llvm), e.load(best, I32.llvm, 64)
    count = LANES
    while count > 1:
        count //= 2
        x, y = e.lanes(values, 0, count), e.lanes(values, count, count)
        i, j = e.lanes(index, 0, count), e.lanes(index, count, count)
        tied = b.and_(b.fcmp_ordered("==", x, y), b.icmp_signed("<", i, j))
        first = b.or_(b.fcmp_ordered(">", x, y), tied)
        values, index = b.select(first, x, y), b.select(first, i, j)
    return b.sext(b.extract_element(index, INT32(0)), INT64)


@op(types.int64, types.float32, types.int64)
def _sort_key(e: Emitter, value: Any, index: Any) -> Any:
    """An int64 that is smaller for a larger value, then for a lower index."""
    b = e.b
    bits = b.bitcast(value, INT32)
    negative = b.icmp_signed("<", bits, INT32(0))
    ordered = b.select(negative, bits, b.xor(bits, INT32(0x7FFFFFFF)))
    return b.or_(b.shl(b.sext(ordered, INT64), INT64(32)), index)


@compiled
def _bucket(best: float, value: float) -> int:
    distance = (best - value) * np.float32(BUCKETS_PER_UNIT)
    return int(distance) if distance < np.float32(BUCKETS - 1) else BUCKETS - 1


@compiled
def _sift(heap: int, root: int, size: int) -> None:
    """Let a heap's root sink to its place; the largest key is on top."""
    while 2 * root + 1 < size:
        child = 2 * root + 1
        if child + 1 < size and read_i64(heap + 8 * (child + 1)) > read_i64(heap + 8 * child):
            child += 1
        upper, lower = read_i64(heap + 8 * root), read_i64(heap + 8 * child)
        if upper >= lower:
            return
        write_i64(heap + 8 * root, lower)
        write_i64(heap + 8 * child, upper)
        root = child


@compiled
def _sort(keys: int, size: int) -> None:
    """Heap sort of int64, ascending."""
    for root in range(size // 2 - 1, -1, -1):
        _sift(keys, root, size)
    for end in range(size - 1, 0, -1):
        top, bottom = read_i64(keys), read_i64(keys + 8 * end)
        write_i64(keys, bottom)
        write_i64(keys + 8 * end, top)
        _sift(keys, 0, end)


@compiled
def _sorted_bucket(scaled: int, vocabulary: int, best: float, bucket: int, keys: int) -> int:
    """Sort a bucket's tokens, best first; returns how many there are."""
    size = 0
    for t in range(vocabulary):
        value = read(scaled + 4 * t)
        if _bucket(best, value) == bucket:
            write_i64(keys + 8 * size, _sort_key(value, t))
            size += 1
    _sort(keys, size)
    return size


@compiled
def _histogram(scaled: int, vocabulary: int, best: float, weights: int, counts: int, masses: int) -> float:
    """exp(scaled - best) of every token; their number and sum per bucket; returns the sum of all."""
    top = splat(best)
    for t in range(0, vocabulary, 16):
        left = min(16, vocabulary - t)
        store_part(weights + 4 * t, exp(sub(load_part(scaled + 4 * t, left), top)), left)
    for i in range(BUCKETS):
        write_i64(counts + 8 * i, 0)
        write_f64(masses + 8 * i, 0.0)
    for t in range(vocabulary):
        i = _bucket(best, read(scaled + 4 * t))
        write_i64(counts + 8 * i, read_i64(counts + 8 * i) + 1)
        write_f64(masses + 8 * i, read_f64(masses + 8 * i) + np.float64(read(weights + 4 * t)))
    total = 0.0
    for i in range(BUCKETS):
        total += read_f64(masses + 8 * i)
    return total


@compiled
def _top_k_cut(
    scaled: int, vocabulary: int, best: float, top_k: int, weights: int, counts: int, masses: int, keys: int
) -> tuple[float, float]:
    """The top_k-th largest scaled logit, and the sum of exp of all that are not below it."""
    bucket, above, mass = 0, 0, 0.0
    while above + read_i64(counts + 8 * bucket) < top_k:
        above += read_i64(counts + 8 * bucket)
        mass += read_f64(masses + 8 * bucket)
        bucket += 1
    size = _sorted_bucket(scaled, vocabulary, best, bucket, keys)
    cut = read(scaled + 4 * (read_i64(keys + 8 * (top_k - above - 1)) & 0xFFFFFFFF))
    for i in range(size):
        token = read_i64(keys + 8 * i) & 0xFFFFFFFF
        if read(scaled + 4 * token) < cut:
            break
        mass += np.float64(read(weights + 4 * token))
    return cut, mass


@compiled
def _top_p_cut(
    scaled: int,
    vocabulary: int,
    best: float,
    enough: float,
    floor: float,
    weights: int,
    masses: int,
    keys: int,
) -> tuple[float, int]:
    """The last token of the nucleus, (scaled logit, index): the first whose sum reaches `enough`; none lies
    below `floor`.
    """
    mass = 0.0
    for bucket in range(BUCKETS):
        more = read_f64(masses + 8 * bucket)
        if more > 0.0 and mass + more >= enough:
            size = _sorted_bucket(scaled, vocabulary, best, bucket, keys)
            for i in range(size):
                token = read_i64(keys + 8 * i) & 0xFFFFFFFF
                value = read(scaled + 4 * token)
                mass += np.float64(read(weights + 4 * token))
                if value < floor:
                    return floor, vocabulary
                if mass >= enough:
                    return value, token
        else:
            mass += more
    return floor, vocabulary


@compiled
def _cut(
    scaled: int, vocabulary: int, best: float, top_k: int, top_p: float, min_p: float, scratch: int
) -> tuple[Any, int]:
    """The cut of a row's filters, (scaled logit, index)."""
    counts, masses = scratch, scratch + 8 * BUCKETS
    keys = masses + 8 * BUCKETS
    weights = keys + 8 * vocabulary
    cut, last = -_INFINITY, vocabulary
    by_rank = 0 < top_k < vocabulary
    if by_rank or top_p < np.float32(1.0):
        total = _histogram(scaled, vocabulary, best, weights, counts, masses)
        if by_rank:
            cut, total = _top_k_cut(scaled, vocabulary, best, top_k, weights, counts, masses, keys)
        if top_p < np.float32(1.0):
            enough = np.float64(top_p) * total
            cut, last = _top_p_cut(scaled, vocabulary, best, enough, cut, weights, masses, keys)
    if min_p > np.float32(0.0):
        least = best + np.float32(math.log(np.float64(min_p)))
        if least > cut:
            return least, vocabulary
    return cut, last


@compiled
def _scale_row(logits: int, vocabulary: int, temperature: float, scaled: int) -> float:
    """Write logits / T, return the largest."""
    tops = splat(-_INFINITY)
    divisor = splat(temperature)
    for t in range(0, vocabulary, 16):
        left = min(16, vocabulary - t)
        value = div(load_part(logits + 4 * t, left), divisor)
        store_part(scaled + 4 * t, value, left)
        tops = maximum(keep_first(value, left, -_INFINITY), tops)
    return max_lanes(tops)


@compiled
def _begin(best: int) -> None:
    store(best, splat(-_INFINITY))
    for lane in range(16):
        write_i32(best + 64 + 4 * lane, lane)


@compiled
def _greedy(logits: int, vocabulary: int) -> int:
    """The index of the largest logit, the lowest on a tie."""
    best = stack(128)
    _begin(best)
    for t in range(0, vocabulary, 16):
        left = min(16, vocabulary - t)
        _challenge(best, keep_first(load_part(logits + 4 * t, left), left, -_INFINITY), t)
    return _winner(best)


@compiled
def _noised(
    scaled: int, vocabulary: int, cut: float, last: int, seed: int, choice: int, position: int
) -> int:
    """The index of the largest scaled logit + noise of what the cut keeps."""
    best, noise = stack(128), stack(256)
    _begin(best)
    for first in range(0, vocabulary, 64):
        _store_words(noise, first, seed, choice, position)
        for t in range(first, min(first + 64, vocabulary), 16):
            left = min(16, vocabulary - t)
            gumbel = sub(zero(), log(sub(zero(), log(_uniform(noise + 4 * (t - first))))))
            kept = _keep(load_part(scaled + 4 * t, left), t, cut, last)
            _challenge(best, keep_first(add(kept, gumbel), left, -_INFINITY), t)
    return _winner(best)


def sample(args: int, part: int, parts: int) -> None:
    """Args: logits, their row stride, rows, vocabulary, temperature, top_k, top_p, min_p, seed, choice,
    position (float32 and int64), out (int64), scratch, bytes of scratch a part.
    """
    logits, stride, rows, vocabulary, temperature, top_k, top_p, min_p = words(args, 8)
    seed, choice, position, out, scratch, scratch_bytes = words(args + 64, 6)
    scaled = scratch + part * scratch_bytes
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        source, heat = logits + row * stride, read(temperature + 4 * row)
        if heat == np.float32(0.0):
            write_i64(out + 8 * row, _greedy(source, vocabulary))
        else:
            best = _scale_row(source, vocabulary, heat, scaled)
            cut, last = _cut(
                scaled,
                vocabulary,
                best,
                read_i64(top_k + 8 * row),
                read(top_p + 4 * row),
                read(min_p + 4 * row),
                scaled + 4 * vocabulary + 64,
            )
            token = _noised(
                scaled,
                vocabulary,
                cut,
                last,
                read_i64(seed + 8 * row),
                read_i64(choice + 8 * row),
                read_i64(position + 8 * row),
            )
            write_i64(out + 8 * row, token)


def scratch_bytes(vocabulary: int) -> int:
    """What a thread needs to sample: scaled logits, buckets, sort keys, weights."""
    return (4 * vocabulary + 64) + 16 * BUCKETS + 8 * vocabulary + 4 * vocabulary + 64
