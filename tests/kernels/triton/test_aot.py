"""Every kernel compiles for every target without a GPU, within its limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from surefoot.kernels.triton import attention, fold, rows, splits
from surefoot.kernels.triton.aot import TARGETS, AotCase, Usage
from surefoot.kernels.triton.table import BEGIN, END, MODULES, aot_cases, faults, markdown, with_table

ROOT = Path(__file__).parents[3]


def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    """All compile for sm_80, sm_90, sm_100 and gfx942; none takes more shared memory than there is, none of a
    decoding step has a stack, and the page shows what each takes (where it is of the triton that is here).
    """
    page, kept = tmp_path / "page.md", (ROOT / "docs" / "triton-kernels.md").read_text()
    page.write_text(kept)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "surefoot.kernels.triton.table", "--write", str(page)],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.read_text().count(" / ") >= len(aot_cases()) * len(TARGETS)
    if f"Compiled by triton {triton.__version__}.\n" in kept:
        assert page.read_text() == kept, "`make kernels-table` writes it anew"


def test_the_page_lists_every_kernel() -> None:
    """docs/triton-kernels.md has a row for each case, so a kernel that is added shows."""
    page = (ROOT / "docs" / "triton-kernels.md").read_text()
    table = page.partition(BEGIN)[2].partition(END)[0]
    missing = [case.name for case in aot_cases() if f"| {case.name} | {case.num_warps} |" not in table]
    assert missing == []


def test_every_kernel_states_its_bytes_and_operations() -> None:
    """A kernel's file says at its top what it moves and does against the least that it could."""
    for module in (*MODULES, splits, fold, rows):
        if module is not attention:  # which launches the last three
            assert "ytes" in str(module.__doc__), module.__name__
            assert "perations" in str(module.__doc__), module.__name__


def test_case_names_are_unique() -> None:
    """A name stands for one kernel at one shape."""
    names = [case.name for case in aot_cases()]
    assert sorted(set(names)) == sorted(names)


def _usage(stack_bytes: int = 0, shared_bytes: int = 0) -> Usage:
    return Usage(registers=32, stack_bytes=stack_bytes, local_bytes=0, shared_bytes=shared_bytes)


def _case(decode: bool) -> AotCase:
    return AotCase(
        name="copy",
        kernel=None,
        signature={},
        constexprs={},
        num_warps=4,
        num_stages=1,
        decode=decode,
    )


def test_a_spill_is_a_fault_in_decoding_alone() -> None:
    """A stack is named as a fault where a decoding step would pay for it."""
    spilling = _usage(stack_bytes=8)
    assert faults(_case(decode=True), TARGETS[1], spilling) == [
        "copy, sm_90: 8 bytes of stack, 0 of local memory"
    ]
    assert faults(_case(decode=False), TARGETS[1], spilling) == []


def test_too_much_shared_memory_is_a_fault() -> None:
    """What fits one target's shared memory is a fault on another."""
    large = _usage(shared_bytes=100 << 10)
    assert faults(_case(decode=True), TARGETS[1], large) == []
    assert faults(_case(decode=False), TARGETS[3], large) == [
        "copy, gfx942: 102400 bytes of shared memory, at most 65536"
    ]


def test_the_table_stays_between_its_marks() -> None:
    """Writing the table keeps the rest of the page, again and again; a page without marks is refused."""
    page = f"before\n{BEGIN}old\n{END}after\n"
    written = with_table(with_table(page, "| new |\n"), "| new |\n")
    assert written == f"before\n{BEGIN}\n| new |\n\n{END}after\n"
    with pytest.raises(ValueError, match="begin: kernels"):
        with_table("no marks", "| new |\n")


def test_a_cell_names_registers_shared_memory_and_stack() -> None:
    """A table's cell has registers of a thread, KiB of a program, and the stack where there is one."""
    usages = {(c.name, t.name): _usage(8, 1536) for c in aot_cases() for t in TARGETS}
    assert "| 32 / 1.5 (8 B stack) |" in markdown(usages)
