"""Vectors as numba values: what kernels are written with.

`F32` and `I32` are 16 lanes of float32 and int32; addresses are int64. A kernel is plain numba code over
these. What must be unrolled into registers is a function of its own over a tuple of vectors (`zeros(4)`),
written as a Python loop that emits code (`tile`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from .forms import FLOAT, INT8, INT16, INT32, INT64, LANES, Emitter, emitter, host_form


class Vector(types.Type):  # type: ignore[misc]  # numba is untyped
    """16 lanes of one LLVM type."""

    def __init__(self, name: str, lane: ir.Type) -> None:
        super().__init__(name=name)
        self.llvm = ir.VectorType(lane, LANES)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]  # numba is untyped
    """A vector is held in registers as it is."""

    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


F32 = Vector("F32x16", FLOAT)
I32 = Vector("I32x16", INT32)
ADDRESS = types.int64
Code = Callable[..., Any]


_EXP_COEFFICIENTS = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _named_after(emit: Code, define: Code) -> Code:
    """Give numba's definition the name, documentation and parameters of the function that emits."""
    functools.update_wrapper(define, emit)
    define.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba reads it off the function
    return define


def op(result: types.Type, *args: types.Type) -> Callable[[Code], Code]:
    """Make a numba function of a fixed signature from one that emits its code: `f(emitter, *values)`."""

    def decorate(emit: Code) -> Code:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            value = emit(emitter(context, builder), *values)
            return context.get_dummy_value() if value is None else value

        def define(typing_context: Any, *given: types.Type) -> Any:
            return result(*args), generate

        return intrinsic(_named_after(emit, define))

    return decorate


def tile(emit: Code) -> Code:
    """Make a numba function over a tuple of vectors from one that emits its code.

    `f(emitter, vectors, *values)` -> as many new vectors. The tuple may have any length, `values` are
    integers.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        vectors = cgutils.unpack_tuple(builder, values[0], signature.args[0].count)
        result = emit(emitter(context, builder), vectors, *values[1:])
        return context.make_tuple(builder, signature.return_type, result)

    def define(typing_context: Any, vectors: types.Type, *rest: types.Type) -> Any:
        return vectors(vectors, *(ADDRESS for _ in rest)), generate

    return intrinsic(_named_after(emit, define))


compiled: Callable[[Code], Code] = njit(error_model="numpy")
"""For functions that kernels call."""


def _zero_tuple(count: int) -> tuple[types.Type, Code]:
    result = types.UniTuple(F32, count)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return context.make_tuple(builder, result, [ir.Constant(F32.llvm, [0.0] * LANES)] * count)

    return result, generate


@intrinsic(prefer_literal=True)
def zeros(typing_context, count):  # type: ignore[no-untyped-def]  # numba reads the signature
    """A tuple of `count` zero vectors; `count` is a literal."""
    result, generate = _zero_tuple(count.literal_value)
    return result(count), generate


@intrinsic
def linear_tile(typing_context):  # type: ignore[no-untyped-def]  # numba reads the signature
    """Zero vectors for the tallest tile of a linear layer that fits the registers."""
    result, generate = _zero_tuple(host_form().linear_rows)
    return result(), generate


@intrinsic
def attention_tile(typing_context):  # type: ignore[no-untyped-def]  # numba reads the signature
    """Zero vectors for the tallest tile of attention that fits the registers."""
    result, generate = _zero_tuple(host_form().attention_rows)
    return result(), generate


@intrinsic(prefer_literal=True)
def words(typing_context, args, count):  # type: ignore[no-untyped-def]  # numba reads the signature
    """The first `count` (a literal) 64-bit integers at an address, as a tuple."""
    result = types.UniTuple(types.int64, count.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        e = emitter(context, builder)
        return context.make_tuple(
            builder, result, [e.load(values[0], INT64, 8 * i) for i in range(result.count)]
        )

    return result(types.int64, count), generate


@intrinsic(prefer_literal=True)
def stack(typing_context, num_bytes):  # type: ignore[no-untyped-def]  # numba reads the signature
    """The address of `num_bytes` (a literal) on this call's stack, aligned to a cache line."""
    size = num_bytes.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        with builder.goto_entry_block():
            area = builder.alloca(ir.ArrayType(ir.IntType(8), size))
            area.align = 64
        return builder.ptrtoint(area, INT64)

    return types.int64(num_bytes), generate


@op(F32, ADDRESS)
def load(e: Emitter, address: Any) -> Any:
    """16 float32."""
    return e.load(address, F32.llvm)


@op(types.none, ADDRESS, F32)
def store(e: Emitter, address: Any, value: Any) -> None:
    """Write 16 float32."""
    e.store(address, value)


@op(F32, ADDRESS)
def load_bf16(e: Emitter, address: Any) -> Any:
    """16 bfloat16."""
    return e.from_bf16(e.load(address, ir.VectorType(INT16, LANES)))


@op(F32, ADDRESS)
def load_f16(e: Emitter, address: Any) -> Any:
    """16 float16."""
    return e.from_f16(e.load(address, ir.VectorType(INT16, LANES)))


def codes(e: Emitter, address: Any, bits: int, half: int = 0) -> Any:
    """Emit 16 codes as float32: 16 bytes, or the low (0) or high (1) halves of 16 bytes."""
    value = e.b.zext(e.load(address, ir.VectorType(INT8, LANES)), I32.llvm)
    if bits == 4:
        four = e.constant(INT32, 4)
        value = e.b.lshr(value, four) if half else e.b.and_(value, e.constant(INT32, 15))
    return e.b.sitofp(value, F32.llvm)


@op(F32, ADDRESS)
def load_bytes(e: Emitter, address: Any) -> Any:
    """16 codes of 8 bits."""
    return codes(e, address, 8)


@op(F32, ADDRESS)
def load_low(e: Emitter, address: Any) -> Any:
    """The low halves of 16 bytes."""
    return codes(e, address, 4)


@op(F32, ADDRESS)
def load_high(e: Emitter, address: Any) -> Any:
    """The high halves of 16 bytes."""
    return codes(e, address, 4, half=1)


@op(types.none, ADDRESS, F32)
def store_bytes(e: Emitter, address: Any, value: Any) -> None:
    """Write 16 whole numbers from 0 to 255 as bytes."""
    e.store(address, e.b.trunc(e.b.fptosi(value, I32.llvm), ir.VectorType(INT8, LANES)))


@op(types.none, ADDRESS, F32, F32)
def store_halves(e: Emitter, address: Any, low: Any, high: Any) -> None:
    """Write 16 bytes from whole numbers from 0 to 15: their low halves and their high halves."""
    shifted = e.b.shl(e.b.fptosi(high, I32.llvm), e.constant(INT32, 4))
    both = e.b.or_(e.b.fptosi(low, I32.llvm), shifted)
    e.store(address, e.b.trunc(both, ir.VectorType(INT8, LANES)))


@op(F32, F32)
def nearest_even(e: Emitter, x: Any) -> Any:
    """The nearest integer, ties to even, for |x| < 2^22."""
    return e.nearest_even(x)


@op(F32, ADDRESS, types.int64)
def load_part(e: Emitter, address: Any, count: Any) -> Any:
    """The first `count` of 16 float32 and 0 in the other lanes; nothing beyond them is read."""
    zero = ir.Constant(F32.llvm, [0.0] * LANES)
    return e.call(
        "llvm.masked.load.v16f32.p0", F32.llvm, e.pointer(address), INT32(4), _first(e, count), zero
    )


@op(types.none, ADDRESS, F32, types.int64)
def store_part(e: Emitter, address: Any, value: Any, count: Any) -> None:
    """Write the first `count` lanes; nothing beyond them is touched."""
    store_masked(e, address, value, count)


def store_masked(e: Emitter, address: Any, value: Any, count: Any) -> None:
    """Emit a store of the first `count` lanes."""
    e.call(
        "llvm.masked.store.v16f32.p0", ir.VoidType(), value, e.pointer(address), INT32(4), _first(e, count)
    )


def _first(e: Emitter, count: Any) -> Any:
    """A mask of the lanes below `count`."""
    lane = ir.Constant(I32.llvm, list(range(LANES)))
    return e.b.icmp_signed("<", lane, e.splat(e.b.trunc(count, INT32)))


@op(F32, F32, types.int64, types.float32)
def keep_first(e: Emitter, value: Any, count: Any, other: Any) -> Any:
    """`value` in the lanes below `count`, `other` elsewhere."""
    return e.b.select(_first(e, count), value, e.splat(other))


@op(F32)
def zero(e: Emitter) -> Any:
    """0 in every lane."""
    return ir.Constant(F32.llvm, [0.0] * LANES)


@op(F32, types.float32)
def splat(e: Emitter, scalar: Any) -> Any:
    """One number in every lane."""
    return e.splat(scalar)


@op(F32, F32, F32)
def add(e: Emitter, x: Any, y: Any) -> Any:
    """`x + y`."""
    return e.b.fadd(x, y)


@op(F32, F32, F32)
def sub(e: Emitter, x: Any, y: Any) -> Any:
    """`x - y`."""
    return e.b.fsub(x, y)


@op(F32, F32, F32)
def mul(e: Emitter, x: Any, y: Any) -> Any:
    """`x * y`."""
    return e.b.fmul(x, y)


@op(F32, F32, F32)
def div(e: Emitter, x: Any, y: Any) -> Any:
    """`x / y`."""
    return e.b.fdiv(x, y)


@op(F32, F32, F32, F32)
def fma(e: Emitter, x: Any, y: Any, z: Any) -> Any:
    """`x * y + z`, rounded once where the processor can."""
    return e.fma(x, y, z)


@op(F32, F32, F32)
def maximum(e: Emitter, x: Any, y: Any) -> Any:
    """The larger of two; `y` where either is not a number."""
    return e.b.select(e.b.fcmp_ordered(">", x, y), x, y)


@op(F32, F32, F32)
def minimum(e: Emitter, x: Any, y: Any) -> Any:
    """The smaller of two; `y` where either is not a number."""
    return e.b.select(e.b.fcmp_ordered("<", x, y), x, y)


@op(F32, F32)
def absolute(e: Emitter, x: Any) -> Any:
    """`|x|`."""
    return e.call("llvm.fabs.v16f32", F32.llvm, x)


@op(types.float32, F32)
def first_lane(e: Emitter, x: Any) -> Any:
    """Lane 0."""
    return e.b.extract_element(x, INT32(0))


@op(types.float32, F32)
def sum_lanes(e: Emitter, x: Any) -> Any:
    """The sum of 16 lanes: halves are added until one is left."""
    return fold_lanes(e, x, e.b.fadd)


@op(types.float32, F32)
def min_lanes(e: Emitter, x: Any) -> Any:
    """The smallest lane."""
    return fold_lanes(e, x, lambda a, b: e.b.select(e.b.fcmp_ordered("<", a, b), a, b))


@op(types.float32, F32)
def max_lanes(e: Emitter, x: Any) -> Any:
    """The largest lane."""
    return fold_lanes(e, x, lambda a, b: e.b.select(e.b.fcmp_ordered(">", a, b), a, b))


def fold_lanes(e: Emitter, x: Any, combine: Code) -> Any:
    """Emit what 16 lanes are combined to: halves with each other until one lane is left."""
    count = LANES
    while count > 1:
        count //= 2
        x = combine(e.lanes(x, 0, count), e.lanes(x, count, count))
    return e.b.extract_element(x, INT32(0))


@op(F32, F32)
def exp(e: Emitter, x: Any) -> Any:
    """e^x within 2 units in the last place; 0 from -87.3 down, infinite from 88.7 up.

    x = n * ln 2 + r with |r| <= ln 2 / 2; e^r by Cephes' polynomial of degree 7; ln 2 in two parts keeps r
    exact.
    """
    b, c = e.b, lambda value: e.constant(FLOAT, value)
    low, high = c(-87.33654), c(88.72283)
    inside = b.select(b.fcmp_ordered("<", x, high), b.select(b.fcmp_ordered(">", x, low), x, low), high)
    n = e.nearest_even(b.fmul(inside, c(1.44269504088896341)))
    r = e.fma(n, c(2.12194440e-4), e.fma(n, c(-0.693359375), inside))
    p = c(1.9875691500e-4)
    for coefficient in _EXP_COEFFICIENTS:
        p = e.fma(p, r, c(coefficient))
    p = e.fma(b.fmul(r, r), p, b.fadd(r, c(1.0)))
    # 2^n in two factors: n = 128 alone would overflow the exponent field.
    power = b.fptosi(n, I32.llvm)
    half = b.ashr(power, e.constant(INT32, 1))
    for part in (half, b.sub(power, half)):
        p = b.fmul(p, b.bitcast(b.shl(b.add(part, e.constant(INT32, 127)), e.constant(INT32, 23)), F32.llvm))
    p = b.select(b.fcmp_ordered("<=", x, low), c(0.0), p)
    return b.select(
        b.fcmp_unordered("uno", x, x), x, b.select(b.fcmp_ordered(">=", x, high), c(float("inf")), p)
    )


@op(F32, F32)
def exp_falling(e: Emitter, x: Any) -> Any:
    """e^x for x <= 0, within 2 units in the last place; 0 below -86."""
    b, c = e.b, lambda value: e.constant(FLOAT, value)
    low = c(-86.0)
    inside = b.select(b.fcmp_ordered("<", x, low), low, x)
    # Adding 1.5 * 2^23 leaves the nearest integer in the low bits: they go to the exponent as they are.
    magic = c(12582912.0)
    shifted = e.fma(inside, c(1.44269504088896341), magic)
    n = b.fsub(shifted, magic)
    r = e.fma(n, c(2.12194440e-4), e.fma(n, c(-0.693359375), inside))
    p = c(1.9875691500e-4)
    for coefficient in (*_EXP_COEFFICIENTS, 1.0, 1.0):
        p = e.fma(p, r, c(coefficient))
    exponent = b.shl(b.bitcast(shifted, I32.llvm), e.constant(INT32, 23))
    power = b.bitcast(b.add(b.bitcast(p, I32.llvm), exponent), F32.llvm)
    return b.select(b.fcmp_ordered("<", x, low), c(0.0), power)


@op(F32, F32)
def log(e: Emitter, x: Any) -> Any:
    """The natural logarithm of positive normal numbers, within 2 units in the last place (Cephes'
    polynomial).
    """
    b, c, i = e.b, lambda value: e.constant(FLOAT, value), lambda value: e.constant(INT32, value)
    bits = b.bitcast(x, I32.llvm)
    # The mantissa in [sqrt(1/2), sqrt(2)): subtracting sqrt(1/2)'s bits carries into the exponent where due.
    shifted = b.sub(bits, i(0x3F3504F3))
    exponent = b.sitofp(b.ashr(shifted, i(23)), F32.llvm)
    mantissa = b.bitcast(b.add(b.and_(shifted, i(0x007FFFFF)), i(0x3F3504F3)), F32.llvm)
    m = b.fsub(mantissa, c(1.0))
    p = c(7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        p = e.fma(p, m, c(coefficient))
    square = b.fmul(m, m)
    tail = e.fma(exponent, c(-2.12194440e-4), b.fmul(b.fmul(square, m), p))
    tail = e.fma(square, c(-0.5), tail)
    return e.fma(exponent, c(0.693359375), b.fadd(m, tail))


@op(types.float32, ADDRESS)
def read(e: Emitter, address: Any) -> Any:
    """One float32."""
    return e.load(address, FLOAT)


@op(types.none, ADDRESS, types.float32)
def write(e: Emitter, address: Any, value: Any) -> None:
    """Write one float32."""
    e.store(address, value)


@op(types.float32, ADDRESS)
def read_f16(e: Emitter, address: Any) -> Any:
    """One float16."""
    return e.b.extract_element(e.from_f16(e.load(address, ir.VectorType(INT16, 1))), INT32(0))


@op(types.none, ADDRESS, types.float32)
def write_f16(e: Emitter, address: Any, value: Any) -> None:
    """Write one float32 as float16, rounded to the nearest."""
    e.store(address, e.to_f16(e.splat(value, 1)))


@op(types.float64, ADDRESS)
def read_f64(e: Emitter, address: Any) -> Any:
    """One float64."""
    return e.load(address, ir.DoubleType())


@op(types.none, ADDRESS, types.float64)
def write_f64(e: Emitter, address: Any, value: Any) -> None:
    """Write one float64."""
    e.store(address, value)


@op(types.int64, ADDRESS)
def read_i32(e: Emitter, address: Any) -> Any:
    """One int32, widened."""
    return e.b.sext(e.load(address, INT32), INT64)


@op(types.int64, ADDRESS)
def read_i64(e: Emitter, address: Any) -> Any:
    """One int64."""
    return e.load(address, INT64)


@op(types.none, ADDRESS, types.int64)
def write_i64(e: Emitter, address: Any, value: Any) -> None:
    """Write one int64."""
    e.store(address, value)


@op(types.none, ADDRESS, types.int64)
def write_i32(e: Emitter, address: Any, value: Any) -> None:
    """Write the low half of an integer."""
    e.store(address, e.b.trunc(value, INT32))


@op(types.none, ADDRESS)
def prefetch(e: Emitter, address: Any) -> None:
    """Ask for a cache line that is read soon."""
    e.call("llvm.prefetch.p0", ir.VoidType(), e.pointer(address), INT32(0), INT32(2), INT32(1))


@tile
def store_rows(e: Emitter, vectors: Any, out: Any, stride: Any) -> Any:
    """Write each vector to its row of 16 float32; rows are `stride` bytes apart."""
    for m, vector in enumerate(vectors):
        e.store(e.row(out, stride, m), vector)
    return vectors


@tile
def store_rows_part(e: Emitter, vectors: Any, out: Any, stride: Any, count: Any) -> Any:
    """As `store_rows`, the first `count` lanes only."""
    for m, vector in enumerate(vectors):
        store_masked(e, e.row(out, stride, m), vector, count)
    return vectors


@tile
def add_to_rows(e: Emitter, vectors: Any, address: Any) -> Any:
    """Add the 16 float32 at an address to each vector."""
    other = e.load(address, F32.llvm)
    return [e.b.fadd(vector, other) for vector in vectors]


@op(types.none, ADDRESS, ADDRESS)
def copy_u8(e: Emitter, source: Any, target: Any) -> None:
    """Copy 1 byte."""
    e.store(target, e.load(source, INT8))


@op(types.none, ADDRESS, ADDRESS)
def copy_u16(e: Emitter, source: Any, target: Any) -> None:
    """Copy 2 bytes."""
    e.store(target, e.load(source, INT16))


@op(types.none, ADDRESS, ADDRESS)
def copy_u32(e: Emitter, source: Any, target: Any) -> None:
    """Copy 4 bytes."""
    e.store(target, e.load(source, INT32))
