"""The `surefoot` command as its users see it: output, errors and exit status."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import subprocess
import sys
import tomllib
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct
from structlog.testing import capture_logs

from surefoot.backends.catalog import packaged_models
from surefoot.backends.fake import FakeBackend
from surefoot.gateway.app import create_app
from surefoot.gateway.cli import EXIT_USAGE, run
from surefoot.gateway.server import serve
from surefoot.gateway.settings import ServeSettings, default_text, describe, flag_name
from surefoot.gateway.tenant_folder import TenantFolder
from surefoot.gateway.tenants import Tenants, hash_key
from surefoot.gateway.usage_store import UsageRow, UsageStore
from surefoot.policies.baseline import BaselinePolicy


class Outcome(Struct, frozen=True):
    """What a command did."""

    status: int
    out: str
    err: str


class Cli:
    """Runs the command in this process, in an environment of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.environ: dict[str, str] = {}

    def __call__(self, *arguments: str) -> Outcome:
        """Run one command line."""
        status = run(arguments, self.environ)
        return Outcome(status, *self._capsys.readouterr())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, restored_logs: None) -> Cli:
    """A command line on a wide terminal; some commands send all logs to a stderr that ends with the test."""
    monkeypatch.setenv("COLUMNS", "200")
    return Cli(capsys)


def test_version(cli: Cli) -> None:
    """`--version` prints the installed version and nothing else."""
    assert cli("--version") == Outcome(0, version("surefoot") + "\n", "")


@pytest.mark.parametrize("arguments", [("--help",), ()])
def test_help_lists_the_commands(cli: Cli, arguments: tuple[str, ...]) -> None:
    """Without a command the help is shown: the commands, and lines that can be typed."""
    outcome = cli(*arguments)
    assert outcome.status == 0
    assert {"serve", "config", "key", "models", "usage"} <= set(re.findall(r"│ (\w+) ", outcome.out))
    assert "    surefoot serve\n" in outcome.out


@pytest.mark.parametrize("command", ["serve", "simulate", "loss", "quality"])
def test_a_gpu_that_is_not_there(cli: Cli, command: str) -> None:
    """Asked for a GPU that is not there, a command ends at once and says what is missing and what to do."""
    outcome = cli(command, "--device", "cuda")
    assert outcome.status == EXIT_USAGE
    assert "device = cuda, but torch" in outcome.err
    assert "set device = cpu" in outcome.err


@pytest.mark.parametrize(
    "command", [("serve",), ("config",), ("models",), ("usage",), ("key", "new"), ("simulate",), ("quality",)]
)
def test_help_has_examples(cli: Cli, command: tuple[str, ...]) -> None:
    """Each command's help has a line that can be typed."""
    assert f"\n    surefoot {' '.join(command)}" in cli(*command, "--help").out


@pytest.mark.parametrize("command", ["serve", "config"])
def test_every_setting_is_a_flag(cli: Cli, command: str) -> None:
    """`serve` and `config` take every setting, with its help and default."""
    out = cli(command, "--help").out
    for name, setting in describe().items():
        assert f"{flag_name(name)} " in out
        assert f"{setting.help} [{default_text(name)}]" in out


def test_config_shows_sources(cli: Cli, tmp_path: Path) -> None:
    """`config` has one line per setting: name, value that holds, place that it came from."""
    file = tmp_path / "surefoot.toml"
    file.write_text('port = 1\ncache_memory = "2GiB"\nmax_sequences = 8')
    cli.environ = {"SUREFOOT_PORT": "2", "SUREFOOT_THREADS": "3"}
    outcome = cli("config", "--config", str(file), "--max-sequences", "4")
    rows = {name: (value, source) for name, value, source in map(str.split, outcome.out.splitlines())}
    assert list(rows) == list(describe())
    assert rows["port"] == ("2", "SUREFOOT_PORT")
    assert rows["threads"] == ("3", "SUREFOOT_THREADS")
    assert rows["cache_memory"] == ("2GiB", str(file))
    assert rows["max_sequences"] == ("4", "--max-sequences")
    assert rows["drain_s"] == ("30", "default")


def test_config_as_json(cli: Cli) -> None:
    """`config --json` gives values with their types: sizes in bytes, None for `auto`."""
    shown = msgspec.json.decode(cli("config", "--json", "--max-body-bytes", "1KiB").out)
    assert shown["max_body_bytes"] == {"value": 1024, "source": "--max-body-bytes"}
    assert shown["cache_memory"] == {"value": None, "source": "default"}
    assert shown["port"] == {"value": 8000, "source": "default"}
    assert shown.keys() == describe().keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("srve",), 'Did you mean "serve"?'),
        (("config", "--prot", "1"), "Did you mean --port?"),
        (("config", "--port"), "--port requires an argument"),
        (("config", "--port", "-1"), "port = '-1' (--port): expected a whole number from 0 to 65535"),
        (("config", "--config", "/no/such.toml"), "/no/such.toml cannot be read: No such file"),
        (("config", "left", "over"), "left"),
        (("key", "old"), "old"),
    ],
)
def test_usage_errors(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    """A command line of no use gets one message on stderr, no traceback, and exit status 2."""
    outcome = cli(*arguments)
    assert (outcome.status, outcome.out) == (EXIT_USAGE, "")
    assert said in outcome.err
    assert "Traceback" not in outcome.err


def test_new_key_is_a_tenants_key(cli: Cli, tmp_path: Path) -> None:
    """`key new` prints a new key and the line that lets it in; the line does not hold the key."""
    outcome = cli("key", "new")
    key = re.search(r"^    (sf-\S+)$", outcome.out, re.MULTILINE)
    line = re.search(r"^    (key_hashes = .*)$", outcome.out, re.MULTILINE)
    assert key is not None
    assert line is not None
    assert tomllib.loads(line[1]) == {"key_hashes": [f"sha256:{hashlib.sha256(key[1].encode()).hexdigest()}"]}
    (tmp_path / "acme.toml").write_text(f'id = "acme"\n{line[1]}\n')
    tenants = Tenants(TenantFolder(tmp_path, ["baseline"]).load().tenants)
    assert tenants.authenticate(f"Bearer {key[1]}").id == "acme"
    assert cli("key", "new").out != outcome.out


def test_usage(cli: Cli, tmp_path: Path) -> None:
    """`usage` shows a file's rows of a period as a table or as JSON; the file is the server's by default."""
    cli.environ = {"XDG_STATE_HOME": str(tmp_path)}
    with closing(UsageStore(tmp_path / "surefoot" / "usage.db")) as store:
        for day in ("2026-01-30", "2026-01-31"):
            store.add([UsageRow(day=day, tenant="acme", model="m", sla_class="batch", requests=3)])
    assert [line.split()[0] for line in cli("usage").out.splitlines()] == [
        "day",
        "2026-01-30",
        "2026-01-31",
        "total",
    ]
    (row,) = msgspec.json.decode(cli("usage", "--since", "2026-01-31", "--json").out)
    assert (row["day"], row["tenant"], row["class"], row["requests"]) == ("2026-01-31", "acme", "batch", 3)
    assert cli("usage", "--until", "2026-01-01").out == "No usage.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--usage-db", "/no/such.db"), "there is no usage file /no/such.db"),
        (("--usage-db", "none"), "usage_db = 'none' (--usage-db): no usage is kept"),
        (("--since", "soon"), "soon"),
        (("--since", "2026-02-01", "--until", "2026-01-31"), "--since is 2026-02-01, which is after --until"),
    ],
)
def test_usage_that_is_not_there(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    """Where no usage is kept, or a day is none, one message says so."""
    outcome = cli("usage", *arguments)
    assert (outcome.status, outcome.out) == (EXIT_USAGE, "")
    assert said in outcome.err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("classes", "[gold]\nprority = 1", "unknown key 'prority'"),
        ("tenants", '[classes]\ndefault = "gold"', "there is no SLA class 'gold'"),
        ("usage_db", "", "usage file"),
    ],
)
def test_files_of_no_use_end_the_start(tmp_path: Path, name: str, text: str, said: str) -> None:
    """Classes, tenants' choices of them and a usage file that cannot be used are refused before the start."""
    value = tmp_path / name
    if name == "tenants":
        value.mkdir()
        (value / "a.toml").write_text(f'id = "a"\nkey_hashes = ["{hash_key("k")}"]\n{text}')
    elif name == "usage_db":
        value.mkdir()
    else:
        value.write_text(text)
    program = [Path(sys.executable).with_name("surefoot"), "serve", flag_name(name), value, "--port", "0"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_models(cli: Cli, tmp_path: Path) -> None:
    """`models` names the supported kinds, the model that comes along, and the models prepared as a whole."""
    cli.environ = {"SUREFOOT_CACHE_DIR": str(tmp_path)}
    assert "none yet" in cli("models").out
    for name in ("whole-bfloat16-1", ".partial-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "no-manifest").mkdir()
    out = cli("models").out
    assert "llama" in out
    assert str(packaged_models()["smollm2"]) in out
    assert "  whole-bfloat16-1\n" in out
    assert "partial" not in out
    assert "no-manifest" not in out
    shown = msgspec.json.decode(cli("models", "--json").out)
    assert shown["prepared"] == [str(tmp_path / "whole-bfloat16-1")]
    assert [found["name"] for found in shown["models"]] == ["smollm2"]


def test_the_program(tmp_path: Path) -> None:
    """The installed console script runs from any folder, with the process's own environment and status."""
    program = Path(sys.executable).with_name("surefoot")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SUREFOOT_PORT": "70000"}
    done = subprocess.run(
        [program, "config"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_USAGE
    assert done.stdout == ""
    assert (
        done.stderr == "surefoot: port = '70000' (SUREFOOT_PORT): expected a whole number from 0 to 65535\n"
    )


COST = '{"num_blocks": 500, "cost": {"fixed_s": 0.01, "row_s": 0.001, "further_row_s": 0.001}}'


@pytest.fixture
def cost_file(tmp_path: Path) -> str:
    """What steps cost on some machine."""
    file = tmp_path / "cost.json"
    file.write_text(COST)
    return str(file)


def test_simulate_reads_its_own_example(cli: Cli, tmp_path: Path, cost_file: str) -> None:
    """The line of a trace that the help shows is one that it reads; the report names its class."""
    example = re.search(r'\{"arrival_s".*\}', cli("simulate", "--help").out)
    assert example is not None
    (tmp_path / "trace.jsonl").write_text(example[0])
    outcome = cli("simulate", "--trace", str(tmp_path / "trace.jsonl"), "--cost", cost_file)
    assert (outcome.status, outcome.err) == (0, "")
    assert re.search(r"^interactive +1 +0 +", outcome.out, re.MULTILINE)


def test_simulate_serves_the_operators_own_classes(cli: Cli, tmp_path: Path, cost_file: str) -> None:
    """A class of the settings' file can be simulated, and what it promises is what counts as good."""
    classes = tmp_path / "classes.toml"
    goodput = {}
    for target_s in (1e-6, 10.0):
        classes.write_text(f"[nightly]\npriority = 5\nttft_target_s = {target_s}\n")
        arguments = ("--rate", "nightly=1", "--classes", str(classes), "--cost", cost_file, "--json")
        outcome = cli("simulate", *arguments)
        assert (outcome.status, outcome.err) == (0, "")
        goodput[target_s] = msgspec.json.decode(outcome.out)["classes"][0]["goodput"]
    assert goodput == {1e-6: 0.0, 10.0: 1.0}


def test_simulate_as_json(cli: Cli, cost_file: str) -> None:
    """`--json` has every figure; scheduler, speed, rates and settings reach the simulation."""
    rates = ("--rate", "interactive=2", "--rate", "batch=9", "--duration", "20")
    shown = {}
    for scheduler in ("promise", "first-come"):
        for speed in ("1", "10"):
            arguments = (*rates, "--cost", cost_file, "--json", "--scheduler", scheduler, "--speed", speed)
            shown[scheduler, speed] = msgspec.json.decode(cli("simulate", *arguments).out)
    goodput = {key: report["classes"][0]["goodput"] for key, report in shown.items()}
    assert goodput["promise", "1"] > goodput["first-come", "1"]
    assert goodput["promise", "10"] == 1.0
    assert {each["sla_class"] for each in shown["promise", "1"]["classes"]} == {"interactive", "batch"}
    refused = cli(
        "simulate", *rates, "--cost", cost_file, "--json", "--max-waiting", "0", "--max-sequences", "2"
    )
    assert msgspec.json.decode(refused.out)["classes"][1]["refusals"]["requests"] > 0


def test_simulate_a_gpu_and_a_format(cli: Cli) -> None:
    """A GPU's data sheet stands in for a machine, and fewer bits let more requests into its cache."""
    crowd = ("--rate", "batch=40", "--duration", "1", "--prompt-tokens", "500", "--cache-blocks", "500")
    shown = [
        msgspec.json.decode(cli("simulate", "--gpu", "h100", *crowd, "--json", "--cache-format", each).out)
        for each in ("k16v16", "k4v4")
    ]
    assert shown[0]["max_resident"] < shown[1]["max_resident"]
    assert shown[0]["output_tokens_per_s"] < shown[1]["output_tokens_per_s"]
    text = cli("simulate", "--gpu", "h100", *crowd).out
    assert f" {shown[0]['max_resident']} at most" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h100"), "gpu says what steps cost: leave cost and speed out"),
        (("--rate", "bach=1"), "unknown class 'bach'"),
        (("--speed", "0"), "speed must be above 0, got 0"),
        (("--trace", "/no/such.jsonl"), "/no/such.jsonl cannot be read: No such file"),
    ],
)
def test_simulate_refuses(cli: Cli, cost_file: str, arguments: tuple[str, ...], said: str) -> None:
    """What cannot be simulated is one message and exit status 2."""
    outcome = cli("simulate", "--cost", cost_file, *arguments)
    assert (outcome.status, outcome.out) == (EXIT_USAGE, "")
    assert said in outcome.err
    assert "/no/such.json is no file of step costs" in cli("simulate", "--cost", "/no/such.json").err


def test_default_model_is_there() -> None:
    """The default of `--model` is one that the package list knows, and it is installed."""
    assert ServeSettings().model in packaged_models()


def test_an_address_that_is_taken_is_named() -> None:
    """Of two servers on one port the second ends with status 1, and the log has host and port."""
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as logs:
        port = taken.getsockname()[1]
        app = create_app([FakeBackend()], Tenants(), BaselinePolicy())
        assert serve(app, "127.0.0.1", port, 0.0, lambda url: pytest.fail(f"served at {url}")) == 1
    failed = {"event": "server.listen_failed", "log_level": "error", "host": "127.0.0.1", "port": port}
    assert failed in logs


def test_a_report_that_could_not_be_written_is_not_measured(cli: Cli, tmp_path: Path) -> None:
    """`quality` refuses a folder of no use at once, and not after the minutes of measuring."""
    (tmp_path / "file").write_text("")
    outcome = cli("quality", "--output", str(tmp_path / "file"))
    assert (outcome.status, outcome.out) == (EXIT_USAGE, "")
    assert f"the report cannot be written to {tmp_path}/file: File exists" in outcome.err
    assert "Loading" not in outcome.err
