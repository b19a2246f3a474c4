"""The product as its users meet it: a real process and socket, the real model, the OpenAI client, curl."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import anyio
import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from surefoot.kernels.cpu.forms import host_form

from .server_process import ServerProcess

pytestmark = pytest.mark.xdist_group("server")

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture
def client(server: ServerProcess) -> OpenAI:
    """The official client, with no retries that would hide a failure."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_names_the_capital(client: OpenAI) -> None:
    """A greedy chat answers correctly; counts add up; the fingerprint names model, weights and plan."""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("smollm2:")
    assert answer.system_fingerprint.endswith(":baseline")


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_prompt_is_cached(server: ServerProcess, client: OpenAI, stream: bool) -> None:
    """Asked again, a prompt is cached up to its last token, the answer is the same, metrics count it."""
    prompt = f"A long story, of which {stream} is the first word: " + "the sea was calm that day, and " * 20

    def ask() -> tuple[str, int, int]:
        answer = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        )
        parts = list(answer) if stream else [answer]
        usage = parts[-1].usage
        text = "".join(choice.text for part in parts for choice in part.choices)
        return text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    def counted(name: str) -> float:
        (line,) = (
            each for each in httpx.get(f"{server.url}/metrics").text.splitlines() if each.startswith(name)
        )
        return float(line.split()[-1])

    hits = counted("vllm:prefix_cache_hits_total")
    first, again = ask(), ask()
    assert (first[2], again[2]) == (0, (again[1] - 1) // 16 * 16)
    assert again[:2] == first[:2]
    assert counted("vllm:prefix_cache_hits_total") == hits + again[2]
    assert counted("surefoot_cache_blocks_cached") >= again[2] // 16


def test_streamed_and_whole_answers_are_equal(client: OpenAI) -> None:
    """The pieces of a stream are the whole answer: text, reason and counts."""
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    "text",
    [
        "日本語のテキスト、漢字とかな。",
        "Ελληνικά και Кириллица",
        "שלום עולם مرحبا",
        "👩‍👩‍👧‍👦 🏳️‍🌈 é",
        "हिन्दी में कुछ शब्द",
    ],
)
def test_any_script_comes_back_whole_and_streamed(client: OpenAI, text: str) -> None:
    """An echoed prompt and its continuation are the same streamed and whole, in any script."""
    whole = client.completions.create(model=MODEL, prompt=text, echo=True, max_tokens=12, temperature=0)
    stream = client.completions.create(
        model=MODEL, prompt=text, echo=True, max_tokens=12, temperature=0, stream=True
    )
    streamed = "".join(chunk.choices[0].text for chunk in stream)
    assert whole.choices[0].text.startswith(text)
    assert streamed == whole.choices[0].text


@pytest.mark.parametrize("stop", ["Paris", " is Paris", "capital of", ["zzz", "France is"]])
def test_stop_strings_end_an_answer_before_themselves(client: OpenAI, stop: str | list[str]) -> None:
    """Streamed and whole, an answer ends right before the first stop string, however it falls on tokens."""
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    free = client.chat.completions.create(**asked).choices[0].message.content or ""
    stops = [stop] if isinstance(stop, str) else stop
    expected = free[: min(i for s in stops if (i := free.find(s)) >= 0)]
    whole = client.chat.completions.create(**asked, stop=stop, logprobs=True)
    streamed = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
    assert whole.usage is not None
    assert whole.choices[0].logprobs is not None
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content or [])


def test_logprobs_echo_scores_a_prompt(client: OpenAI) -> None:
    """Echo with `max_tokens` 0 gives the prompt's own log-probabilities, the first token's being null."""
    scored = client.completions.create(
        model=MODEL, prompt="The capital of France is Paris", echo=True, max_tokens=0, logprobs=1
    )
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == scored.choices[0].text == "The capital of France is Paris"
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_a_seed_repeats_and_choices_differ(client: OpenAI) -> None:
    """The same seed gives the same choices; choices of one request differ from one another."""

    def ask(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=1, seed=seed, n=3
        )
        return [choice.text for choice in answer.choices]

    first = ask(11)
    assert len(set(first)) == 3
    assert ask(11) == first
    assert ask(12) != first


def test_the_async_client_in_parallel(server: ServerProcess) -> None:
    """Sixteen concurrent streams each end in order, and equal what one alone says."""

    async def ask(client: AsyncOpenAI, results: list[str]) -> None:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, stream=True
        )
        results.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))

    async def main() -> list[str]:
        results: list[str] = []
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            await ask(client, results)
            async with anyio.create_task_group() as group:
                for _ in range(16):
                    group.start_soon(ask, client, results)
        return results

    results = anyio.run(main)
    assert len(results) == 17
    assert len(set(results)) == 1


def test_the_client_raises_its_own_errors(client: OpenAI) -> None:
    """The OpenAI client sees its error classes, with code and param."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="8192") as long:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as hot:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=3)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="49151") as bias:
        client.chat.completions.create(model=MODEL, messages=QUESTION, logit_bias={"50000": 1})
    assert bias.value.param == "logit_bias"


def test_models_and_health(server: ServerProcess, client: OpenAI) -> None:
    """The model is listed with its context length; health and readiness say so."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra["max_model_len"] == 8192  # type: ignore[index]  # ours
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


def test_the_log_names_the_op_set(server: ServerProcess) -> None:
    """What a start prints says for which processor the kernels are, and on how many threads they run."""
    assert f"Computing with the op set cpu-{host_form().name} on 1 thread." in server.log.read_text()


def test_curl_gets_a_stream(server: ServerProcess) -> None:
    """curl sees server-sent events that end with [DONE]."""
    body = json.dumps({"model": MODEL, "messages": QUESTION, "max_tokens": 4, "stream": True})
    done = subprocess.run(
        [
            "curl",
            "-sN",
            f"{server.url}/v1/chat/completions",
            "-H",
            "content-type: application/json",
            "-d",
            body,
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    events = [line for line in done.stdout.splitlines() if line]
    assert all(event.startswith(("data: ", ": ")) for event in events)
    assert events[-1] == "data: [DONE]"


def test_a_deadline_ends_a_request(server: ServerProcess) -> None:
    """A request that cannot be done within its deadline gets an error that says so."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
    late = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"x-surefoot-deadline-ms": "200"}, timeout=60
    )
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"


def test_disconnects_leave_nothing_behind(server: ServerProcess) -> None:
    """After 300 clients that went away at random moments no block is in use and nothing runs or waits."""
    rng = random.Random(0)

    async def leave(client: httpx.AsyncClient, patience_s: float, stream: bool) -> None:
        body = {
            "model": MODEL,
            "prompt": "Once upon a time",
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": stream,
        }
        with anyio.move_on_after(patience_s):
            async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    pass

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=None) as client,
            anyio.create_task_group() as group,
        ):
            for _ in range(300):
                group.start_soon(leave, client, rng.uniform(0.0, 3.0), rng.random() < 0.5)

    async def settled() -> None:
        names = ("surefoot_cache_blocks_used", "vllm:num_requests_running", "vllm:num_requests_waiting")
        while any([await anyio.to_thread.run_sync(server.metric, name) for name in names]):  # noqa: ASYNC110 - over HTTP there is no event
            await anyio.sleep(0.05)

    async def main() -> None:
        await storm()
        with anyio.fail_after(60):
            await settled()

    anyio.run(main)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert server.metric("surefoot_engine_restarts_total") == 0


def test_prompts_and_answers_are_not_logged(server: ServerProcess, client: OpenAI) -> None:
    """Each request leaves one event, with its counts and times, and nothing of its text."""
    raw = client.completions.with_raw_response.create(
        model=MODEL,
        prompt="xylophone zeppelin",
        max_tokens=3,
        temperature=0,
        extra_headers={"x-request-id": "logged-1"},
    )
    assert raw.headers["x-request-id"] == "logged-1"
    while '"logged-1"' not in (text := server.log.read_text()):  # it is written once the answer is out
        time.sleep(0.01)
    events = [json.loads(line) for line in text.splitlines() if '"logged-1"' in line]
    assert [event["event"] for event in events] == ["request.finished"]
    assert events[0]["output_tokens"] == 3
    assert {"ttft_s", "tpot_s", "queue_s", "finish_reason", "tenant"} <= events[0].keys()
    assert "xylophone" not in text
    assert "zeppelin" not in text


def begin_stream(url: str, max_tokens: int) -> tuple[threading.Thread, threading.Event, list[str]]:
    """A stream in a thread; the event is set at its first text, the list gets its data lines."""
    began, lines = threading.Event(), []

    def read() -> None:
        body = {
            "model": MODEL,
            "prompt": "Once",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        lines.append(line)
                        began.set()
        except httpx.HTTPError as error:
            lines.append(type(error).__name__)

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(60)
    return thread, began, lines


def test_sigterm_lets_a_running_stream_end(cache_dir: Path, tmp_path: Path) -> None:
    """SIGTERM drains: the running stream comes to its end, then the process exits with 0."""
    with ServerProcess(cache_dir, "--drain-s=60", log=tmp_path / "log") as server:
        thread, _, lines = begin_stream(server.url, max_tokens=30)
        server.signal(signal.SIGTERM)
        thread.join(60)
        assert lines[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0


def test_sigterm_ends_a_stream_that_takes_too_long(cache_dir: Path, tmp_path: Path) -> None:
    """After the drain limit a stream gets an error event, and the process ends."""
    with ServerProcess(cache_dir, "--drain-s=0.2", log=tmp_path / "log") as server:
        thread, _, lines = begin_stream(server.url, max_tokens=8000)
        server.signal(signal.SIGTERM)
        thread.join(60)
        assert "shutting down" in lines[-1]
        assert server.process.wait(60) == 0


def test_sigterm_while_the_model_is_loaded_is_an_end_as_asked(cache_dir: Path, tmp_path: Path) -> None:
    """Whoever stops a server that is not ready yet gets status 0, and no abort by a thread that was left."""
    server = ServerProcess(cache_dir, log=tmp_path / "log")
    with server.log.open("w") as out:
        process = subprocess.Popen(server._command, stderr=out, stdout=out)
    while "Loading the weights" not in server.log.read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, server.log.read_text()
    assert "server.stopped" in server.log.read_text()


def test_a_second_sigint_leaves_at_once(cache_dir: Path, tmp_path: Path) -> None:
    """SIGINT drains like SIGTERM; another one does not wait for the drain."""
    with ServerProcess(cache_dir, "--drain-s=600", log=tmp_path / "log") as server:
        thread, _, _ = begin_stream(server.url, max_tokens=8000)
        server.signal(signal.SIGINT)
        while "server.stopping" not in server.log.read_text():
            assert server.process.poll() is None
        server.signal(signal.SIGINT)
        assert server.process.wait(60) == 130
        thread.join(60)


def test_another_address_without_keys_is_refused(cache_dir: Path) -> None:
    """Binding 0.0.0.0 without tenant keys ends with status 2 and says what to do."""
    command = ["surefoot", "serve", "--host=0.0.0.0", "--port=0", f"--cache-dir={cache_dir}"]
    command[0] = ServerProcess(cache_dir, log=cache_dir)._command[0]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "surefoot key new" in done.stderr
