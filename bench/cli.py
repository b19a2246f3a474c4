"""The `surefoot bench` command."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter

from .arrivals import parse_rate
from .command_line import run_app
from .compare import compare
from .errors import BadArgument, BenchError
from .lengths import parse_length
from .loop import run_async
from .report import report
from .results import check_storable, load, store
from .run import run_bench
from .settings import BenchSettings, Endpoint
from .view import ProgressView

EXIT_USAGE = 2
EXIT_FAILED = 1
KEY_ENV = "OPENAI_API_KEY"
DEFAULT_REQUESTS = 100

ABOUT = """\
Load any OpenAI-compatible server and measure what its clients see.

Eight requests always under way (a closed loop), 128 tokens in and 128 out:

    surefoot bench --concurrency 8

Requests that arrive at random, from 1 to 10 a second over a minute (an open loop):

    surefoot bench --rate 1:10 --duration 60 --output ramp.json

Two stored results side by side:

    surefoot bench compare before.json after.json
"""

COMPARE = """\
Show two stored results side by side, with ratios.

    surefoot bench compare before.json after.json
"""

SERVER, LOAD, WORK, LIMITS, OUT = (
    Group(name, sort_key=place)
    for place, name in enumerate(("Server", "Load", "Work", "Limits of goodput", "Output"))
)


def flag(help_text: str, group: Group, **more: Any) -> Parameter:
    """A flag whose default is told in its help."""
    return Parameter(help=help_text, group=group, show_default=False, **more)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line as it was typed."""

    url: Annotated[str, flag("Where it is [http://127.0.0.1:8000]", SERVER)] = "http://127.0.0.1:8000"
    model: Annotated[str | None, flag("The model to ask for [the first that the server lists]", SERVER)] = (
        None
    )
    endpoint: Annotated[Endpoint, flag("Which API to use [chat]", SERVER)] = "chat"
    api_key: Annotated[str | None, flag(f"Key to send [the environment's {KEY_ENV}]", SERVER)] = None
    timeout: Annotated[str, flag("How long an answer may take, e.g. 90s [600s]", SERVER)] = "600s"
    concurrency: Annotated[int | None, flag("Closed loop: requests always under way [1]", LOAD)] = None
    rate: Annotated[
        str | None, flag("Open loop: arrivals per second, such as 4, or a ramp such as 1:10", LOAD)
    ] = None
    requests: Annotated[
        int | None, flag(f"Requests of the run [{DEFAULT_REQUESTS}, or no limit with --duration]", LOAD)
    ] = None
    duration: Annotated[str | None, flag("Send nothing after this long, e.g. 60s", LOAD)] = None
    warmup: Annotated[int, flag("Requests before the run that are not counted [2]", LOAD)] = 2
    prompt_tokens: Annotated[
        str, flag("Length of synthetic prompts: 128, 64:256 (uniform) or 128~32 (normal) [128]", WORK)
    ] = "128"
    output_tokens: Annotated[str, flag("Length of answers, written like that of prompts [128]", WORK)] = "128"
    prompts: Annotated[
        Path | None, flag("File of prompts in place of synthetic ones: .jsonl, or a prompt per line", WORK)
    ] = None
    ignore_eos: Annotated[bool, flag("Answers run to their full length, if the server can [on]", WORK)] = True
    extra: Annotated[str, flag("JSON object to add to every request's body", WORK)] = "{}"
    seed: Annotated[int, flag("Seed of prompts, lengths and arrivals [0]", WORK)] = 0
    ttft: Annotated[str | None, flag("A good request's longest TTFT, e.g. 500ms", LIMITS)] = None
    tpot: Annotated[str | None, flag("A good request's longest TPOT, e.g. 50ms", LIMITS)] = None
    output: Annotated[Path | None, flag("Store everything in this file, as JSON", OUT)] = None
    quiet: Annotated[bool, flag("Show no progress", OUT, negative="")] = False

    def settings(self, key: str | None) -> BenchSettings:
        """What the texts mean. `BadArgument` if one has no meaning, or two do not go together."""
        if self.rate is not None and self.concurrency is not None:
            raise BadArgument("--concurrency (a closed loop) and --rate (an open one) do not go together")
        no_end = self.requests is None and self.duration is None
        return BenchSettings(
            url=self.url,
            model=self.model,
            endpoint=self.endpoint,
            api_key=self.api_key or key,
            timeout_s=parse_seconds("--timeout", self.timeout),
            concurrency=self.concurrency if self.concurrency is not None else 1,
            rate=parse_rate(self.rate) if self.rate is not None else None,
            num_requests=DEFAULT_REQUESTS if no_end else self.requests,
            duration_s=parse_seconds("--duration", self.duration) if self.duration is not None else None,
            num_warmup=self.warmup,
            prompt_tokens=parse_length(self.prompt_tokens),
            output_tokens=parse_length(self.output_tokens),
            prompts=self.prompts,
            ignore_eos=self.ignore_eos,
            extra=parse_extra(self.extra),
            seed=self.seed,
            max_ttft_s=parse_seconds("--ttft", self.ttft) if self.ttft is not None else None,
            max_tpot_s=parse_seconds("--tpot", self.tpot) if self.tpot is not None else None,
        )


def parse_seconds(name: str, text: str) -> float:
    """`1.5`, `1.5s` or `1500ms`, in seconds."""
    number, scale = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = float(number) * scale
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise BadArgument(f"{name} {text}: expected a time above 0 such as 1.5s or 1500ms")
    return seconds


def parse_extra(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadArgument(f"--extra {text}: expected a JSON object: {error}") from error


def build_bench_app() -> App:
    """The command, to run by itself or to mount into another."""
    app = App(name="bench", help=ABOUT, help_format="plaintext", version_flags=[])
    app.default(run_command)
    app.command(compare_command, name="compare", help=COMPARE)
    return app


def run_command(*, flags: Flags = Flags()) -> int:
    """Run one load, print its table; returns the exit status."""
    try:
        settings = flags.settings(os.environ.get(KEY_ENV))
        if flags.output is not None:
            check_storable(flags.output)
        result = run_async(run_bench(settings, ProgressView(sys.stderr, settings, flags.quiet)))
        sys.stdout.write(report(result))
        if flags.output is not None:
            store(result, flags.output)
    except BenchError as error:
        return _complain(error)
    return 0 if result.summary.num_ok else EXIT_FAILED


def compare_command(a: Path, b: Path, /) -> int:
    """Print two results side by side; returns the exit status."""
    try:
        sys.stdout.write(compare(load(a), load(b)))
    except BenchError as error:
        return _complain(error)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns the process's exit status."""
    return run_app(build_bench_app(), arguments, bad_usage=EXIT_USAGE)


def _complain(error: BenchError) -> int:
    sys.stderr.write(f"surefoot bench: {error}\n")
    return EXIT_USAGE if isinstance(error, BadArgument) else EXIT_FAILED
