"""The measurement of low load: its arrivals, its bars, and what it asks of whom."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from surefoot.bench.client import HttpClient
from surefoot.bench.errors import BenchError
from surefoot.bench.low_load_job import rows_of, run, text_of
from surefoot.bench.low_load_rounds import (
    ALONE,
    ARMS,
    EMPTY,
    LOAD,
    TIERS,
    Arrival,
    Caller,
    LowLoadJob,
    LowLoadResult,
    Timed,
    measure,
    planned,
)
from surefoot.bench.machine import describe_machine

from .scripted_server import Call, scripted

JOB = LowLoadJob(prompt_tokens=5, output_tokens=2)


def result(**load_s: float) -> LowLoadResult:
    """Each class's first token takes 100 ms, or what is said of low load; every fifth's three times that."""
    arms = {
        arm: [
            Timed(
                tier=tier,
                ttft_s=(load_s.get(tier, 0.1) if arm == LOAD else 0.1) * (3 if number % 5 == 0 else 1),
                total_s=0.3,
                is_beside=arm == LOAD and number % 5 == 0,
            )
            for tier in TIERS
            for number in range(10)
        ]
        for arm in ARMS
    }
    return LowLoadResult(
        machine=describe_machine(),
        model="m.gguf",
        threads=2,
        prompt_tokens=5,
        output_tokens=2,
        load=0.2,
        rate=1.0,
        arms=arms,
    )


def test_every_class_has_its_bar() -> None:
    """A class whose median is more than 5 % above that of an empty server misses, whatever the others do."""
    assert [row.kept for row in rows_of(result())] == [True, True, True]
    assert [row.kept for row in rows_of(result(flex=0.104))] == [True, True, True]
    slow = result(flex=0.106)
    assert [row.kept for row in rows_of(slow)] == [True, True, False]
    assert rows_of(slow)[2].share_beside == 0.2
    (line,) = [line for line in text_of(slow, rows_of(slow)).splitlines() if line.startswith("flex")]
    assert line.split()[3:8] == ["106.0", "318.0", "20%", "1.000", "1.060"]
    assert line.endswith("<= 1.05  MISSED")


def test_arrivals_are_a_rounds_own() -> None:
    """A round has as many of each class, at about the rate, the same for the same seed and round alone."""
    job = LowLoadJob(requests=300)
    plan = planned(job, 4.0, 0)
    assert Counter(due.tier for due in plan) == dict.fromkeys(TIERS, 100)
    assert plan[-1].at_s == pytest.approx(75, rel=0.2)
    assert plan == planned(job, 4.0, 0) != planned(job, 4.0, 1)


def test_company_only_at_low_load() -> None:
    """Both without company have one request open at a time, however close arrivals are; the third has all."""
    plan = [Arrival(0.0, tier) for tier in TIERS]

    async def main() -> None:
        num_open, most = 0, 0
        all_here = asyncio.Event()
        together = False

        async def count(call: Call) -> None:
            nonlocal num_open, most
            num_open += 1
            most = max(most, num_open)
            if together:
                all_here.set() if num_open == len(plan) else None
                await all_here.wait()
            num_open -= 1
            await call.start()
            await call.text("x")
            await call.finish(2, 5)

        async with scripted(count) as server, HttpClient(server.url) as client:
            caller = Caller(JOB, client, "m", Random(1))
            alone = await caller.one_by_one(plan)
            assert (most, [each.is_beside for each in alone]) == (1, [False] * 3)
            together = True
            crowd = await caller.as_they_come(plan)
            assert (most, [each.is_beside for each in crowd]) == (3, [False, True, True])
            assert [each.tier for each in crowd] == [call.body["service_tier"] for call in server.calls[:3]]
        assert len({tuple(call.body["prompt"]) for call in server.calls}) == 6
        assert all(0 < each.ttft_s <= each.total_s for each in (*alone, *crowd))

    asyncio.run(main())


def test_a_request_that_fails_ends_the_measurement() -> None:
    """A refusal is no time to first token."""

    async def main() -> None:
        async with (
            scripted(lambda call: call.refuse(429, "too many")) as server,
            HttpClient(server.url) as client,
        ):
            await Caller(JOB, client, "m", Random(1)).ask("flex")

    with pytest.raises(BenchError, match="429"):
        asyncio.run(main())


def test_the_whole_job_on_a_stand_in(tmp_path: Path) -> None:
    """Two servers are started, with a scheduler each, and every arm has every request."""
    command = tmp_path / "surefoot"
    stub = Path(__file__).with_name("stub_surefoot.py")
    flags = tmp_path / "flags"
    command.write_text(f'#!/bin/sh\necho "$@" >> {flags}\nexec "{sys.executable}" "{stub}" "$@"\n')
    command.chmod(0o700)
    (model := tmp_path / "m.gguf").touch()
    job = LowLoadJob(model=model, rounds=2, requests=6, load=0.9, output_tokens=2, surefoot=command)
    found = asyncio.run(measure(job, lambda text: None))
    assert ["--scheduler=first-come" in line for line in flags.read_text().splitlines()] == [True, False]
    assert {arm: len(answers) for arm, answers in found.arms.items()} == {EMPTY: 12, ALONE: 12, LOAD: 12}
    assert 0.9 / found.rate >= 2 * 0.005
    assert all(each.ttft_s >= 0.005 for answers in found.arms.values() for each in answers)


@pytest.mark.parametrize("flags", [("--load", "1.5"), ("--requests", "1"), ("--rounds", "0")])
def test_what_cannot_be_measured(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A load of more than all, or too few requests for every class, is refused with the number."""
    assert run(list(flags)) == 2
    assert flags[1] in capsys.readouterr().err
