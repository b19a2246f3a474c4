"""`surefoot policy`: what operators see before a server does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from surefoot.gateway.cli import EXIT_USAGE, run
from surefoot.gateway.tenants import hash_key
from surefoot.policies.base import Observation
from surefoot.policies.bounds import CacheBounds, PlanBounds, SpeculationBounds

EXAMPLES = Path(__file__).parents[2] / "examples" / "tenants"
EXPLAIN = ("explain", "--tenant", "chat", "--tenants", str(EXAMPLES))
HEAD = f'id = "acme"\nkey_hashes = ["{hash_key("x")}"]\n'
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `surefoot policy ...`; gives status, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run_policy(*arguments: str, **environ: str) -> tuple[int, str, str]:
        status = run(("policy", *arguments), environ)
        return (status, *capsys.readouterr())

    return run_policy


def test_examples_pass(cli: Cli) -> None:
    """Every example is a file that this version serves, and each explains itself."""
    assert cli("check", str(EXAMPLES)) == (0, f"{EXAMPLES}: 5 tenants are fine, with defaults.toml\n", "")
    for file in EXAMPLES.glob("*.toml"):
        assert file.read_text().startswith("# ")


def test_check_names_every_fault(cli: Cli, tmp_path: Path) -> None:
    """Each bad file is one line with its place; the folder may come from the settings."""
    (tmp_path / "a.toml").write_text(HEAD + "wieght = 1.0")
    (tmp_path / "b.toml").write_text("id = ")
    status, out, err = cli("check", SUREFOOT_TENANTS=str(tmp_path))
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        f"{tmp_path}/a.toml:3: unknown key 'wieght'. Did you mean 'weight'?",
        f"{tmp_path}/b.toml:1: not TOML: Invalid value (at end of document)",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check",), "no folder of tenant files"),
        (("check", "/no/such"), "/no/such: no such folder"),
        (("show", "chta", "--tenants", str(EXAMPLES)), "no tenant 'chta'. Did you mean 'chat'?"),
        (("explain", "--tenants", str(EXAMPLES)), "--tenant"),
        (("replay", "/no/such.log"), "/no/such.log cannot be read: No such file"),
        (("replay", "/dev/null", "--policy", "x"), "there is no policy 'x'; known are baseline, "),
        (("replay", "/dev/null"), "/dev/null has no event request.planned: a server writes them with"),
        ((*EXPLAIN, "--kind", "images"), "images"),
        ((*EXPLAIN, "--prompt-tokens", "0"), "--prompt-tokens"),
        ((*EXPLAIN, "--cache-pressure", "80"), "--cache-pressure"),
        ((*EXPLAIN, "--acceptance", "-1"), "--acceptance"),
        ((*EXPLAIN, "--load", "-1"), "--load"),
        ((*EXPLAIN, "--hour", "24"), "--hour"),
    ],
)
def test_usage_errors(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    """What cannot be done is one message and status 2."""
    status, out, err = cli(*arguments)
    assert (status, out) == (EXIT_USAGE, "")
    assert said in err
    assert "Traceback" not in err


def test_show(cli: Cli) -> None:
    """Each value stands beside its origin, with file and line, and no hash is shown."""
    status, out, _ = cli("show", "agent", "--tenants", str(EXAMPLES))
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert status == 0
    assert rows["limits.max_n"][0] == "1"
    assert re.fullmatch(r"agent\.toml:\d+", rows["limits.max_n"][1])
    assert rows["weight"] == ["1.0", "built-in"]
    assert "sha256" not in out


def test_explain(cli: Cli) -> None:
    """Every rule says its part, then come the plan and the reason; the file clamps the tier."""
    where = ("--tenants", str(EXAMPLES))
    _, out, _ = cli("explain", "--tenant", "chat", *where, "--tier", "flex", "--prompt-tokens", "3000")
    assert "adaptive       for tenant chat, class batch\n" in out
    for rule in ("pressure", "prompt_length", "acceptance", "quality"):
        assert re.search(rf"^rule  {rule} ", out, re.MULTILINE)
    assert "3000 prompt tokens" in out
    assert "plan  draft4" in out
    assert "class interactive" in cli("explain", "--tenant", "agent", *where, "--tier", "flex")[1]
    assert "class batch" in cli("explain", "--tenant", "summaries", *where, "--tier", "priority")[1]


def test_replay(cli: Cli, tmp_path: Path) -> None:
    """Changes are counted with the first reason."""
    bounds = PlanBounds(speculation=SpeculationBounds(), cache=CacheBounds(format="k8v8"))
    seen = Observation(tenant_id="a", model="m", bounds=bounds)
    log = tmp_path / "log"
    log.write_bytes(msgspec.json.encode({"plan": "baseline", "observation": seen}) * 1 + b"\n{}\n")
    assert cli("replay", str(log))[1] == "1 requests, of which 0 would have had another plan\n"
    assert cli("replay", str(log), "--policy", "fixed")[1] == (
        "1 requests, of which 1 would have had another plan\n"
        "       1  baseline -> k8v8:"
        " the policy is fixed, and the tenant's file allows k8v8\n"
    )
    log.write_bytes(b"Loading the weights.\n\n  curl -d '{}'\n" + log.read_bytes())
    assert cli("replay", str(log))[1].startswith("1 requests")
    log.write_text("{")
    assert "line 1: " in cli("replay", str(log))[2]


@pytest.mark.parametrize("command", ["check", "show", "explain", "replay"])
def test_help_has_examples(cli: Cli, command: str) -> None:
    """Each command's help has a line that can be typed."""
    assert f"\n    surefoot policy {command}" in cli(command, "--help")[1]
