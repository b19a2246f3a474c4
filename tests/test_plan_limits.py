"""The longest context that a request meets is its plan's, all the way from HTTP to a real engine's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from litestar.testing import TestClient

from surefoot.backends.engine.backend import EngineBackend, EngineParts
from surefoot.backends.engine.settings import EngineSettings
from surefoot.gateway.app import create_app
from surefoot.gateway.tenants import Tenant, Tenants
from surefoot.policies.bounds import CacheBounds
from surefoot.policies.registry import load_policies, serving_policy

from .engine.serving import blocks, load_tiny, prompt_of
from .gateway.harness import bearer, hashes

NUM_BLOCKS = 26
NUM_FULL = NUM_BLOCKS * 16
"""The longest context in full precision: the model takes 512 tokens."""
NUM_PROMPT = 200
BOUNDS = {
    "full": CacheBounds(),
    "small": CacheBounds(format="k4v4", per_request=True),
    "short": CacheBounds(format="k4v4", max_context=NUM_PROMPT + 50),
    "narrow": CacheBounds(max_context=NUM_PROMPT + 50),
}


@pytest.fixture(scope="module")
def http(parts: EngineParts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A server over a tiny model whose cache is its limit, with a tenant of each kind."""
    tiny = load_tiny("qwen3", parts, tmp_path_factory.mktemp("tiny"))
    settings = EngineSettings(cache_bytes=blocks(tiny, NUM_BLOCKS))
    tenants = [
        Tenant(id=name, key_hashes=hashes(name), policy="fixed", cache=bounds)
        for name, bounds in BOUNDS.items()
    ]
    backend = EngineBackend("tiny", lambda: tiny, settings)
    app = create_app([backend], Tenants(tenants), serving_policy(load_policies([])))
    with TestClient(app) as client:
        client.blocking_portal.call(app.state.lifecycle.started.wait)
        yield client


def ask(http: TestClient, tenant: str, max_tokens: int, **fields: Any) -> Any:
    """A prompt and so many tokens after it."""
    body = {
        "model": "tiny",
        "prompt": prompt_of(NUM_PROMPT),
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
        "return_metrics": True,
    }
    return http.post("/v1/completions", json=body | fields, headers=bearer(tenant))


def test_a_quantised_plan_goes_beyond_full_precision(http: TestClient) -> None:
    """A context that the cache has no room for in full precision is served whole in fewer bits."""
    answer = ask(http, "small", 300).json()
    assert NUM_PROMPT + 300 > NUM_FULL
    assert answer["usage"]["completion_tokens"] == 300
    assert answer["metrics"]["cache"]["num_demoted_tokens"] > 300


@pytest.mark.parametrize(
    ("tenant", "max_tokens", "fields", "words"),
    [
        ("full", 300, {}, f"maximum context length is {NUM_FULL} tokens."),
        (
            "small",
            300,
            {"cache": {"format": "k16v16"}},
            f"maximum context length is {NUM_FULL} tokens.",
        ),
        ("small", 313, {}, "This model's maximum context length is 512 tokens."),
        ("short", 51, {}, f"maximum context length is {NUM_PROMPT + 50} tokens by the request's plan."),
        ("narrow", 51, {}, f"maximum context length is {NUM_PROMPT + 50} tokens by the request's plan."),
    ],
)
def test_the_limit_is_the_plans(
    http: TestClient, tenant: str, max_tokens: int, fields: dict[str, Any], words: str
) -> None:
    """One token beyond what the request's own plan holds is refused with that number, and no token sooner."""
    refused = ask(http, tenant, max_tokens, **fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert words in error["message"]
    if tenant in ("short", "narrow"):
        assert ask(http, tenant, max_tokens - 1).status_code == 200
