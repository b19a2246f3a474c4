"""Limits of a tenant per minute: counted right, said in headers, and obeyed by OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.backends.errors import EngineFailed, NotReady, Overloaded
from surefoot.backends.fake import FakeBackend, Script
from surefoot.gateway.clock import FakeClock
from surefoot.gateway.errors import to_http
from surefoot.gateway.rate_limits import Bucket, duration_text
from surefoot.gateway.tenants import Tenant, TenantLimits, Tenants

from .harness import Gateway, Serve, bearer, client_of, hashes

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "one two"}]}
OURS = bearer("k")


def tenant(**limits: int) -> Tenant:
    """A tenant with limits, whose key is `k`."""
    return Tenant(id="acme", key_hashes=hashes("k"), limits=TenantLimits(**limits))


def left(response: Any, what: str = "tokens") -> int:
    """What a response says is left of a limit."""
    return int(response.headers[f"x-ratelimit-remaining-{what}"])


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 20)), min_size=1, max_size=60),
)
def test_a_bucket_gives_no_more_than_its_limit(limit: int, steps: list[tuple[float, int]]) -> None:
    """In t seconds a bucket gives at most a minute's worth and what t seconds refill."""
    clock, given_at = FakeClock(), []
    bucket = Bucket(clock)
    for pause_s, amount in steps:
        clock.advance(pause_s)
        if amount <= limit and not bucket.wait_s(amount, limit):
            bucket.take(amount, limit)
            given_at.append((clock.monotonic(), amount))
    for i, (begin_s, _) in enumerate(given_at):
        total = 0
        for end_s, amount in given_at[i:]:
            total += amount
            assert total <= limit * (1 + (end_s - begin_s) / 60) + 1e-3


@given(st.integers(1, 1000), st.integers(0, 5000), st.integers(1, 2000))
def test_a_wait_that_was_told_is_enough(limit: int, used: int, amount: int) -> None:
    """After the seconds that a bucket tells there is room, and not a hundredth of them before."""
    clock = FakeClock(1e6)
    bucket = Bucket(clock)
    bucket.take(used, limit)
    if wait_s := bucket.wait_s(amount, limit):
        clock.advance(wait_s * 0.99)
        assert bucket.wait_s(amount, limit) > 0
        clock.advance(wait_s * 0.01)
    assert bucket.wait_s(amount, limit) == 0


def test_nothing_is_carried_over() -> None:
    """A tenant that was idle for an hour has a minute's worth, and no more."""
    clock = FakeClock()
    with client_of(tenant(requests_per_minute=3), clock=clock) as client:
        clock.advance(3600)
        statuses = [client.post(CHAT, json=BODY, headers=OURS).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]


def test_requests_per_minute() -> None:
    """One request too many is a 429 that says when to come back; refused ones do not count."""
    clock, backend = FakeClock(), FakeBackend()
    with client_of(tenant(requests_per_minute=2), clock=clock, backend=backend) as client:
        first = client.post(CHAT, json=BODY, headers=OURS)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert (left(first, "requests"), first.headers["x-ratelimit-reset-requests"]) == (1, "30s")
        assert left(client.post(CHAT, json=BODY, headers=OURS), "requests") == 0
        for _ in range(3):
            refused = client.post(CHAT, json=BODY, headers=OURS)
            error = refused.json()["error"]
            assert (refused.status_code, error["type"], error["code"]) == (
                429,
                "rate_limit_error",
                "rate_limit_exceeded",
            )
            assert "limit of 2 requests per minute" in error["message"]
            assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("30", "30000")
            assert refused.headers["x-should-retry"] == "true"
            assert (left(refused, "requests"), refused.headers["x-ratelimit-reset-requests"]) == (0, "1m0s")
        clock.advance(30)
        assert client.post(CHAT, json=BODY, headers=OURS).status_code == 200
        assert client.post(CHAT, json=BODY, headers=OURS).status_code == 429
    assert len(backend.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_streamed_and_whole_answers_count_alike(stream: bool, num_choices: int) -> None:
    """Each costs the tokens of its prompt and of all its choices, and no estimate remains."""
    with client_of(tenant(tokens_per_minute=1000), clock=FakeClock()) as client:
        for i in range(3):
            answer = client.post(CHAT, json=BODY | {"stream": stream, "n": num_choices}, headers=OURS)
            assert answer.status_code == 200
            after = client.get("/v1/models", headers=OURS)
            # The fake backend has two tokens of prompt, and four of each choice's answer.
            assert left(after) == 1000 - (i + 1) * (2 + 4 * num_choices)


def test_an_estimate_is_held_while_a_request_runs() -> None:
    """What is left when a stream begins is less by about the prompt; at its end by what it really was."""
    body = {"model": "fake", "prompt": "x" * 400, "stream": True}
    with client_of(tenant(tokens_per_minute=1000), clock=FakeClock()) as client:
        assert left(client.post("/v1/completions", json=body, headers=OURS)) == 900
        assert left(client.get("/v1/models", headers=OURS)) == 1000 - 1 - 4


def test_headers_are_on_errors_too() -> None:
    """A wrong request is told what is left, and costs nothing; a stranger is told nothing."""
    limits = tenant(requests_per_minute=10, tokens_per_minute=500)
    with client_of(limits, clock=FakeClock()) as client:
        for body, status in (({}, 400), (BODY | {"model": "gpt-9"}, 404), (BODY | {"n": 0}, 400)):
            response = client.post(CHAT, json=body, headers=OURS)
            assert response.status_code == status
            assert (left(response, "requests"), left(response)) == (10, 500)
            assert response.headers["x-ratelimit-reset-tokens"] == "0s"
        stranger = client.post(CHAT, json=BODY, headers=bearer("wrong"))
        assert stranger.status_code == 401
        assert not [name for name in stranger.headers if name.startswith("x-ratelimit")]


def test_without_limits_there_are_no_headers(http: Any) -> None:
    """A tenant without limits per minute is told of none."""
    response = http.post(CHAT, json=BODY)
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("error", [Overloaded("Full."), NotReady("Not now."), EngineFailed("Down.")])
def test_what_no_backend_took_costs_nothing(error: Exception) -> None:
    """A request that was refused for want of room, or by a fault of ours, is not one of the tenant's."""
    limits, backend = tenant(requests_per_minute=2, tokens_per_minute=100), FakeBackend()
    backend.script = Script(error_at_start=error)
    with client_of(limits, clock=FakeClock(), backend=backend) as client:
        for _ in range(4):
            response = client.post(CHAT, json=BODY, headers=OURS)
            assert response.json()["error"]["message"] == str(error)
            assert (left(response, "requests"), left(response)) == (2, 100)


def test_failed_answers_count_what_they_made() -> None:
    """An answer that fails after two tokens costs these and the prompt."""
    backend = FakeBackend(Script(error=EngineFailed("Down."), error_at=2))
    with client_of(tenant(tokens_per_minute=100), clock=FakeClock(), backend=backend) as client:
        assert left(client.post(CHAT, json=BODY, headers=OURS)) == 100 - 2 - 2


def test_an_overdrawn_bucket_refills_first() -> None:
    """An answer longer than the limit is not cut; the next request waits until the debt is paid."""
    clock, backend = FakeClock(), FakeBackend(Script(pieces=("x",) * 98))
    with client_of(tenant(tokens_per_minute=60), clock=clock, backend=backend) as client:
        assert client.post(CHAT, json=BODY, headers=OURS).status_code == 200
        refused = client.post(CHAT, json=BODY, headers=OURS)
        # 100 of 60 are used, the estimate is 2: 42 seconds at one token a second.
        assert (refused.status_code, refused.headers["retry-after-ms"], left(refused)) == (429, "42000", 0)
        assert "about 2 tokens, but 0 are left of your limit of 60" in refused.json()["error"]["message"]
        clock.advance(41.9)
        assert client.post(CHAT, json=BODY, headers=OURS).status_code == 429
        clock.advance(0.1)
        assert client.post(CHAT, json=BODY, headers=OURS).status_code == 200


def test_a_prompt_above_the_limit_takes_all_of_it() -> None:
    """An estimate is not certain, so a prompt above the limit is served when the whole limit is free."""
    clock = FakeClock()
    body = {"model": "fake", "prompt": [1] * 100}
    with client_of(tenant(tokens_per_minute=50), clock=clock) as client:
        assert client.post("/v1/completions", json=body, headers=OURS).status_code == 200
        assert client.post("/v1/completions", json=body, headers=OURS).status_code == 429
        clock.advance((100 + 4) * 60 / 50)
        assert client.post("/v1/completions", json=body, headers=OURS).status_code == 200


def test_tenants_have_limits_of_their_own() -> None:
    """What one tenant uses is not taken from another."""
    other = Tenant(id="b", key_hashes=hashes("b"), limits=TenantLimits(requests_per_minute=1))
    with client_of(tenant(requests_per_minute=1), other, clock=FakeClock()) as client:
        statuses = [client.post(CHAT, json=BODY, headers=bearer(key)).status_code for key in "kkbb"]
    assert statuses == [200, 429, 200, 429]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_requests_count_what_was_sent(serve: Serve, stream: bool) -> None:
    """A client that goes away after two tokens is charged for these and the prompt, whole or streamed."""
    held = Held()
    backend = FakeBackend(Script(gates={2: held}))
    tenants = Tenants([tenant(tokens_per_minute=100, max_concurrent_requests=1)])
    async with serve(backend, tenants, clock=FakeClock()) as gateway:
        asking = asyncio.create_task(gateway.client.post(CHAT, json=BODY | {"stream": stream}, headers=OURS))
        async with asyncio.timeout(60):
            await held.waiting.wait()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(60):
            await backend.idle()
        # The next answer comes after the end of the first, as only one may run.
        backend.script = Script()
        answer = await served(gateway)
    assert left(answer) == 100 - (2 + 2) - (2 + 4)


class Held(asyncio.Event):
    """A gate that never opens, and tells when something waits at it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()

    async def wait(self) -> Literal[True]:
        """Wait for ever."""
        self.waiting.set()
        return await super().wait()


async def served(gateway: Gateway) -> Any:
    """Ask until there is room for one more running request."""
    async with asyncio.timeout(60):
        while True:
            answer = await gateway.client.post(CHAT, json=BODY, headers=OURS)
            if answer.status_code != 429:
                return answer


@pytest.mark.anyio
async def test_the_openai_client_waits_as_told(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's client sleeps for the milliseconds that a 429 names, and is then served."""
    clock, slept = FakeClock(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    async with (
        serve(tenants=Tenants([tenant(requests_per_minute=40)]), clock=clock) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="k", max_retries=2) as api,
    ):
        monkeypatch.setattr(api, "_sleep_for_retry", sleep_for_retry(api, sleep))
        for _ in range(41):
            await api.chat.completions.create(model="fake", messages=BODY["messages"])
        assert gateway.server.server_state.total_requests == 42
    assert slept == [1.5]


def sleep_for_retry(api: openai.AsyncOpenAI, sleep: Any) -> Any:
    """The client's own reckoning of its wait, with another clock's sleep."""

    async def wait(*, retries_taken: int, max_retries: int, options: Any, response: Any) -> None:
        headers = response.headers if response is not None else None
        await sleep(api._calculate_retry_timeout(max_retries - retries_taken, options, headers))

    return wait


@pytest.mark.parametrize(
    ("after_s", "seconds", "ms"),
    [(0.0, "1", "1"), (0.0421, "1", "43"), (1.0, "1", "1000"), (1.001, "2", "1001"), (1e9, "60", "60000")],
)
def test_retry_headers(after_s: float, seconds: str, ms: str) -> None:
    """An overload is a 429 whose headers are rounded up and never ask for more than a minute."""
    error = to_http(Overloaded("Full.", retry_after_s=after_s))
    assert error.status == 429
    assert error.headers == {"retry-after": seconds, "retry-after-ms": ms, "x-should-retry": "true"}


@pytest.mark.parametrize("error", [NotReady("No."), EngineFailed("No.")])
def test_faults_of_ours_say_when_to_come_back(error: Exception) -> None:
    """A backend that is at fault gives a 503 with the same headers."""
    answer = to_http(error)
    assert (answer.status, answer.headers["retry-after-ms"]) == (503, "5000")
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (8.6401, "8.641s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3661.25, "1h1m1.25s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Durations have OpenAI's form, rounded up to a millisecond."""
    assert duration_text(seconds) == text
