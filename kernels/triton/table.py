"""Every kernel compiled for every target, and what each takes, as a table.

`python -m surefoot.kernels.triton.table` prints it; `--write docs/triton-kernels.md` puts it into the page,
between its marks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from . import attention, commit, demote, linear, mass, merge, rms_norm, rope, rotate, sample, silu_mul
from .aot import TARGETS, AotCase, Target, Usage, compile_case

MODULES = (attention, mass, merge, commit, demote, rms_norm, rope, rotate, silu_mul, sample, linear)
BEGIN, END = "<!-- begin: kernels -->\n", "<!-- end: kernels -->\n"

Job = tuple[int, int]
"""A case's index and a target's: kernels do not travel between processes."""


def aot_cases() -> list[AotCase]:
    """Every module's."""
    return [case for module in MODULES for case in module.aot_cases()]


def compile_all(workers: int) -> dict[tuple[str, str], Usage]:
    """What each kernel takes, by its case's name and the target's, compiled in `workers` processes."""
    cases = aot_cases()
    jobs = [(c, t) for c in range(len(cases)) for t in range(len(TARGETS))]
    # spawn: a fork would share the state of LLVM's threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        usages = pool.map(_compile, jobs)
        return {(cases[c].name, TARGETS[t].name): usage for (c, t), usage in zip(jobs, usages, strict=True)}


def faults(case: AotCase, target: Target, usage: Usage) -> list[str]:
    """What a compiled kernel may not do: take more shared memory than there is; in a decoding step, spill."""
    found = []
    if usage.shared_bytes > target.max_shared_bytes:
        found.append(f"{usage.shared_bytes} bytes of shared memory, at most {target.max_shared_bytes}")
    if case.decode and (usage.stack_bytes or usage.local_bytes):
        found.append(f"{usage.stack_bytes} bytes of stack, {usage.local_bytes} of local memory")
    return [f"{case.name}, {target.name}: {fault}" for fault in found]


def markdown(usages: dict[tuple[str, str], Usage]) -> str:
    """A row per case: registers of a thread / KiB of shared memory of a program, and stack where there is.

    The compilers come with triton, whose version is the last line.
    """
    lines = [
        "| Kernel | Warps | " + " | ".join(target.name for target in TARGETS) + " |",
        "|---|---|" + "---|" * len(TARGETS),
    ]
    for case in aot_cases():
        cells = (_cell(usages[case.name, target.name]) for target in TARGETS)
        lines.append(f"| {case.name} | {case.num_warps} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Compiled by triton {triton.__version__}."]) + "\n"


def with_table(page: str, table: str) -> str:
    """The page with the table between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN.strip()} followed by {END.strip()}")
    return head + BEGIN + "\n" + table + "\n" + END + tail


def main(arguments: Sequence[str]) -> int:
    """Print the table or write it; 1 if any kernel does what it may not."""
    parser = argparse.ArgumentParser(prog="python -m surefoot.kernels.triton.table", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page to put the table into")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    args = parser.parse_args(arguments)
    usages = compile_all(args.workers)
    table = markdown(usages)
    if args.write is None:
        sys.stdout.write(table)
    else:
        args.write.write_text(with_table(args.write.read_text(), table))
    found = [
        fault
        for case in aot_cases()
        for target in TARGETS
        for fault in faults(case, target, usages[case.name, target.name])
    ]
    sys.stderr.write("".join(f"{fault}\n" for fault in found))
    return 1 if found else 0


def _compile(job: Job) -> Usage:
    case, target = job
    return compile_case(aot_cases()[case], TARGETS[target])


def _cell(usage: Usage) -> str:
    spilled = usage.stack_bytes + usage.local_bytes
    cell = f"{usage.registers} / {usage.shared_bytes / 1024:.3g}"
    return f"{cell} ({spilled} B stack)" if spilled else cell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
