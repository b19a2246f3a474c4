"""Drafts as clients and operators see them: fields, counts, metrics, and who may ask for what."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from litestar.testing import TestClient
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from surefoot.backends.fake import FakeBackend, Script
from surefoot.backends.types import DraftStats, SpeculationStats, SpeculationUsage
from surefoot.gateway.admin import AdminKey
from surefoot.gateway.app import create_app
from surefoot.gateway.tenants import Tenant, Tenants, hash_key, local_tenant
from surefoot.policies.bounds import SpeculationBounds
from surefoot.policies.registry import load_policies, serving_policy

from .harness import Serve, bearer, hashes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
PREDICTION = {"type": "content", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}
DRAFTS = SpeculationUsage(
    num_drafts=10,
    num_draft_tokens=30,
    num_accepted_tokens=12,
    num_predicted_tokens=20,
    num_accepted_predicted_tokens=9,
    accepted_at=(6, 4, 2),
)
SHAPE = {
    "mean_acceptance_length": 2.2,
    "draft_acceptance_rate": 0.4,
    "acceptance_histogram": [4, 2, 2, 2, 0],
    "num_spec_steps": 10,
    "num_accepted_draft_tokens": 12,
    "num_draft_tokens": 30,
    "num_spec_tokens": 4,
}


def app_of(backend: FakeBackend, tenants: Tenants) -> TestClient:
    """A gateway whose policies are the product's."""
    policy = serving_policy(load_policies([]))
    return TestClient(create_app([backend], tenants, policy, admin_key=AdminKey(hash_key("admin"))))


@pytest.fixture
def backend() -> FakeBackend:
    """Every answer had the drafts above."""
    return FakeBackend(Script(speculation=DRAFTS))


@pytest.fixture
def http(backend: FakeBackend) -> Any:
    """A client of three tenants: one whose requests may choose, one whose may not, one without drafts."""
    bounds = SpeculationBounds(max_draft=4, proposers=("prediction", "ngram"))
    free = SpeculationBounds(max_draft=4, proposers=("prediction", "ngram"), per_request=True)
    tenants = Tenants(
        [
            Tenant(id="free", key_hashes=hashes("free"), policy="fixed", speculation=free),
            Tenant(id="bound", key_hashes=hashes("bound"), policy="adaptive", speculation=bounds),
            Tenant(id="plain", key_hashes=hashes("plain")),
        ]
    )
    with app_of(backend, tenants) as client:
        assert client.get("/health/ready").status_code == 200
        yield client


def ask(http: TestClient, tenant: str = "free", path: str = CHAT, **fields: Any) -> Any:
    """A small request."""
    body = BODY if path == CHAT else {"model": "fake", "prompt": "Hi"}
    return http.post(path, json=body | fields, headers=bearer(tenant))


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chat"), (TEXT, "text")])
def test_a_prediction_reaches_the_backend(
    http: TestClient, backend: FakeBackend, path: str, kind: str
) -> None:
    """Its text, or that of its parts, arrives with the plan and the kind of traffic."""
    assert ask(http, path=path, prediction=PREDICTION).status_code == 200
    assert ask(http, path=path, prediction={"type": "content", "content": "x"}).status_code == 200
    assert ask(http, path=path, prediction=None).status_code == 200
    assert [each.prediction for each in backend.requests] == ["a b", "x", None]
    assert {(each.kind, each.flow, each.plan.name) for each in backend.requests} == {(kind, "free", "draft4")}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0]"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content"),
        ({"speculation": {"max_draft": 65}}, "speculation.max_draft"),
        ({"speculation": {"max_draft": -1}}, "speculation.max_draft"),
        ({"speculation": {"proposers": []}}, "speculation.proposers"),
        ({"return_metrics": 1}, "return_metrics"),
    ],
)
def test_wrong_values_are_named(http: TestClient, fields: dict[str, Any], param: str) -> None:
    """A prediction or a wish that cannot be read is refused by its place."""
    response = ask(http, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("wish", "plan"),
    [
        ({}, "draft4"),
        ({"enabled": None, "max_draft": None}, "draft4"),
        ({"enabled": True}, "draft4"),
        ({"max_draft": 64}, "draft4"),
        ({"max_draft": 2}, "draft2"),
        ({"max_draft": 0}, "baseline"),
        ({"enabled": False, "max_draft": 2}, "baseline"),
    ],
)
def test_a_request_lowers_its_own_plan(
    http: TestClient, backend: FakeBackend, wish: dict[str, Any], plan: str
) -> None:
    """Where the file allows it, `speculation` shortens drafts, and never lengthens them."""
    response = ask(http, speculation=wish)
    assert (response.headers["x-surefoot-plan"], backend.requests[-1].plan.name) == (plan, plan)


@pytest.mark.parametrize("tenant", ["bound", "plain"])
def test_a_wish_needs_the_files_leave(http: TestClient, tenant: str) -> None:
    """Without `per_request` the field is refused by name, and with the key that would allow it."""
    response = ask(http, tenant, speculation={"enabled": False})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
    assert (error["param"], "speculation.per_request" in error["message"]) == ("speculation", True)
    assert ask(http, tenant, speculation=None).status_code == 200


def test_metrics_have_vllms_shape(http: TestClient) -> None:
    """`return_metrics` gives how drafts fared; it is null without drafts in the plan and for n > 1."""
    assert ask(http, return_metrics=True).json()["metrics"]["speculative_decoding"] == SHAPE
    assert ask(http, path=TEXT, return_metrics=True).json()["metrics"]["speculative_decoding"] == (SHAPE)
    for answer in (ask(http, "plain", return_metrics=True), ask(http, n=2, return_metrics=True)):
        assert answer.json()["metrics"]["speculative_decoding"] is None
    assert "metrics" not in ask(http).json()


def test_metrics_of_nothing(http: TestClient, backend: FakeBackend) -> None:
    """A plan with drafts that drafted nothing reports zeros, not null."""
    backend.script = Script()
    told = ask(http, return_metrics=True).json()["metrics"]["speculative_decoding"]
    assert told == {
        **dict.fromkeys(SHAPE, 0),
        "mean_acceptance_length": 1.0,
        "acceptance_histogram": [0] * 5,
        "num_spec_tokens": 4,
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_ends_with_metrics(http: TestClient, path: str, usage: bool) -> None:
    """The last chunk has them, with the counts if those are wanted, and no other chunk has."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    text = ask(http, path=path, stream=True, return_metrics=True, **options).text
    *others, last, done = [line for line in text.splitlines() if line.startswith("data: ")]
    assert done == "data: [DONE]"
    assert not any('"metrics"' in line for line in others)
    assert ('"acceptance_histogram":[4,2,2,2,0]' in last, '"choices":[]' in last) == (True, True)
    assert ('"accepted_prediction_tokens":9' in last) == usage


@pytest.mark.anyio
async def test_the_openai_client(serve: Serve) -> None:
    """The official client sends a prediction, and reads what became of it, whole and streamed."""
    asked: dict[str, Any] = BODY | {"prediction": {"type": "content", "content": "x"}}
    async with (
        serve(FakeBackend(Script(speculation=DRAFTS))) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = await client.chat.completions.create(**asked, extra_body={"return_metrics": True})
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        usages = [chunk.usage async for chunk in stream]
        assert [each.prediction for each in gateway.backend.requests] == ["x", "x"]
    for usage in (whole.usage, usages[-1]):
        details = usage and usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (9, 11)
    assert whole.model_extra is not None
    assert whole.model_extra["metrics"]["speculative_decoding"] is None


def test_the_log_tells_of_drafts(http: TestClient, backend: FakeBackend) -> None:
    """A request's event has its drafts, of all prompts together; without any it has no word of them."""
    with capture_logs() as logs:
        ask(http)
        ask(http, path=TEXT, prompt=["a", "b"])
        backend.script = Script()
        ask(http)
    one, two, none = [each for each in logs if each["event"] == "request.finished"]
    keys = ("drafts", "draft_tokens", "accepted_tokens", "mean_acceptance_length")
    assert [one[key] for key in keys] == [10, 30, 12, 2.2]
    assert [two[key] for key in keys] == [20, 60, 24, 2.2]
    assert not set(keys) & none.keys()


def test_learnt_acceptance_reaches_the_policy(http: TestClient, backend: FakeBackend) -> None:
    """`adaptive` drafts as far as this tenant's traffic of this kind has paid; of others it knows nothing."""
    backend.speculation = SpeculationStats(acceptance={"bound": {"chat": 0.4}, "free": {"text": 0.1}})
    assert ask(http, "bound").headers["x-surefoot-plan"] == "draft2"
    assert ask(http, "bound", TEXT).headers["x-surefoot-plan"] == "draft4"


def test_a_plan_is_no_more_than_the_server_drafts(http: TestClient, backend: FakeBackend) -> None:
    """The header, the fingerprint's plan and `num_spec_tokens` are of drafts as the backend makes them."""
    backend.speculation = SpeculationStats(max_draft=3, proposers=("ngram",))
    answer = ask(http, return_metrics=True)
    assert answer.headers["x-surefoot-plan"] == backend.requests[-1].plan.name == "draft3"
    assert answer.json()["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    assert backend.requests[-1].plan.speculation.proposers == ("ngram",)
    backend.speculation = SpeculationStats(max_draft=3, proposers=("suffix",))
    assert ask(http).headers["x-surefoot-plan"] == "baseline"


def test_metrics_by_position_tenant_and_length(http: TestClient, backend: FakeBackend) -> None:
    """vLLM's counters are of all, by position; ours are by tenant and proposer, lengths as a histogram."""
    backend.speculation = SpeculationStats(
        drafts=(
            DraftStats(
                flow="free",
                proposer="ngram",
                num_drafts=5,
                num_draft_tokens=12,
                num_accepted_tokens=4,
                drafted_at=(5, 4, 3),
                accepted_at=(3, 1, 0),
            ),
            DraftStats(
                flow="bound",
                proposer="suffix",
                num_drafts=1,
                num_draft_tokens=1,
                num_accepted_tokens=1,
                drafted_at=(1,),
                accepted_at=(1,),
            ),
        ),
        drafting_s_total=0.5,
        realised_gain=0.25,
        is_synthetic=True,
    )
    text = http.get("/metrics").text
    seen = {
        (each.name, *(value for name, value in sorted(each.labels.items()) if name != "model_name")): (
            each.value
        )
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    assert seen["vllm:spec_decode_num_drafts_total",] == 6
    assert seen["vllm:spec_decode_num_draft_tokens_total",] == 13
    assert seen["vllm:spec_decode_num_accepted_tokens_total",] == 5
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [seen[per_pos, position] for position in "012"] == [4, 1, 0]
    assert seen["surefoot_draft_tokens_total", "ngram", "free"] == 12
    assert seen["surefoot_accepted_tokens_total", "suffix", "bound"] == 1
    lengths = {le: seen["surefoot_draft_length_bucket", le, "ngram", "free"] for le in ("1.0", "2.0", "3.0")}
    assert lengths == {"1.0": 1, "2.0": 2, "3.0": 5}
    assert seen["surefoot_draft_length_sum", "ngram", "free"] == 12
    assert seen["surefoot_drafting_seconds_total",] == 0.5
    assert seen["surefoot_speculation_realised_gain",] == 0.25
    assert seen["surefoot_synthetic_acceptance",] == 1


def test_drafts_without_tenant_files(backend: FakeBackend) -> None:
    """`local_max_draft` gives the local tenant drafts from the request's own text; 0 gives none."""
    for max_draft, plan in ((3, "draft3"), (0, "baseline")):
        with app_of(backend, Tenants(local=local_tenant(max_draft))) as client:
            assert client.get("/health/ready").status_code == 200
            assert client.post(CHAT, json=BODY).headers["x-surefoot-plan"] == plan
            shown = client.get("/v1/surefoot/tenants/local", headers=bearer("admin")).json()
            assert shown["decision"]["plan"]["name"] == plan
        used = backend.requests[-1].plan.speculation
        assert used.max_draft == max_draft
    assert backend.requests[0].plan.speculation.proposers == ("prediction", "ngram")


def test_an_operator_purges_earlier_outputs(backend: FakeBackend) -> None:
    """It needs the operators' key and a tenant that exists, reaches the backend, and is logged."""
    path = "/v1/surefoot/tenants/{}/suffix"
    with app_of(backend, Tenants()) as client, capture_logs() as logs:
        assert client.delete(path.format("local")).status_code == 401
        assert client.delete(path.format("nobody"), headers=bearer("admin")).status_code == 404
        assert backend.forgotten == []
        assert client.delete(path.format("local"), headers=bearer("admin")).status_code == 204
    assert backend.forgotten == ["local"]
    purges = [each for each in logs if each["event"] == "admin.suffix_purged"]
    assert purges == [{"event": "admin.suffix_purged", "log_level": "info", "tenant": "local", "by": "admin"}]
