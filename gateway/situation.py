"""What `surefoot policy explain` is told of a request and of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


@dataclass(frozen=True)
class Situation:
    """Each field is a flag; cyclopts makes flags of dataclasses only."""

    model: Annotated[str, Parameter(help="Model that is asked for")] = "smollm2"
    tier: Annotated[str, Parameter(help="The request's service_tier")] = "auto"
    kind: Annotated[Literal["chat", "text"], Parameter(help="By the endpoint")] = "chat"
    prompt_tokens: Annotated[
        int | None, Parameter(validator=Number(gte=1), show_default=False, help="Tokens of the prompt")
    ] = None
    cache_pressure: Annotated[
        float, Parameter(validator=Number(gte=0, lte=1), help="Share of the cache in use, 0 to 1")
    ] = 0.0
    load: Annotated[int, Parameter(validator=Number(gte=0), help="Requests that run or wait")] = 0
    acceptance: Annotated[
        float | None,
        Parameter(
            validator=Number(gte=0, lte=1),
            show_default=False,
            help="Share of drafted tokens accepted lately, 0 to 1",
        ),
    ] = None
    quality_loss: Annotated[
        float | None, Parameter(show_default=False, help="Nats per token lost lately")
    ] = None
    has_seed: Annotated[bool, Parameter(negative="", help="The request has a seed")] = False
    hour: Annotated[float, Parameter(validator=Number(gte=0, lt=24), help="Hours since midnight, UTC")] = 12.0
