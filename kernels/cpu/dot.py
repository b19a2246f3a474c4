"""The 8-bit dot product of a group: the one thing that each form does in its own instructions.

Codes are nibbles (0 to 15) or bytes (-128 to 127), activations int8 within [-127, 127]; 4 products per output
and step, 8 steps a group. Everything is exact in integers, so all forms give the same sum in any order.
`offset` is what makes up for codes that were moved: int32 -8 * sum(activations) for Q4_0, whose codes are 8
too large; -128 * sum(activations) for bytes, where a form may make them unsigned.
"""

from __future__ import annotations

from typing import Any, Protocol

from llvmlite import ir

from .forms import INT8, INT16, INT32, Emitter


class Dot(Protocol):
    """How a form adds up a group; vectors are `width` outputs wide."""

    def begin(self, width: int, offset: Any | None) -> Any:
        """The empty sum."""

    def codes(self, raw: Any) -> Any:
        """What `step` needs of `4 * width` code bytes; worked out once for all rows."""

    def step(self, total: Any, codes: Any, x: Any) -> Any:
        """Add 4 products per output; `x` is an int32 of 4 activations."""

    def finish(self, total: Any, offset: Any | None) -> Any:
        """The sum, int32."""


def make_dot(e: Emitter, *, nibbles: bool) -> Dot:
    """The dot product of a form for one kind of codes."""
    match e.form.name:
        case "avx512-vnni":
            return VnniDot(e, nibbles)
        case "avx2":
            return Avx2NibbleDot(e) if nibbles else Avx2ByteDot(e)
        case _:
            return PortableDot(e, nibbles)


def _bytes(e: Emitter, vector: Any) -> Any:
    return e.b.bitcast(vector, ir.VectorType(INT8, vector.type.count * vector.type.element.width // 8))


class VnniDot:
    """AVX-512 VNNI: `vpdpbusd` takes one side unsigned, so byte codes get 128 added and -128 * sum(x) given
    back.
    """

    def __init__(self, e: Emitter, nibbles: bool) -> None:
        self.e, self.nibbles = e, nibbles

    def begin(self, width: int, offset: Any | None) -> Any:
        return self.e.constant(INT32, 0, width) if offset is None else offset

    def codes(self, raw: Any) -> Any:
        return raw if self.nibbles else self.e.b.xor(raw, self.e.constant(INT8, -128, raw.type.count))

    def step(self, total: Any, codes: Any, x: Any) -> Any:
        activations = _bytes(self.e, self.e.splat(x, total.type.count))
        return self.e.call("llvm.x86.avx512.vpdpbusd.512", total.type, total, codes, activations)

    def finish(self, total: Any, offset: Any | None) -> Any:
        return total


class Avx2NibbleDot:
    """AVX2, codes 0 to 15: pairs add up in int16 over the whole group (at most 16 * 15 * 127 = 30480), then
    widen.
    """

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def begin(self, width: int, offset: Any | None) -> Any:
        return None

    def codes(self, raw: Any) -> Any:
        return raw

    def step(self, total: Any, codes: Any, x: Any) -> Any:
        width = codes.type.count // 4
        activations = _bytes(self.e, self.e.splat(x, width))
        pairs = self.e.call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(INT16, 2 * width), codes, activations)
        return pairs if total is None else self.e.b.add(total, pairs)

    def finish(self, total: Any, offset: Any | None) -> Any:
        ones = self.e.constant(INT16, 1, total.type.count)
        wide = self.e.call("llvm.x86.avx2.pmadd.wd", ir.VectorType(INT32, total.type.count // 2), total, ones)
        return wide if offset is None else self.e.b.add(wide, offset)


class Avx2ByteDot:
    """AVX2, codes -128 to 127: |code| times the activation with the code's sign; pairs fit int16 only one
    step long.
    """

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def begin(self, width: int, offset: Any | None) -> Any:
        return self.e.constant(INT32, 0, width)

    def codes(self, raw: Any) -> Any:
        zero = self.e.constant(INT8, 0, raw.type.count)
        negative = self.e.b.icmp_signed("<", raw, zero)
        return raw, self.e.b.select(negative, self.e.b.sub(zero, raw), raw)

    def step(self, total: Any, codes: Any, x: Any) -> Any:
        signed, magnitude = codes
        width = total.type.count
        activations = _bytes(self.e, self.e.splat(x, width))
        turned = self.e.call("llvm.x86.avx2.psign.b", signed.type, activations, signed)
        pairs = self.e.call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(INT16, 2 * width), magnitude, turned)
        ones = self.e.constant(INT16, 1, 2 * width)
        return self.e.b.add(total, self.e.call("llvm.x86.avx2.pmadd.wd", total.type, pairs, ones))

    def finish(self, total: Any, offset: Any | None) -> Any:
        return total


class PortableDot:
    """Plain vector arithmetic in int16: even and odd bytes are multiplied apart; two products fit, the sum is
    widened.
    """

    def __init__(self, e: Emitter, nibbles: bool) -> None:
        self.e, self.nibbles = e, nibbles

    def begin(self, width: int, offset: Any | None) -> Any:
        return offset if self.nibbles and offset is not None else self.e.constant(INT32, 0, width)

    def codes(self, raw: Any) -> Any:
        return self._split(self.e.b.bitcast(raw, ir.VectorType(INT16, raw.type.count // 2)))

    def step(self, total: Any, codes: Any, x: Any) -> Any:
        width, b = total.type.count, self.e.b
        activations = self._split(b.bitcast(self.e.splat(x, width), ir.VectorType(INT16, 2 * width)))
        pairs = b.add(b.mul(codes[0], activations[0]), b.mul(codes[1], activations[1]))
        wide, half = b.bitcast(pairs, total.type), self.e.constant(INT32, 16, width)
        return b.add(total, b.add(b.ashr(b.shl(wide, half), half), b.ashr(wide, half)))

    def finish(self, total: Any, offset: Any | None) -> Any:
        return total

    def _split(self, pairs: Any) -> tuple[Any, Any]:
        """Even and odd bytes of int16 lanes, sign-extended."""
        eight = self.e.constant(INT16, 8, pairs.type.count)
        return self.e.b.ashr(self.e.b.shl(pairs, eight), eight), self.e.b.ashr(pairs, eight)
