"""What deciding a step costs, measured on a real engine: what is timed, and the bar."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from surefoot.backends.engine.backend import PUBLISH_EVERY_S, EngineParts
from surefoot.backends.engine.bench_scheduler import Job, Measured, is_kept, measure, text_of

from .serving import load_tiny


def test_every_step_is_timed_beside_its_decision(parts: EngineParts, tmp_path: Path) -> None:
    """Each scheduler decides as many steps as were asked for, with all running, the others waiting, and the
    decision part of the step.
    """
    tiny = load_tiny("qwen3", parts, tmp_path, vocab_size=10_000)
    results = measure(Job(running=4, waiting=6, steps=5), tiny)
    assert [each.name.split(",")[0] for each in results] == ["first come", "promises", "promises"]
    for each in results:
        assert (each.num_running, each.num_waiting) == (4, 6)
        assert len(each.schedule_s) == len(each.step_s) == 5
        assert all(0 < a < b for a, b in zip(each.schedule_s, each.step_s, strict=True))
        assert each.publish_s > 0


@pytest.mark.parametrize(("schedule_s", "publish_s", "kept"), [(0.002, 0.0, True), (0.002, 0.005, False)])
def test_telling_counts(schedule_s: float, publish_s: float, kept: bool) -> None:
    """The bar holds for deciding and telling together: 2 % of a step, and 2 % of the time."""
    one = Measured(
        name="ours",
        num_running=64,
        num_waiting=500,
        schedule_s=[schedule_s] * 3,
        step_s=[0.1] * 3,
        publish_s=publish_s * PUBLISH_EVERY_S / 0.25,
    )
    assert is_kept([one]) is kept
    assert is_kept([replace(one, publish_s=0.0), one]) is kept
    assert ("MISSED" in text_of([one])) is not kept
