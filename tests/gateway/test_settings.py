"""Where settings come from, which of them are refused, and in what words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.backends.engine.start import engine_settings
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.gateway.setting_types import ByteSize, byte_size
from surefoot.gateway.settings import (
    EffectiveSettings,
    ServeSettings,
    SettingsError,
    check_exposure,
    default_text,
    describe,
    env_name,
    flag_name,
    resolve,
    value_text,
)
from surefoot.gateway.start import engine_options, load_tenants

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.write_text(text, encoding="utf-8")
    return path


def refusal(
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> str:
    """The message of the error that these sources must raise."""
    with pytest.raises(SettingsError) as caught:
        resolve(flags or {}, environ or {}, config)
    return str(caught.value)


def test_defaults() -> None:
    """Without any source, the default model is served on loopback, and every source is `default`."""
    effective = resolve({}, {})
    assert (effective.settings.model, effective.settings.host, effective.settings.port) == (
        "smollm2",
        "127.0.0.1",
        8000,
    )
    assert set(effective.sources.values()) == {"default"}
    assert effective.settings == ServeSettings()


@pytest.mark.parametrize(
    ("given", "value", "source"),
    [
        ("flag env file", 1, "--port"),
        ("env file", 2, "SUREFOOT_PORT"),
        ("flag file", 1, "--port"),
        ("file", 3, "surefoot.toml"),
        ("", 8000, "default"),
    ],
)
def test_precedence(tmp_path: Path, given: str, value: int, source: str) -> None:
    """A flag goes before the environment, that before the file, that before the default; each is named."""
    effective = resolve(
        {"port": "1"} if "flag" in given else {},
        {"SUREFOOT_PORT": "2"} if "env" in given else {},
        write(tmp_path / "surefoot.toml", "port = 3") if "file" in given else None,
    )
    assert effective.settings.port == value
    assert effective.sources["port"].endswith(source)


def test_sources_mix(tmp_path: Path) -> None:
    """Each field is settled by itself: one from a flag, one from the environment, one from the file."""
    effective = resolve(
        {"port": "1"},
        {"SUREFOOT_DEVICE": "cpu", "PATH": "/bin"},
        write(tmp_path / "c.toml", 'weights = "fp32"'),
    )
    assert (effective.settings.port, effective.settings.device, effective.settings.weights) == (
        1,
        "cpu",
        "fp32",
    )


def test_config_from_the_environment(tmp_path: Path) -> None:
    """`SUREFOOT_CONFIG` names the file, and a flag names another one in its place."""
    environ = {"SUREFOOT_CONFIG": str(write(tmp_path / "a.toml", "port = 1"))}
    assert resolve({}, environ).settings.port == 1
    assert resolve({}, environ, write(tmp_path / "b.toml", "port = 2")).settings.port == 2


def test_an_empty_variable_is_not_set() -> None:
    """An empty environment variable counts as none."""
    assert resolve({}, {"SUREFOOT_PORT": "", "SUREFOOT_CONFIG": "", "XDG_CACHE_HOME": ""}) == resolve({}, {})


def test_every_field_reads_its_own_text() -> None:
    """The text that `surefoot config` shows for a value, given as a flag or a variable, gives that value."""
    settings = resolve({}, {}).settings
    texts = {name: value_text(getattr(settings, name)) for name in describe()}
    assert resolve(texts, {}).settings == settings
    assert resolve({}, {env_name(name): text for name, text in texts.items()}).settings == settings


def test_file_values_keep_their_types(tmp_path: Path) -> None:
    """A TOML file may give numbers as numbers and sizes as numbers or texts."""
    config = write(
        tmp_path / "c.toml", 'drain_s = 5\nmax_body_bytes = 1024\ncache_memory = "1.5GiB"\nthreads = "auto"\n'
    )
    settings = resolve({}, {}, config).settings
    assert (settings.drain_s, settings.max_body_bytes, settings.threads) == (5.0, 1024, None)
    assert settings.cache_memory == 1.5 * 1024**3


def test_rates_are_a_list_in_a_file_and_commas_in_a_flag(tmp_path: Path) -> None:
    """Rates read the same from both, print as a flag has them, and reach the engine with the other bounds."""
    config = write(tmp_path / "c.toml", "synthetic_acceptance = [0.8, 1]\nmax_draft = 4\n")
    settings = resolve({}, {}, config).settings
    assert settings == resolve({"synthetic_acceptance": "0.8,1", "max_draft": "4"}, {}).settings
    assert value_text(settings.synthetic_acceptance) == "0.8,1"
    speculation = engine_settings(engine_options(settings)).speculation
    assert (speculation.synthetic_acceptance, speculation.max_draft) == ((0.8, 1.0), 4)


@pytest.mark.parametrize("form", ["auto", *WeightMode])
def test_the_form_of_the_weights_reaches_the_engine(form: str) -> None:
    """`auto` is the file's own form, and the others are what they are called."""
    chosen = engine_options(resolve({"weights": form}, {}).settings).weights
    assert chosen is (WeightMode.NATIVE if form == "auto" else WeightMode(form))


def test_cache_dir_follows_the_user() -> None:
    """Prepared weights lie under the user's cache folder unless a setting says otherwise."""
    assert resolve({}, {"XDG_CACHE_HOME": "/caches"}).settings.cache_dir == Path("/caches/surefoot")
    assert resolve({"cache_dir": "/w"}, {"XDG_CACHE_HOME": "/caches"}).settings.cache_dir == Path("/w")
    assert resolve({}, {}).settings.cache_dir == Path.home() / ".cache" / "surefoot"


def test_usage_is_kept_where_there_are_tenants() -> None:
    """By default usage lies under the user's state folder, and is kept only of tenants; a setting decides."""
    environ = {"XDG_STATE_HOME": "/state"}
    kept = Path("/state/surefoot/usage.db")
    assert resolve({"tenants": "t"}, environ).usage_file == kept
    assert resolve({"tenants": "t"}, {}).usage_file == Path.home() / ".local/state/surefoot/usage.db"
    assert resolve({}, environ).usage_file is None
    assert resolve({}, environ).readable_usage_file == kept
    assert resolve({"usage_db": "/u.db"}, environ).usage_file == Path("/u.db")
    assert resolve({"usage_db": "none", "tenants": "t"}, environ).usage_file is None
    assert resolve({"usage_db": "none"}, environ).readable_usage_file is None


def test_home_is_expanded() -> None:
    """`~` in a path is the home folder."""
    assert resolve({"tenants": "~/tenants"}, {}).settings.tenants == Path.home() / "tenants"


def test_local_settings_reach_the_local_tenant() -> None:
    """Without tenant files drafts and cache format of everybody's plan are those of the settings."""
    settings = ServeSettings(local_max_draft=3, local_cache_format="k8v4")
    tenants, watch = load_tenants(settings, ["fixed"], ["standard"])
    bounds = tenants.authenticate(None).bounds
    assert (bounds.speculation.max_draft, bounds.cache.format, watch) == (3, "k8v4", None)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", "http", "a whole number from 0 to 65535"),
        ("port", "65536", "a whole number from 0 to 65535"),
        ("port", "-1", "a whole number from 0 to 65535"),
        ("port", "80.5", "a whole number from 0 to 65535"),
        ("device", "tpu", "auto or cpu or cuda"),
        ("weights", "int4", "auto or native or int8 or bf16 or fp32"),
        ("batch_invariant", "yes", "on or off"),
        ("host", " ", "a text"),
        ("max_sequences", "0", "a whole number of 1 or more"),
        ("max_waiting", "-1", "a whole number of 0 or more"),
        ("threads", "many", "a whole number of 1 or more"),
        ("drain_s", "-1", "a number of seconds, 0 or more"),
        ("drain_s", "nan", "a number of seconds, 0 or more"),
        ("watchdog_s", "0", "a number of seconds, 1 or more"),
        ("keep_alive_s", "inf", "a number of seconds, 0.1 or more"),
        ("cache_memory", "512 MB/s", "a number of bytes above 0"),
        ("max_body_bytes", "0", "a number of bytes above 0"),
        ("max_draft", "65", "a whole number from 0 to 64"),
        ("local_max_draft", "-1", "a whole number from 0 to 64"),
        ("scheduler", "fair", "promise or first-come"),
        ("local_cache_format", "k3v3", "k16v16 or k8v8 or k8v4 or mixed or k4v4"),
        ("synthetic_acceptance", "0.8,", "numbers from 0 to 1 with commas between them"),
        ("synthetic_acceptance", "0.8,1.1", "numbers from 0 to 1 with commas between them"),
        ("admin_key_hash", "sha256:12", "a hash from `surefoot key new`: sha256: and 64"),
        ("classes", " ", "a text"),
        ("usage_db", " ", "a text"),
        ("log_format", "xml", "auto or console or json"),
        ("log_level", "loud", "debug or info or warning or error"),
    ],
)
def test_bad_values(tmp_path: Path, name: str, value: str, expected: str) -> None:
    """A value of no use is refused from every source, with field, value, source and what was expected."""
    file = write(tmp_path / "c.toml", f'{name} = "{value}"')
    for message, source in [
        (refusal(flags={name: value}), flag_name(name)),
        (refusal(environ={env_name(name): value}), env_name(name)),
        (refusal(config=file), str(file)),
    ]:
        assert message.startswith(f"{name} = {value!r} ({source}): expected {expected}")


@pytest.mark.parametrize(
    ("name", "value"), [("port", True), ("port", 8000.0), ("host", 1), ("tenants", 3), ("drain_s", [])]
)
def test_wrong_types(name: str, value: Any) -> None:
    """Settings built in code are checked like all others."""
    with pytest.raises(SettingsError, match=f"{name} = "):
        ServeSettings(**{name: value})


def test_step_budget_holds_every_sequence() -> None:
    """The step's token budget is at least the number of sequences, and the message has both."""
    assert "max_batched_tokens = 32: expected max_sequences (64) or more" in refusal(
        {"max_batched_tokens": "32"}
    )


@pytest.mark.parametrize(
    ("name", "near"), [("SUREFOOT_PROT", "SUREFOOT_PORT"), ("SUREFOOT_CACHE_MEM", "SUREFOOT_CACHE_MEMORY")]
)
def test_unknown_variable(name: str, near: str) -> None:
    """A `SUREFOOT_*` variable that means nothing is refused with the nearest that does."""
    assert refusal(environ={name: "1"}) == f"unknown environment variable: {name}; did you mean {near}?"


def test_unknown_key(tmp_path: Path) -> None:
    """An unknown key in the file is refused with the file and the nearest key, or with all keys."""
    file = write(tmp_path / "c.toml", "prot = 1")
    assert refusal(config=file) == f"unknown key in {file}: prot; did you mean port?"
    message = refusal(config=write(tmp_path / "d.toml", "zzz = 1"))
    assert all(name in message for name in describe())


def test_unreadable_files(tmp_path: Path) -> None:
    """A file that is missing, is no TOML or no text is refused with its name and the reason."""
    missing = tmp_path / "none.toml"
    assert (
        refusal(config=missing)
        == f"the configuration file {missing} cannot be read: No such file or directory"
    )
    assert "line 1" in refusal(config=write(tmp_path / "bad.toml", "port = ]\n"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not TOML" in refusal(config=tmp_path / "binary.toml")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    """An address that only this machine can reach may be served without keys."""
    check_exposure(host, tenants_have_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_exposure_needs_keys(host: str) -> None:
    """Any other address is refused without keys, with what to do, and accepted with them."""
    with pytest.raises(SettingsError, match=r"`surefoot key new`.*--tenants.*127\.0\.0\.1"):
        check_exposure(host, tenants_have_keys=False)
    check_exposure(host, tenants_have_keys=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("10B", 10),
        ("1KiB", 1024),
        ("2 MiB", 2 * 1024**2),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("2GB", 2 * 10**9),
        ("3kB", 3000),
    ],
)
def test_byte_sizes(text: str, size: int) -> None:
    """Sizes are read in powers of 1024 and of 1000."""
    assert byte_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "-1", "0", "1e9", "GiB", "1 gib", "1KiBs", "inf", "nan", "0.1B", "1_000"]
)
def test_bad_byte_sizes(text: str) -> None:
    """What is not a positive size is refused rather than guessed at."""
    with pytest.raises(ValueError, match="a number of bytes above 0"):
        byte_size(text)


@given(st.integers(min_value=1, max_value=2**50))
def test_byte_sizes_print_exactly(size: int) -> None:
    """A size's text reads back as the same size."""
    assert byte_size(str(ByteSize(size))) == size


def test_docs_list_every_setting() -> None:
    """The reference in docs/operations.md has one row for each setting, with its default and its help."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{name}` | `{default_text(name)}` | {setting.help} |" for name, setting in describe().items()
    ]


def test_effective_settings_name_every_field() -> None:
    """Each field has a source, in the order of declaration."""
    effective: EffectiveSettings = resolve({}, {})
    assert list(effective.sources) == list(describe()) == list(ServeSettings.__struct_fields__)


def test_the_help_names_every_word_that_a_setting_takes() -> None:
    """A setting that is one of several words says which."""
    hints = get_type_hints(ServeSettings)
    words = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    assert {"device", "weights", "scheduler", "log_level"} <= words.keys()
    for name, its_words in words.items():
        assert all(word in describe()[name].help for word in its_words), name


def test_a_cache_beyond_the_memory_is_refused() -> None:
    """Memory that the process cannot have is refused before the start, with both sizes."""
    with pytest.raises(SettingsError, match=r"cache_memory = 1048576TiB: this process can have \d+\.\d GiB"):
        engine_options(ServeSettings(cache_memory=ByteSize(2**60), device="cpu"))


def test_batch_invariance_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, chosen or found, it is refused with what holds there; on a GPU it reaches the engine."""
    for device in ("cpu", "auto"):
        with pytest.raises(SettingsError, match="batch_invariant = on: the model runs on the CPU, where no"):
            engine_options(resolve({"batch_invariant": "on", "device": device}, {}).settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    for word, chosen in (("on", True), ("off", False)):
        settings = resolve({"batch_invariant": word, "device": "cuda"}, {}).settings
        assert engine_options(settings).batch_invariant is chosen
