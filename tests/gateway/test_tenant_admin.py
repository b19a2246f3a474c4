"""A running server whose tenant files change, and what operators see and do."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar
from litestar.testing import TestClient
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from surefoot.backends.fake import FakeBackend, Script
from surefoot.gateway.admin import AdminKey
from surefoot.gateway.app import create_app
from surefoot.gateway.clock import FakeClock
from surefoot.gateway.overrides import Override, Overrides
from surefoot.gateway.settings import SettingsError, resolve
from surefoot.gateway.tenant_folder import TenantFolder
from surefoot.gateway.tenant_watch import TenantWatch
from surefoot.gateway.tenants import Tenant, Tenants, hash_key
from surefoot.policies.registry import load_policies, serving_policy

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
LIST = "/v1/surefoot/tenants"
ADMIN = {"authorization": "Bearer operator"}
USER = {"authorization": "Bearer user"}
GOOD = f'id = "acme"\nkey_hashes = ["{hash_key("user")}"]\n'


class Served(Struct):
    """A gateway over a folder with one tenant, `acme`. Nothing looks at the folder unless told to."""

    folder: Path
    watch: TenantWatch
    backend: FakeBackend
    app: Litestar

    def write(self, text: str, name: str = "acme.toml") -> None:
        """Replace a file and look at the folder."""
        (self.folder / name).write_text(text)
        self.watch.look()


@pytest.fixture
def served(tmp_path: Path) -> Served:
    """Not running yet."""
    (tmp_path / "acme.toml").write_text(GOOD)
    policies = load_policies([])
    folder = TenantFolder(tmp_path, policies)
    tenants = Tenants(folder.load().tenants, keys_required=True)
    watch = TenantWatch(folder, tenants, 0)
    backend = FakeBackend()
    app = create_app(
        [backend],
        tenants,
        serving_policy(policies),
        admin_key=AdminKey(hash_key("operator"), "ops"),
        watch=watch,
    )
    return Served(tmp_path, watch, backend, app)


@pytest.fixture
def client(served: Served) -> Iterator[TestClient]:
    """A client of the gateway, running."""
    with TestClient(served.app) as client:
        assert client.get("/health/ready").status_code == 200
        yield client


def metric(client: TestClient, name: str) -> float:
    """A sample without labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return next(each.value for family in families for each in family.samples if each.name == name)


def test_a_change_takes_effect(served: Served, client: TestClient) -> None:
    """A changed file counts from the next request on, and the log and the metrics say so."""
    body = BODY | {"max_tokens": 9}
    assert client.post(CHAT, json=body, headers=USER).status_code == 200
    with capture_logs() as logs:
        served.write(GOOD + "[limits]\nmax_tokens = 3")
    assert logs == [
        {
            "event": "tenants.reloaded",
            "log_level": "info",
            "num_tenants": 1,
            "added": 0,
            "changed": 1,
            "removed": 0,
            "tenants": ["acme"],
        }
    ]
    assert client.post(CHAT, json=body, headers=USER).status_code == 400
    assert metric(client, "surefoot_tenant_reloads_total") == 1
    assert metric(client, "surefoot_tenant_files_refused") == 0


def test_a_bad_change_is_told_everywhere(served: Served, client: TestClient) -> None:
    """A bad file keeps what was; log (once), metrics and endpoint tell it, with line and reason."""
    since = metric(client, "surefoot_tenants_last_success_timestamp_seconds")
    with capture_logs() as logs:
        served.write(GOOD + "wieght = 2.0")
        served.watch.look()
    (event,) = logs
    assert (event["event"], event["log_level"], event["line"]) == ("tenants.refused", "error", 3)
    assert client.post(CHAT, json=BODY, headers=USER).status_code == 200
    assert metric(client, "surefoot_tenant_files_refused") == 1
    assert metric(client, "surefoot_tenant_reloads_total") == 0
    assert metric(client, "surefoot_tenants_last_success_timestamp_seconds") == since
    (problem,) = client.get(LIST, headers=ADMIN).json()["reload"]["problems"]
    assert problem == {
        "file": str(served.folder / "acme.toml"),
        "line": 3,
        "message": "unknown key 'wieght'. Did you mean 'weight'?",
    }
    served.write(GOOD)
    assert client.get(LIST, headers=ADMIN).json()["reload"]["problems"] == []
    assert metric(client, "surefoot_tenants_last_success_timestamp_seconds") > since


@pytest.mark.anyio
async def test_a_running_request_keeps_its_plan(served: Served) -> None:
    """A request that runs while its tenant goes away ends as it began; the next one is refused."""
    gate = asyncio.Event()
    served.backend.script = Script(gates={1: gate})
    transport = httpx.ASGITransport(app=served.app)
    async with served.app.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        await served.app.state.lifecycle.started.wait()
        running = asyncio.create_task(client.post(CHAT, json=BODY, headers=USER))
        await served.backend.asked(1)
        (served.folder / "acme.toml").unlink()
        served.watch.look()
        assert (await client.post(CHAT, json=BODY, headers=USER)).status_code == 401
        gate.set()
        answer = await running
    assert (answer.status_code, answer.headers["x-surefoot-plan"]) == (200, "baseline")


class Watched(Tenants):
    """Tells when they are replaced."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        super().__init__(tenants)
        self.replaced = threading.Event()

    def replace(self, tenants: Sequence[Tenant]) -> None:
        """As always, and tell."""
        super().replace(tenants)
        self.replaced.set()


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["period", "SIGHUP"])
async def test_the_watch_looks(tmp_path: Path, how: str) -> None:
    """The folder is looked at again and again, or at once after SIGHUP, until the server ends."""
    (tmp_path / "acme.toml").write_text(GOOD)
    folder = TenantFolder(tmp_path, ["baseline"])
    tenants = Watched(folder.load().tenants)
    watch = TenantWatch(folder, tenants, 0.01 if how == "period" else 0)
    async with watch.running():
        for weight in (7.0, 8.0):
            tenants.replaced.clear()
            # Renamed, as a look may come at any moment.
            (tmp_path / "new").write_text(GOOD + f"weight = {weight}")
            (tmp_path / "new").rename(tmp_path / "acme.toml")
            if how == "SIGHUP":
                os.kill(os.getpid(), signal.SIGHUP)
            assert await asyncio.to_thread(tenants.replaced.wait, 60)
            assert tenants.authenticate("Bearer user").weight == weight
    assert "tenants" not in [each.name for each in threading.enumerate()]


@pytest.mark.parametrize("headers", [{}, USER, {"authorization": "Bearer wrong"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", LIST),
        ("GET", LIST + "/acme"),
        ("PUT", LIST + "/acme/override"),
        ("DELETE", LIST + "/acme/override"),
    ],
)
def test_operators_only(client: TestClient, method: str, path: str, headers: dict[str, str]) -> None:
    """Without the operators' key nothing is told or done; a tenant's key does not open it."""
    answer = client.request(method, path, headers=headers, content=b"{}" if method == "PUT" else None)
    expected = (403, "admin_key_required") if headers == USER else (401, "invalid_api_key")
    assert (answer.status_code, answer.json()["error"]["code"]) == expected


def test_without_an_admin_key_it_is_closed() -> None:
    """A server without the setting is closed to every key, and says what is missing."""
    with TestClient(create_app([FakeBackend()], Tenants(), serving_policy(load_policies([])))) as client:
        answer = client.get(LIST, headers=ADMIN)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_enabled")
    assert "admin_key_hash" in error["message"]


@pytest.mark.parametrize("text", ["sha256:12", "operator", ""])
def test_an_admin_key_is_named_by_its_hash(text: str) -> None:
    """Anything but a hash is refused at start, the key itself too."""
    with pytest.raises(SettingsError, match=r"admin_key_hash.*expected a hash from `surefoot key new`"):
        resolve({"admin_key_hash": text}, {})


def test_the_list_of_tenants(served: Served, client: TestClient) -> None:
    """Each tenant has its id, file, policy and number of keys; no answer has a hash."""
    served.write("[limits]\nmax_n = 4\n[speculation]\nenabled = false", "defaults.toml")
    answer = client.get(LIST, headers=ADMIN)
    assert answer.json()["tenants"] == [
        {"id": "acme", "file": "acme.toml", "policy": "baseline", "num_keys": 1, "override": None}
    ]
    one = client.get(LIST + "/acme", headers=ADMIN)
    values = {each["key"]: (each["value"], each["origin"]) for each in one.json()["values"]}
    assert values["limits.max_n"] == (4, "defaults.toml:2")
    assert values["id"] == ("acme", "acme.toml:1")
    assert values["weight"] == (1.0, "built-in")
    assert one.json()["keys"] == [{"label": "", "expires": None}]
    assert one.json()["decision"]["plan"]["name"] == "baseline"
    assert hash_key("user") not in answer.text + one.text


def test_the_local_tenant_is_listed() -> None:
    """Without a folder there is the local tenant, with what is built in."""
    app = create_app(
        [FakeBackend()],
        Tenants(),
        serving_policy(load_policies([])),
        admin_key=AdminKey(hash_key("operator")),
    )
    with TestClient(app) as client:
        assert [each["id"] for each in client.get(LIST, headers=ADMIN).json()["tenants"]] == ["local"]
        one = client.get(LIST + "/local", headers=ADMIN).json()
    assert {each["origin"] for each in one["values"]} == {"built-in"}


def test_an_override(client: TestClient) -> None:
    """A forced plan shows in the list, in the log of requests and in the audit log, until it is cleared."""
    path = LIST + "/acme/override"
    with capture_logs() as logs:
        done = client.put(path, json={"plan": "baseline", "expires_in_s": 600}, headers=ADMIN)
        client.post(CHAT, json=BODY, headers=USER)
        assert client.get(LIST, headers=ADMIN).json()["tenants"][0]["override"]["plan"] == "baseline"
        assert client.delete(path, headers=ADMIN).status_code == 204
        assert client.delete(path, headers=ADMIN).status_code == 204
        client.post(CHAT, json=BODY, headers=USER)
    assert (done.status_code, done.json()) == (200, {"plan": "baseline", "by": "ops", "expires_in_s": 600})
    audit = [each for each in logs if each["event"].startswith("admin.")]
    assert audit == [
        {
            "event": "admin.override_set",
            "log_level": "info",
            "tenant": "acme",
            "plan": "baseline",
            "by": "ops",
            "expires_in_s": 600,
        },
        {"event": "admin.override_cleared", "log_level": "info", "tenant": "acme", "by": "ops"},
    ]
    reasons = [each["plan_reason"] for each in logs if "plan_reason" in each]
    assert reasons == [
        "an operator forces baseline for now",
        "the policy is baseline, whatever is observed",
    ]


@pytest.mark.parametrize(
    ("tenant", "body", "status", "code"),
    [
        ("acmee", {"plan": "baseline", "expires_in_s": 1}, 404, "unknown_tenant"),
        ("acme", {"plan": "turbo", "expires_in_s": 1}, 400, "invalid_value"),
        ("acme", {"plan": "baseline"}, 400, "missing_required_parameter"),
        ("acme", {"plan": "baseline", "expires_in_s": 0}, 400, "invalid_value"),
        ("acme", {"plan": "baseline", "expires_in_s": 1e9}, 400, "invalid_value"),
        ("acme", {"plan": "baseline", "expires_in_s": 1, "x": 1}, 400, "unknown_parameter"),
    ],
)
def test_overrides_of_no_use(
    client: TestClient, tenant: str, body: dict[str, Any], status: int, code: str
) -> None:
    """A tenant that is not there, a plan that cannot be forced and a wrong time are refused."""
    answer = client.put(f"{LIST}/{tenant}/override", json=body, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_overrides_expire() -> None:
    """A forced plan ends by itself, and tells how long it still holds."""
    clock = FakeClock()
    overrides = Overrides(clock)
    overrides.set("acme", Override(plan="baseline", by="ops", expires_in_s=10))
    clock.advance(4)
    held = overrides.get("acme")
    assert held is not None
    assert (held.plan, held.expires_in_s) == ("baseline", 6.0)
    clock.advance(6)
    assert overrides.get("acme") is None
    assert not overrides.clear("acme")


def test_a_policy_sees_the_request(served: Served, client: TestClient) -> None:
    """The observation has tenant, class, kind, an estimate of the prompt, pressure, load and the bounds."""
    served.write(GOOD + 'policy = "adaptive"\n[classes]\ndefault = "batch"')
    with capture_logs() as logs:
        client.post(CHAT, json=BODY | {"messages": [{"role": "user", "content": "x" * 401}]}, headers=USER)
        client.post("/v1/completions", json={"model": "fake", "prompt": [[1, 2, 3], [4]]}, headers=USER)
    chat, text = (each["observation"] for each in logs if each["event"] == "request.planned")
    assert chat.items() >= {
        "tenant_id": "acme", "model": "fake", "policy": "adaptive", "service_class": "batch", "kind": "chat",
        "num_prompt_tokens": 101, "cache_pressure": 0.0, "load": 0, "override": None,
    }.items()  # fmt: skip
    assert 0 <= chat["hour"] < 24
    assert (text["kind"], text["num_prompt_tokens"]) == ("text", 3)
