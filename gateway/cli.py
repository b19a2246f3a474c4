"""The `surefoot` command. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import msgspec
from cyclopts import App, CycloptsError, Parameter

from surefoot.backends.catalog import ModelNotFound, packaged_models, prepared_models, supported_models
from surefoot.bench.cli import build_bench_app

from .policy_cli import build_policy_app
from .report_cli import add_reports
from .setting_flags import ConfigFlag, JsonFlag, settled, with_flags
from .settings import EffectiveSettings, SettingsError, describe, resolve, value_text

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

USAGE = """\
Show who used what: requests and tokens by day, tenant, model and class.

Of the server that runs with the same settings, or of any file:

    surefoot usage
    surefoot usage --since 2026-01-01 --until 2026-01-31 --json
    surefoot usage --usage-db /var/lib/surefoot/usage.db
"""

USAGE_SETTINGS = ("usage_db",)
"""The settings that can be flags of `usage`."""

DayFlag = Annotated[datetime | None, Parameter(show_default=False, help="A day, such as 2026-01-31; UTC")]


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

    def serve(*, config: ConfigFlag = None, flags: Any = None) -> int:
        return _serve(settled(flags, config, environ))

    def show_config(*, json: JsonFlag = False, config: ConfigFlag = None, flags: Any = None) -> None:
        effective = settled(flags, config, environ)
        _say(_config_json(effective) if json else _config_table(effective))

    def models(*, json: JsonFlag = False, config: ConfigFlag = None) -> None:
        cache_dir = resolve({}, environ, config).settings.cache_dir
        _say(_models_json(cache_dir) if json else _models_text(cache_dir))

    def usage(
        *,
        since: DayFlag = None,
        until: DayFlag = None,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> None:
        _say(_usage(settled(flags, config, environ), since, until, as_json=json))

    app.command(with_flags(serve, describe()), name="serve", help=SERVE)
    app.command(with_flags(show_config, describe()), name="config", help=CONFIG)
    app.command(models, name="models", help=MODELS)
    app.command(with_flags(usage, USAGE_SETTINGS), name="usage", help=USAGE)
    add_reports(app, environ)
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
    if first is not None and last is not None and first > last:
        raise SettingsError(f"--since is {first}, which is after --until, {last}")
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
