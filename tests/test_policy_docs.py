"""docs/policies.md: what it shows can be used as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import fields, replace

from surefoot.gateway.cli import run
from surefoot.gateway.tenant_folder import TenantFolder
from surefoot.gateway.tenants import Tenant
from surefoot.policies.base import Observation
from surefoot.policies.bounds import SPENDABLE, Losses, PlanBounds
from surefoot.policies.registry import BUILT_IN, load_policies, serving_policy

TEXT = (Path(__file__).parent.parent / "docs" / "policies.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The examples in a language."""
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    """A folder with the page's tenant and its defaults."""
    acme, defaults, *_ = blocks("toml")
    (tmp_path / "acme.toml").write_text(acme)
    (tmp_path / "defaults.toml").write_text(defaults)
    return tmp_path


def test_tenant_files(tenants: Path) -> None:
    """The tenant and the defaults of the page make a tenant."""
    acme = TenantFolder(tenants, BUILT_IN).load().loaded["acme"].tenant
    assert (acme.models, acme.limits.max_n, acme.limits.max_tokens) == (("smollm2",), 4, 1024)


def test_a_tenant_with_a_format(tmp_path: Path) -> None:
    """The page's tenant of long documents gets the plan that the page names."""
    (tmp_path / "archive.toml").write_text(blocks("toml")[3])
    tenant = TenantFolder(tmp_path, BUILT_IN).load().loaded["archive"].tenant
    seen = Observation(
        tenant_id="archive", model="m", policy=tenant.policy, bounds=tenant.bounds, num_prompt_tokens=5000
    )
    plan = serving_policy(load_policies([])).decide(seen).plan
    assert (plan.name, plan.cache.max_context) == ("k8v4-recent128", 8192)
    assert f"`{plan.name}`" in TEXT


def test_a_limit_on_loss(tenants: Path) -> None:
    """The page's limit means the format that the page names for all, by its own figures, and the next one for
    the share that it names.
    """
    (tenants / "defaults.toml").write_text(blocks("toml")[2])
    cache = TenantFolder(tenants, BUILT_IN).load().loaded["acme"].tenant.cache
    assert (cache.lasting, cache.least_precise(0.003)) == ("k8v4", "mixed")
    share = (SPENDABLE * cache.max_loss - cache.loss.k8v4) / (cache.loss.mixed - cache.loss.k8v4)
    assert share == pytest.approx(0.6, abs=0.05)
    assert replace(cache, loss=Losses()).lasting == "mixed"


def test_module() -> None:
    """The page's modules pass the test kit as the page runs it, and its entry point names one of them."""
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, names)
    (point,) = tomllib.loads(blocks("toml")[4])["project"]["entry-points"]["surefoot.policies"].values()
    assert point.partition(":")[2] in names


def test_commands(tenants: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the page runs, on the page's tenant; those that serve are named right."""
    monkeypatch.chdir(tenants.parent)
    tenants.rename(tenants.parent / "tenants")
    seen = Observation(tenant_id="acme", model="m", bounds=PlanBounds())
    Path("surefoot.log").write_bytes(msgspec.json.encode({"observation": seen}))
    lines = [line.removeprefix("$ ").split() for block in blocks("console") for line in block.splitlines()]
    assert len(lines) == 6
    for program, *arguments in lines:
        assert program == "surefoot"
        if arguments[0] != "serve":
            assert run(arguments, {}) == 0, capsys.readouterr().err


def keys_of(shape: Any, prefix: str = "") -> list[str]:
    """Every key that a tenant's file may have, dotted."""
    found = []
    for each in fields(shape):
        inner = each.type if isinstance(each.type, type) and issubclass(each.type, Struct) else None
        found += keys_of(inner, f"{prefix}{each.name}.") if inner else [prefix + each.name]
    return found


def test_every_key_is_documented() -> None:
    """The table of keys names each of them, the later ones of a table by their last word."""
    table = TEXT.partition("### All keys")[2].partition("###")[0]
    for key in keys_of(Tenant):
        names = (f"`{key}`", f"`.{key.rpartition('.')[2]}`", f"`[[{key}]]`")
        assert any(name in table for name in names), key
