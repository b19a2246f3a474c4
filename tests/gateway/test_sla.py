"""SLA classes: what a client may ask for, what it gets, and what it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from litestar.testing import TestClient

from surefoot.backends.fake import FakeBackend
from surefoot.gateway.http_settings import HttpSettings
from surefoot.gateway.sla import (
    DEFAULT_CLASSES,
    ClassesError,
    SlaClass,
    load_classes,
)
from surefoot.gateway.tenants import Tenant, TenantClasses, Tenants

from .harness import Serve, bearer, client_of, hashes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
ALL = TenantClasses()
RESERVED = TenantClasses(reserved="interactive")
MODEST = TenantClasses(allowed=("standard", "batch"))
BATCH_ONLY = TenantClasses(default="batch", allowed=("batch",))
INTERACTIVE_ONLY = TenantClasses(default="interactive", allowed=("interactive",))

PROMISES: list[tuple[TenantClasses, str | None, str, str]] = [
    (ALL, None, "standard", "default"),
    (ALL, "auto", "standard", "default"),
    (ALL, "default", "standard", "default"),
    (ALL, "priority", "interactive", "priority"),
    (ALL, "fast", "interactive", "priority"),
    (ALL, "flex", "batch", "flex"),
    (ALL, "scale", "standard", "default"),
    (RESERVED, "scale", "interactive", "scale"),
    (RESERVED, "auto", "standard", "default"),
    (TenantClasses(default="batch"), None, "batch", "flex"),
    (TenantClasses(default="batch"), "scale", "batch", "flex"),
    (MODEST, "priority", "standard", "default"),
    (MODEST, "flex", "batch", "flex"),
    (TenantClasses(allowed=("standard",), reserved="interactive"), "scale", "interactive", "scale"),
    (TenantClasses(allowed=("standard",), reserved="interactive"), "priority", "standard", "default"),
    (BATCH_ONLY, "priority", "batch", "flex"),
    (BATCH_ONLY, None, "batch", "flex"),
    # Nothing below is allowed: the default it is.
    (INTERACTIVE_ONLY, "flex", "interactive", "priority"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("classes", "asked", "name", "tier"), PROMISES)
def test_the_tenants_file_clamps_what_is_asked_for(
    path: str, classes: TenantClasses, asked: str | None, name: str, tier: str
) -> None:
    """A tier is lowered to what the tenant may have, never refused; backend, answer and header agree."""
    backend = FakeBackend()
    tenant = Tenant(id="acme", key_hashes=hashes("k"), classes=classes, weight=2.5)
    with client_of(tenant, backend=backend) as client:
        body = {"model": "fake"} | ({"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"})
        response = client.post(path, json=body | {"service_tier": asked}, headers=bearer("k"))
    assert response.status_code == 200
    assert response.json()["service_tier"] == tier
    assert response.headers["x-surefoot-class"] == name
    (request,) = backend.requests
    sla = DEFAULT_CLASSES[name]
    assert (request.priority, request.ttft_target_s, request.tpot_target_s) == (
        sla.priority,
        sla.ttft_target_s,
        sla.tpot_target_s,
    )
    assert (request.flow, request.weight) == ("acme", 2.5)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_chunk_names_the_tier(http: TestClient, path: str) -> None:
    """A stream says in each of its chunks which tier it is served in."""
    body: dict[str, Any] = {"model": "fake", "stream": True, "service_tier": "fast"}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    response = http.post(path, json=body | {"stream_options": {"include_usage": True}})
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    assert len(chunks) > 4
    assert {chunk["service_tier"] for chunk in chunks} == {"priority"}
    assert response.headers["x-surefoot-class"] == "interactive"


@pytest.mark.anyio
async def test_the_openai_client_sees_the_tier(serve: Serve) -> None:
    """The client's objects have the tier that was used, whole and streamed."""
    tenants = Tenants([Tenant(id="a", key_hashes=hashes("k"), classes=MODEST)])
    async with (
        serve(tenants=tenants) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="k", max_retries=0) as api,
    ):
        whole = await api.chat.completions.create(model="fake", messages=MESSAGES, service_tier="priority")
        assert whole.service_tier == "default"
        stream = await api.chat.completions.create(
            model="fake", messages=MESSAGES, service_tier="flex", stream=True
        )
        assert {chunk.service_tier async for chunk in stream} == {"flex"}
        with pytest.raises(openai.BadRequestError, match="'service_tier' must be one of"):
            await api.chat.completions.create(
                model="fake", messages=MESSAGES, extra_body={"service_tier": "platinum"}
            )


def test_classes_of_an_operators_own(tmp_path: Path) -> None:
    """A file adds classes and replaces built-in ones whole; a tenant's default may be one of them."""
    file = tmp_path / "classes.toml"
    file.write_text(
        "[interactive]\npriority = 300\nttft_target_s = 0.2\n"
        '[gold]\npriority = 250\ntpot_target_s = 0.05\ntier = "priority"\n'
    )
    classes = load_classes(file)
    tenant = TenantClasses(default="gold", allowed=("gold", "batch"))
    promise = classes.promise("priority", tenant)
    assert (promise.name, promise.tier) == ("gold", "priority")
    assert promise.sla == SlaClass(priority=250, tpot_target_s=0.05, tier="priority")
    assert classes.promise("fast", ALL).sla == SlaClass(priority=300, ttft_target_s=0.2)
    assert classes.promise("flex", ALL).sla == DEFAULT_CLASSES["batch"]
    settings = HttpSettings(classes=classes)
    backend = FakeBackend()
    with client_of(
        Tenant(id="a", key_hashes=hashes("k"), classes=tenant), backend=backend, settings=settings
    ) as client:
        answer = client.post(CHAT, json={"model": "fake", "messages": MESSAGES}, headers=bearer("k"))
    assert (answer.headers["x-surefoot-class"], answer.json()["service_tier"]) == ("gold", "priority")
    assert backend.requests[0].priority == 250


BAD_FILES = [
    ("[gold]\nprority = 1", ["[gold]", "unknown key 'prority'", "Did you mean 'priority'?"]),
    ("[gold]\nttft_target_s = 1.0", ["[gold]", "missing key `priority`"]),
    ("[gold]\npriority = 'high'", ["[gold]", "`int`", "priority"]),
    ("[gold]\npriority = 5000", ["[gold]", "<= 1000"]),
    ("[gold]\npriority = 1\nttft_target_s = 0.0", ["[gold]", "> 0.0", "ttft_target_s"]),
    ("[gold]\npriority = 1\ntier = 'scale'", ["[gold]", "'scale'", "tier"]),
    ("['Gold!']\npriority = 1", ["[Gold!]", "lower-case letters"]),
    ("priority = 1", ["'priority' stands in no class"]),
    ("[gold", ["classes.toml"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    """The message has the file, the class, the key and, for a slip of the pen, the nearest known one."""
    file = tmp_path / "classes.toml"
    file.write_text(text)
    with pytest.raises(ClassesError) as caught:
        load_classes(file)
    for word in ["classes.toml", *words]:
        assert word in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that cannot be read is an error that names it."""
    with pytest.raises(ClassesError, match=r"nowhere\.toml"):
        load_classes(tmp_path / "nowhere.toml")
