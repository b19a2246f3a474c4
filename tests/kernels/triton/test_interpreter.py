"""Runs the facts of `interpreted/` in Triton's interpreter.

It is chosen when triton is imported, so each file has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FACTS = sorted(Path(__file__).parent.glob("interpreted/facts_*.py"))


@pytest.mark.parametrize("facts", FACTS, ids=lambda path: path.stem)
def test_interpreted_kernels_keep_to_the_reference(facts: Path) -> None:
    """Every fact of a file holds for the kernels as Triton's interpreter runs them."""
    done = subprocess.run(
        # An interpreted kernel meets infinities in numpy, which warns of what a GPU computes in silence. The
        # time limit is this test's.
        [
            *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=0"),
            *("-W", "ignore::RuntimeWarning", f"--confcutdir={facts.parent}", str(facts)),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
