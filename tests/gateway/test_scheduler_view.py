"""`GET /v1/surefoot/scheduler`: who waits and who runs, for the operator only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from surefoot.backends.fake import FakeBackend, Script
from surefoot.backends.types import SchedulerView, SequenceView
from surefoot.gateway.admin import AdminKey
from surefoot.gateway.tenants import Tenant, hash_key

from .harness import Serve, bearer, client_of, hashes

SCHEDULER = "/v1/surefoot/scheduler"
ADMIN = AdminKey(hash_key("admin"))
ACME = Tenant(id="acme", key_hashes=hashes("k"))
VIEW = SequenceView(
    request_id="elsewhere-0",
    choice=1,
    priority=100,
    flow="acme",
    running=True,
    age_s=2.5,
    num_prompt_tokens=7,
    num_output_tokens=3,
    num_blocks=1,
    num_preemptions=2,
    slack_s=-0.5,
)


@pytest.mark.parametrize(
    ("tenants", "admin_key", "headers", "status", "code"),
    [
        ((ACME,), ADMIN, bearer("admin"), 200, None),
        ((ACME,), ADMIN, bearer("k"), 403, "admin_key_required"),
        ((ACME,), ADMIN, bearer("wrong"), 401, "invalid_api_key"),
        ((ACME,), ADMIN, {}, 401, "invalid_api_key"),
        ((ACME,), None, bearer("k"), 404, "not_enabled"),
        ((ACME,), None, {}, 401, "invalid_api_key"),
        ((), None, {}, 200, None),
        ((), ADMIN, bearer("admin"), 200, None),
        ((), ADMIN, bearer("wrong"), 401, "invalid_api_key"),
        ((), ADMIN, {"authorization": "Basic x"}, 401, "invalid_api_key"),
        ((), ADMIN, {}, 401, "invalid_api_key"),
    ],
)
def test_who_may_look(
    tenants: tuple[Tenant, ...],
    admin_key: AdminKey | None,
    headers: dict[str, str],
    status: int,
    code: str | None,
) -> None:
    """The admin key opens it; without one it is open only where nobody has a key."""
    with client_of(*tenants, admin_key=admin_key) as client:
        response = client.get(SCHEDULER, headers=headers)
    assert response.status_code == status
    assert response.json().get("error", {}).get("code") == code


def test_the_admin_key_is_no_tenants() -> None:
    """The operator's key asks no model."""
    with client_of(ACME, admin_key=ADMIN) as client:
        assert client.get("/v1/models", headers=bearer("admin")).status_code == 401


def test_a_view_without_requests_of_ours() -> None:
    """Backlog, stats and the scheduler's numbers are shown as they are; what is not known is null."""
    backend = FakeBackend()
    waiting = replace(VIEW, running=False, slack_s=None)
    backend.scheduler_view = SchedulerView(waiting=(waiting,), running=(VIEW,), backlog_s=1.5)
    with client_of(backend=backend) as client:
        body = client.get(SCHEDULER).json()
    (shown,) = body.pop("backends")
    assert body == {"object": "surefoot.scheduler"}
    assert (shown["models"], shown["state"], shown["backlog_s"]) == (["fake"], "ready", 1.5)
    assert shown["stats"]["num_blocks"] == 100
    assert shown["running"] == [
        {
            "completion_id": None,
            "request_id": None,
            "tenant": "acme",
            "class": None,
            "choice": 1,
            "priority": 100,
            "age_s": 2.5,
            "slack_s": -0.5,
            "num_prompt_tokens": 7,
            "num_output_tokens": 3,
            "num_blocks": 1,
            "num_preemptions": 2,
        }
    ]
    assert shown["waiting"] == [shown["running"][0] | {"slack_s": None}]


@pytest.mark.anyio
async def test_a_running_request_is_known(serve: Serve) -> None:
    """A request is shown with its client's id, its completion's, its tenant and its class, until it ends."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(gates={0: gate}))
    body: dict[str, Any] = {"model": "fake", "prompt": ["a", "b"], "service_tier": "flex"}
    async with serve(backend) as gateway:
        asking = asyncio.create_task(
            gateway.client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        )
        async with asyncio.timeout(60):
            await backend.asked(2)
        views = [
            replace(VIEW, request_id=each.request_id, flow=each.flow, priority=each.priority)
            for each in backend.requests
        ]
        backend.scheduler_view = SchedulerView(waiting=tuple(views))
        shown = (await gateway.client.get(SCHEDULER)).json()["backends"][0]["waiting"]
        gate.set()
        answer = (await asking).json()
        for each in shown:
            assert (each["request_id"], each["completion_id"]) == ("mine", answer["id"])
            assert (each["tenant"], each["class"], each["priority"]) == ("local", "batch", 0)
        after = (await gateway.client.get(SCHEDULER)).json()["backends"][0]["waiting"]
        assert [each["completion_id"] for each in after] == [None, None]
