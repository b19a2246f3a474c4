"""The threads that share a kernel's work with its caller.

A caller publishes a kernel and takes parts of it, one after another, until none is left; a worker that is
awake takes parts too. So nothing waits for a worker that the system has not scheduled: on cores that other
programs use as well, the caller does all of it alone. (OpenMP's static loop does wait: beside one other busy
process, steps of 13 ms took 50 to 1,000 ms, see docs/measurements.md.)

A worker that finds nothing spins, for it will be needed again within microseconds; after `IDLE_SPINS` it
parks until the next kernel.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .forms import INT64, Emitter
from .vector import ADDRESS, compiled, op, read_i64, write_i64

BUSY_SPINS = 500
"""Looks before each further one offers the core to others: some 20 us, more than between two kernels."""

IDLE_SPINS = 10_000
"""Looks without work before a worker parks: some ms, more than passes between two steps of an engine."""

KERNEL, ARGS, PARTS, LEFT, UNDONE, CLOSED = 0, 8, 16, 64, 128, 192
"""Offsets into a pool's shared words; those that threads write are on cache lines of their own."""

JOB_BYTES = 256


@op(types.none, types.int64, ADDRESS, types.int64, types.int64)
def call(e: Emitter, function: Any, args: Any, part: Any, parts: Any) -> None:
    """Call a kernel by its address."""
    signature = ir.FunctionType(ir.VoidType(), [INT64] * 3)
    e.b.call(e.b.inttoptr(function, signature.as_pointer()), [args, part, parts])


def _word(e: Emitter, address: Any) -> Any:
    return e.b.inttoptr(address, INT64.as_pointer())


@op(types.int64, ADDRESS)
def _look(e: Emitter, address: Any) -> Any:
    """Read a word that another thread writes, and all that it wrote before."""
    return e.b.load_atomic(_word(e, address), "acquire", 8)


@op(types.none, ADDRESS, types.int64)
def _publish(e: Emitter, address: Any, value: Any) -> None:
    """Write a word, after all that was written before."""
    e.b.store_atomic(value, _word(e, address), "release", 8)


@op(types.int64, ADDRESS)
def _take(e: Emitter, address: Any) -> Any:
    """Take 1 from a word; its value before."""
    return e.b.atomic_rmw("sub", _word(e, address), INT64(1), "acq_rel")


@op(types.none)
def _relax(e: Emitter) -> None:
    """Tell the processor that this is a spin loop, where it has a word for that."""
    if e.form.name != "portable":
        e.call("llvm.x86.sse2.pause", ir.VoidType())


_yield = types.ExternalFunction("sched_yield", types.int32())
"""POSIX: let another thread have this core."""


@compiled
def _pass_time(spins: int) -> None:
    """Between two looks: the one looked out for may be waiting for this very core."""
    if spins < BUSY_SPINS:
        _relax()
    else:
        _yield()


@compiled
def _work(job: int) -> None:
    """Take parts of the published kernel, the last first, until none is left.

    The number that is left says whether one was taken, whenever: what else is published may change meanwhile.
    """
    while True:
        left = _take(job + LEFT)
        if left <= 0:
            return
        # What is published can change only when all parts are done, this one included.
        call(read_i64(job + KERNEL), read_i64(job + ARGS), left - 1, read_i64(job + PARTS))
        _take(job + UNDONE)


@compiled
def share(job: int, kernel: int, args: int, parts: int) -> None:
    """Run a kernel's parts, together with whoever is awake."""
    write_i64(job + KERNEL, kernel)
    write_i64(job + ARGS, args)
    write_i64(job + PARTS, parts)
    write_i64(job + UNDONE, parts)
    _publish(job + LEFT, parts)
    _work(job)
    spins = 0
    while _look(job + UNDONE) > 0:
        _pass_time(spins)
        spins += 1


def attend_pool(job: int, idle_spins: int) -> None:
    """A worker's life until it parks: see whether there is work, do it, look again."""
    spins = 0
    while spins < idle_spins and _look(job + CLOSED) == 0:
        if _look(job + LEFT) > 0:
            _work(job)
            spins = 0
        _pass_time(spins)
        spins += 1


class Pool:
    """`num_threads - 1` workers beside the caller. They end when the pool is collected."""

    def __init__(self, num_threads: int, worker: Any) -> None:
        """`worker` is `attend_pool`, compiled."""
        self.num_threads = num_threads
        self._words = np.zeros(JOB_BYTES // 8 + 8, dtype=np.int64)
        self.job = (int(self._words.ctypes.data) + 63) // 64 * 64
        self._at = self.job - int(self._words.ctypes.data)
        self._parked = [False] * (num_threads - 1)
        self._wake = [threading.Event() for _ in self._parked]
        for index, wake in enumerate(self._wake):
            thread = threading.Thread(
                target=_serve,
                args=(self._words, self.job, worker, self._parked, index, wake),
                name=f"kernel-worker-{index + 1}",
                daemon=True,
            )
            thread.start()
        self._finalizer = weakref.finalize(self, _close, self._words, self._at, self._wake)

    def wake(self) -> None:
        """Before a kernel: see to it that workers look out for it."""
        for index, parked in enumerate(self._parked):
            if parked:
                self._parked[index] = False
                self._wake[index].set()


def _serve(words: Any, job: int, worker: Any, parked: list[bool], index: int, wake: threading.Event) -> None:
    closed = (job - int(words.ctypes.data) + CLOSED) // 8
    while not words[closed]:
        worker(job, IDLE_SPINS)
        wake.clear()
        parked[index] = True
        if not words[closed]:
            wake.wait()


def _close(words: Any, at: int, wakes: list[threading.Event]) -> None:
    words[(at + CLOSED) // 8] = 1
    for wake in wakes:
        wake.set()
