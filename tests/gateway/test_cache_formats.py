"""Cache formats as clients and operators see them: fields, plans, counts, metrics, and who may ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from litestar import Litestar
from litestar.testing import TestClient
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from surefoot.backends.fake import BLOCK_BYTES, FakeBackend, Script
from surefoot.backends.types import CachePlan, CacheUsage, FormatStats, FormatTotal
from surefoot.gateway.admin import AdminKey
from surefoot.gateway.app import create_app
from surefoot.gateway.cli import run
from surefoot.gateway.tenants import LOCAL_TENANT, Tenant, TenantClasses, Tenants, hash_key, local_tenant
from surefoot.policies.bounds import CacheBounds, Protection
from surefoot.policies.registry import load_policies, serving_policy

from .harness import bearer, hashes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
USED = CacheUsage(tokens={"k16v16": 100, "k4v4": 300}, num_demoted_tokens=320, reproducible=False)
SHAPE = {
    "format": "k4v4",
    "tokens": {"k16v16": 100, "k4v4": 300},
    "num_demoted_tokens": 320,
    "protected_share": 0.25,
    "reproducible": False,
}
KEYS = ("cache_tokens", "demoted_tokens", "protected_share", "reproducible")


@pytest.fixture
def backend() -> FakeBackend:
    """Every answer lay in the cache as above."""
    return FakeBackend(Script(cache=USED))


@pytest.fixture
def http(backend: FakeBackend) -> Iterator[TestClient]:
    """A client of tenants: three whose requests may choose, one whose may not, one under pressure, one that
    repeats, and one with a limit on loss.
    """
    free = CacheBounds(format="k8v4", max_context=100, per_request=True)
    firm = CacheBounds(format="k8v4", protect=Protection(recent=128))
    tight = CacheBounds(format="k4v4", demote="pressure")
    loose = CacheBounds(format="k4v4", demote="pressure", per_request=True)
    both = CacheBounds(format="mixed", per_request=True)
    limited = CacheBounds(format="k4v4", max_loss=0.003)
    batch = TenantClasses(default="batch")
    tenants = Tenants(
        [
            Tenant(
                id="limited", key_hashes=hashes("limited"), policy="adaptive", cache=limited, classes=batch
            ),
            Tenant(id="free", key_hashes=hashes("free"), policy="fixed", cache=free),
            Tenant(id="firm", key_hashes=hashes("firm"), policy="fixed", cache=firm),
            Tenant(id="both", key_hashes=hashes("both"), policy="fixed", cache=both),
            Tenant(id="tight", key_hashes=hashes("tight"), policy="fixed", cache=tight),
            Tenant(id="loose", key_hashes=hashes("loose"), policy="fixed", cache=loose),
            Tenant(id="same", key_hashes=hashes("same"), policy="fixed", cache=tight, reproducible=True),
        ]
    )
    admin_key = AdminKey(hash_key("admin"))
    app = create_app([backend], tenants, serving_policy(load_policies([])), admin_key=admin_key)
    with TestClient(app) as client:
        assert client.get("/health/ready").status_code == 200
        yield client


def ask(http: TestClient, tenant: str = "free", path: str = CHAT, **fields: Any) -> Any:
    """A small request."""
    body = BODY if path == CHAT else {"model": "fake", "prompt": "Hi"}
    return http.post(path, json=body | fields, headers=bearer(tenant))


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("tenant", "fields", "name", "plan"),
    [
        ("free", {}, "k8v4", CachePlan(format="k8v4", max_context=100)),
        ("free", {"cache": {}}, "k8v4", CachePlan(format="k8v4", max_context=100)),
        (
            "free",
            {"cache": {"format": None, "protect": None, "demote": None, "max_context": None}},
            "k8v4",
            CachePlan(format="k8v4", max_context=100),
        ),
        (
            "free",
            {"cache": {"protect": {"sinks": None, "recent": None}}},
            "k8v4",
            CachePlan(format="k8v4", max_context=100),
        ),
        ("free", {"cache": {"format": "k8v4"}}, "k8v4", CachePlan(format="k8v4", max_context=100)),
        ("free", {"cache": {"format": "k8v8"}}, "k8v8", CachePlan(format="k8v8", max_context=100)),
        ("free", {"cache": {"format": "k16v16"}}, "baseline", CachePlan(max_context=100)),
        ("free", {"cache": {"max_context": 50}}, "k8v4", CachePlan(format="k8v4", max_context=50)),
        (
            "free",
            {"cache": {"protect": {"sinks": 4, "recent": 256}, "demote": "eager"}},
            "k8v4-recent256",
            CachePlan(format="k8v4", recent=256, max_context=100),
        ),
        ("firm", {"cache": None}, "k8v4-recent128", CachePlan(format="k8v4", recent=128)),
        ("tight", {}, "k4v4-pressure", CachePlan(format="k4v4", demote="pressure")),
        ("tight", {"seed": 0}, "k4v4", CachePlan(format="k4v4")),
        (
            "loose",
            {"cache": {"demote": "pressure"}},
            "k4v4-pressure",
            CachePlan(format="k4v4", demote="pressure"),
        ),
        ("loose", {"cache": {"demote": "eager"}}, "k4v4", CachePlan(format="k4v4")),
        ("both", {}, "mixed", CachePlan(format="mixed")),
        ("both", {"cache": {"format": "k8v4"}}, "k8v4", CachePlan(format="k8v4")),
        ("same", {}, "k4v4", CachePlan(format="k4v4")),
    ],
)
def test_a_plan_reaches_the_backend(
    http: TestClient,
    backend: FakeBackend,
    path: str,
    tenant: str,
    fields: dict[str, Any],
    name: str,
    plan: CachePlan,
) -> None:
    """File, request and seed make the plan; the header and the fingerprint have its name."""
    answer = ask(http, tenant, path, **fields)
    assert (answer.status_code, answer.headers["x-surefoot-plan"]) == (200, name)
    assert answer.json()["system_fingerprint"] == f"fp_fake_{name}"
    assert backend.requests[-1].plan.cache == plan


def test_a_limit_on_loss_is_kept_by_what_was_chosen(http: TestClient) -> None:
    """`adaptive` mixes formats: one beyond what all answers may have while the tenant's limit has room, and
    the last one that they all may have where it is used up; kinds of traffic do not share their room, and
    what is refused does not count.
    """
    long = [{"role": "user", "content": "word " * 200}]
    assert ask(http, "limited", messages=long, prediction={"type": "x", "content": ""}).status_code == 400
    plans = [ask(http, "limited", messages=long).headers["x-surefoot-plan"] for _ in range(12)]
    assert plans[:3] == ["k8v4", "mixed", "k8v4"]
    loss = {"k8v4": 0.0008, "mixed": 0.0045}
    assert plans.count("mixed") > 1
    assert sum(loss[each] for each in plans) / len(plans) <= 0.003
    assert ask(http, "limited", TEXT, prompt="word " * 200).headers["x-surefoot-plan"] == "k8v4"


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"format": "k4v4"}, "cache.format", ("'k4v4'", "less precise than your limit of 'k8v4'")),
        ({"format": "k3v3"}, "cache.format", ("'k3v3'", "one of k16v16, k8v8, k8v4, mixed, k4v4")),
        ({"format": 8}, "cache.format", ("expected `str",)),
        ({"max_context": 101}, "cache.max_context", ("101", "more than your limit of 100")),
        ({"max_context": 0}, "cache.max_context", ("between 1 and", "it is 0")),
        ({"protect": {"recent": 63}}, "cache.protect.recent", ("63", "less than your limit of 64")),
        ({"protect": {"sinks": -1}}, "cache.protect.sinks", ("between 0 and", "it is -1")),
        ({"protect": {"important": 1}}, "cache.protect.important", ("Unknown parameter",)),
        ({"demote": "pressure"}, "cache.demote", ("'pressure'", "demoted at once")),
        ({"demote": "never"}, "cache.demote", ("'never'", "one of eager, pressure")),
    ],
)
def test_wrong_wishes_are_named(
    http: TestClient, backend: FakeBackend, wish: dict[str, Any], param: str, words: tuple[str, ...]
) -> None:
    """Fewer bits, less protection, demotion by pressure or a longer context than the file allows is refused
    with the limit, and so is nonsense.
    """
    answer = ask(http, cache=wish)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert all(word in error["message"] for word in words)
    assert backend.requests == []


def test_a_wish_needs_the_files_leave(http: TestClient) -> None:
    """Without `per_request` the field is refused by name, and with the key that would allow it."""
    answer = ask(http, "firm", cache={"format": "k16v16"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "cache")
    assert "cache.per_request" in error["message"]


def test_a_context_that_is_too_long_for_the_plan(http: TestClient) -> None:
    """What a plan's longest context does not hold is refused as what the model's does not hold."""
    assert ask(http, max_tokens=99).status_code == 200
    assert ask(http, max_tokens=100).json()["error"]["code"] == "context_length_exceeded"
    assert ask(http, max_tokens=50, cache={"max_context": 50}).status_code == 400


def test_the_answer_says_what_was_demoted(http: TestClient, backend: FakeBackend) -> None:
    """`return_metrics` gives tokens by format, of several sequences too; null where all bits were kept."""
    assert ask(http, "tight", return_metrics=True).json()["metrics"]["cache"] == SHAPE
    two = ask(http, "tight", TEXT, prompt=["a", "b"], return_metrics=True).json()["metrics"]["cache"]
    assert two == SHAPE | {"tokens": {"k16v16": 200, "k4v4": 600}, "num_demoted_tokens": 640}
    backend.script = Script()
    assert ask(http, return_metrics=True).json()["metrics"] == {"speculative_decoding": None, "cache": None}
    assert "metrics" not in ask(http).json()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_ends_with_what_was_demoted(http: TestClient, path: str) -> None:
    """The last chunk has it, and no other."""
    text = ask(http, "tight", path, stream=True, return_metrics=True).text
    *others, last, done = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
    ]
    assert done == "[DONE]"
    assert msgspec.json.decode(last)["metrics"]["cache"] == SHAPE
    assert not any("demoted" in line for line in others)


def test_the_log_tells_of_formats(http: TestClient, backend: FakeBackend) -> None:
    """A request's event has its tokens by format, of all prompts; nothing where all bits were kept."""
    with capture_logs() as logs:
        ask(http)
        backend.script = Script(cache=CacheUsage(tokens={"k8v4": 30}, num_demoted_tokens=30))
        ask(http, path=TEXT, prompt=["a", "b"])
        backend.script = Script()
        ask(http)
    one, two, none = [each for each in logs if each["event"] == "request.finished"]
    assert [one[key] for key in KEYS] == [{"k16v16": 100, "k4v4": 300}, 320, 0.25, False]
    assert [two[key] for key in KEYS] == [{"k8v4": 60}, 60, 0.0, True]
    assert not set(KEYS) & none.keys()
    assert [key for key in KEYS if f"`{key}`" not in DOCS.read_text()] == []


def test_what_was_not_finished_is_not_told(http: TestClient, backend: FakeBackend) -> None:
    """Only the end of a request tells how its tokens lay; one that failed before has no word of them."""
    backend.script = Script(cache=USED, error=ValueError("x"), error_at=1)
    with capture_logs() as logs:
        assert ask(http, stream=True).status_code == 200
    (event,) = [each for each in logs if each["event"] == "request.finished"]
    assert not set(KEYS) & event.keys()


HELD = (
    FormatStats(flow="free", format="k16v16", num_tokens=40, num_blocks=3),
    FormatStats(flow="free", format="k8v4", num_tokens=78, num_blocks=2),
    FormatStats(flow="firm", format="k8v4", num_tokens=39, num_blocks=1),
)


TOTALS = (
    FormatTotal(format="k16v16", num_tokens=40, num_blocks=3, fragmentation=1 / 6),
    FormatTotal(format="k8v4", num_tokens=78, num_blocks=2),
)


def scrape(http: TestClient) -> dict[tuple[str, str | None, str | None], float]:
    """Every sample, by name, tenant and format."""
    return {
        (each.name, each.labels.get("tenant"), each.labels.get("format")): each.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for each in family.samples
    }


def test_metrics_by_tenant_and_format(http: TestClient, backend: FakeBackend) -> None:
    """Tokens, blocks and bytes that are held, by tenant and format; demoted tokens by format, from 0 on."""
    backend.formats, backend.demoted_tokens_total = HELD, {"k8v4": 117}
    seen = scrape(http)
    for name, values in (
        ("tokens", (40, 78, 39)),
        ("blocks", (3, 2, 1)),
        ("bytes", (3 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES)),
    ):
        assert [seen[f"surefoot_format_{name}", each.flow, each.format] for each in HELD] == list(values)
    assert seen["surefoot_demoted_tokens_total", None, "k8v4"] == 117
    assert seen["surefoot_demoted_tokens_total", None, "k4v4"] == 0
    assert seen["surefoot_cache_block_bytes", None, None] == BLOCK_BYTES


def test_metrics_in_all(http: TestClient, backend: FakeBackend) -> None:
    """Tokens, bytes and the share of room without a token, of each format; 0 of one that nobody uses."""
    backend.format_totals = TOTALS
    seen = scrape(http)
    for name, values in (
        ("tokens", (40, 78, 0)),
        ("bytes", (3 * BLOCK_BYTES, 2 * BLOCK_BYTES, 0)),
        ("fragmentation", (1 / 6, 0, 0)),
    ):
        held = [seen[f"surefoot_cache_{name}", None, each] for each in ("k16v16", "k8v4", "k4v4")]
        assert held == pytest.approx(values)


def test_metrics_of_requests_that_ended(http: TestClient, backend: FakeBackend) -> None:
    """Tokens by format and demoted ones are counted by tenant; full precision and failures count nowhere."""
    ask(http, "tight")
    ask(http, "tight", TEXT, prompt=["a", "b"])
    backend.script = Script()
    ask(http, "free")
    backend.script = Script(cache=USED, error=ValueError("x"), error_at=1)
    ask(http, "firm")
    seen = scrape(http)
    assert seen["surefoot_ended_format_tokens_total", "tight", "k16v16"] == 300
    assert seen["surefoot_ended_format_tokens_total", "tight", "k4v4"] == 900
    assert seen["surefoot_ended_demoted_tokens_total", "tight", None] == 960
    ended = {tenant for name, tenant, _ in seen if name.startswith("surefoot_ended")}
    assert ended == {"tight"}


def test_operators_see_formats(http: TestClient, backend: FakeBackend) -> None:
    """The scheduler's view has what is held in each format, how much is empty, and what was demoted."""
    backend.formats, backend.demoted_tokens_total = HELD, {"k8v4": 117}
    backend.format_totals = TOTALS
    (shown,) = http.get("/v1/surefoot/scheduler", headers=bearer("admin")).json()["backends"]
    assert shown["stats"]["formats"][1] == {
        "flow": "free", "format": "k8v4", "num_tokens": 78, "num_blocks": 2,
    }  # fmt: skip
    assert shown["stats"]["format_totals"] == list(msgspec.to_builtins(TOTALS))
    assert (shown["stats"]["block_bytes"], shown["stats"]["demoted_tokens_total"]) == (
        BLOCK_BYTES,
        {"k8v4": 117},
    )


def test_formats_without_tenant_files(backend: FakeBackend) -> None:
    """`local_cache_format` is the local tenant's plan, beside drafts or alone, and requests may ask for more
    bits; by itself it is full precision, with nothing to ask for.
    """
    more_bits = {"cache": {"format": "k8v8"}}
    for max_draft, plans in ((0, ("k8v4", "k8v8")), (3, ("k8v4+draft3", "k8v8+draft3"))):
        with TestClient(local_app(backend, local_tenant(max_draft, "k8v4"))) as client:
            assert client.get("/health/ready").status_code == 200
            answers = [client.post(CHAT, json=BODY | fields) for fields in ({}, more_bits)]
        assert tuple(each.headers["x-surefoot-plan"] for each in answers) == plans
    assert local_tenant(0) == LOCAL_TENANT
    with TestClient(local_app(backend, local_tenant(0))) as client:
        assert client.get("/health/ready").status_code == 200
        assert client.post(CHAT, json=BODY).headers["x-surefoot-plan"] == "baseline"
        assert client.post(CHAT, json=BODY | more_bits).status_code == 400


def local_app(backend: FakeBackend, local: Tenant) -> Litestar:
    """A server without tenant files."""
    return create_app([backend], Tenants(local=local), serving_policy(load_policies([])))


def test_operators_see_a_tenants_plan() -> None:
    """A tenant's view has each value of its cache, and the plan with all that the engine is told of it."""
    local = Tenant(id="local", policy="fixed", cache=CacheBounds(format="k8v4", max_context=100))
    policy, admin_key = serving_policy(load_policies([])), AdminKey(hash_key("admin"))
    app = create_app([FakeBackend()], Tenants(local=local), policy, admin_key=admin_key)
    with TestClient(app) as client:
        shown = client.get("/v1/surefoot/tenants/local", headers=bearer("admin")).json()
    values = {each["key"]: each["value"] for each in shown["values"]}
    assert (values["cache.format"], values["cache.max_context"]) == ("k8v4", 100)
    plan = CachePlan(format="k8v4", max_context=100)
    assert shown["decision"]["plan"]["cache"] == msgspec.to_builtins(plan)


FILE = f"""
id = "acme"
key_hashes = ["{hash_key("x")}"]
policy = "fixed"

[cache]
format = "k4v4"
demote = "pressure"
max_context = 9000
protect.recent = 256
"""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("plan  k4v4-recent256-pressure  ", "when the cache is full")),
        (("--has-seed",), ("plan  k4v4-recent256  ", "rule  repeatable", "at once", "has a seed, so k4v4")),
    ],
)
def test_explain_speaks_of_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """`policy explain` says the format, when it comes, what it spares and the longest context."""
    (tmp_path / "acme.toml").write_text(FILE)
    assert run(("policy", "explain", "--tenant", "acme", "--tenants", str(tmp_path), *flags), {}) == 0
    out = capsys.readouterr().out
    for word in (
        *words,
        "cache k4v4",
        "the first 4 and the latest 256 tokens",
        "contexts of up to 9000 tokens",
    ):
        assert word in out, out
    assert run(("policy", "show", "acme", "--tenants", str(tmp_path)), {}) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["cache.format"] == ['"k4v4"', "acme.toml:7"]
    assert rows["cache.per_request"] == ["false", "built-in"]
