"""Products of 16-bit pairs: the one thing that each form does in its own instructions.

Everything is exact in integers, so all forms give the same sum in any order. Codes lie within [-128, 127],
activations within [-32767, 32767]: a group of 32 adds up to less than 32 * 128 * 32767 < 2^27, and nibbles
with their offset to 32 * (15 + 8) * 32767 at most, so int32 cannot overflow. (Two int8 per activation with
`vpdpbusd` need as many instructions, and leave two sums to convert and scale.)
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .forms import INT16, INT32, Emitter


def add_pairs(e: Emitter, total: Any, codes: Any, x: Any) -> Any:
    """Add two products to each int32 of `total`; `codes` holds two int16 for each, int32 `x` two for all."""
    width = total.type.count
    pair = e.b.bitcast(e.splat(x, width), ir.VectorType(INT16, 2 * width))
    match e.form.name:
        case "avx512-vnni":
            return e.call("llvm.x86.avx512.vpdpwssd.512", total.type, total, codes, pair)
        case "avx2":
            return e.b.add(total, e.call("llvm.x86.avx2.pmadd.wd", total.type, codes, pair))
        case _:
            even, odd = (e.b.mul(_every_second(e, codes, i), _every_second(e, pair, i)) for i in (0, 1))
            return e.b.add(total, e.b.add(even, odd))


def _every_second(e: Emitter, pairs: Any, first: int) -> Any:
    """The first or the second int16 of each pair, as int32."""
    width = pairs.type.count // 2
    index = ir.Constant(ir.VectorType(INT32, width), [2 * i + first for i in range(width)])
    lanes = e.b.shuffle_vector(pairs, ir.Constant(pairs.type, ir.Undefined), index)
    return e.b.sext(lanes, ir.VectorType(INT32, width))
