"""What a start says while it takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from surefoot.backends.engine import start
from surefoot.backends.engine.start import EngineOptions, load_parts


class Enough(Exception):
    """Nothing is loaded here."""


def test_a_first_compile_shows_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sentence a second says how many kernels are done, and that this happens once; a quick start, which
    finds them all, says none.
    """
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    options = EngineOptions(model=tmp_path, model_id="m", cache_dir=tmp_path, threads=1)
    for kernel_s, sentences in (
        (
            0.4,
            [
                "Compiling kernels, which is done once: 2 of 6.",
                "Compiling kernels, which is done once: 5 of 6.",
            ],
        ),
        (0.1, []),
    ):

        def compiling(
            *_: object, progress: Callable[[str, int, int], None], pause_s: float = kernel_s, **__: object
        ) -> NoReturn:
            nonlocal now_s
            for done in range(7):
                now_s += pause_s
                progress("kernel", done, 6)
            raise Enough

        said: list[str] = []
        monkeypatch.setattr(start, "select_ops", compiling)
        with pytest.raises(Enough):
            load_parts(options, said.append)
        assert said == sentences
