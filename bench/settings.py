"""What a run is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .arrivals import Rate
from .errors import BadArgument
from .lengths import Length

Endpoint = Literal["chat", "completions"]

ABOVE_0 = {
    "concurrency": "--concurrency",
    "num_requests": "--requests",
    "duration_s": "--duration",
    "timeout_s": "--timeout",
    "max_ttft_s": "--ttft",
    "max_tpot_s": "--tpot",
}
"""Settings that are above 0, by what they are called on a command line."""

OWN_FIELDS = frozenset({"model", "messages", "prompt", "stream"})
"""What the generator writes into every body, so that `extra` may not."""


class BenchSettings(Struct, frozen=True, kw_only=True):
    """One run. `BadArgument` if a value is of no use.

    With `rate` the loop is open: requests arrive whatever the server does. Without, it is closed:
    `concurrency` requests are always under way. The run ends after `num_requests` or `duration_s`, whichever
    comes first (a duration: nothing is sent after it, and what was sent is waited for).
    """

    url: str
    prompt_tokens: Length
    output_tokens: Length
    model: str | None = None
    endpoint: Endpoint = "chat"
    api_key: str | None = None
    concurrency: int = 1
    rate: Rate | None = None
    num_requests: int | None = 100
    duration_s: float | None = None
    num_warmup: int = 2
    prompts: Path | None = None
    ignore_eos: bool = True
    extra: dict[str, Any] = {}
    timeout_s: float = 600.0
    seed: int = 0
    max_ttft_s: float | None = None
    max_tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise BadArgument("a run needs an end: a number of requests or a duration")
        for name, flag in ABOVE_0.items():
            if (value := getattr(self, name)) is not None and value <= 0:
                raise BadArgument(f"{flag} {value}: expected a number above 0")
        if self.num_warmup < 0:
            raise BadArgument(f"--warmup {self.num_warmup}: expected 0 or more")
        if taken := sorted(OWN_FIELDS & self.extra.keys()):
            raise BadArgument(f"--extra: {', '.join(taken)} is written by the generator itself")

    @property
    def path(self) -> str:
        """The endpoint's path."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def described(self) -> dict[str, Any]:
        """The arguments as the result stores them; a key is never stored."""
        described: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        described["prompt_tokens"] = self.prompt_tokens.text
        described["output_tokens"] = self.output_tokens.text
        described["api_key"] = None if self.api_key is None else "(given)"
        return described
