"""Compiling kernels ahead of time, for processors that need not be there, and reading what they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from msgspec import Struct
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTER_ALIGNMENT = 16
"""What torch's allocator gives at least, and what the launcher therefore finds in pointers (in bytes)."""


Kind = str | tuple[str, ...]


class AotCase(Struct, frozen=True, kw_only=True):
    """A kernel at a serving shape.

    `signature` has the type of each argument that is no constant, in Triton's words ("*bf16", "i32"), or a
    tuple's types; pointers are taken as aligned, and ":16" after an integer's type says that 16 divides it.
    `constexprs` has the constants. `decode`: whether it runs in a decoding step, where nothing may spill to
    memory. `options`: what else it is launched with, by a target's backend or, beyond that, its name.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Kind]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    decode: bool
    options: dict[str, dict[str, int]] = {}


class Target(Struct, frozen=True, kw_only=True):
    """A processor to compile for. `max_shared_bytes`: what one program may have."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    max_shared_bytes: int


TARGETS = (
    # CUDA C++ Programming Guide, "Compute Capabilities": 163, 227 and 227 KiB; CDNA 3 ISA: 64 KiB.
    Target(name="sm_80", backend="cuda", arch=80, warp_size=32, max_shared_bytes=163 << 10),
    Target(name="sm_90", backend="cuda", arch=90, warp_size=32, max_shared_bytes=227 << 10),
    Target(name="sm_100", backend="cuda", arch=100, warp_size=32, max_shared_bytes=227 << 10),
    Target(name="gfx942", backend="hip", arch="gfx942", warp_size=64, max_shared_bytes=64 << 10),
)


class Usage(Struct, frozen=True, kw_only=True):
    """What a thread of a compiled kernel takes: registers, and bytes of stack and local memory (on AMD: of
    private memory, which holds both); and a program's bytes of shared memory.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def compile_case(case: AotCase, target: Target) -> Usage:
    """Compile a case for a target. Raises what Triton raises where it cannot."""
    signature = {name: _plain(kind) for name, kind in case.signature.items()}
    signature |= dict.fromkeys(case.constexprs, "constexpr")
    names = case.kernel.arg_names
    assert set(names) == set(signature), f"{case.name}: arguments {set(names) ^ set(signature)}"
    source = ASTSource(
        fn=case.kernel,
        signature={name: signature[name] for name in names},
        constexprs=case.constexprs,
        attrs={
            path: [["tt.divisibility", POINTER_ALIGNMENT]]
            for name, kind in case.signature.items()
            for path in _aligned(names.index(name), kind)
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages}
        | case.options.get(target.backend, {})
        | case.options.get(target.name, {}),
    )
    if target.backend == "hip":
        return _amd_usage(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _nvidia_usage(compiled.asm["cubin"], compiled.metadata.shared)


def _plain(kind: Kind) -> Kind:
    return tuple(k.removesuffix(":16") for k in kind) if isinstance(kind, tuple) else kind.removesuffix(":16")


def _aligned(index: int, kind: Kind) -> list[tuple[int, ...]]:
    """Where an argument has what 16 divides: its index, and in a tuple the place."""
    kinds = {(index, i): k for i, k in enumerate(kind)} if isinstance(kind, tuple) else {(index,): kind}
    return [path for path, k in kinds.items() if k.startswith("*") or k.endswith(":16")]


def _nvidia_usage(cubin: bytes, shared_bytes: int) -> Usage:
    """As `cuobjdump -res-usage` reports it; shared memory is asked for at launch, so not in the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout))
    return Usage(
        registers=int(found["REG"]),
        stack_bytes=int(found["STACK"]),
        local_bytes=int(found["LOCAL"]),
        shared_bytes=shared_bytes,
    )


def _amd_usage(assembly: str, shared_bytes: int) -> Usage:
    """As the assembly's metadata has it."""
    found = dict(
        re.findall(r"^\s*\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", assembly, re.MULTILINE)
    )
    return Usage(
        registers=int(found["vgpr_count"]),
        stack_bytes=int(found["private_segment_fixed_size"]),
        local_bytes=0,
        shared_bytes=shared_bytes,
    )
