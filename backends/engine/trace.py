"""What the simulator is asked to serve: a trace from a file, or one that is drawn from rates."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field


class TraceError(ValueError):
    """What is asked of the simulator cannot be used; the message has the line, the word or the number."""


class Promise(Struct, frozen=True, kw_only=True):
    """What a class stands for in the scheduler's terms; None for no promise."""

    priority: int = 0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None


class TraceRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a trace. What it does not say of priority and targets, its class does.

    `max_tokens` is what the client would allow (None: as many as there are output tokens). Requests of one
    `prompt_group` have the same first tokens, as far as their prompts go.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    sla_class: str = field(name="class", default="standard")
    priority: int | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    flow: str = ""
    weight: float = 1.0
    max_tokens: int | None = None
    prompt_group: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or self.arrival_s < 0 or self.weight <= 0:
            raise ValueError("tokens are 1 or more, arrival_s is 0 or more, weight is above 0")
        if self.max_tokens is not None and self.max_tokens < self.output_tokens:
            raise ValueError("max_tokens is output_tokens or more")


class Lengths(Struct, frozen=True, kw_only=True):
    """Mean lengths of synthetic requests, in tokens; each is drawn between half and one and a half of it."""

    prompt_tokens: int = 128
    output_tokens: int = 128


def read_trace(file: Path) -> list[TraceRequest]:
    """JSON lines in any order of arrival; raises `TraceError`."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from error
    requests = [_read_line(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError(f"{file} has no request")
    return sorted(requests, key=lambda request: request.arrival_s)


def parse_rates(words: Sequence[str], known: Iterable[str]) -> dict[str, float]:
    """`interactive=2` means two requests a second of that class; raises `TraceError`."""
    rates: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        try:
            rates[name] = float(number)
        except ValueError:
            raise TraceError(f"{word!r}: expected a class and its requests a second, like batch=2") from None
        if name not in known:
            raise TraceError(f"{word!r}: unknown class {name!r}; known are: {', '.join(known)}")
        if not 0 < rates[name] < float("inf"):
            raise TraceError(f"{word!r}: the rate must be above 0")
    return rates


def synthetic_trace(
    rates: Mapping[str, float], duration_s: float, lengths: Lengths, seed: int
) -> list[TraceRequest]:
    """Poisson arrivals of each class; the same for the same seed."""
    requests: list[TraceRequest] = []
    for name, rate in rates.items():
        # A class's requests stay the same whatever other classes there are.
        source = random.Random(f"{seed} {name}")
        arrival_s = source.expovariate(rate)
        while arrival_s < duration_s:
            requests.append(
                TraceRequest(
                    arrival_s=arrival_s,
                    prompt_tokens=_draw(source, lengths.prompt_tokens),
                    output_tokens=_draw(source, lengths.output_tokens),
                    sla_class=name,
                )
            )
            arrival_s += source.expovariate(rate)
    return sorted(requests, key=lambda request: request.arrival_s)


def _read_line(file: Path, number: int, line: bytes) -> TraceRequest:
    try:
        return msgspec.json.decode(line, type=TraceRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"{file}, line {number}: {error}") from None


def _draw(source: random.Random, mean: int) -> int:
    return source.randint(max(1, mean // 2), mean + mean // 2)
