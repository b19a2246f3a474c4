"""What a processor offers the kernels: one kernel text, and a `Form` that says how its vectors become
instructions.

A kernel sees vectors of 16 lanes whatever the processor. LLVM cuts them to native width; a form adds what
LLVM cannot find by itself: the dot product of 16-bit pairs, and how many rows fit the registers. Every form
computes the same bits where the processor has a fused multiply-add, because integer sums are exact and each
output is one chain of float operations in a fixed order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from msgspec import Struct
from numba.core.registry import cpu_target

LANES = 16
"""Lanes of every vector: one block's tokens, one panel's outputs."""


class Form(Struct, frozen=True):
    """`pieces` native vectors make one of 16 lanes; `linear_rows` and
    `attention_rows` rows of a register tile fit the registers."""

    name: str
    pieces: int
    linear_rows: int
    attention_rows: int
    has_fma: bool
    has_f16: bool


def host_form() -> Form:
    """The form for the processor that numba compiles for (`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` change
    it).
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return form_of(str(triple), frozenset(f[1:] for f in features.split(",") if f.startswith("+")))


def form_of(triple: str, features: frozenset[str]) -> Form:
    """The widest form that these features allow."""
    if features >= {"avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c"}:
        return Form("avx512-vnni", pieces=1, linear_rows=8, attention_rows=8, has_fma=True, has_f16=True)
    if features >= {"avx2", "fma", "f16c"}:
        return Form("avx2", pieces=2, linear_rows=4, attention_rows=6, has_fma=True, has_f16=True)
    # AArch64 always fuses; what else it offers is left to LLVM.
    is_arm = triple.startswith(("aarch64", "arm64"))
    return Form(
        "portable",
        pieces=4,
        linear_rows=2,
        attention_rows=2,
        has_fma=is_arm or "fma" in features,
        has_f16=is_arm,
    )


class Emitter:
    """An LLVM builder that knows the form; vectors are `n` lanes of 32 bits unless said otherwise."""

    def __init__(self, builder: ir.IRBuilder, form: Form) -> None:
        self.b = builder
        self.form = form

    def call(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        """Call an LLVM intrinsic or runtime function by name."""
        signature = ir.FunctionType(result, [a.type for a in args])
        function = self.b.module.globals.get(name) or ir.Function(self.b.module, signature, name)
        return self.b.call(function, args)

    def pointer(self, address: ir.Value) -> ir.Value:
        """An address held in int64 as a pointer."""
        return self.b.inttoptr(address, ir.PointerType())

    def load(self, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
        """A value of type `kind` at `address + offset` bytes, of any alignment."""
        return self.b.load(self.pointer(self.at(address, offset)), align=1, typ=kind)

    def store(self, address: ir.Value, value: ir.Value, offset: int = 0) -> None:
        """Write `value` at `address + offset` bytes, of any alignment."""
        self.b.store(value, self.pointer(self.at(address, offset)), align=1)

    def at(self, address: ir.Value, offset: int) -> ir.Value:
        """`address + offset`."""
        return self.b.add(address, INT64(offset)) if offset else address

    def row(self, address: ir.Value, stride: ir.Value, index: int) -> ir.Value:
        """`address + index * stride`."""
        return self.b.add(address, self.b.mul(stride, INT64(index))) if index else address

    def splat(self, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
        """A vector with `scalar` in every lane."""
        kind = ir.VectorType(scalar.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, INT32(0))
        return self.b.shuffle_vector(
            one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
        )

    def constant(self, kind: ir.Type, value: float, lanes: int = LANES) -> ir.Value:
        """A constant in every lane."""
        return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)

    def lanes(self, vector: ir.Value, first: int, count: int) -> ir.Value:
        """Lanes `first` to `first + count` of a vector."""
        if count == vector.type.count:
            return vector
        index = ir.Constant(ir.VectorType(INT32, count), list(range(first, first + count)))
        return self.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), index)

    def concat(self, vectors: list[ir.Value]) -> ir.Value:
        """Join 1, 2 or 4 vectors of equal width."""
        while len(vectors) > 1:
            lanes = 2 * vectors[0].type.count
            index = ir.Constant(ir.VectorType(INT32, lanes), list(range(lanes)))
            vectors = [
                self.b.shuffle_vector(a, b, index) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    def rotate(self, lanes: ir.Value, bits: ir.Value) -> ir.Value:
        """int32 lanes turned right by as many bits."""
        count = lanes.type.count
        return self.call(f"llvm.fshr.v{count}i32", lanes.type, lanes, lanes, self.splat(bits, count))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """`x * y + z`, rounded once where the processor can; a call per lane would be the alternative."""
        if not self.form.has_fma:
            return self.b.fadd(self.b.fmul(x, y), z)
        return self.call(f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)

    def from_f16(self, half: ir.Value) -> ir.Value:
        """int16 lanes that hold float16 -> float32 lanes, exact."""
        lanes = half.type.count
        wide = ir.VectorType(FLOAT, lanes)
        if self.form.has_f16:
            return self.b.fpext(self.b.bitcast(half, ir.VectorType(ir.HalfType(), lanes)), wide)
        # Shift exponent and mantissa to their place and rescale: 2^112 is the difference of the biases.
        integer = self.b.zext(half, ir.VectorType(INT32, lanes))
        magnitude = self.b.and_(integer, self.constant(INT32, 0x7FFF, lanes))
        shifted = self.b.shl(magnitude, self.constant(INT32, 13, lanes))
        scaled = self.b.fmul(self.b.bitcast(shifted, wide), self.constant(FLOAT, 2.0**112, lanes))
        special = self.b.icmp_unsigned(">=", magnitude, self.constant(INT32, 0x7C00, lanes))
        infinite = self.b.or_(shifted, self.constant(INT32, 0x7F800000, lanes))
        bits = self.b.select(special, infinite, self.b.bitcast(scaled, ir.VectorType(INT32, lanes)))
        sign = self.b.shl(
            self.b.and_(integer, self.constant(INT32, 0x8000, lanes)), self.constant(INT32, 16, lanes)
        )
        return self.b.bitcast(self.b.or_(bits, sign), wide)

    def to_f16(self, x: ir.Value) -> ir.Value:
        """float32 lanes -> int16 lanes that hold the nearest float16, ties to even."""
        lanes = x.type.count
        if self.form.has_f16:
            half_type = ir.VectorType(ir.HalfType(), lanes)
            return self.b.bitcast(self.b.fptrunc(x, half_type), ir.VectorType(INT16, lanes))

        def c(value: int) -> ir.Value:
            return self.constant(INT32, value, lanes)

        integers = ir.VectorType(INT32, lanes)
        bits = self.b.bitcast(x, integers)
        magnitude = self.b.and_(bits, c(0x7FFFFFFF))
        # Rebias and drop 13 bits of mantissa; what is added before carries where the rest rounds up.
        odd = self.b.and_(self.b.lshr(magnitude, c(13)), c(1))
        biased = self.b.sub(self.b.add(magnitude, self.b.add(odd, c(0xFFF))), c(112 << 23))
        normal = self.b.lshr(biased, c(13))
        # Below the normal range: adding 1/2 aligns the mantissa to steps of 2^-24, rounded by the addition.
        aligned = self.b.fadd(self.b.bitcast(magnitude, x.type), self.constant(FLOAT, 0.5, lanes))
        subnormal = self.b.sub(self.b.bitcast(aligned, integers), c(126 << 23))
        half = self.b.select(
            self.b.icmp_unsigned("<", magnitude, c(113 << 23)),
            subnormal,
            self.b.select(self.b.icmp_unsigned("<", magnitude, c(143 << 23)), normal, c(0x7C00)),
        )
        is_nan = self.b.icmp_unsigned(">", magnitude, c(0x7F800000))
        half = self.b.select(is_nan, c(0x7E00), half)
        sign = self.b.lshr(self.b.and_(bits, c(0x80000000 - (1 << 32))), c(16))
        return self.b.trunc(self.b.or_(half, sign), ir.VectorType(INT16, lanes))

    def to_bf16(self, x: ir.Value) -> ir.Value:
        """float32 lanes -> int16 lanes that hold the nearest bfloat16, ties to even."""
        lanes = x.type.count
        bits = self.b.bitcast(x, ir.VectorType(INT32, lanes))
        sixteen = self.constant(INT32, 16, lanes)
        odd = self.b.and_(self.b.lshr(bits, sixteen), self.constant(INT32, 1, lanes))
        # What is added carries into the kept half where the dropped one rounds up.
        rounded = self.b.lshr(self.b.add(bits, self.b.add(odd, self.constant(INT32, 0x7FFF, lanes))), sixteen)
        is_nan = self.b.fcmp_unordered("uno", x, x)
        kept = self.b.select(is_nan, self.constant(INT32, 0x7FC0, lanes), rounded)
        return self.b.trunc(kept, ir.VectorType(INT16, lanes))

    def from_bf16(self, half: ir.Value) -> ir.Value:
        """int16 lanes that hold bfloat16 -> float32 lanes, exact."""
        lanes = half.type.count
        integer = self.b.zext(half, ir.VectorType(INT32, lanes))
        return self.b.bitcast(
            self.b.shl(integer, self.constant(INT32, 16, lanes)), ir.VectorType(FLOAT, lanes)
        )

    def nearest_even(self, x: ir.Value) -> ir.Value:
        """Round to the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no fraction
        bits.
        """
        magic = self.constant(FLOAT, 12582912.0, x.type.count)
        return self.b.fsub(self.b.fadd(x, magic), magic)


INT8, INT16, INT32, INT64 = (ir.IntType(n) for n in (8, 16, 32, 64))
FLOAT = ir.FloatType()


def emitter(context: Any, builder: ir.IRBuilder) -> Emitter:
    """An emitter for the code that numba is building."""
    triple, _, features = context.codegen().magic_tuple()
    return Emitter(
        builder, form_of(str(triple), frozenset(f[1:] for f in features.split(",") if f.startswith("+")))
    )
