"""The `surefoot` command. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, make_dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, CycloptsError, Group, Parameter

from surefoot.backends.catalog import ModelNotFound, packaged_models, prepared_models, supported_models
from surefoot.bench.cli import build_bench_app
from surefoot.policies.bounds import Format

from .policy_cli import build_policy_app
from .settings import EffectiveSettings, SettingsError, default_text, describe, resolve, value_text

EXIT_USAGE = 2
"""The exit status for a command line, a setting or a tenant file that is of no use."""

ABOUT = """\
An OpenAI-compatible gateway that serves a model in its own process.

Serve the model that comes along, and talk to it:

    surefoot serve
    curl http://127.0.0.1:8000/v1/models

Serve another one, to others, who need keys:

    surefoot key new
    surefoot serve --model ~/models/Qwen3-0.6B --tenants tenants --host 0.0.0.0
"""

SERVE = """\
Serve a model until Ctrl-C or SIGTERM, which let running requests finish.

Every setting can be a flag (--cache-memory 2GiB), an environment variable
(SUREFOOT_CACHE_MEMORY=2GiB) or a line of a TOML file (cache_memory = "2GiB");
where several speak, flags come first and the file last. The first start of a
model prepares its weights, which takes a while; later starts reuse them.

A small machine, another port:

    surefoot serve --port 9000 --cache-memory 256MiB --max-sequences 8

All settings from a file:

    surefoot serve --config surefoot.toml
"""

CONFIG = """\
Show the value of each setting and where it comes from, as `serve` would see it.

What would hold with this file and this flag:

    surefoot config --config surefoot.toml --port 9000
"""

KEY = "Make keys for tenants."

KEY_NEW = """\
Make a key for a tenant. It is shown once and kept nowhere.

The tenant's file holds only the key's hash:

    surefoot key new
"""

MODELS = """\
Show which kinds of models can be served, and those found on this machine.

For people, and for programs:

    surefoot models
    surefoot models --json
"""

LOSS = """\
Measure what a form of the weights costs, in nats per token against float32.

Both score the same text, token by token, the way that the server scores prompts.
The text is that of this installation's licences, descriptions and Python modules,
or of files. This takes minutes; the exit status does not depend on the result.

The default model in its own groups, and in 8 bits:

    surefoot loss
    surefoot loss --weights int8 --json

Another one, on text like that of its users:

    surefoot loss --model ~/models/Qwen3-0.6B --text letters.txt news.txt --tokens 50000
"""

QUALITY = """\
Measure what a quantised KV cache costs in quality, against full precision.

A text is read in full precision; then all but its first and latest tokens are
demoted, as the server would do it, and the model predicts what follows, answers
questions about facts at ten depths, and writes on. Full precision does the same,
and so does a window of equal bytes that drops old tokens, to compare with.

loss: log-probability of the text's own tokens, in nats per token; its sign is real,
and within the interval it is noise. divergence: how far the predictions are from full
precision's (Kullback-Leibler), never below 0 and far less noisy: judge by it.
A default run takes minutes; the exit status does not depend on the result.

The default plans, with a report and a plot in a folder:

    surefoot quality --output report

Is a shorter window of recent tokens enough for k8v4?

    surefoot quality --formats k8v4 --recent 16 64 256

On the model and the texts of your users, in their length:

    surefoot quality --model ~/models/Qwen3-0.6B --text a.txt b.txt --context 4096 --texts 12
"""

USAGE = """\
Show who used what: requests and tokens by day, tenant, model and class.

Of the server that runs with the same settings, or of any file:

    surefoot usage
    surefoot usage --since 2026-01-01 --until 2026-01-31 --json
    surefoot usage --usage-db /var/lib/surefoot/usage.db
"""

SIMULATE = """\
Tell what this machine, or a faster one, would promise: trace in, report out.

The server's own scheduler runs in virtual time over what steps cost on this machine,
as a served engine measured and kept it; nothing is computed, so an hour takes seconds.
Served within target counts as goodput; what the server would refuse counts against it.

So many requests a second of each class, on this machine and on one ten times as fast:

    surefoot simulate --rate interactive=1 --rate batch=8
    surefoot simulate --rate interactive=1 --rate batch=80 --speed 10

More requests in the same cache, and a GPU by its data sheet instead of this machine:

    surefoot simulate --rate batch=4 --prompt-tokens 2000 --cache-format k8v4
    surefoot simulate --gpu h100 --rate batch=20 --cache-format k4v4

A trace, and how first-come-first-served would do on it:

    surefoot simulate --trace day.jsonl --json
    surefoot simulate --trace day.jsonl --scheduler first-come

A trace has a request a line. Needed are arrival_s, prompt_tokens and output_tokens; also
known are class, priority, ttft_target_s, tpot_target_s, flow, weight, max_tokens and
prompt_group (requests of one begin with the same tokens):

    {"arrival_s": 0.25, "prompt_tokens": 400, "output_tokens": 60, "class": "interactive"}
"""

SIMULATE_SETTINGS = (
    "model",
    "served_model_id",
    "weights",
    "device",
    "threads",
    "scheduler",
    "prefix_cache",
    "max_sequences",
    "max_batched_tokens",
    "max_waiting",
    "max_waiting_s",
    "headroom",
    "classes",
    "cache_dir",
)
"""The settings that can be flags of `simulate`."""

LOSS_SETTINGS = ("model", "weights", "device", "threads", "max_batched_tokens", "cache_dir")
"""The settings that can be flags of `loss`."""

QUALITY_SETTINGS = ("model", "weights", "device", "threads", "cache_dir")
"""The settings that can be flags of `quality`."""

USAGE_SETTINGS = ("usage_db",)
"""The settings that can be flags of `usage`."""

DayFlag = Annotated[datetime | None, Parameter(show_default=False, help="A day, such as 2026-01-31; UTC")]
ConfigFlag = Annotated[
    Path | None, Parameter(name="--config", help="TOML file of settings (or SUREFOOT_CONFIG)")
]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON")]
TextFlag = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--text",
        negative="",
        consume_multiple=True,
        show_default=False,
        help="Files of UTF-8 text to score [text of this installation]",
    ),
]
OutputFlag = Annotated[
    Path | None,
    Parameter(name="--output", help="Folder for quality.md, quality.json and quality.svg"),
]
TokensFlag = Annotated[
    int, Parameter(name="--tokens", show_default=False, help="Score so many tokens or a few more [20000]")
]
WindowFlag = Annotated[
    int,
    Parameter(
        name="--window", show_default=False, help="Tokens of a window, whose first is not scored [1024]"
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimulateFlags:
    """What to simulate."""

    trace: Annotated[Path | None, Parameter(help="File of requests, a JSON object a line")] = None
    rate: Annotated[
        tuple[str, ...],
        Parameter(negative="", show_default=False, help="Without a trace: requests a second of a class"),
    ] = ("interactive=1", "batch=4")
    duration: Annotated[float, Parameter(help="Without a trace: seconds in which requests arrive")] = 300.0
    prompt_tokens: Annotated[int, Parameter(help="Without a trace: mean length of prompts")] = 128
    output_tokens: Annotated[int, Parameter(help="Without a trace: mean length of answers")] = 128
    seed: Annotated[int, Parameter(help="Without a trace: another seed, other requests")] = 0
    speed: Annotated[float, Parameter(help="How many times as fast as measured the machine is")] = 1.0
    cost: Annotated[
        Path | None, Parameter(help="File of step costs [what the model's server kept, else measured now]")
    ] = None
    gpu: Annotated[
        Literal["l40s", "h100", "h200"] | None,
        Parameter(show_default=False, help="Instead: Llama-3.1-8B on this GPU, by its data sheet"),
    ] = None
    cache_format: Annotated[
        Format,
        Parameter(help="How precise the cache is, for all requests"),
    ] = "k16v16"
    cache_blocks: Annotated[
        int | None, Parameter(help="Blocks of 16 tokens that the cache has [as the server had]")
    ] = None


DEFAULT_SIMULATION = SimulateFlags()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QualityFlags:
    """What to compare. Names are those of `QualitySettings`."""

    formats: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", consume_multiple=True, show_default=False, help="Formats [k8v8 k8v4 mixed k4v4]"
        ),
    ] = ("k8v8", "k8v4", "mixed", "k4v4")
    sinks: Annotated[int, Parameter(help="First tokens that stay in full precision")] = 4
    recent: Annotated[
        tuple[int, ...],
        Parameter(
            negative="", consume_multiple=True, show_default=False, help="Latest tokens that stay so [64]"
        ),
    ] = (64,)
    context: Annotated[int, Parameter(help="Tokens of a text before the first demotion")] = 2048
    texts: Annotated[int, Parameter(help="Texts; more make intervals narrower")] = 6
    tokens: Annotated[int, Parameter(help="Tokens that are predicted after each text")] = 128
    tasks: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            consume_multiple=True,
            show_default=False,
            help="What facts are asked for [retrieval look-alikes variable-tracking copying]",
        ),
    ] = ("retrieval", "look-alikes", "variable-tracking", "copying")
    haystacks: Annotated[int, Parameter(help="Texts in which ten facts a task are hidden")] = 2
    generated: Annotated[int, Parameter(help="Tokens that are written after each text")] = 96
    seed: Annotated[int, Parameter(help="Another seed, other facts and other writing")] = 0


DEFAULT_QUALITY = QualityFlags()


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:], os.environ))


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command line; returns the process's exit status."""
    try:
        status = build_cli(environ)(arguments, exit_on_error=False, result_action="return_value")
    except CycloptsError:  # Which cyclopts has shown already.
        return EXIT_USAGE
    except SettingsError as error:
        sys.stderr.write(f"surefoot: {error}\n")
        return EXIT_USAGE
    return status or 0


def build_cli(environ: Mapping[str, str]) -> App:
    """The commands, for an environment."""
    app = App(name="surefoot", help=ABOUT, version=lambda: version("surefoot"), help_format="plaintext")

    def settled(flags: Any, config: Path | None) -> EffectiveSettings:
        given = (
            {} if flags is None else {name: text for name, text in asdict(flags).items() if text is not None}
        )
        return resolve(given, environ, config)

    def serve(*, config: ConfigFlag = None, flags: Any = None) -> int:
        return _serve(settled(flags, config))

    def show_config(*, json: JsonFlag = False, config: ConfigFlag = None, flags: Any = None) -> None:
        effective = settled(flags, config)
        _say(_config_json(effective) if json else _config_table(effective))

    def models(*, json: JsonFlag = False, config: ConfigFlag = None) -> None:
        cache_dir = settled(None, config).settings.cache_dir
        _say(_models_json(cache_dir) if json else _models_text(cache_dir))

    def usage(
        *,
        since: DayFlag = None,
        until: DayFlag = None,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> None:
        _say(_usage(settled(flags, config), since, until, as_json=json))

    # Torch, which `start` brings along, takes seconds to import.

    def loss(
        *,
        text: TextFlag = (),
        tokens: TokensFlag = 20_000,
        window: WindowFlag = 1024,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> int:
        from .start import run_loss

        return run_loss(settled(flags, config).settings, text, tokens, window, as_json=json)

    def quality(
        *,
        text: TextFlag = (),
        what: QualityFlags = DEFAULT_QUALITY,
        output: OutputFlag = None,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> int:
        from .start import run_quality

        settings = settled(flags, config).settings
        return run_quality(settings, {"files": text, **asdict(what)}, output, as_json=json)

    def simulate(
        *,
        what: SimulateFlags = DEFAULT_SIMULATION,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> int:
        from .start import run_simulation

        return run_simulation(settled(flags, config).settings, asdict(what), as_json=json)

    for command, name, text, settings in (
        (serve, "serve", SERVE, describe()),
        (show_config, "config", CONFIG, describe()),
        (models, "models", MODELS, ()),
        (usage, "usage", USAGE, USAGE_SETTINGS),
        (loss, "loss", LOSS, LOSS_SETTINGS),
        (quality, "quality", QUALITY, QUALITY_SETTINGS),
        (simulate, "simulate", SIMULATE, SIMULATE_SETTINGS),
    ):
        if settings:
            # The type exists only now, so it cannot stand in the signature.
            command.__annotations__["flags"] = Annotated[_flags_type(settings), Parameter(name="*")]
        app.command(command, name=name, help=text)
    app.command(key := App(name="key", help=KEY))
    key.command(_key_new, name="new", help=KEY_NEW)
    app.command(build_bench_app())
    app.command(build_policy_app(environ))
    return app


def _serve(effective: EffectiveSettings) -> int:
    from surefoot.policies.registry import PolicyError

    from .sla import ClassesError
    from .start import run_gateway  # Torch takes seconds to import.
    from .tenant_files import TenantFileError
    from .usage_store import UsageError

    try:
        return run_gateway(effective.settings, effective.usage_file)
    except (PolicyError, TenantFileError, ClassesError, UsageError, ModelNotFound) as error:
        raise SettingsError(str(error)) from error


def _key_new() -> None:
    from .tenants import new_key  # Brings the web framework along.

    key, key_hash = new_key()
    _say(
        f"Key, for the client (shown only now):\n\n    {key}\n\n"
        f'Its hash, for the tenant\'s file (tenants/NAME.toml):\n\n    key_hashes = ["{key_hash}"]\n'
    )


def _usage(
    effective: EffectiveSettings, since: datetime | None, until: datetime | None, *, as_json: bool
) -> str:
    from .usage_store import UsageError, UsageFilter, read_usage, usage_table

    file = effective.readable_usage_file
    if file is None:
        raise SettingsError(f"usage_db = 'none' ({effective.sources['usage_db']}): no usage is kept")
    first, last = (None if day is None else day.date().isoformat() for day in (since, until))
    try:
        rows = read_usage(file, UsageFilter(since=first, until=last))
    except UsageError as error:
        raise SettingsError(str(error)) from error
    return _json(rows) if as_json else usage_table(rows)


def _models_json(cache_dir: Path) -> str:
    found = [{"name": name, "path": path} for name, path in packaged_models().items()]
    return _json({"supported": supported_models(), "models": found, "prepared": prepared_models(cache_dir)})


def _models_text(cache_dir: Path) -> str:
    found = [f"  {name}  {path}" for name, path in packaged_models().items()]
    prepared = [f"  {folder.name}" for folder in prepared_models(cache_dir)]
    lines = [
        fill(supported_models(), 78),
        "",
        "Found (name it with --model):",
        *(found or ["  none; give --model a folder or a file"]),
        "",
        f"Prepared in {cache_dir} (ready in seconds):",
        *(prepared or ["  none yet; the first start of a GGUF file does it"]),
    ]
    return "\n".join(lines) + "\n"


def _flags_type(names: Collection[str]) -> Any:
    """A class with a text for each setting, None where no flag was given: reading it is for the settings."""
    group = Group("Settings")
    members = [
        (
            name,
            Annotated[
                str | None,
                Parameter(
                    help=f"{setting.help} [{default_text(name)}]", metavar="VALUE", negative="", group=group
                ),
            ],
            None,
        )
        for name, setting in describe().items()
        if name in names
    ]
    flags_type = make_dataclass("Flags", members, frozen=True)
    # cyclopts looks for a class's members only where its module is not one of Python's.
    flags_type.__module__ = __name__
    return flags_type


def _config_table(effective: EffectiveSettings) -> str:
    rows = [
        (name, value_text(getattr(effective.settings, name)), source)
        for name, source in effective.sources.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}\n" for name, value, source in rows)


def _config_json(effective: EffectiveSettings) -> str:
    values = {
        name: {"value": getattr(effective.settings, name), "source": source}
        for name, source in effective.sources.items()
    }
    return _json(values)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=_json_value)).decode() + "\n"


def _json_value(value: object) -> int | str:
    return int(value) if isinstance(value, int) else str(value)


def _say(text: str) -> None:
    sys.stdout.write(text)
