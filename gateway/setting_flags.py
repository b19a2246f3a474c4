"""Settings as flags of commands. A flag's text is read by the settings, not by the command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, make_dataclass
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, TypeVar, cast

from cyclopts import Group, Parameter

from .settings import EffectiveSettings, default_text, describe, resolve

Command = TypeVar("Command", bound=Callable[..., Any])

ConfigFlag = Annotated[
    Path | None, Parameter(name="--config", help="TOML file of settings (or SUREFOOT_CONFIG)")
]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON")]


def with_flags(command: Command, names: Collection[str]) -> Command:
    """The command, whose parameter `flags` takes these settings; its value is for `settled`."""
    # The type exists only now, so neither it nor a default can stand in the signature.
    flags_type = _flags_type(names)
    command.__annotations__["flags"] = Annotated[flags_type, Parameter(name="*")]
    function = cast("FunctionType", command)
    function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "flags": flags_type()}
    return command


def settled(flags: Any, config: Path | None, environ: Mapping[str, str]) -> EffectiveSettings:
    """All settings, with those of a command's `flags`. Raises `SettingsError`."""
    given = {name: text for name, text in asdict(flags).items() if text is not None}
    return resolve(given, environ, config)


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
