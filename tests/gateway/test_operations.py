"""What an operator sees: health, metrics, logs, and how the process ends."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from litestar.testing import TestClient
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from surefoot.backends.errors import DeadlineExceeded, EngineFailed, Overloaded
from surefoot.backends.fake import FakeBackend, Script
from surefoot.backends.types import BackendState, BackendStatus, Chunk, FinishReason, PromptEcho
from surefoot.gateway.app import create_app
from surefoot.gateway.http_settings import HttpSettings
from surefoot.gateway.logs import configure_logs
from surefoot.gateway.metrics import TOKEN_BUCKETS, Gaps, Metrics
from surefoot.gateway.sla import Classes, SlaClass
from surefoot.gateway.tenants import Tenant, TenantClasses, TenantLimits, Tenants, new_key
from surefoot.policies.baseline import BaselinePolicy

from .harness import Serve, bearer, client_of, hashes

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "my secret question"}]}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a scrape, by name and labels."""
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


@pytest.mark.anyio
async def test_live_while_loading() -> None:
    """While a backend loads the server is live, not ready, says why, and refuses requests with a 503."""
    gate = asyncio.Event()
    backend = FakeBackend(start_gate=gate)
    app = create_app([backend], Tenants(), BaselinePolicy())
    transport = httpx.ASGITransport(app=app)
    async with app.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/health/live")).status_code == 200
        waiting = await client.get("/health/ready")
        assert (waiting.status_code, waiting.json()["reason"]) == (503, "the fake backend was not started")
        assert (await client.get("/health")).json() == waiting.json()
        assert waiting.headers["retry-after"]
        assert (await client.post(CHAT, json=BODY)).json()["error"]["code"] == "not_ready"
        gate.set()
        await app.state.lifecycle.started.wait()
        assert (await client.get("/health/ready")).json() == {"status": "ready"}
        stopping = asyncio.create_task(app.state.lifecycle.stop(1))
        await asyncio.sleep(0)
        assert (await client.get("/health/ready")).json()["reason"] == "the server is shutting down"
        await stopping


def test_metrics_after_requests(http: TestClient, backend: FakeBackend) -> None:
    """Requests are counted under vLLM's names, with its label, and ours."""
    http.post(CHAT, json=BODY)
    backend.script = Script(num_cached_tokens=2)
    http.post(CHAT, json=BODY | {"n": 2, "max_tokens": 3, "stream": True})
    backend.script = Script(error=EngineFailed("Down."), error_at=1)
    http.post(CHAT, json=BODY)
    http.post(CHAT, json=BODY | {"temperature": 9})
    http.post(CHAT, json=BODY | {"max_tokens": 4000})
    http.post(CHAT, json=BODY | {"model": "invented"})
    http.request("FROB", "/invented")
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    seen = samples(response.text)

    def value(name: str, **labels: str) -> float:
        return seen[name, frozenset(labels.items())]

    model = {"model_name": "fake"}
    assert value("vllm:prompt_tokens_total", **model) == 9
    assert value("vllm:generation_tokens_total", **model) == 11
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value(gauge, **model) == 0
    assert value("vllm:num_preemptions_total", **model) == 0
    assert value("vllm:prefix_cache_queries_total", **model) == 9
    assert value("vllm:prefix_cache_hits_total", **model) == 2
    for histogram in (
        "vllm:time_to_first_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
    ):
        assert value(histogram + "_count", **model) == 2
    for histogram, tokens in (("vllm:request_prompt_tokens", 9), ("vllm:request_generation_tokens", 11)):
        assert value(histogram + "_count", **model) == 3
        assert value(histogram + "_sum", **model) == tokens
    assert value("vllm:e2e_request_latency_seconds_count", **model) == 3
    assert value("vllm:inter_token_latency_seconds_count", **model) == 3 + 2 * 2
    for reason, count in (("stop", 1), ("length", 2), ("error", 1)):
        assert value("vllm:request_success_total", finished_reason=reason, **model) == count
    chat = {"tenant": "local", "route": CHAT, "method": "POST"}
    for status, count in (("200", 2), ("503", 1), ("400", 2), ("404", 1)):
        assert value("surefoot_requests_total", status=status, **chat) == count
    assert value("surefoot_requests_total", tenant="", route="unknown", method="unknown", status="404") == 1
    assert value("surefoot_backend_ready", **model) == 1
    assert value("surefoot_cache_blocks", **model) == 100
    assert value("surefoot_cache_blocks_free", **model) == 100
    assert value("surefoot_cache_blocks_cached", **model) == 0
    assert value("surefoot_prefix_cache_evictions_total", **model) == 0
    assert value("surefoot_engine_restarts_total", **model) == 0
    assert value("surefoot_event_loop_cpu_seconds_total") > 0
    assert not any("invented" in str(labels) for _, labels in seen)


def test_metrics_of_promises(backend: FakeBackend) -> None:
    """Waits, paces, kept promises, refusals, preemptions and hits are counted by tenant and class."""
    classes = Classes(
        {
            "kept": SlaClass(priority=1, ttft_target_s=600, tpot_target_s=600),
            "late": SlaClass(priority=1, ttft_target_s=1e-9),
            "slow": SlaClass(priority=1, tpot_target_s=1e-9),
        }
    )
    tenants = [
        Tenant(id=name, key_hashes=hashes(name), classes=TenantClasses(default=name), limits=limits)
        for name, limits in {
            "kept": TenantLimits(requests_per_minute=3),
            "late": TenantLimits(),
            "slow": TenantLimits(),
            "batch": TenantLimits(),
        }.items()
    ]
    backend.script = Script(num_preemptions=2, num_cached_tokens=1)
    with client_of(*tenants, backend=backend, settings=HttpSettings(classes=classes)) as client:
        for name in ("kept", "kept", "late", "slow", "batch"):
            client.post(CHAT, json=BODY, headers=bearer(name))
        backend.script = Script(error=EngineFailed("Down."), error_at=1)
        client.post(CHAT, json=BODY, headers=bearer("kept"))
        client.post(CHAT, json=BODY, headers=bearer("kept"))
        backend.script = Script(error_at_start=Overloaded("Full.", reason="seconds"))
        client.post(CHAT, json=BODY, headers=bearer("batch"))
        backend.status = BackendStatus(BackendState.FAILED, "broken")
        client.post(CHAT, json=BODY, headers=bearer("batch"))
        seen = samples(client.get("/metrics").text)

    def value(name: str, tenant: str, **labels: str) -> float | None:
        return seen.get((name, frozenset({"tenant": tenant, "class": tenant, **labels}.items())))

    promised, kept = "surefoot_requests_with_target_total", "surefoot_requests_within_target_total"
    # Two were kept; a request that failed was not.
    assert (value(promised, "kept"), value(kept, "kept")) == (3, 2)
    assert (value(promised, "late"), value(kept, "late")) == (1, 0)
    assert (value(promised, "slow"), value(kept, "slow")) == (1, 0)
    assert (value(promised, "batch"), value(kept, "batch")) == (None, None)
    for metric in ("queue_time", "time_to_first_token", "time_per_output_token"):
        assert value(f"surefoot_{metric}_seconds_count", "kept") == 2
        assert value(f"surefoot_{metric}_seconds_count", "batch") == 1
    assert value("surefoot_preemptions_total", "kept") == 4
    # Of the request that failed nobody knows what was cached.
    assert value("surefoot_prompt_tokens_total", "kept") == 2 * 3
    assert value("surefoot_cached_tokens_total", "kept") == 2
    refusals = "surefoot_refusals_total"
    assert value(refusals, "kept", reason="requests_per_minute") == 1
    assert value(refusals, "batch", reason="seconds") == 1
    assert value(refusals, "batch", reason="not_ready") == 1


def test_the_bare_end_of_a_choice_is_no_gap() -> None:
    """Time between tokens ends with the last token, not with the chunk that says why it was the last."""
    metrics = Metrics([])
    gaps = metrics.gap_meter("fake")
    for event in (
        PromptEcho(0, "a", (1,), None),
        Chunk(0, "a", (1,)),
        Chunk(0, "b", (2,)),
        Chunk(0, "", (), None, FinishReason.STOP),
    ):
        gaps.observe(0, event)
    seen = samples(metrics.render().decode())
    assert seen["vllm:inter_token_latency_seconds_count", frozenset({("model_name", "fake")})] == 1


def test_gaps_are_counted_as_prometheus_counts() -> None:
    """The buckets and the sum are those of a histogram of prometheus_client, on bounds and between them."""
    gaps, registry = Gaps(), CollectorRegistry()
    theirs = Histogram("gap", "", buckets=TOKEN_BUCKETS, registry=registry)
    for seconds in (0.0, 0.002, 0.0021, 0.4, 40.0, 41.0):
        gaps.observe(seconds)
        theirs.observe(seconds)
    seen = samples(generate_latest(registry).decode())
    assert gaps.sum_s == seen["gap_sum", frozenset()]
    for bound, count in gaps.buckets():
        assert seen["gap_bucket", frozenset({("le", bound)})] == count


def test_deadlines_are_counted_as_such(http: TestClient, backend: FakeBackend) -> None:
    """A request whose deadline passed while it ran is told apart from one that failed."""
    backend.script = Script(error=DeadlineExceeded("Too late."), error_at=1)
    http.post(CHAT, json=BODY)
    labels = frozenset({("model_name", "fake"), ("finished_reason", "deadline")})
    assert samples(http.get("/metrics").text)["vllm:request_success_total", labels] == 1


def test_docs_list_every_metric_and_key(http: TestClient) -> None:
    """docs/operations.md names each metric of a scrape, and each key of a request's event."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    with capture_logs() as logs:
        http.post(CHAT, json=BODY)
    families = {
        each.name.removesuffix("_created")
        for each in text_string_to_metric_families(http.get("/metrics").text)
    }
    assert {name for name in families if f"`{name}`" not in text and f"`{name}_total`" not in text} == set()
    assert [key for key in logs[-1] if f"`{key}`" not in text and key != "log_level"] == []


@pytest.mark.anyio
async def test_lag_of_the_event_loop_is_measured(serve: Serve) -> None:
    """A loop that is held up for 0.3 s shows in the histogram."""
    async with serve() as gateway:
        time.sleep(0.3)  # noqa: ASYNC251 (this is the lag)
        await asyncio.sleep(0.06)
        seen = samples((await gateway.client.get("/metrics")).text)
    assert seen["surefoot_event_loop_lag_seconds_sum", frozenset()] > 0.2


def test_two_servers_do_not_share_metrics() -> None:
    """Each application counts for itself."""
    for _ in range(2):
        with TestClient(create_app([FakeBackend()], Tenants(), BaselinePolicy())) as client:
            client.get("/v1/models")
            lines = client.get("/metrics").text.splitlines()
            (line,) = [line for line in lines if line.startswith("surefoot_requests_total")]
            assert line.endswith(" 1.0")


def test_a_path_cannot_forge_a_log_line(http: TestClient) -> None:
    """A line break in a path is logged in its quoted form."""
    with capture_logs() as logs:
        http.get("/nope%0A2026-01-01 [info] forged")
    assert logs[-1]["path"] == "/nope%0A2026-01-01%20%5Binfo%5D%20forged"


def test_one_event_per_request() -> None:
    """A request's end is one event with ids, counts and times."""
    key, key_hash = new_key()
    tenants = Tenants([Tenant(id="acme", key_hashes=(key_hash,))])
    headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
    with TestClient(create_app([FakeBackend()], tenants, BaselinePolicy())) as client:
        assert client.get("/health/ready").status_code == 200
        with capture_logs() as logs:
            client.post(CHAT, json=BODY | {"stream": True}, headers=headers)
    planned, event = logs
    assert (planned["event"], planned["log_level"], planned["plan"]) == (
        "request.planned",
        "debug",
        "baseline",
    )
    times = {name: event.pop(name) for name in ("queue_s", "ttft_s", "tpot_s", "total_s")}
    assert all(0 <= value <= times["total_s"] for value in times.values())
    assert event.pop("completion_id").startswith("chatcmpl-")
    assert event == {
        "event": "request.finished",
        "log_level": "info",
        "request_id": "mine",
        "tenant": "acme",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "model": "fake",
        "stream": True,
        "plan": "baseline",
        "plan_reason": "the policy is baseline, whatever is observed",
        "prompt_tokens": 3,
        "output_tokens": 4,
        "cached_tokens": 0,
        "class": "standard",
        "tier": "default",
        "preemptions": 0,
        "within_target": True,
        "finish_reason": "stop",
    }


def test_the_version_is_told(http: TestClient) -> None:
    """`/version` has the installed version, in the shape that vLLM gives it."""
    assert http.get("/version").json() == {"version": version("surefoot")}


def test_probes_are_quiet(http: TestClient, backend: FakeBackend) -> None:
    """Health checks and scrapes are logged at debug level, "not ready" too; wrong paths are not."""
    with capture_logs() as logs:
        http.get("/health/live")
        http.get("/metrics")
        backend.status = BackendStatus(BackendState.FAILED, "broken")
        assert http.head("/health/ready").status_code == 503
        http.get("/health/nope")
    assert [each["log_level"] for each in logs] == ["debug", "debug", "debug", "info"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path",
    ["/health", "/health/live", "/health/ready", "/metrics", "/version", "/v1/models", "/v1/models/fake"],
)
async def test_head_is_get_without_a_body(serve: Serve, path: str) -> None:
    """What can be read can be asked for by HEAD."""
    async with serve() as gateway:
        head, whole = [await gateway.client.request(method, path) for method in ("HEAD", "GET")]
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.headers["x-request-id"]


async def exchange(url: str, *pieces: bytes) -> bytes:
    """Send the pieces, for as long as the server listens; gives all that it answers until it hangs up."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = asyncio.create_task(reader.read())
    with suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    async with asyncio.timeout(60):
        await asyncio.wait([answer])
    writer.close()
    return b"" if answer.exception() else answer.result()


START = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
HEADS = [
    [START + b"a: " + b"x" * 70_000 + b"\r\n\r\n"],
    [START, *[b"a: " + b"x" * 1000 + b"\r\n"] * 100, b"\r\n"],
]


@pytest.mark.anyio
@pytest.mark.parametrize("pieces", HEADS, ids=["one header", "many headers"])
async def test_a_head_that_is_too_large(serve: Serve, pieces: list[bytes]) -> None:
    """More than 64 KiB of headers is a 431, as soon as they are there; a little less is served."""
    async with serve() as gateway:
        answer = await exchange(gateway.url, *pieces)
        assert answer.startswith(b"HTTP/1.1 431 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "headers_too_large"
        assert "65536" in error["message"]
        fits = await exchange(gateway.url, START, b"a: ", *[b"x" * 10_000] * 6, b"\r\n\r\n")
        assert fits.startswith(b"HTTP/1.1 200 ")


@pytest.mark.anyio
async def test_a_head_without_end_is_cut_off(serve: Serve) -> None:
    """The server hangs up on a header that goes on and on, and does not wait for its end."""
    async with serve() as gateway:
        answer = await exchange(gateway.url, START, b"a: ", *[b"x" * 100_000] * 20)
    # What was still on its way may make the operating system drop the answer.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.anyio
async def test_what_is_no_http_is_answered_in_openais_shape(serve: Serve) -> None:
    """A request that the parser refuses gets a 400 before the application sees it, and no request id."""
    async with serve() as gateway:
        answer = await exchange(gateway.url, b"G@T / HTTP/1.1\r\nhost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"x-request-id" not in head
    assert json.loads(body)["error"]["code"] == "invalid_request"


@pytest.mark.anyio
async def test_websockets_are_not_advertised(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """A client that asks for a WebSocket gets a plain answer, and no log line recommends a library."""
    upgrade = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    async with serve() as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(upgrade)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert "install" not in caplog.text


@pytest.mark.usefixtures("restored_logs")
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_prompts_and_keys_are_never_logged(log_format: Any) -> None:
    """Whatever goes wrong, no log line has a word of a prompt, of an answer, or of a key."""
    out = io.StringIO()
    configure_logs(log_format, "debug", out)
    key, key_hash = new_key()
    tenants = Tenants([Tenant(id="acme", key_hashes=(key_hash,))])
    backend = FakeBackend()
    scripts = [
        Script(),
        Script(error_at_start=ValueError("my secret question")),
        Script(error=ValueError("my secret question"), error_at=2),
        Script(error=EngineFailed("Down."), error_at=2),
    ]
    with TestClient(
        create_app([backend], tenants, BaselinePolicy()), raise_server_exceptions=False
    ) as client:
        for script in scripts:
            backend.script = script
            for fields in ({}, {"stream": True}, {"temperature": 9}, {"my secret question": 1}):
                client.post(CHAT, json=BODY | fields, headers={"authorization": f"Bearer {key}"})
        client.post(CHAT, json=BODY, headers={"authorization": "Bearer sf-my-wrong-key"})
        client.post(
            CHAT, content=b'{"messages": "my secret question', headers={"authorization": f"Bearer {key}"}
        )
    logged = out.getvalue()
    assert logged.count("request.finished") == 18
    assert "request.crashed" in logged
    assert "ValueError" in logged
    for secret in ("secret", "world", key, key_hash, "sf-"):
        assert secret not in logged


@pytest.mark.usefixtures("restored_logs")
def test_json_lines() -> None:
    """Each line is one JSON object with time, level and event, a library's warning as well."""
    out = io.StringIO()
    configure_logs("auto", "info", out)
    structlog.get_logger().info("thing.happened", size=3)
    structlog.get_logger().debug("thing.ignored")
    logging.getLogger("uvicorn.error").warning("Odd: %s", "x")
    logging.getLogger("uvicorn.error").info("Noise")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["event"], first["level"], first["size"]) == ("thing.happened", "info", 3)
    assert (second["event"], second["level"]) == ("Odd: x", "warning")
    assert first["timestamp"].endswith("Z")


@contextmanager
def server_process(**options: Any) -> Iterator[subprocess.Popen[str]]:
    """The program `fake_server.py`, ended at the latest with the block."""
    program = Path(__file__).with_name("fake_server.py")
    with subprocess.Popen(
        [sys.executable, "-P", str(program), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    """The line that the program prints when it serves."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def begin_stream(client: httpx.Client, url: str) -> httpx.Response:
    """Start a stream and read its first event."""
    response = client.send(
        client.build_request("POST", url + CHAT, json=BODY | {"stream": True}), stream=True
    )
    assert response.status_code == 200
    return response


def test_sigterm_lets_running_requests_end_within_the_limit() -> None:
    """After SIGTERM a stuck stream gets an error event when the drain is over; the exit status is 0."""
    with server_process(gated=True, drain_s=0.5) as process, httpx.Client(timeout=60) as client:
        response = begin_stream(client, url_of(process))
        begun = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        text = response.read().decode()
        assert time.perf_counter() - begun > 0.4
        assert '"code":"not_ready"' in text
        assert "[DONE]" not in text
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(number: signal.Signals) -> None:
    """Without requests there is nothing to wait for."""
    with server_process(drain_s=600) as process:
        assert url_of(process)
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


def test_a_second_sigint_leaves_at_once() -> None:
    """Ctrl-C twice does not wait for the stuck stream."""
    with (
        server_process(gated=True, drain_s=600) as process,
        httpx.Client(timeout=60) as client,
        closing(begin_stream(client, url_of(process))),
    ):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("server.stopping" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


def test_a_backend_that_cannot_start_ends_the_server() -> None:
    """The process exits with 1 and logs why, without ever saying that it serves."""
    with server_process(fails=True) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "no such weights" in err


def test_an_address_in_use_ends_the_server() -> None:
    """The process exits with 1 and logs the address that it could not have."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with server_process(port=port) as process:
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert str(port) in err
