"""Whole runs against a scripted server on a real socket."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from surefoot.bench.arrivals import parse_rate
from surefoot.bench.errors import BenchError
from surefoot.bench.latencies import Latencies
from surefoot.bench.lengths import parse_length
from surefoot.bench.load import REFUSED_PAUSE_S
from surefoot.bench.progress import Progress
from surefoot.bench.prompts import Calibration
from surefoot.bench.report import report
from surefoot.bench.results import BenchResult
from surefoot.bench.run import run_bench
from surefoot.bench.settings import BenchSettings
from surefoot.bench.view import ERASE_LINE, ProgressView, progress_line

from .scripted_server import Call, Script, ScriptedServer, let_pass, scripted, whole


def settings(url: str, **more: Any) -> BenchSettings:
    """Small requests: 20 tokens in, 4 out."""
    lengths = {"prompt_tokens": parse_length("20"), "output_tokens": parse_length("4")}
    return BenchSettings(**{"url": url, "num_requests": 6, "num_warmup": 0, **lengths, **more})


@asynccontextmanager
async def unseen(progress: Progress) -> AsyncIterator[None]:
    """A view that shows nothing."""
    yield


def run(script: Script = whole, **more: Any) -> tuple[BenchResult, ScriptedServer]:
    """One run against a server that answers by `script`."""

    async def main() -> tuple[BenchResult, ScriptedServer]:
        async with scripted(script) as server:
            return await run_bench(settings(server.url, **more), unseen), server

    return asyncio.run(main())


def after_meeting(script: Script) -> Script:
    """Good answers while the server is got to know (3 requests), then `script`."""
    num_calls = 0

    async def answer(call: Call) -> None:
        nonlocal num_calls
        num_calls += 1
        await (whole if num_calls <= 3 else script)(call)

    return answer


def test_a_closed_loop_keeps_so_many_requests_under_way() -> None:
    """With concurrency 3 there are always 3 requests at the server, never more."""
    waiting: list[asyncio.Event] = []
    seen: list[int] = []

    async def in_threes(call: Call) -> None:
        waiting.append(asyncio.Event())
        seen.append(len(waiting))
        if len(waiting) == 3:
            for event in waiting:
                event.set()
            waiting.clear()
        else:
            await waiting[-1].wait()
        await whole(call)

    result, _ = run(after_meeting(in_threes), concurrency=3, num_requests=9)
    assert seen == [1, 2, 3] * 3
    assert result.summary.num_ok == 9
    assert [record.index for record in result.records] == list(range(9))


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Requests arrive while none has been answered, at the times of the schedule."""
    held: list[asyncio.Event] = []

    async def hold_until_all_are_there(call: Call) -> None:
        held.append(asyncio.Event())
        if len(held) == 8:
            for event in held:
                event.set()
        await held[-1].wait()
        await whole(call)

    result, _ = run(after_meeting(hold_until_all_are_there), rate=parse_rate("200"), num_requests=8)
    assert result.summary.num_ok == 8
    for record in result.records:
        assert record.scheduled_s is not None
        assert record.start_s >= record.scheduled_s


def test_times_are_those_of_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """TTFT, gaps and end to end are the times between which the server sent, by the client's own clock."""
    now_s, seen = 100.0, Progress()
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)

    @asynccontextmanager
    async def view(progress: Progress) -> AsyncIterator[None]:
        nonlocal seen
        seen = progress
        yield

    async def paced(call: Call) -> None:
        nonlocal now_s
        await call.start()
        await call.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number, pause_s in enumerate((0.5, 0.25, 0.125, 1.0), start=1):
            now_s += pause_s
            await call.text("x")
            while seen.num_chunks < number:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
        await call.finish(4)

    async def main() -> BenchResult:
        async with scripted(after_meeting(paced)) as server:
            return await run_bench(settings(server.url, num_requests=1), view)

    (record,) = asyncio.run(main()).records
    assert record.latencies == Latencies(ttft_s=0.5, tpot_s=1.375 / 3, itl_s=(0.25, 0.125, 1.0), e2e_s=1.875)


def test_synthetic_prompts_have_the_wanted_length() -> None:
    """On a server that counts 1.5 tokens a word and 12 for its template, prompts come out as asked."""

    async def counting(call: Call) -> None:
        await call.start()
        await call.text("x")
        await call.finish(1, num_prompt_tokens=12 + call.num_words * 3 // 2)

    result, _ = run(counting, prompt_tokens=parse_length("120"), num_requests=3)
    assert result.calibration == Calibration(overhead=12.0, tokens_per_word=1.5)
    assert [record.num_prompt_tokens for record in result.records] == [120, 120, 120]


def test_what_is_sent() -> None:
    """A request has model, length, key and extra fields, and asks for usage and a full answer."""
    _, server = run(api_key="k", extra={"temperature": 0}, num_requests=1)
    call = server.calls[-1]
    assert call.path == "/v1/chat/completions"
    assert call.headers["authorization"] == "Bearer k"
    assert {name: call.body[name] for name in call.body if name != "messages"} == {
        "model": "scripted",
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": 4,
        "temperature": 0,
    }


def test_the_completions_endpoint() -> None:
    """With the text endpoint prompts are text, and chunks' text is read."""
    result, server = run(endpoint="completions")
    assert server.calls[-1].path == "/v1/completions"
    assert isinstance(server.calls[-1].body["prompt"], str)
    assert result.summary.num_output_tokens == 24


def test_requests_are_the_same_whatever_the_concurrency() -> None:
    """Prompts and lengths of a run depend on the seed alone."""

    def bodies(**more: Any) -> list[str]:
        _, server = run(output_tokens=parse_length("1:30"), **more)
        return sorted(str(call.body) for call in server.calls)

    assert bodies(concurrency=1) == bodies(concurrency=4)
    assert bodies(seed=1) != bodies(seed=2)


def test_connections_are_used_again() -> None:
    """A run of 6 requests, one after another, takes one connection."""
    _, server = run()
    assert len(server.writers) == 1


def test_a_server_that_knows_neither_ignore_eos_nor_usage() -> None:
    """Fields that the server refuses by name are left out, and chunks are counted instead of usage."""

    async def strict(call: Call) -> None:
        for name in ("ignore_eos", "stream_options"):
            if name in call.body:
                await call.refuse(400, f"unknown field {name}")
                return
        await whole(call)

    result, _ = run(strict)
    assert not result.target.knows_ignore_eos
    assert not result.target.knows_usage
    assert result.calibration == Calibration(overhead=0.0, tokens_per_word=1.0)
    assert result.summary.num_output_tokens == 24
    assert not result.summary.all_counted_by_server
    assert "no token counts" in report(result)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """Given prompts are sent in their order, with their own output lengths."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a b", "max_tokens": 2}\n"c d e"\n')
    result, server = run(prompts=file, num_requests=3)
    sent = [(call.num_words, call.body["max_tokens"]) for call in server.calls[-3:]]
    assert sent == [(2, 2), (3, 4), (2, 2)]
    assert result.calibration is None


def test_warm_up_is_not_counted() -> None:
    """Warm-up requests reach the server, with prompts of their own, and no record."""
    result, server = run(num_warmup=5, concurrency=2)
    assert len(server.calls) == 3 + 5 + 6
    assert len(result.records) == 6
    prompts = [call.body["messages"][0]["content"] for call in server.calls]
    assert len(set(prompts)) == len(prompts)


def test_output_of_any_kind_is_a_token() -> None:
    """Reasoning, tool calls and refusals count like text; roles and empty pieces do not."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": None},
        {"content": "", "tool_calls": []},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ]

    async def many_kinds(call: Call) -> None:
        await call.start()
        for delta in deltas:
            await call.event({"choices": [{"index": 0, "delta": delta}], "error": None, "usage": None})
        await call.finish(4)

    result, _ = run(many_kinds, num_requests=1)
    assert [record.num_chunks for record in result.records] == [4]


async def five_hundred(call: Call) -> None:
    """An error before the stream."""
    await call.refuse(500, "engine fell over")


async def in_stream_error(call: Call) -> None:
    """An error after the first token."""
    await call.start()
    await call.text("x")
    await call.event({"error": {"message": "engine fell over", "type": "server_error"}})
    await call.raw(b"0\r\n\r\n")


async def cut_line(call: Call) -> None:
    """The connection ends after the first token."""
    await call.start()
    await call.text("x")
    call.hang_up()


async def no_answer(call: Call) -> None:
    """The connection ends before any byte."""
    call.hang_up()


async def early_end(call: Call) -> None:
    """The stream ends in order, without [DONE] or a finish reason."""
    await call.start()
    await call.text("x")
    await call.raw(b"0\r\n\r\n")


async def no_text(call: Call) -> None:
    """A whole stream without any text."""
    await call.start()
    await call.finish(4)


async def not_json(call: Call) -> None:
    """An event that is not JSON."""
    await call.start()
    await call.chunk(b"data: {oops\n\n")


async def not_http(call: Call) -> None:
    """Bytes that are not HTTP."""
    await call.raw(b"hello\r\n\r\n")


async def silence(call: Call) -> None:
    """A token, and then nothing for longer than the client waits."""
    await call.start()
    await call.text("x")
    let_pass(601.0)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        (five_hundred, "http_500", "engine fell over"),
        (in_stream_error, "stream_error", "engine fell over"),
        (cut_line, "disconnect", "closed the connection"),
        (no_answer, "disconnect", "closed the connection"),
        (early_end, "truncated", "without"),
        (no_text, "empty", "no chunk had any text"),
        (not_json, "bad_event", "oops"),
        (not_http, "protocol", "hello"),
        (silence, "timeout", "600 s"),
    ],
)
def test_failures_are_counted_by_kind(script: Script, kind: str, says: str) -> None:
    """Whatever goes wrong in a request is an error of its own kind; the run goes on and says what it was."""
    result, _ = run(after_meeting(script), num_requests=3, timeout_s=600.0, concurrency=2)
    assert result.summary.errors == {kind: 3}
    assert (result.summary.num_ok, result.summary.num_failed) == (0, 3)
    assert all(says in (record.error_message or "") for record in result.records)
    assert f"3 {kind}" in report(result)


def test_good_requests_among_failed_ones() -> None:
    """Failed requests take nothing from the figures of the good ones."""
    num_calls = 0

    async def every_other(call: Call) -> None:
        nonlocal num_calls
        num_calls += 1
        await (whole if num_calls % 2 else five_hundred)(call)

    result, _ = run(after_meeting(every_other))
    assert (result.summary.num_ok, result.summary.errors) == (3, {"http_500": 3})
    assert result.summary.num_output_tokens == 12


def test_a_server_that_dies_during_the_run() -> None:
    """Refused connections are counted, and a closed loop rests between them instead of spinning."""

    async def main() -> BenchResult:
        async with scripted() as server:
            view_entered = asyncio.Event()

            @asynccontextmanager
            async def view(progress: Progress) -> AsyncIterator[None]:
                view_entered.set()
                yield

            task = asyncio.create_task(run_bench(settings(server.url, num_requests=3), view))
            await view_entered.wait()
            server.die()
            return await task

    result = asyncio.run(main())
    assert result.summary.errors == {"connect": 3}
    starts = [record.start_s for record in result.records]
    assert all(later - earlier > 0.99 * REFUSED_PAUSE_S for earlier, later in pairwise(starts))


def test_no_server_is_said_at_once() -> None:
    """A run against nothing ends with the address."""

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen, so that nobody else can
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(BenchError, match="no server at http://127"):
            asyncio.run(run_bench(settings(url), unseen))


def test_a_server_that_refuses_everything() -> None:
    """A request that the server refuses for another reason ends the run with the server's words."""

    async def no(call: Call) -> None:
        await call.refuse(401, "bad key")

    with pytest.raises(BenchError, match="bad key"):
        run(no)


def test_an_interrupted_run_keeps_what_it_has() -> None:
    """Cancelling the run, as Ctrl-C does, gives the requests that had ended, and says so."""

    num_calls = 0

    async def main() -> BenchResult:
        reached = asyncio.Event()

        async def third_hangs(call: Call) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 3:
                reached.set()
                await asyncio.Event().wait()
            await whole(call)

        async with scripted(after_meeting(third_hangs)) as server:
            task = asyncio.create_task(run_bench(settings(server.url), unseen))
            await reached.wait()
            task.cancel()
            return await task

    result = asyncio.run(main())
    assert result.interrupted
    assert result.summary.num_ok == 2


def test_a_line_tells_of_the_run() -> None:
    """A line has time, running, done, failed, speed and TTFT."""
    progress = Progress()
    progress.num_running, progress.num_ok, progress.num_failed = 3, 4, 1
    progress.recent_ttft_s.extend([0.1, 0.3, 0.2])
    line = progress_line(progress, settings("http://x", num_requests=9), 12.34)
    assert line == "0 s  3 running  4/9 done  1 failed  12.3 chunks/s  TTFT p50 200 ms"


class Screen(StringIO):
    """Where a view writes; it may say that it is a terminal, and knows when something was written."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.written = asyncio.Event()

    def isatty(self) -> bool:
        """As it was made."""
        return self.is_terminal

    def flush(self) -> None:
        """Called after each line."""
        self.written.set()


def watched(is_terminal: bool, *, num_lines: int, quiet: bool = False) -> str:
    """What is shown of a run of six requests, which are answered once there are so many lines; with none the
    run is a short one.
    """

    async def main() -> str:
        out = Screen(is_terminal)

        async def answer(call: Call) -> None:
            if not num_lines:
                let_pass(-600.0)
            while out.getvalue().count("running") < num_lines:
                out.written.clear()
                let_pass(5.1)
                await out.written.wait()
            await whole(call)

        async with scripted(after_meeting(answer)) as server:
            chosen = settings(server.url)
            await run_bench(chosen, ProgressView(out, chosen, quiet))
        return out.getvalue()

    return asyncio.run(main())


def test_a_terminal_has_one_line_that_renews_itself() -> None:
    """Each line erases the one before, and at the end nothing of them is left."""
    erase, first, second, *_, left = watched(True, num_lines=2).split(ERASE_LINE)
    assert (erase, left) == ("", "")
    assert "1 running  0/6 done" in first
    assert "1 running  0/6 done" in second
    assert "\n" not in first + second


def test_off_a_terminal_there_is_a_line_now_and_then() -> None:
    """Without a terminal lines follow one another; a short run has none, and with `quiet` no run has any."""
    first, second, *_ = watched(False, num_lines=2).splitlines()
    assert "1 running  0/6 done" in first
    assert "1 running  0/6 done" in second
    assert watched(False, num_lines=0) == ""
    assert watched(True, num_lines=0, quiet=True) == ""
