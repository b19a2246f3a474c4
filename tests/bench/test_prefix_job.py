"""The prefix cache's measurement: its statistics, its bars, and what it asks of whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from surefoot.bench.client import HttpClient
from surefoot.bench.errors import BenchError
from surefoot.bench.machine import describe_machine
from surefoot.bench.prefix_job import rows_of, run, text_of
from surefoot.bench.prefix_rounds import Answered, Asker, PrefixJob, PrefixResult, ask_twice, probe
from surefoot.bench.two_samples import compare_samples, kolmogorov_smirnov_p, mann_whitney

from .scripted_server import Call, scripted


def normal(seed: int, count: int = 200, mean: float = 0.0, deviation: float = 1.0) -> list[float]:
    """Numbers of a normal distribution."""
    random = Random(seed)
    return [random.gauss(mean, deviation) for _ in range(count)]


def test_p_values_are_those_of_shuffling() -> None:
    """Both closed forms agree with the share of shuffles that differ as much, ties included."""
    random = Random(5)
    a = [float(round(value)) for value in normal(1, 40, deviation=3)]
    b = [float(round(value)) for value in normal(2, 50, mean=1, deviation=3)]
    share_below, p = mann_whitney(a, b)
    pairs = [(x < y) + (x == y) / 2 for x in a for y in b]
    assert share_below == pytest.approx(sum(pairs) / len(pairs))
    both, extreme, runs = [*a, *b], 0, 1000
    for _ in range(runs):
        random.shuffle(both)
        extreme += abs(mann_whitney(both[:40], both[40:])[0] - 0.5) >= abs(share_below - 0.5)
    assert p == pytest.approx(extreme / runs, abs=0.03)
    a, b = normal(1, 40, deviation=1.5), normal(2, 50)
    both, extreme, p = [*a, *b], 0, kolmogorov_smirnov_p(a, b)
    for _ in range(runs):
        random.shuffle(both)
        extreme += kolmogorov_smirnov_p(both[:40], both[40:]) <= p
    assert p == pytest.approx(extreme / runs, abs=0.05)


def test_equal_distributions_pass_and_others_fail() -> None:
    """At n = 200 p is small for a shift or another spread, and seldom small for neither."""
    shifted = compare_samples(normal(1), normal(2, mean=0.5))
    assert shifted.mann_whitney_p < 1e-3
    assert shifted.kolmogorov_smirnov_p < 1e-3
    assert shifted.share_below > 0.6
    assert compare_samples(normal(1), normal(2, deviation=2)).kolmogorov_smirnov_p < 1e-3
    null = [compare_samples(normal(2 * seed), normal(2 * seed + 1)) for seed in range(200)]
    for p in ([each.mann_whitney_p for each in null], [each.kolmogorov_smirnov_p for each in null]):
        assert 0.01 <= sum(value < 0.05 for value in p) / len(p) <= 0.1
    same = compare_samples([1.0] * 30, [1.0] * 30)
    assert (same.share_below, same.mann_whitney_p, same.kolmogorov_smirnov_p) == (0.5, 1.0, 1.0)


def result(hit_s: float = 0.1, other_shift_s: float = 0.0, leaked: int = 0) -> PrefixResult:
    """Ten prompts that take 1 s when they are new; other tenants' prompts take about as long."""
    others = [Answered(1 + other_shift_s + value / 100, leaked) for value in normal(1)]
    return PrefixResult(
        machine=describe_machine(),
        model="m.gguf",
        threads=2,
        prompt_tokens=1500,
        probe_tokens=256,
        cold=[Answered(1.0, 0)] * 10,
        hits=[Answered(hit_s, 1472)] * 10,
        others=others,
        never_seen=[Answered(1 + value / 100, 0) for value in normal(2)],
    )


def test_all_bars_are_kept() -> None:
    """A hit that is ten times as fast and times that are alike keep every bar."""
    rows = rows_of(result())
    assert [row.kept for row in rows].count(True) == 4
    assert all(row.kept is not False for row in rows)
    assert "new / again" in text_of(result(), rows)


@pytest.mark.parametrize(
    ("worse", "missed"),
    [
        (result(hit_s=0.25), {"new / again"}),
        (result(other_shift_s=-0.01), {"Mann-Whitney p", "Kolmogorov-Smirnov p"}),
        (result(leaked=16), {"tokens found across tenants"}),
    ],
)
def test_a_missed_bar_is_named(worse: PrefixResult, missed: set[str]) -> None:
    """Each bar is missed by its own figures alone."""
    assert {row.title for row in rows_of(worse) if row.kept is False} == missed


def test_what_is_asked_of_whom() -> None:
    """A prompt is asked twice by one tenant; the other asks as often for it as for what nobody has seen."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    async def remember(call: Call) -> None:
        asked = (call.headers["authorization"], tuple(call.body["prompt"]))
        cached = 7 if asked in seen else 0
        seen.append(asked)
        await call.start()
        await call.text("x")
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await call.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
        await call.chunk(b"data: [DONE]\n\n")
        await call.raw(b"0\r\n\r\n")

    async def main() -> None:
        job = PrefixJob(prompt_tokens=30, pairs=3, probe_tokens=20, samples=4)
        async with (
            scripted(remember) as server,
            HttpClient(server.url, {"authorization": "1"}) as first,
            HttpClient(server.url, {"authorization": "2"}) as second,
        ):
            askers = Asker(first, "m"), Asker(second, "m")
            cold, hits = await ask_twice(job, askers[0], Random(1))
            assert [each.num_cached_tokens for each in (*cold, *hits)] == [0] * 3 + [7] * 3
            assert len({prompt for _, prompt in seen}) == 3
            seen.clear()
            others, never_seen = await probe(job, *askers, Random(2), lambda text: None)
        assert (len(others), len(never_seen)) == (4, 4)
        assert all(each.ttft_s > 0 for each in (*others, *never_seen))
        assert [tenant for tenant, _ in seen] == ["1", "2"] * 8
        assert sum(one == two for (_, one), (_, two) in zip(seen[::2], seen[1::2], strict=True)) == 4

    asyncio.run(main())


def test_a_server_without_counts_is_refused() -> None:
    """What a server found in its cache must be known."""

    async def no_usage(call: Call) -> None:
        call.body["stream_options"] = {}
        await call.start()
        await call.finish(1, 1)

    async def main() -> None:
        async with scripted(no_usage) as server, HttpClient(server.url) as client:
            await Asker(client, "m").ask([1])

    with pytest.raises(BenchError, match="no usage"):
        asyncio.run(main())


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A measurement that cannot start ends with status 2 and the reason."""
    assert run(["--model", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err
