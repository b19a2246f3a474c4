"""What `surefoot policy explain` is told of a request and of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True)
class Situation:
    """Each field is a flag; cyclopts makes flags of dataclasses only."""

    model: Annotated[str, Parameter(help="Model that is asked for")] = "smollm2"
    tier: Annotated[str, Parameter(help="The request's service_tier")] = "auto"
    kind: Annotated[str, Parameter(help="chat or text")] = "chat"
    prompt_tokens: Annotated[int | None, Parameter(help="Tokens of the prompt")] = None
    cache_pressure: Annotated[float, Parameter(help="Share of the cache in use, 0 to 1")] = 0.0
    load: Annotated[int, Parameter(help="Requests that run or wait")] = 0
    acceptance: Annotated[float | None, Parameter(help="Share of drafted tokens accepted lately")] = None
    quality_loss: Annotated[float | None, Parameter(help="Nats per token lost lately")] = None
    has_seed: Annotated[bool, Parameter(negative="", help="The request has a seed")] = False
    hour: Annotated[float, Parameter(help="Hours since midnight, UTC")] = 12.0
