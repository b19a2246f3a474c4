"""Getting to know a server before the run: its models, the fields it takes, how it counts tokens."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .client import HttpClient
from .errors import BenchError, RequestFailed, StatusFailed
from .prompts import Calibration, Prompt, calibrate
from .requester import Target, ask
from .settings import BenchSettings
from .words import sentence

FEW_WORDS = 8
MANY_WORDS = range(40, 2000)
"""Where the second point of the calibration lies: at the wanted length if that is in this range."""


class ServerInfo(Struct, frozen=True, kw_only=True):
    """Where the server is and what it says it serves."""

    url: str
    models: list[dict[str, Any]]


class ModelList(Struct):
    """The answer to `GET /v1/models`."""

    data: list[dict[str, Any]]


async def read_server(client: HttpClient, settings: BenchSettings) -> ServerInfo:
    """Ask for the models. `BenchError` if there is no server; one without a list is taken as it is."""
    try:
        head, body = await client.get("/v1/models")
    except RequestFailed as error:
        raise BenchError(f"no server at {settings.url}: {error}") from error
    try:
        models = msgspec.json.decode(body, type=ModelList).data if head.status == 200 else []
    except msgspec.DecodeError:
        models = []
    if not models and settings.model is None:
        raise BenchError(
            f"{settings.url}/v1/models lists no models (status {head.status}): name one, --model"
        )
    return ServerInfo(url=settings.url, models=models)


async def meet(client: HttpClient, settings: BenchSettings, server: ServerInfo) -> Target:
    """Find out by asking which optional fields the server knows. `BenchError` if it takes no request."""
    model = settings.model or str(server.models[0].get("id"))
    target = Target(model=model, knows_ignore_eos=settings.ignore_eos)
    while True:
        try:
            await ask(client, settings, target, Prompt(text="hello"), 1)
        except StatusFailed as refusal:
            leaner = _without_refused(target, refusal)
            if leaner == target:
                raise BenchError(f"the server refuses a simple request: {refusal}") from refusal
            target = leaner
        except RequestFailed as error:
            raise BenchError(f"the server does not answer a simple request: {error}") from error
        else:
            return target


async def learn_lengths(client: HttpClient, settings: BenchSettings, target: Target) -> Calibration:
    """How the server counts our words. One token per word is assumed of a server that gives no counts."""
    random = Random(f"calibration-{settings.seed}")
    many_words = min(max(round(settings.prompt_tokens.mean), MANY_WORDS.start), MANY_WORDS.stop)
    counts = []
    for num_words in (FEW_WORDS, many_words):
        try:
            usage = await ask(client, settings, target, Prompt(text=sentence(random, num_words)), 1)
        except RequestFailed as error:
            raise BenchError(f"the server does not answer a prompt of {num_words} words: {error}") from error
        if usage is None or not usage.prompt_tokens:
            return Calibration(overhead=0.0, tokens_per_word=1.0)
        counts.append((num_words, usage.prompt_tokens))
    return calibrate(counts[0], counts[1])


def _without_refused(target: Target, refusal: StatusFailed) -> Target:
    """The target without the fields that the server's message names."""
    if refusal.status not in (400, 422):
        return target
    if "ignore_eos" in refusal.body:
        target = replace(target, knows_ignore_eos=False)
    if "stream_options" in refusal.body or "include_usage" in refusal.body:
        target = replace(target, knows_usage=False)
    return target
