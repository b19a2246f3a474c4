"""What the gateway is started with, and where each value comes from.

A value is taken from the first of these that has it: command-line flag (`--port 8000`), environment variable
(`SUREFOOT_PORT=8000`), TOML file (`port = 8000`), default.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import NODEFAULT, Struct, field
from msgspec.structs import fields

from surefoot.policies.bounds import FORMATS, MAX_DRAFT, Format

from .setting_types import (
    ByteSize,
    Setting,
    auto_or,
    byte_size,
    key_hash,
    none_or,
    one_of,
    path,
    rates,
    seconds,
    share,
    text,
    whole,
)

ENV_PREFIX = "SUREFOOT_"
CONFIG_ENV = ENV_PREFIX + "CONFIG"


class SettingsError(ValueError):
    """A setting cannot be used. The message has the field, the value, where it came from and the limit."""


class ServeSettings(Struct, frozen=True, kw_only=True):
    """Start-up settings of gateway and engine, None for `auto`. `SettingsError` if one is of no use."""

    model: Annotated[
        str, Setting(text, "What to serve: smollm2 (comes along), a Hugging Face folder or a GGUF file")
    ] = "smollm2"
    served_model_id: Annotated[
        str | None, Setting(auto_or(text), "The model's name in the API (auto: from the model)")
    ] = None
    tenants: Annotated[
        Path | None,
        Setting(auto_or(path), "Folder of tenant files (auto: none, one local tenant without keys)"),
    ] = None
    tenants_reload_s: Annotated[
        float, Setting(seconds(0), "Seconds between looks at the tenant files; 0 looks at SIGHUP only")
    ] = 1.0
    classes: Annotated[
        Path | None,
        Setting(auto_or(path), "TOML file of SLA classes (auto: interactive, standard and batch)"),
    ] = None
    admin_key_hash: Annotated[
        str | None,
        Setting(auto_or(key_hash), "Hash of the operators' key, from `surefoot key new` (auto: none)"),
    ] = None
    usage_db: Annotated[
        Path | Literal["none"] | None,
        Setting(
            auto_or(none_or(path)),
            "SQLite file of usage, or none (auto: with tenants, in XDG_STATE_HOME or ~/.local/state)",
        ),
    ] = None
    host: Annotated[
        str, Setting(text, "Address to listen on; one that others can reach only with tenants that have keys")
    ] = "127.0.0.1"
    port: Annotated[int, Setting(whole(0, 65535), "Port to listen on; 0 takes a free one")] = 8000
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Setting(
            one_of("auto", "cpu", "cuda"),
            "Where the model runs: cpu, cuda or auto (a GPU that torch sees, else the CPU)",
        ),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "native", "int8", "bf16", "fp32"],
        Setting(
            one_of("auto", "native", "int8", "bf16", "fp32"),
            "Form of the weights: native (the file's own groups), int8, bf16 or fp32 (auto: native)",
        ),
    ] = "auto"
    batch_invariant: Annotated[
        Literal["on", "off"],
        Setting(
            one_of("on", "off"),
            "On a GPU: matrix products whose bits no other request can change, for slower steps: on or off",
        ),
    ] = "off"
    cache_memory: Annotated[
        ByteSize | None,
        Setting(
            auto_or(byte_size), "Memory of the KV cache, e.g. 512MiB (auto: a share of what is available)"
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        Setting(auto_or(text), "A smaller model of the same vocabulary that drafts for it (auto: none)"),
    ] = None
    draft_cache_memory: Annotated[
        ByteSize | None,
        Setting(auto_or(byte_size), "Memory of the draft model's KV cache (auto: for as many tokens)"),
    ] = None
    max_draft: Annotated[
        int, Setting(whole(0, MAX_DRAFT), "Longest draft of any plan, in tokens; 0 for no speculation")
    ] = 16
    local_max_draft: Annotated[
        int,
        Setting(
            whole(0, MAX_DRAFT), "Without tenants: longest draft, from the request's own text (0 for none)"
        ),
    ] = 0
    local_cache_format: Annotated[
        Format,
        Setting(
            one_of(*FORMATS),
            "Without tenants: bits of K and V in the cache, fewer for more tokens: " + ", ".join(FORMATS),
        ),
    ] = FORMATS[0]
    synthetic_acceptance: Annotated[
        tuple[float, ...] | None,
        Setting(
            auto_or(rates),
            "For benchmarks: accept drafts at these rates by position, e.g. 0.8,0.6; answers are nonsense",
        ),
    ] = None
    scheduler: Annotated[
        Literal["promise", "first-come"],
        Setting(
            one_of("promise", "first-come"),
            "Who runs next: promise (by class and target) or first-come (to compare)",
        ),
    ] = "promise"
    max_sequences: Annotated[int, Setting(whole(1), "Sequences that run at once")] = 64
    max_batched_tokens: Annotated[
        int,
        Setting(
            whole(1), "Tokens of one engine step, no fewer than max_sequences; a longer prompt takes several"
        ),
    ] = 512
    max_model_len: Annotated[
        int | None,
        Setting(auto_or(whole(2)), "Most tokens of a prompt and its answer (auto: the model's limit)"),
    ] = None
    max_waiting: Annotated[
        int, Setting(whole(0), "Requests that may wait for their turn; more are told to come back later")
    ] = 1024
    prefix_cache: Annotated[
        Literal["on", "off"],
        Setting(one_of("on", "off"), "Keep what prompts begin with for a tenant's later requests: on or off"),
    ] = "on"
    max_waiting_s: Annotated[
        float,
        Setting(seconds(1), "Seconds of work that may wait, of a request's priority and above"),
    ] = 600.0
    headroom: Annotated[
        float,
        Setting(share, "Share of sequences and cache that is kept free for higher priorities"),
    ] = 0.1
    threads: Annotated[
        int | None,
        Setting(auto_or(whole(1)), "CPU threads of the engine (auto: the CPUs this process may use)"),
    ] = None
    drain_s: Annotated[
        float, Setting(seconds(0), "Seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    keep_alive_s: Annotated[
        float, Setting(seconds(0.1), "Seconds of silence until a waiting stream gets a comment line")
    ] = 10.0
    max_body_bytes: Annotated[ByteSize, Setting(byte_size, "Largest request body")] = ByteSize(8 * 1024**2)
    watchdog_s: Annotated[
        float, Setting(seconds(1), "Seconds that one engine step may take before the engine counts as hung")
    ] = 120.0
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Setting(
            one_of("auto", "console", "json"),
            "Form of the log: console, json or auto (console on a terminal, else json)",
        ),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting(
            one_of("debug", "info", "warning", "error"),
            "Least severe events that are logged: debug, info, warning or error",
        ),
    ] = "info"
    cache_dir: Annotated[
        Path, Setting(path, "Folder of prepared weights (default: under XDG_CACHE_HOME or ~/.cache)")
    ] = field(default_factory=lambda: default_cache_dir(None))

    def __post_init__(self) -> None:
        for name, setting in describe().items():
            read_value(name, setting, getattr(self, name), "")
        if self.max_batched_tokens < self.max_sequences:
            raise SettingsError(
                f"max_batched_tokens = {self.max_batched_tokens}: expected max_sequences"
                f" ({self.max_sequences}) or more, because each running sequence takes a token of every step"
            )


class EffectiveSettings(Struct, frozen=True):
    """The settings that hold, the place that each was taken from, and the user's folder for what is kept."""

    settings: ServeSettings
    sources: Mapping[str, str]
    state_dir: Path

    @property
    def usage_file(self) -> Path | None:
        """Where a server keeps usage, None if it does not."""
        return self.readable_usage_file if self.settings.usage_db or self.settings.tenants else None

    @property
    def readable_usage_file(self) -> Path | None:
        """Where to look for usage; `auto` does not ask for tenants here, as reading is harmless."""
        usage_db = self.settings.usage_db
        if usage_db == "none":
            return None
        return self.state_dir / "usage.db" if usage_db is None else usage_db


class Layer(Struct, frozen=True):
    """What one place says: raw values by field, and how that place spells each field."""

    values: Mapping[str, object]
    sources: Mapping[str, str]


class Environment(Struct, frozen=True):
    """What the process environment says: settings, the file to read, and the user's folders."""

    layer: Layer
    config: Path | None
    cache_home: Path | None
    state_home: Path | None


def resolve(
    flags: Mapping[str, str], environ: Mapping[str, str], config: Path | None = None
) -> EffectiveSettings:
    """Settle every field. `config` is the file that a flag named, which goes before `SUREFOOT_CONFIG`.

    Raises `SettingsError`, also for names that no field has.
    """
    environment = read_environment(environ)
    file = config or environment.config
    layers = [_flags_layer(flags), environment.layer, *([read_file(file)] if file else [])]
    values: dict[str, Any] = {"cache_dir": default_cache_dir(environment.cache_home)}
    sources = dict.fromkeys(describe(), "default")
    for name, setting in describe().items():
        for layer in layers:
            if name in layer.values:
                sources[name] = layer.sources[name]
                values[name] = read_value(name, setting, layer.values[name], f" ({sources[name]})")
                break
    return EffectiveSettings(ServeSettings(**values), sources, default_state_dir(environment.state_home))


def read_environment(environ: Mapping[str, str]) -> Environment:
    """The only place where the environment is read. `SettingsError` for a `SUREFOOT_*` that means nothing."""
    # An empty variable is how shells and compose files say "not set".
    ours = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX) and value}
    config = ours.pop(CONFIG_ENV, None)
    names = {env_name(name): name for name in describe()}
    _refuse_unknown(ours, [*names, CONFIG_ENV], "environment variable")
    layer = Layer({names[env]: value for env, value in ours.items()}, {names[env]: env for env in ours})
    cache_home, state_home = environ.get("XDG_CACHE_HOME"), environ.get("XDG_STATE_HOME")
    return Environment(
        layer,
        Path(config) if config else None,
        Path(cache_home) if cache_home else None,
        Path(state_home) if state_home else None,
    )


def read_file(file: Path) -> Layer:
    """A TOML file of settings at its top level. `SettingsError` if it cannot be read or has unknown keys."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the configuration file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # Not UTF-8, or not TOML; the message says where.
        raise SettingsError(f"the configuration file {file} is not TOML: {error}") from error
    _refuse_unknown(values, describe(), f"key in {file}")
    return Layer(values, dict.fromkeys(values, str(file)))


def read_value(name: str, setting: Setting, raw: object, source: str) -> Any:
    """`raw` as the field's value. `SettingsError` with all that is known about it."""
    try:
        return setting.read(raw)
    except ValueError as error:
        raise SettingsError(f"{name} = {raw!r}{source}: expected {error}") from None


def check_exposure(host: str, tenants_have_keys: bool) -> None:
    """Refuse to let strangers in: an address that others can reach needs tenants with keys."""
    if tenants_have_keys or is_loopback(host):
        return
    raise SettingsError(
        f"host = {host!r}: this address can be reached from elsewhere, and no tenant has a key, so anybody"
        " could use the model. Make a key with `surefoot key new`, put its line into a tenant file and name"
        " the folder with --tenants; or listen on 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def describe() -> dict[str, Setting]:
    """The `Setting` of every field, in the order of their declaration."""
    hints = get_type_hints(ServeSettings, include_extras=True)
    return {each.name: get_args(hints[each.name])[1] for each in fields(ServeSettings)}


def default_text(name: str) -> str:
    """A field's default as one would write it."""
    default = next(each.default for each in fields(ServeSettings) if each.name == name)
    return "~/.cache/surefoot" if default is NODEFAULT else value_text(default)


def value_text(value: object) -> str:
    """A value as one would write it in a flag."""
    if value is None:
        return "auto"
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def env_name(name: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + name.upper()


def flag_name(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def default_cache_dir(cache_home: Path | None) -> Path:
    """Where prepared weights lie unless a setting says otherwise: under the user's cache folder."""
    return (cache_home or Path("~/.cache").expanduser()) / "surefoot"


def default_state_dir(state_home: Path | None) -> Path:
    """Where what must outlive the process lies unless a setting says otherwise."""
    return (state_home or Path("~/.local/state").expanduser()) / "surefoot"


def _flags_layer(flags: Mapping[str, str]) -> Layer:
    return Layer(flags, {name: flag_name(name) for name in flags})


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(names)}"
            raise SettingsError(f"unknown {what}: {name}; {hint}")
