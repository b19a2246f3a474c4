"""The parts of the main job's measurement, each against times and servers that are known."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import numpy
import pytest

from surefoot.bench.errors import BenchError
from surefoot.bench.http1 import ResponseHead
from surefoot.bench.keep_alive import Waiter, watch_waiting
from surefoot.bench.loop_lag import LAG_METRIC, LagProbe, quantile, read_buckets
from surefoot.bench.machine import describe_machine
from surefoot.bench.main_job import rows_of, run, text_of
from surefoot.bench.main_rounds import REQUESTS_EACH, Job, JobResult, OurRound, measure
from surefoot.bench.progress import Progress
from surefoot.bench.served import ServedProcess, free_port

from .scripted_server import Call, let_pass, scripted

HEAD = ResponseHead(200, {})
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def our_round(**more: float) -> OurRound:
    """A round that keeps every bar against 10 tok/s."""
    values = {
        "ready_s": 5.0,
        "one_stream_tokens_per_s": 20.0,
        "streams_tokens_per_s": 50.0,
        "ping_p99_s": 0.005,
        "own_lag_p99_s": 0.002,
        "loop_cpu_per_token_s": 0.00005,
        "keep_alive_late_p99_s": 0.01,
        "num_keep_alives": 700,
    }
    return OurRound(**{**values, **more})


def result(*rounds: OurRound) -> JobResult:
    """A result in which bfloat16 is the faster peer, at 10 tok/s."""
    return JobResult(
        machine=describe_machine(),
        model="m.gguf",
        threads=2,
        first_ready_s=30.0,
        ours=list(rounds),
        transformers={"float32": [8.0] * len(rounds), "bfloat16": [10.0] * len(rounds)},
    )


def test_bars_are_held_against_the_faster_peer() -> None:
    """Ratios are taken round by round to the faster dtype, and a bar is kept by the median."""
    job = result(
        our_round(), our_round(one_stream_tokens_per_s=10.0), our_round(one_stream_tokens_per_s=30.0)
    )
    rows = {row.title: row for row in rows_of(job)}
    assert rows["one stream / transformers"].values == [2.0, 1.0, 3.0]
    assert rows["8 streams / transformers"].values == [5.0, 5.0, 5.0]
    assert rows["event loop's CPU with 8 streams, us a token"].values == pytest.approx([50.0] * 3)
    assert all(row.kept is not False for row in rows.values())
    assert "kept" in text_of(job, list(rows.values()))


@pytest.mark.parametrize(
    ("worse", "missed"),
    [
        ({"one_stream_tokens_per_s": 14.0}, "one stream / transformers"),
        ({"streams_tokens_per_s": 39.0}, "8 streams / transformers"),
        ({"ping_p99_s": 0.011}, "ping p99 with 8 streams, ms"),
        ({"own_lag_p99_s": 0.011}, "event loop lag p99, its own, ms"),
        ({"keep_alive_late_p99_s": 0.2}, "keep-alives of 100 late p99, ms"),
        ({"ready_s": 11.0}, "ready at a later start, s"),
    ],
)
def test_a_missed_bar_is_named(worse: dict[str, float], missed: str) -> None:
    """Each bar is missed by its own figure alone."""
    assert [row.title for row in rows_of(result(our_round(**worse))) if row.kept is False] == [missed]


def test_quantiles_of_a_histogram() -> None:
    """Buckets are read from Prometheus' text, and a quantile lies within its bucket in a straight line."""
    text = (
        f"# TYPE {LAG_METRIC} histogram\n"
        f'{LAG_METRIC}_bucket{{le="0.001"}} 50.0\n'
        f'{LAG_METRIC}_bucket{{le="0.01"}} 90.0\n'
        f'{LAG_METRIC}_bucket{{le="0.1"}} 100.0\n'
        f'{LAG_METRIC}_bucket{{le="+Inf"}} 100.0\n'
        f"{LAG_METRIC}_count 100.0\nother_bucket 3\n"
    )
    buckets = read_buckets(text, LAG_METRIC)
    assert buckets == {0.001: 50, 0.01: 90, 0.1: 100, float("inf"): 100}
    assert quantile(buckets, 0.5) == pytest.approx(0.001)
    assert quantile(buckets, 0.95) == pytest.approx(0.055)
    assert quantile({}, 0.99) is None
    assert quantile({1.0: 0.0, float("inf"): 0.0}, 0.99) is None


def test_pings_go_on_while_the_load_runs() -> None:
    """A probe has the time of every ping, and no lag of a server without the histogram."""

    async def main() -> LagProbe:
        async with scripted() as server:
            probe = LagProbe(server.url)
            async with probe(Progress()):
                paths = [await server.gets.get() for _ in range(6)]
        assert paths == ["/metrics", *["/health/live"] * 5]
        return probe

    probe = asyncio.run(main())
    assert probe.ping_s
    assert all(seconds > 0 for seconds in probe.ping_s)
    assert (probe.num_lost, probe.own_p99_s, probe.own_cpu_s) == (0, None, None)


def test_a_comment_is_late_by_the_silence_beyond_the_period() -> None:
    """With a period of 1 s, comments after 1.25 s and 1.5 s of silence are late by 0.25 s and 0.5 s."""
    waiter = Waiter(1.0)
    start = time.perf_counter()
    waiter.receive(HEAD, b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n', start)
    waiter.receive(HEAD, b": keep-alive\n\n", start + 1.25)
    waiter.receive(HEAD, b": keep-alive\n\n", start + 2.75)
    assert waiter.waits
    assert waiter.late_s == pytest.approx([0.25, 0.5])
    waiter.receive(HEAD, b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n', start + 2.8)
    waiter.end()
    assert not waiter.waits
    assert len(waiter.late_s) == 2


def test_silence_at_the_end_counts() -> None:
    """A stream that never got its comment is late by all the silence beyond the period."""
    waiter = Waiter(-1.0)
    waiter.end()
    assert len(waiter.late_s) == 1
    assert waiter.late_s[0] >= 1.0


def test_only_streams_that_wait_are_watched() -> None:
    """Of 2 running and 3 waiting streams, the 3 are reported, each with its comment."""
    num_calls, num_sent = 0, list[int]()

    async def two_run(call: Call) -> None:
        nonlocal num_calls
        num_calls += 1
        number = num_calls
        await call.start()
        await (call.text("x") if number <= 2 else call.chunk(b": keep-alive\n\n"))
        num_sent.append(number)
        if len(num_sent) == 5:
            let_pass(600.0)
        await asyncio.Event().wait()

    async def main() -> None:
        async with scripted(two_run) as server:
            report = await watch_waiting(server.url, {"prompt": "a"}, 2, 3, 3600.0, 600.0)
        assert (report.num_waiting, report.num_comments, len(report.late_s)) == (3, 3, 3)

    asyncio.run(main())


def test_streams_that_were_refused_do_not_wait() -> None:
    """If fewer streams waited than were to, nothing is reported as on time."""

    async def refuse(call: Call) -> None:
        await call.refuse(429, "too many")

    async def main() -> None:
        async with scripted(refuse) as server:
            await watch_waiting(server.url, {"prompt": "a"}, 2, 3, 3600.0, 600.0)

    with pytest.raises(BenchError, match="0 streams waited, and 5 ended"):
        asyncio.run(main())


def test_a_served_process_is_ready_on_entry_and_gone_on_exit(tmp_path: Path) -> None:
    """Entry waits for the first good answer and notes how long it took; exit ends the process."""

    async def main() -> None:
        port = free_port()
        command = [sys.executable, "-c", SERVER, str(port)]
        served = ServedProcess(command, f"http://127.0.0.1:{port}", tmp_path / "log")
        async with served:
            assert served.ready_s > 0
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(main())


def test_a_process_that_ends_early_is_shown_with_its_log(tmp_path: Path) -> None:
    """A server that cannot start is an error with what it printed."""

    async def main() -> None:
        command = [sys.executable, "-c", "raise SystemExit('no memory for the cache')"]
        async with ServedProcess(command, f"http://127.0.0.1:{free_port()}", tmp_path / "log"):
            pass

    with pytest.raises(BenchError, match="no memory for the cache"):
        asyncio.run(main())


def test_the_whole_job_on_a_stand_in(tmp_path: Path) -> None:
    """Every figure of our rounds comes out on a server of known pace: 8 places, 5 ms or more a token."""
    command = tmp_path / "surefoot"
    stub = Path(__file__).with_name("stub_surefoot.py")
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stub}" "$@"\n')
    command.chmod(0o700)
    (model := tmp_path / "m.gguf").touch()
    said: list[str] = []
    job = Job(model=model, rounds=1, output_tokens=20, peers=False, watch_s=4.0, surefoot=command)
    result = asyncio.run(measure(job, said.append))
    assert said == ["first start, which prepares the weights", "round 1 of 1: surefoot"]
    (ours,) = result.ours
    assert 0 < ours.one_stream_tokens_per_s <= 200
    assert ours.one_stream_tokens_per_s < ours.streams_tokens_per_s <= 8 * 200
    assert ours.ready_s > 0
    assert ours.ping_p99_s > 0
    assert ours.own_lag_p99_s == pytest.approx(0.0099)
    assert ours.loop_cpu_per_token_s is not None
    assert ours.loop_cpu_per_token_s * 8 * REQUESTS_EACH * 20 == pytest.approx(0.5)
    assert ours.num_keep_alives >= 100
    assert ours.keep_alive_late_p99_s < 60


def test_a_server_that_dies_under_load_is_named(tmp_path: Path) -> None:
    """A server that ends while it is measured is an error of its own, with its exit status."""
    dying = SERVER.replace("self.end_headers()", "self.end_headers(); __import__('os')._exit(7)")

    async def main() -> None:
        port = free_port()
        command = [sys.executable, "-c", dying, str(port)]
        async with ServedProcess(command, f"http://127.0.0.1:{port}", tmp_path / "log") as served:
            await served.wait()

    with pytest.raises(BenchError, match=r"ended \(7\) while it was measured"):
        asyncio.run(main())


def test_a_model_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that does not exist ends the job with status 2 and the path."""
    with pytest.raises(BenchError, match=r"none\.gguf"):
        Job(model=tmp_path / "none.gguf").model_file()
    assert run(["--model", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err


def test_what_is_asked_in_vain_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No rounds, or a file that could not be written, end the job before a server is started."""
    (model := tmp_path / "m.gguf").touch()
    asked = ["--model", str(model), "--surefoot", str(tmp_path / "none")]
    assert run([*asked, "--rounds", "0"]) == 2
    assert "--rounds 0: expected 1 or more" in capsys.readouterr().err
    assert run([*asked, "--output", str(tmp_path / "none" / "x.json")]) == 2
    assert "no file can be written there" in capsys.readouterr().err


def test_q_and_k_are_put_back_in_order() -> None:
    """Rows that the GGUF converter moved from halves to pairs go back to halves."""
    from surefoot.bench.peer_transformers import unpermute

    num_heads, head_dim = 3, 8
    rows = numpy.arange(num_heads * head_dim * 5).reshape(num_heads * head_dim, 5)
    halves = rows.reshape(num_heads, 2, head_dim // 2, 5)
    converted = halves.swapaxes(1, 2).reshape(rows.shape)
    assert not (converted == rows).all()
    assert (unpermute(converted, num_heads) == rows).all()
