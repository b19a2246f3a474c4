"""Compiles the CPU's kernels in a process of its own: `python -m surefoot.kernels.compile FOLDER`.

numba and LLVM keep some 320 MB of what compiling took; the process that only loads kernels does without.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .cpu.launch import Launcher, Progress, cache_key
from .cpu.ops import CpuOps


def compile_apart(cache_dir: Path, progress: Progress) -> None:
    """Have another process compile kernels into a folder without any; `progress(name, done, total)` is called
    before each.

    What it could not compile, or could not be kept, is left to who needs kernels. If this process is killed,
    the other one ends at its next kernel.
    """
    try:
        (cache_dir / cache_key()).mkdir(parents=True)
    except OSError:
        return  # There are some, or none can be kept.
    command = [sys.executable, "-P", "-m", "surefoot.kernels.compile", str(cache_dir)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    # A session of its own: Ctrl-C is for this process, whose end it will notice.
    with subprocess.Popen(command, stdout=pipe, stderr=nowhere, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, done, total = line.split()
            progress(name, int(done), int(total))


def main(cache_dir: Path) -> None:
    """Compile what is not there yet; a line for each kernel says that it is at it."""

    def report(name: str, done: int, total: int) -> None:
        if name:
            sys.stdout.write(f"{name} {done} {total}\n")
            sys.stdout.flush()

    CpuOps(Launcher(cache_dir, num_threads=1), report)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
