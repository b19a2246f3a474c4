"""An engine that answers requests of tokens, one after the other or several at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from msgspec import Struct

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.engine import Engine
from surefoot.backends.engine.hf_folder import read_config
from surefoot.backends.engine.model import Model
from surefoot.backends.engine.prepare import LoadedModel
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.runner import StepInput
from surefoot.backends.engine.safetensors_folder import SafetensorsFolder
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.sequence import Request
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.backends.errors import BackendError
from surefoot.backends.types import (
    BASELINE_PLAN,
    Chunk,
    Event,
    Finished,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    TokenLogprob,
    TokenPrompt,
)

from .harness import make_engine
from .tiny_models import SHAPE, tiny_hf_model


def load_tiny(name: str, parts: EngineParts, folder: Path, **changes: object) -> EngineParts:
    """A tiny model in place of the real one, whose tokenizer knows its ids; with `changes` to its config."""
    tiny_hf_model(name, **changes).save_pretrained(folder)
    config = read_config(folder)
    with SafetensorsFolder(folder) as source:
        model = Model(config, source, parts.ops, mode=WeightMode.FLOAT32)
    loaded = LoadedModel(config, model, parts.loaded.tokenizer, name)
    return EngineParts(loaded=loaded, ops=parts.ops, cache_dtype=parts.cache_dtype)


class Served(Struct):
    """What came of one request, and the rows of each step while it was served."""

    events: list[Event | BackendError]
    rows: list[int]

    @property
    def choices(self) -> list[tuple[list[int], list[TokenLogprob]]]:
        """Tokens and log-probabilities, by choice."""
        chunks = [event for event in self.events if isinstance(event, Chunk)]
        return [
            (
                [token_id for chunk in chunks if chunk.index == index for token_id in chunk.token_ids],
                [entry for chunk in chunks if chunk.index == index for entry in chunk.logprobs or ()],
            )
            for index in sorted({chunk.index for chunk in chunks})
        ]

    @property
    def num_cached_tokens(self) -> int:
        """What the client is told."""
        assert isinstance(self.events[-1], Finished)
        return self.events[-1].usage.num_cached_tokens


class Server:
    """An engine that answers one request after the other, or several at once."""

    def __init__(
        self, parts: EngineParts, make_scheduler: MakeScheduler = PromiseScheduler, **limits: int
    ) -> None:
        self.engine: Engine = make_engine(parts, make_scheduler=make_scheduler, **limits)
        self._keys = itertools.count()
        self._rows: list[int] = []
        self._run = self.engine._runner.run
        self.engine._runner.run = self._counted  # type: ignore[method-assign]  # counts rows on the way

    def serve(
        self, tokens: Sequence[int], params: SamplingParams, *, salt: str = "", echo: bool = False
    ) -> Served:
        """One request alone."""
        return self.serve_all([message(tokens, params, salt=salt, echo=echo)])[0]

    def add(self, each: GenerateRequest) -> Request:
        """Queue one."""
        assert isinstance(each.prompt, TokenPrompt)
        return self.engine.submit(each, each.prompt.token_ids, key=next(self._keys))

    def serve_all(self, messages: Sequence[GenerateRequest]) -> list[Served]:
        """All at once; each gets all steps' rows."""
        self._rows = []
        served = {self.add(each).key: Served([], self._rows) for each in messages}
        return self.finish(served)

    def finish(self, served: dict[int, Served]) -> list[Served]:
        """Serve what was added to its end; each request's events go to its key."""
        while self.engine.has_work:
            for output in self.engine.step():
                served[output.key].events.append(output.event)
            self.engine.pool.check_integrity()
        assert self.engine.pool.num_used == 0
        return list(served.values())

    def _counted(self, step: StepInput) -> torch.Tensor:
        self._rows.append(step.num_rows)
        return self._run(step)


def message(
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    salt: str = "",
    echo: bool = False,
    plan: ServingPlan = BASELINE_PLAN,
) -> GenerateRequest:
    """A request for the continuation of some tokens."""
    prompt = TokenPrompt(tuple(tokens))
    return GenerateRequest(
        request_id="", model="", prompt=prompt, params=params, salt=salt, echo=echo, plan=plan
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens that every model has."""
    return Random(seed).choices(range(SHAPE["vocab_size"]), k=length)


def blocks(parts: EngineParts, count: int) -> int:
    """The bytes of so many cache blocks."""
    config = parts.loaded.model.config
    numbers = 16 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return count * numbers * parts.cache_dtype.itemsize
