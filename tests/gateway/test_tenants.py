"""Tenants: their files, their keys and their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.backends.fake import FakeBackend, Script
from surefoot.gateway.errors import InvalidKey
from surefoot.gateway.tenant_files import TenantFileError
from surefoot.gateway.tenant_folder import TenantFolder
from surefoot.gateway.tenants import (
    LOCAL_TENANT,
    Tenant,
    TenantLimits,
    Tenants,
    hash_key,
    new_key,
)
from surefoot.policies.registry import BUILT_IN

from .harness import Serve, bearer, client_of

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
HASHES = [hash_key(f"key {i}") for i in range(3)]
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a tenant file; returns its folder."""

    def write_file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path

    return write_file


def load_tenants(folder: Path) -> Tenants:
    """The tenants of a folder, as at the start of a server."""
    return Tenants(TenantFolder(folder, BUILT_IN).load().tenants, keys_required=True)


def test_a_file_is_read(write: Write) -> None:
    """Every field of a file arrives; what is left out has no limit."""
    write(
        "acme.toml",
        f'id = "acme"\nkey_hashes = ["{HASHES[0]}"]\nmodels = ["fake"]\n'
        "[limits]\nmax_concurrent_requests = 2\nmax_tokens = 100\nmax_n = 3\n",
    )
    folder = write("other.toml", f'id = "other"\nkey_hashes = ["{HASHES[1]}", "{HASHES[2]}"]\n')
    tenants = load_tenants(folder)
    assert tenants.authenticate("Bearer key 0") == Tenant(
        id="acme",
        key_hashes=(HASHES[0],),
        models=("fake",),
        limits=TenantLimits(max_concurrent_requests=2, max_tokens=100, max_n=3),
    )
    assert tenants.authenticate("bearer key 2") == Tenant(id="other", key_hashes=tuple(HASHES[1:]))
    assert tenants.keys_required


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """Who names a folder wants keys: without a file in it the message says how to make one."""
    with pytest.raises(TenantFileError, match=r"no tenant file .*`surefoot key new`.*name no folder"):
        load_tenants(tmp_path)


def test_no_tenants_mean_no_keys() -> None:
    """Without tenants everybody is the local tenant, whatever key they send."""
    tenants = Tenants()
    assert not tenants.keys_required
    assert tenants.authenticate(None) is LOCAL_TENANT
    assert tenants.authenticate("Bearer anything") is LOCAL_TENANT


BAD_FILES = [
    ('key_hash = ["x"]', ["acme.toml:1: unknown key 'key_hash'", "Did you mean 'key_hashes'?"]),
    (
        f'id = "a"\nkey_hashes = ["{HASHES[0]}"]\n[limits]\nmax_token = 3',
        ["acme.toml:4: ", "limits.max_token'", "'max_tokens'?"],
    ),
    (f'id = "a"\nkey_hashes = ["{HASHES[0]}"]\n[limits]\nmax_n = 0', ["limits.max_n", ">= 1"]),
    (f'id = "a"\nkey_hashes = ["{HASHES[0]}"]\nmodels = "fake"', ["acme.toml:3: 'models'", "array"]),
    ('id = "a"\nkey_hashes = []', ["key_hashes"]),
    ('id = "a"', ["no key: it needs 'key_hashes'"]),
    ('id = "a"\nkey_hashes = ["sha256:12"]', ["'key_hashes[0]' must be what `surefoot key new` prints"]),
    (
        f'id = "A b"\nkey_hashes = ["{HASHES[0]}"]',
        ["'id': expected 1 to 64 lower-case letters, digits", '"A b"'],
    ),
    (f'id = "a"\nkey_hashes = ["{HASHES[0]}"]\nmax_tokens = 3', ["'max_tokens'", "under [limits]"]),
    ('id = "a', ["Unterminated string"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES)
def test_a_bad_file_is_refused(write: Write, text: str, words: list[str]) -> None:
    """The message has the file, the key and, for a slip of the pen, the nearest known one."""
    folder = write("acme.toml", text)
    with pytest.raises(TenantFileError) as caught:
        load_tenants(folder)
    for word in ["acme.toml", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "second",
    [f'id = "a"\nkey_hashes = ["{HASHES[1]}"]', f'id = "b"\nkey_hashes = ["{HASHES[0]}"]'],
    ids=["id", "key"],
)
def test_twins_are_refused(write: Write, second: str) -> None:
    """Two files must not share an id or a key; the message names both."""
    write("one.toml", f'id = "a"\nkey_hashes = ["{HASHES[0]}"]')
    folder = write("two.toml", second)
    with pytest.raises(TenantFileError, match=r"two\.toml: .* is also in .*one\.toml"):
        load_tenants(folder)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """A folder that is not there is an error, not a server without keys."""
    with pytest.raises(TenantFileError, match="no such folder"):
        load_tenants(tmp_path / "nowhere")


def test_new_keys() -> None:
    """Keys differ, and each opens the tenant that has its hash."""
    keys = [new_key() for _ in range(100)]
    assert len(set(keys)) == 100
    tenants = Tenants([Tenant(id=f"t{i}", key_hashes=(key_hash,)) for i, (_, key_hash) in enumerate(keys)])
    assert [tenants.authenticate(f"Bearer {key}").id for key, _ in keys] == [f"t{i}" for i in range(100)]
    assert all(key not in key_hash for key, key_hash in keys)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic key 0", "key 0", "Bearer key 9", "Bearer é"]
)
def test_keys_that_open_nothing(header: str | None) -> None:
    """A missing key, another scheme and an unknown key are refused, and none is quoted."""
    tenants = Tenants([Tenant(id="a", key_hashes=(HASHES[0],))])
    with pytest.raises(InvalidKey) as caught:
        tenants.authenticate(header)
    assert "key 9" not in str(caught.value)


ALL_PATHS = [("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/fake")]


@pytest.mark.parametrize(("method", "path"), ALL_PATHS)
@pytest.mark.parametrize("headers", [{}, bearer("wrong")])
def test_v1_needs_a_key(method: str, path: str, headers: dict[str, str]) -> None:
    """With tenants every path of the API is closed without a right key, before the body is looked at."""
    with client_of(Tenant(id="a", key_hashes=(HASHES[0],))) as client:
        response = client.request(method, path, headers=headers, content=b"{" if method == "POST" else None)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert client.request(method, path, headers=bearer("key 0"), content=b"").status_code != 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics", "/version"])
def test_health_and_metrics_need_none(path: str) -> None:
    """Probes and scrapers carry no key."""
    with client_of(Tenant(id="a", key_hashes=(HASHES[0],))) as client:
        assert client.get(path).status_code == 200


def test_models_of_a_tenant() -> None:
    """A model that a tenant may not use does not exist for it."""
    tenants = [
        Tenant(id="a", key_hashes=(HASHES[0],), models=("other",)),
        Tenant(id="b", key_hashes=(HASHES[1],), models=("fake",)),
    ]
    with client_of(*tenants) as client:
        refused = client.post(CHAT, json=BODY, headers=bearer("key 0"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert client.get("/v1/models", headers=bearer("key 0")).json()["data"] == []
        assert client.get("/v1/models/fake", headers=bearer("key 0")).status_code == 404
        assert client.post(CHAT, json=BODY, headers=bearer("key 1")).status_code == 200


def test_limits_of_a_request() -> None:
    """Asking for more than the limit is a 400 with both numbers; asking for nothing gets the limit."""
    limits = TenantLimits(max_tokens=3, max_n=2)
    backend = FakeBackend()
    with client_of(Tenant(id="a", key_hashes=(HASHES[0],), limits=limits), backend=backend) as client:
        for fields, param in (({"max_tokens": 4}, "max_tokens"), ({"n": 3}, "n")):
            response = client.post(CHAT, json=BODY | fields, headers=bearer("key 0"))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert str(fields[param]) in error["message"]
            assert str(fields[param] - 1) in error["message"]
        assert (
            client.post(CHAT, json=BODY, headers=bearer("key 0")).json()["choices"][0]["finish_reason"]
            == "length"
        )
        assert backend.requests[-1].params.max_tokens == 3
        text = {"model": "fake", "prompt": "a"}
        assert client.post("/v1/completions", json=text, headers=bearer("key 0")).status_code == 200
        assert backend.requests[-1].params.max_tokens == 3


@pytest.mark.anyio
async def test_concurrent_requests_of_a_tenant(serve: Serve) -> None:
    """One request too many is a 429 that says when to come back; when one ends there is room again."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(gates={0: gate}))
    limits = TenantLimits(max_concurrent_requests=1)
    tenants = Tenants(
        [
            Tenant(id="a", key_hashes=(HASHES[0],), limits=limits),
            Tenant(id="b", key_hashes=(HASHES[1],), limits=limits),
        ]
    )
    async with serve(backend, tenants) as gateway:

        def ask(key: str) -> asyncio.Task[Any]:
            return asyncio.create_task(gateway.client.post(CHAT, json=BODY, headers=bearer(key)))

        held = [ask("key 0"), ask("key 1")]
        async with asyncio.timeout(60):
            await backend.asked(2)
        refused = await ask("key 0")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"]
        gate.set()
        assert [(await each).status_code for each in held] == [200, 200]
        assert (await ask("key 0")).status_code == 200
