"""Activations as linear layers of group formats multiply them: quantised per row and group of 32.

int8 codes, but for the largest number in each half of a group, an *outlier*, whose code has 16 bits. One
scale for all 32 costs 0.0034 nat a token on SmolLM2-135M, since the largest takes the others' bits; with two
outliers it is 0.0003, and 16 bits for all take a third longer (docs/measurements.md).

A group is a cache line: 32 int8 codes, with 0 in an outlier's place; float32 scale s, float32 sum of the
group, int32 offset (what is to be added where the multiplied weights are larger than those that they stand
for); the codes of two outliers, int16; of each outlier, at k, the place of the vector in a panel's group that
has its weights, and the bits by which to turn an int32 of it so that the weight gets into the lower (of the
second outlier, the upper) int16. A group's rows follow one another (a tile's rows then lie at fixed offsets),
groups are `rows * 64 + 64` bytes apart.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .dot import byte_excess
from .forms import FLOAT, INT8, INT16, INT32, INT64, LANES, Emitter
from .kinds import Q4_0_EXCESS, Q8_0
from .vector import ADDRESS, F32, I32, fold_lanes, load, op, words

ACTIVATION_BYTES = 64
"""Bytes of a quantised activation group."""

SCALE, SUM, OFFSET, OUTLIERS = range(32, 48, 4)
PLACES, TURNS = (48, 56), (52, 60)
"""Where each of its numbers is, after the codes; places and turns are those of two outliers."""

MOST, OUTLIER_MOST = 127.0, 32767.0
"""The largest activation code, and the largest of an outlier."""

LEAST_SCALE = 2.0**-126
"""The smallest normal number: groups that would need a smaller scale count as zeros."""


@op(types.none, ADDRESS, F32, F32, types.int64)
def _store_activation_group(e: Emitter, out: Any, first: Any, second: Any, kind: Any) -> None:
    """Quantise 32 numbers for a kind of weights: codes, scale, sum, offset, and the largest |x| of each half.

    The scale lets the largest of the others have the code 127, or an outlier 32767, whatever is more.
    """
    b, halves = e.b, (first, second)
    # As integers, sizes have the same order, and what is not a number comes after infinity.
    sizes = [b.and_(b.bitcast(x, I32.llvm), e.constant(INT32, 0x7FFFFFFF)) for x in halves]
    tops, others = _two_largest(e, *sizes)
    places = [_first_equal(e, size, top) for size, top in zip(sizes, tops, strict=True)]
    scale = _scale(e, *(b.bitcast(_larger(e, *both), FLOAT) for both in (others, tops)))
    inverse, lanes = e.splat(b.fdiv(FLOAT(1.0), scale)), ir.Constant(I32.llvm, list(range(LANES)))
    in_bytes, total = b.icmp_signed("==", kind, INT64(Q8_0)), e.constant(INT32, 0)
    for half, (x, k) in enumerate(zip(halves, places, strict=True)):
        codes = _nearest(e, b.fmul(x, inverse))
        total = b.add(total, codes)
        own = b.select(b.icmp_signed("==", lanes, e.splat(k)), e.constant(INT32, 0), codes)
        e.store(out, b.trunc(own, ir.VectorType(INT8, LANES)), LANES * half)
        e.store(out, b.trunc(b.extract_element(codes, k), INT16), OUTLIERS + 2 * half)
        vector, turn = _whereabouts(e, b.add(k, INT32(LANES * half)), in_bytes)
        e.store(out, b.shl(vector, INT32(6)), PLACES[half])
        e.store(out, b.xor(turn, INT32(16 * half)), TURNS[half])
    sum_ = fold_lanes(e, total, b.add)
    e.store(out, scale, SCALE)
    e.store(out, b.fmul(scale, b.sitofp(sum_, FLOAT)), SUM)
    excess = b.select(in_bytes, INT32(byte_excess(e.form)), INT32(Q4_0_EXCESS))
    e.store(out, b.neg(b.mul(sum_, excess)), OFFSET)


def _whereabouts(e: Emitter, k: Any, in_bytes: Any) -> tuple[Any, Any]:
    """Of a panel's weight k of each output: the vector, and the bits of an int32 that lie below it."""
    b = e.b
    vector = b.lshr(k, b.select(in_bytes, INT32(2), INT32(3)))
    below = b.shl(b.and_(k, INT32(3)), INT32(3))
    return vector, b.or_(below, b.and_(k, b.select(in_bytes, INT32(0), INT32(4))))


def _two_largest(e: Emitter, first: Any, second: Any) -> list[list[Any]]:
    """The largest lane of each of two vectors, and the largest of each but for that one."""
    b, none = e.b, ir.Constant(first.type, ir.Undefined)

    def pick(x: Any, y: Any, indices: list[int]) -> Any:
        return b.shuffle_vector(x, y, ir.Constant(I32.llvm, indices))

    # From here on eight lanes belong to each: those that are left to compare, again and again.
    near = [*range(8), *range(16, 24)]
    a, c = pick(first, second, near), pick(first, second, [i + 8 for i in near])
    top, other = _larger(e, a, c), _smaller(e, a, c)
    for step in (4, 2, 1):
        turned = [i & 8 | (i + step) & 7 for i in range(LANES)]
        a, c = pick(top, none, turned), pick(other, none, turned)
        other = _larger(e, _smaller(e, top, a), _larger(e, other, c))
        top = _larger(e, top, a)
    return [[b.extract_element(x, INT32(i)) for i in (0, 8)] for x in (top, other)]


def _larger(e: Emitter, x: Any, y: Any) -> Any:
    return e.b.select(e.b.icmp_signed(">", x, y), x, y)


def _smaller(e: Emitter, x: Any, y: Any) -> Any:
    return e.b.select(e.b.icmp_signed("<", x, y), x, y)


def _scale(e: Emitter, other: Any, top: Any) -> Any:
    """A group's scale: 1 for zeros; not a number where some number is not finite, so that faults stay."""
    b = e.b
    scale, for_top = b.fdiv(other, FLOAT(MOST)), b.fdiv(top, FLOAT(OUTLIER_MOST))
    scale = b.select(b.fcmp_ordered(">", scale, for_top), scale, for_top)
    scale = b.select(b.fcmp_ordered(">=", scale, FLOAT(LEAST_SCALE)), scale, FLOAT(1.0))
    return b.fadd(scale, b.fmul(top, FLOAT(0.0)))


def _first_equal(e: Emitter, vector: Any, value: Any) -> Any:
    """The first lane that equals an int32; there is one."""
    found = e.b.zext(e.b.bitcast(e.b.icmp_signed("==", vector, e.splat(value)), INT16), INT32)
    return e.call("llvm.cttz.i32", INT32, found, ir.IntType(1)(1))


def _nearest(e: Emitter, x: Any) -> Any:
    """The nearest int32, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves it in the lowest bits."""
    magic = e.constant(FLOAT, 12582912.0)
    return e.b.sub(e.b.bitcast(e.b.fadd(x, magic), I32.llvm), e.constant(INT32, 0x4B400000))


def quantise_rows(args: int, part: int, parts: int) -> None:
    """Quantise rows of float32 in groups of 32.

    Args: x, its row stride, rows, groups, out, bytes from one group's rows to the next's; the weights' kind
    is where `linear` has it.
    """
    x, stride, rows, groups, out, group_bytes = words(args, 6)
    (kind,) = words(args + 96, 1)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        source, target = x + row * stride, out + row * ACTIVATION_BYTES
        for g in range(groups):
            at = source + g * 128
            _store_activation_group(target + g * group_bytes, load(at), load(at + 64), kind)


def group_bytes(rows: int) -> int:
    """Bytes from one group's rows to the next's; a cache line more, lest they all fall on the same cache
    sets.
    """
    return rows * ACTIVATION_BYTES + 64
