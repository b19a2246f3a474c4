"""The loads that every peer gets, and what is read from each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct

from .client import HttpClient
from .errors import BenchError
from .lengths import parse_length
from .prompts import Calibration, SyntheticPrompts
from .results import BenchResult
from .run import View, run_bench
from .server import learn_lengths, meet, read_server
from .settings import BenchSettings

SHORT_PROMPT = 16
CALIBRATION_TOKENS = 512
"""Enough words for their mean length to hold for longer prompts too."""
MIN_PROMPT_SHARE = 0.9
"""Prompts shorter than this share of what was asked for would flatter the server that counts them so."""

Figure = Literal["output", "prefill", "decode"]
"""Output tokens over the whole time, prompt tokens over TTFT, or the inverse of TPOT: in tok/s."""


class PeerLoad(Struct, frozen=True, kw_only=True):
    """A closed loop, the figure that is read from it, and how many times llama.cpp's it has to be."""

    key: str
    title: str
    figure: Figure
    prompt_tokens: int
    output_tokens: int
    bar: float
    num_streams: int = 1
    requests_each: int = 1

    @property
    def num_requests(self) -> int:
        """Of the whole load."""
        return self.num_streams * self.requests_each


def warm_up_of(loads: Sequence[PeerLoad]) -> PeerLoad:
    """What a server gets before these loads: as many streams as it will have. Nobody counts it."""
    return PeerLoad(
        key="warm_up",
        title="warm-up",
        figure="output",
        prompt_tokens=SHORT_PROMPT,
        output_tokens=4,
        bar=0,
        num_streams=max(load.num_streams for load in loads),
    )


def peer_loads(output_tokens: int, prefill_tokens: int, past_tokens: int) -> tuple[PeerLoad, ...]:
    """All that is measured, in its order."""

    def streams(num_streams: int, title: str, bar: float, requests_each: int = 1) -> PeerLoad:
        return PeerLoad(
            key=f"streams_{num_streams}",
            title=title,
            figure="output",
            prompt_tokens=SHORT_PROMPT,
            output_tokens=output_tokens,
            bar=bar,
            num_streams=num_streams,
            requests_each=requests_each,
        )

    return (
        streams(1, "one stream", 1.5, requests_each=2),
        streams(8, "8 streams", 3.0),
        streams(32, "32 streams", 4.0),
        PeerLoad(
            key="prefill",
            title=f"prefill of {prefill_tokens:,}",
            figure="prefill",
            prompt_tokens=prefill_tokens,
            output_tokens=1,
            bar=3.0,
            requests_each=2,
        ),
        PeerLoad(
            key="after_past",
            title=f"one stream after {past_tokens:,}",
            figure="decode",
            prompt_tokens=past_tokens,
            # A fixed part of the answer's length: prefill takes most of this load's time already.
            output_tokens=max(2, output_tokens // 2),
            bar=1.8,
        ),
    )


async def calibrate_words(url: str) -> Calibration:
    """How the model counts our words; asked once, as every server reads the same file's vocabulary."""
    length = parse_length(str(CALIBRATION_TOKENS))
    settings = BenchSettings(url=url, endpoint="completions", prompt_tokens=length, output_tokens=length)
    async with HttpClient(url) as client:
        target = await meet(client, settings, await read_server(client, settings))
        return await learn_lengths(client, settings, target)


def write_prompts(load: PeerLoad, calibration: Calibration, seed: int, file: Path) -> None:
    """Prompts of the load's length, all different, so that no prefix cache gains anything."""
    prompts = SyntheticPrompts(parse_length(str(load.prompt_tokens)), seed, calibration)
    lines = [msgspec.json.encode(prompts.prompt(index).text) for index in range(load.num_requests)]
    file.write_bytes(b"\n".join(lines) + b"\n")


async def run_load(load: PeerLoad, url: str, prompts: Path, view: View) -> float:
    """Tokens per second. `BenchError` unless every request was good and of the lengths asked for."""
    settings = settings_of(load, url, prompts)
    result = await run_bench(settings, view)
    if result.interrupted:
        raise BenchError("interrupted")
    summary = result.summary
    if summary.num_failed:
        raise BenchError(f"{load.title}: requests failed: {summary.errors}")
    if summary.num_output_tokens != load.num_requests * load.output_tokens:
        wanted = load.num_requests * load.output_tokens
        raise BenchError(f"{load.title}: {summary.num_output_tokens} tokens came in place of {wanted}")
    if summary.num_prompt_tokens < MIN_PROMPT_SHARE * load.num_requests * load.prompt_tokens:
        raise BenchError(f"{load.title}: prompts had only {summary.num_prompt_tokens} tokens")
    return figure_of(load, result)


def settings_of(load: PeerLoad, url: str, prompts: Path) -> BenchSettings:
    """The load as `surefoot bench` runs it."""
    return BenchSettings(
        url=url,
        endpoint="completions",
        concurrency=load.num_streams,
        num_requests=load.num_requests,
        num_warmup=0,
        prompts=prompts,
        prompt_tokens=parse_length(str(load.prompt_tokens)),
        output_tokens=parse_length(str(load.output_tokens)),
        extra={"temperature": 0},
    )


def figure_of(load: PeerLoad, result: BenchResult) -> float:
    """The load's figure, in tokens per second."""
    if load.figure == "output":
        return result.summary.output_tokens_per_s
    good = [(record, record.latencies) for record in result.records if record.latencies is not None]
    if load.figure == "prefill":
        return median((record.num_prompt_tokens or 0) / latencies.ttft_s for record, latencies in good)
    tpots = [latencies.tpot_s for _, latencies in good if latencies.tpot_s]
    if not tpots:
        raise BenchError(f"{load.title}: no answer had two tokens at different times")
    return 1 / median(tpots)
