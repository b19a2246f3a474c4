"""What a step takes on this machine, by batch size and verified rows: measured on the real engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from surefoot.backends.types import GenerateRequest, SamplingParams, ServingPlan, SpeculationPlan, TokenPrompt

from ..backend import EngineParts
from ..bench_engine import MIB, make_bench_engine, say
from ..cost_model import CostModel, StepCost
from ..engine import Engine
from ..sequence import Request
from ..settings import EngineSettings
from .settings import SpeculationSettings

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
STEPS_EACH = 3
NUM_ROUNDS = 3
NUM_PROMPT_TOKENS = 16


class StepTable(Struct, frozen=True, kw_only=True):
    """Seconds of a step in which `batch` sequences verify `rows` rows in all, as pairs of rows and seconds.

    More rows never take less time: where noise says so, the larger time stands. `tile_rows` is the op set's
    `row_tile`; the first row of a tile is measured where the last one of the tile before it is.
    """

    seconds: dict[int, list[tuple[int, float]]]
    tile_rows: int = 0

    def step_s(self, batch: int, num_rows: int) -> float:
        """Between measured numbers of rows time is proportional to them."""
        points = self.seconds[batch]
        place = min(max(bisect_right(points, num_rows, key=lambda point: point[0]), 1), len(points) - 1)
        (low, below), (high, above) = points[place - 1], points[place]
        return below + (above - below) * (num_rows - low) / (high - low)


def table_of(samples: dict[int, list[tuple[int, float]]], tile_rows: int = 0) -> StepTable:
    """From rows and seconds by batch, in rising order of rows."""
    rising = {}
    for batch, points in samples.items():
        longest = 0.0
        rising[batch] = [(rows, longest := max(longest, seconds)) for rows, seconds in points]
    return StepTable(seconds=rising, tile_rows=tile_rows)


class _Stored(Struct):
    table: StepTable


def load_table(file: Path) -> StepTable:
    """From what an earlier run of `bench_lengths` stored."""
    return msgspec.json.decode(file.read_bytes(), type=_Stored).table


def measure_table(parts: EngineParts) -> StepTable:
    """Run every batch size with drafts of every length, all of which are accepted whatever they are."""
    settings = EngineSettings(
        cache_bytes=512 * MIB,
        max_sequences=max(BATCHES),
        max_batched_tokens=max(BATCHES) * (1 + max(LENGTHS)),
        headroom=0.0,
        prefix_cache=False,
        speculation=SpeculationSettings(synthetic_acceptance=(1.0,)),
    )
    engine = make_bench_engine(parts, settings)
    make_eager(engine.costs)
    tile_rows = parts.ops.row_tile
    measured: dict[int, dict[int, list[float]]] = {
        batch: {rows: [] for rows in rows_to_measure(batch, tile_rows)} for batch in BATCHES
    }
    for number in range(NUM_ROUNDS):
        for batch, by_rows in measured.items():
            say(f"round {number + 1} of {NUM_ROUNDS}: steps of {batch} sequences ...")
            for rows, seconds in by_rows.items():
                seconds += _step_seconds(engine, batch, rows)
    typical = {
        batch: [(rows, _typical(seconds)) for rows, seconds in by_rows.items()]
        for batch, by_rows in measured.items()
    }
    return table_of(typical, tile_rows)


def rows_to_measure(batch: int, tile_rows: int) -> list[int]:
    """Those of every fixed length, in rising order, and of the step that follows where a tile is full."""
    fixed = [batch * (1 + length) for length in LENGTHS]
    full = [-(-rows // tile_rows) * tile_rows for rows in fixed] if tile_rows else []
    edges = [edge for rows in full for edge in (rows, rows + 1) if edge < fixed[-1]]
    return sorted({*fixed, *edges})


def _typical(seconds: list[float]) -> float:
    """The lower quartile: what else the machine does makes steps longer, never shorter."""
    return sorted(seconds)[len(seconds) // 4]


def make_eager(costs: CostModel) -> None:
    """Costs that make every draft pay, whatever it is worth."""
    costs.frozen = True
    costs.refit(StepCost(fixed_s=1.0, row_s=1e-9, sequence_s=0.0, context_s=0.0))


def _step_seconds(engine: Engine, batch: int, num_rows: int) -> Iterator[float]:
    for request in _requests(batch, num_rows):
        engine.add(request)
    while engine.has_work:
        engine.step()
        sample = engine.last_step
        # Prefills have more rows than they sample from.
        if sample is not None and sample.shape.num_rows == sample.shape.num_sequences == num_rows:
            yield sample.seconds


def _requests(batch: int, num_rows: int) -> Iterator[Request]:
    """As many as run together, each long enough for the steps and a last one that is shorter.

    Their drafts differ by a token at most.
    """
    for number in range(batch):
        prompt = tuple(
            1000 + (number * NUM_PROMPT_TOKENS + place) % 20_000 for place in range(NUM_PROMPT_TOKENS)
        )
        length = (num_rows - batch + number) // batch
        max_tokens = STEPS_EACH * (1 + length) + 2
        message = GenerateRequest(
            request_id="table",
            model="",
            prompt=TokenPrompt(prompt),
            params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
            plan=ServingPlan(name="table", speculation=SpeculationPlan(max_draft=length)),
        )
        yield Request(message, prompt, key=number, max_tokens=max_tokens, seed=number, arrived_s=0.0)
