"""Running a cyclopts application as every command here does."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App, CycloptsError


def run_app(app: App, arguments: Sequence[str], *, bad_usage: int) -> int:
    """Run one command line; returns the exit status, `bad_usage` for arguments that cannot be read."""
    try:
        status = app(arguments, exit_on_error=False, result_action="return_value")
    except CycloptsError:  # Which cyclopts has shown already.
        return bad_usage
    return status or 0
