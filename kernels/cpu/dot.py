"""Products of four bytes at a time: the one thing that each form does in its own instructions.

Everything is exact in integers, so all forms give the same sum in any order. Codes lie within [-128, 127],
activations within [-127, 127], but for two in a group within [-32767, 32767]: a group of 32 adds up to less
than 2^24, which float32 holds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .forms import INT8, INT16, INT32, Emitter, Form


def byte_excess(form: Form) -> int:
    """How much too large `ByteDot.codes` makes signed codes, where only unsigned bytes can be multiplied."""
    return 128 if form.name == "avx512-vnni" else 0


class ByteDot:
    """Sums of products for `width` outputs, of int8 codes (`signed`) or of nibbles in uint8."""

    def __init__(self, e: Emitter, width: int, *, signed: bool) -> None:
        self._e, self._width, self._signed = e, width, signed
        self._in_pairs = e.form.name == "avx2" and not signed
        """Sums of nibbles' products stay in int16 for a group: 8 x 2 x 15 x 127 < 2^15."""

    def zero(self) -> Any:
        """No products yet."""
        if self._in_pairs:
            return self._e.constant(INT16, 0, 2 * self._width)
        return self._e.constant(INT32, 0, self._width)

    def codes(self, stored: Any) -> Any:
        """Bytes as `add` takes them, worked out once for all rows."""
        if self._signed and byte_excess(self._e.form):
            return self._e.b.xor(stored, self._e.constant(INT8, -128, 4 * self._width))
        return stored

    def add(self, total: Any, codes: Any, x: Any) -> Any:
        """Four products more for each output; int32 `x` holds four activations for all of them."""
        e, quad = self._e, self._e.b.bitcast(self._e.splat(x, self._width), codes.type)
        match e.form.name:
            case "avx512-vnni":
                return e.call("llvm.x86.avx512.vpdpbusd.512", total.type, total, codes, quad)
            case "avx2" if self._in_pairs:
                return e.b.add(total, self._bytes_to_pairs(codes, quad))
            case "avx2":
                # The product that takes unsigned bytes gets the codes' size, and x with their sign.
                size = e.call(
                    f"llvm.abs.v{4 * self._width}i8", codes.type, codes, ir.Constant(ir.IntType(1), 0)
                )
                turned = e.call("llvm.x86.avx2.psign.b", codes.type, quad, codes)
                return e.b.add(total, self._pairs_to_sums(self._bytes_to_pairs(size, turned)))
            case _:
                pairs = zip(
                    _halves(e, codes, signed=self._signed), _halves(e, quad, signed=True), strict=True
                )
                for own, others in pairs:
                    total = e.b.add(total, _add_up_pairs(e, own, others))
                return total

    def total(self, sums: Any) -> Any:
        """The sums as int32."""
        return self._pairs_to_sums(sums) if self._in_pairs else sums

    def widened(self, codes: Any) -> Any:
        """`codes` in the lower halves of int16, as int16."""
        if not self._signed or byte_excess(self._e.form):
            return codes
        eight = self._e.constant(INT16, 8, codes.type.count)
        return self._e.b.ashr(self._e.b.shl(codes, eight), eight)

    def add_pair(self, total: Any, codes: Any, x: Any) -> Any:
        """Two products more for each int32 of `total`: of the int16 in `codes` with the two in int32 `x`."""
        e = self._e
        pair = e.b.bitcast(e.splat(x, self._width), codes.type)
        match e.form.name:
            case "avx512-vnni":
                return e.call("llvm.x86.avx512.vpdpwssd.512", total.type, total, codes, pair)
            case "avx2":
                return e.b.add(total, e.call("llvm.x86.avx2.pmadd.wd", total.type, codes, pair))
            case _:
                return e.b.add(total, _add_up_pairs(e, codes, pair))

    def _bytes_to_pairs(self, codes: Any, quad: Any) -> Any:
        pairs = ir.VectorType(INT16, 2 * self._width)
        return self._e.call("llvm.x86.avx2.pmadd.ub.sw", pairs, codes, quad)

    def _pairs_to_sums(self, pairs: Any) -> Any:
        ones = self._e.constant(INT16, 1, 2 * self._width)
        return self._e.call("llvm.x86.avx2.pmadd.wd", ir.VectorType(INT32, self._width), pairs, ones)


def _halves(e: Emitter, quads: Any, *, signed: bool) -> tuple[Any, Any]:
    """Bytes 0 and 2, then bytes 1 and 3 of each four, as int16."""
    count = quads.type.count // 2
    words, eight = e.b.bitcast(quads, ir.VectorType(INT16, count)), e.constant(INT16, 8, count)
    widen = e.b.ashr if signed else e.b.lshr
    return widen(e.b.shl(words, eight), eight), widen(words, eight)


def _add_up_pairs(e: Emitter, codes: Any, x: Any) -> Any:
    """The sum of two products of int16 for each int32."""
    even, odd = (e.b.mul(_every_second(e, codes, i), _every_second(e, x, i)) for i in (0, 1))
    return e.b.add(even, odd)


def _every_second(e: Emitter, pairs: Any, first: int) -> Any:
    """The first or the second int16 of each pair, as int32."""
    width = pairs.type.count // 2
    index = ir.Constant(ir.VectorType(INT32, width), [2 * i + first for i in range(width)])
    lanes = e.b.shuffle_vector(pairs, ir.Constant(pairs.type, ir.Undefined), index)
    return e.b.sext(lanes, ir.VectorType(INT32, width))
