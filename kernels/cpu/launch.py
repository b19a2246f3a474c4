"""Compiling kernels, keeping the machine code, and running them over threads.

A kernel is a function `(args, part, parts)`: `args` is the address of up to 24 integers (addresses, sizes,
strides) and one float64 at the end; the function does its share, `part` of `parts`. It is compiled to a C
function, so that one loop serves all kernels: a `tape` lists which to run, one after another, on which
threads (`pool.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from msgspec import Struct
from numba import cfunc, njit, types
from numba.core.registry import cpu_target

from .forms import host_form
from .pool import Pool, attend_pool, call, share
from .vector import ADDRESS, compiled, read_f64, read_i64, stack, write_f64, write_i64

MAX_ARGS = 24

LAUNCH_WORDS = MAX_ARGS + 2
"""A launch written down: its integers, its float64, the address of its tape."""

_NO_ARGS = (0,) * MAX_ARGS

Kernel = Callable[[int, int, int], None]
Progress = Callable[[str, int, int], None]


class Stage(Struct, frozen=True):
    """One kernel of a tape: on all threads, or on the caller's alone when the work is too small to share.

    With several `pieces` for each thread, one that is late or slower takes fewer of them.
    """

    kernel: Kernel
    shared: bool = True
    pieces: int = 1


@compiled
def real(args: int) -> float:
    """A kernel's one float64 argument."""
    return read_f64(args + 8 * 24)


@compiled
def _run_tape(tape: int, job: int, parts: int, args: int) -> None:
    """Run a tape of (kernel, pieces for each thread or 0 for the caller alone) that a 0 ends."""
    while True:
        kernel = read_i64(tape)
        if kernel == 0:
            break
        pieces = read_i64(tape + 8)
        if parts > 1 and pieces != 0:
            share(job, kernel, args, parts * pieces)
        else:
            call(kernel, args, 0, 1)
        tape += 16


def _run(
    tape: int,
    job: int,
    parts: int,
    value: float,
    a0: int,
    a1: int,
    a2: int,
    a3: int,
    a4: int,
    a5: int,
    a6: int,
    a7: int,
    a8: int,
    a9: int,
    a10: int,
    a11: int,
    a12: int,
    a13: int,
    a14: int,
    a15: int,
    a16: int,
    a17: int,
    a18: int,
    a19: int,
    a20: int,
    a21: int,
    a22: int,
    a23: int,
) -> None:
    """Write the arguments down and run a tape."""
    args = stack(200)
    for i, word in enumerate(
        (
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            a8,
            a9,
            a10,
            a11,
            a12,
            a13,
            a14,
            a15,
            a16,
            a17,
            a18,
            a19,
            a20,
            a21,
            a22,
            a23,
        )
    ):
        write_i64(args + 8 * i, word)
    write_f64(args + 192, value)
    _run_tape(tape, job, parts, args)


def _replay(launches: int, end: int, job: int, parts: int) -> None:
    """Run launches from one address to another, each `LAUNCH_WORDS` words: arguments, value, tape."""
    for args in range(launches, end, 8 * LAUNCH_WORDS):
        _run_tape(read_i64(args + 200), job, parts, args)


class Launcher:
    """Compiled kernels and the threads they run on; for any Python thread, but one at a time."""

    def __init__(self, cache_dir: Path | None, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._pool: Pool | None = None
        self._cache_dir = None if cache_dir is None else cache_dir / cache_key()
        self._addresses: dict[Kernel, int] = {}
        self._compiled: list[Any] = []
        self._run: Any = None
        self._replay: Any = None

    def compile(self, kernels: Iterable[Kernel], progress: Progress | None = None) -> None:
        """Compile or load kernels; `progress(name, done, total)` is called before each and at the end."""
        todo = [k for k in dict.fromkeys(kernels) if k not in self._addresses]
        total = len(todo) + 1
        report = progress or (lambda name, done, total: None)
        # numba reads the folder when a function is set up for caching, and only there.
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(self._cache_dir or "")
        try:
            report("run", 0, total)
            self._run = self._run or self._compile_run()
            self._replay = self._replay or self._jit(types.none(*[types.int64] * 4))(_replay)
            self._pool = self._pool or Pool(self.num_threads, self._compile_worker())
            for done, kernel in enumerate(todo, start=1):
                report(kernel.__name__, done, total)
                self._addresses[kernel] = self._compile(kernel)
        finally:
            numba.config.CACHE_DIR = before
        report("", total, total)

    def tape(self, stages: Sequence[Stage]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The stages as `run` reads them; keep the array as long as its address is used."""
        words = [word for s in stages for word in (self._addresses[s.kernel], s.pieces if s.shared else 0)]
        return np.array([*words, 0], dtype=np.int64)

    def run(self, tape: int, *args: int, value: float = 0.0) -> None:
        """Run the tape at an address; every stage sees the same arguments, 0 for those not given."""
        assert self._pool is not None, "kernels are compiled before they are run"
        self._pool.wake()
        self._run(tape, self._pool.job, self.num_threads, value, *args, *_NO_ARGS[len(args) :])

    def replay(self, launches: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Run launches `[count, LAUNCH_WORDS]` one after another, in one call."""
        assert self._pool is not None, "kernels are compiled before they are run"
        self._pool.wake()
        begin = launches.ctypes.data
        self._replay(begin, begin + launches.nbytes, self._pool.job, self.num_threads)

    def _compile_run(self) -> Any:
        signature = types.none(*[types.int64] * 3, types.float64, *[types.int64] * MAX_ARGS)
        return self._jit(signature)(_run)

    def _compile_worker(self) -> Any:
        return self._jit(types.none(types.int64, types.int64))(attend_pool)

    def _jit(self, signature: Any) -> Any:
        return njit(signature, nogil=True, error_model="numpy", cache=self._cache_dir is not None)

    def _compile(self, kernel: Kernel) -> int:
        signature = types.void(ADDRESS, types.int64, types.int64)
        compiled = cfunc(signature, error_model="numpy", cache=self._cache_dir is not None)(kernel)
        # numba keeps its bitcode, 0.7 MB of each kernel, for other kernels to inline; these are called.
        compiled._library._shared_module = None
        self._compiled.append(compiled)
        return int(compiled.address)


def cache_key() -> str:
    """A folder name that changes whenever the machine code might: sources, compiler, processor, form."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(repr((numba.__version__, llvmlite.__version__)).encode())
    digest.update(repr(cpu_target.target_context.codegen().magic_tuple()).encode())
    return f"{host_form().name}-{digest.hexdigest()[:16]}"
