"""The command line, stored results and their comparison."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from surefoot.bench.cli import EXIT_USAGE, Flags, build_bench_app, main, parse_seconds
from surefoot.bench.errors import BadArgument
from surefoot.bench.latencies import Latencies
from surefoot.bench.metrics import Distribution, Summary
from surefoot.bench.records import RequestRecord
from surefoot.bench.results import BenchResult, load

from .scripted_server import scripted


def bench(*arguments: str) -> int:
    """Run the command against a scripted server; returns its status."""

    async def both() -> int:
        async with scripted() as server:
            return await asyncio.to_thread(main, [*arguments, "--url", f"{server.url}/v1"])

    return asyncio.run(both())


def test_a_run_prints_a_table_and_stores_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has the latencies; the file has arguments, server, machine, figures and every request."""
    file = tmp_path / "result.json"
    status = bench(
        "--requests=5",
        "--concurrency=2",
        "--output-tokens=3",
        "--ttft=10s",
        "--api-key=secret",
        f"--output={file}",
    )
    assert status == 0
    printed = capsys.readouterr().out
    for title in ("TTFT ms", "TPOT ms", "ITL ms", "output tokens/s", "goodput requests/s", "p99"):
        assert title in printed
    assert "secret" not in file.read_text()
    stored = json.loads(file.read_text())
    assert stored["schema"] == "surefoot.bench/1"
    assert stored["arguments"]["concurrency"] == 2
    assert stored["server"]["models"] == [{"id": "scripted", "object": "model"}]
    assert stored["machine"]["num_cpus"] >= 1
    assert stored["summary"]["goodput"]["num_good"] == 5
    assert [record["num_output_tokens"] for record in stored["records"]] == [3] * 5
    assert len(stored["records"][0]["latencies"]["itl_s"]) == 2
    assert isinstance(load(file), BenchResult)


def test_comparing_two_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison has both values, their ratio, and the arguments that differ."""
    for name, concurrency in (("a", 1), ("b", 2)):
        file = tmp_path / f"{name}.json"
        assert bench("--requests=4", f"--concurrency={concurrency}", "--quiet", f"--output={file}") == 0
    a = load(tmp_path / "a.json")
    summary = msgspec.structs.replace(a.summary, output_tokens_per_s=50.0)
    faster = msgspec.structs.replace(a, summary=msgspec.structs.replace(summary, output_tokens_per_s=75.0))
    slower = msgspec.structs.replace(a, summary=summary)
    (tmp_path / "slow.json").write_bytes(msgspec.json.encode(slower))
    (tmp_path / "fast.json").write_bytes(msgspec.json.encode(faster))
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "slow.json"), str(tmp_path / "fast.json")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("output tokens/s"))
    assert row.split() == ["output", "tokens/s", "50.00", "75.00", "1.500"]
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "concurrency: 1 / 2" in capsys.readouterr().out


def test_files_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not there, no result, or one of another schema is refused by name, as other arguments are."""
    good, other, empty, none = (tmp_path / name for name in ("good", "other", "empty", "none"))
    assert bench("--requests=1", "--quiet", f"--output={good}") == 0
    other.write_text(good.read_text().replace('"surefoot.bench/1"', '"surefoot.bench/9"'))
    empty.write_text("{}")
    capsys.readouterr()
    for file, said in (
        (none, "none cannot be read: No such file or directory"),
        (empty, "empty is not a result of `surefoot bench`: Object missing required field"),
        (other, "other has the schema 'surefoot.bench/9', and 'surefoot.bench/1' is what can be read"),
    ):
        assert main(["compare", str(good), str(file)]) == EXIT_USAGE
        printed = capsys.readouterr()
        assert (printed.out, said in printed.err) == ("", True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate=2", "--concurrency=2"], "--concurrency (a closed loop) and --rate (an open one)"),
        (["--rate=fast"], "fast"),
        (["--prompt-tokens=0"], "length"),
        (["--extra=[1]"], "--extra [1]: expected a JSON object"),
        (['--extra={"model": "x"}'], "--extra: model is written by the generator itself"),
        (["--duration=-1s"], "--duration -1s: expected a time above 0"),
        (["--requests=0"], "--requests 0: expected a number above 0"),
        (["--concurrency=0"], "--concurrency 0: expected a number above 0"),
        (["--warmup=-1"], "--warmup -1: expected 0 or more"),
        (["--url=localhost:8000"], "expected http://host:port"),
        (
            ["--output=/no/such/folder/x.json"],
            "--output /no/such/folder/x.json: no file can be written there",
        ),
        (["--output=/"], "--output /: no file"),
        (["--prompts=/no/such.jsonl"], "--prompts /no/such.jsonl cannot be read: No such file"),
        (["--nonsense"], "--nonsense"),
        (["left", "over"], "left"),
        (["compare", "one.json"], "requires an argument"),
    ],
)
def test_arguments_of_no_use_end_with_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad argument is explained on stderr, and nothing is sent."""
    assert main(arguments) == EXIT_USAGE
    printed = capsys.readouterr()
    assert (printed.out, said in printed.err) == ("", True)


def test_every_flag_and_stored_field_is_documented() -> None:
    """docs/benchmarking.md names what may be asked for, and what a stored result has of it."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    names = {f"`--{flag.name.replace('_', '-')}" for flag in dataclasses.fields(Flags)}
    for stored in (BenchResult, Summary, RequestRecord, Distribution, Latencies):
        names |= {f"`{name}`" for name in stored.__struct_fields__}
    assert {name for name in names if name not in page} == set()


def test_times_may_have_a_unit() -> None:
    """A time is in seconds unless it says ms."""
    assert [parse_seconds("--ttft", text) for text in ("2", "1.5s", "250ms")] == [2.0, 1.5, 0.25]
    with pytest.raises(BadArgument, match="--ttft 2m"):
        parse_seconds("--ttft", "2m")


def test_help_names_every_flag() -> None:
    """`python -m surefoot.bench --help` works, and shows the flags and the other command."""
    text = subprocess.run(
        [sys.executable, "-m", "surefoot.bench", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for word in (
        "--url",
        "--rate",
        "--concurrency",
        "--prompt-tokens",
        "--no-ignore-eos",
        "--ttft",
        "compare",
    ):
        assert word in text


def test_the_command_can_be_mounted() -> None:
    """The command is an app of the name `bench` that another one takes in."""
    from cyclopts import App

    app = App(name="surefoot")
    app.command(build_bench_app())
    assert app(["bench", "--rate=x"], exit_on_error=False, result_action="return_value") == 2


def test_the_generator_loads_nothing_heavy() -> None:
    """Importing the command loads no torch and no package of ours but bench."""
    code = (
        "import sys, surefoot.bench.cli\n"
        "print([name for name in sys.modules if name in ('torch', 'numpy', 'httpx')"
        " or (name.startswith('surefoot.') and not name.startswith('surefoot.bench'))])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "[]"
