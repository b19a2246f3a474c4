"""The controller against fixed draft lengths, in virtual time over what steps take on this machine.

    make bench-draft-lengths
    python -m surefoot.backends.engine.speculation.bench_lengths --help

Measures steps on the real engine first (or reads them from a file); the rest is the same whenever it is run
on the same table. The exit status is 0 if every bar is kept, 1 if one is missed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from ..bench_engine import load_bench_parts, say
from ..cost_model import CostModel, StepCost, StepSample, StepShape, fit
from .bench_plot import Panel, plot
from .bench_swing import PHASE_S, Swing, swing
from .bench_table import LENGTHS, StepTable, load_table, measure_table
from .controller import Controller
from .replay import NUM_CONTEXT_TOKENS, Replay, fixed_tokens_per_s
from .settings import SpeculationSettings

BAR = 0.98
BREAK_EVEN_LENGTHS = (2, 4, 8)
BREAK_EVEN_BATCHES = (1, 8, 32)
RATES = tuple(tenths / 10 for tenths in range(11))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to replay, and on which table."""

    model: Annotated[str, Parameter(help="What to serve")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Folder of prepared weights")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="CPU threads [as many as there are]")] = None
    table: Annotated[Path | None, Parameter(help="A file that an earlier run stored [measure]")] = None
    seeds: Annotated[int, Parameter(help="Replays of each cell")] = 2
    tokens: Annotated[int, Parameter(help="Steps of a replay times its batch size, at least")] = 4000
    folder: Annotated[Path | None, Parameter(help="Write speculation.json and .svg there")] = None


class Cell(Struct, frozen=True, kw_only=True):
    """Tokens per second at a batch size and acceptance: with each fixed length, and with the controller."""

    batch: int
    rate: float
    fixed: dict[int, float]
    adaptive: float

    @property
    def share(self) -> float:
        """Of the best fixed length, none included."""
        return self.adaptive / max(self.fixed.values())


class BreakEven(Struct, frozen=True, kw_only=True):
    """The acceptance from which on drafts of a length are better than none; None if they never are."""

    batch: int
    length: int
    rate: float | None


class Result(Struct, frozen=True, kw_only=True):
    """All of it."""

    table: StepTable
    cells: list[Cell]
    break_even: list[BreakEven]
    swing: Swing


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Replay acceptance from 0 to 1 at batch sizes from 1 to 32 on the cost of this machine's steps."""
    if job.table is not None:
        table = load_table(job.table)
    else:
        table = measure_table(load_bench_parts(job.model, job.cache_dir, job.threads))
    result = replay_all(job, table)
    sys.stdout.write(text_of(result))
    if job.folder is not None:
        (job.folder / "speculation.json").write_bytes(msgspec.json.encode(result) + b"\n")
        (job.folder / "speculation.svg").write_text(plot_of(result), encoding="utf-8")
    return 0 if is_kept(result) else 1


def replay_all(job: Job, table: StepTable) -> Result:
    """Every cell, and where fixed lengths break even."""
    cells = []
    for batch in table.seconds:
        say(f"replaying {batch} sequences ...")
        cells += [_cell(job, table, batch, rate) for rate in RATES]
    even = [
        BreakEven(batch=batch, length=length, rate=break_even(table, batch, length))
        for batch in BREAK_EVEN_BATCHES
        for length in BREAK_EVEN_LENGTHS
        if batch in table.seconds
    ]
    say("replaying a load that swings ...")
    replay = Replay(Controller(SpeculationSettings()), warm_costs(table), table.step_s, seed=0)
    return Result(table=table, cells=cells, break_even=even, swing=swing(table, replay))


def warm_costs(table: StepTable) -> CostModel:
    """What an engine knows after its warm-up: a few decoding steps without drafts."""
    samples = (
        StepSample(StepShape(batch, batch, batch * NUM_CONTEXT_TOKENS), table.step_s(batch, batch))
        for batch in table.seconds
    )
    return CostModel(fit(samples, StepCost.guess(table.tile_rows)))


def break_even(table: StepTable, batch: int, length: int) -> float | None:
    """By bisection: tokens rise with acceptance, and what a step takes does not depend on it."""
    without = fixed_tokens_per_s(table.step_s, batch, 0.0, 0)
    low, high = 0.0, 1.0
    if fixed_tokens_per_s(table.step_s, batch, high, length) < without:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        pays = fixed_tokens_per_s(table.step_s, batch, middle, length) >= without
        low, high = (low, middle) if pays else (middle, high)
    return high


def _cell(job: Job, table: StepTable, batch: int, rate: float) -> Cell:
    adaptive = [
        Replay(Controller(SpeculationSettings()), warm_costs(table), table.step_s, seed)
        .run(batch, rate, 300 + job.tokens // batch)
        .tokens_per_s
        for seed in range(job.seeds)
    ]
    return Cell(
        batch=batch,
        rate=rate,
        fixed={length: fixed_tokens_per_s(table.step_s, batch, rate, length) for length in LENGTHS},
        adaptive=fmean(adaptive),
    )


def is_kept(result: Result) -> bool:
    """Whether every cell is at its bar."""
    return all(cell.share >= BAR for cell in result.cells) and result.swing.share > 1.0


def text_of(result: Result) -> str:
    """The result for people."""
    batches = list(result.table.seconds)
    lines = ["ms of a step, by sequences (down) and draft tokens of each (across)"]
    lines.append(f"{'':>10}" + "".join(f"{length:>8}" for length in LENGTHS))
    for batch in batches:
        times = (1000 * result.table.step_s(batch, batch * (1 + length)) for length in LENGTHS)
        lines.append(f"{batch:>10}" + "".join(f"{ms:>8.1f}" for ms in times))
    lines += ["", "controller's tokens/s over those of the best fixed length, by acceptance (across)"]
    lines.append(f"{'':>10}" + "".join(f"{rate:>8.1f}" for rate in RATES))
    for batch in batches:
        cells = [cell for cell in result.cells if cell.batch == batch]
        lines.append(f"{batch:>10}" + "".join(f"{cell.share:>8.3f}" for cell in cells))
    lines += ["", "acceptance at which a fixed length breaks even (a - : never)"]
    lines.append(f"{'':>10}" + "".join(f"{f'length {length}':>10}" for length in BREAK_EVEN_LENGTHS))
    for batch in dict.fromkeys(each.batch for each in result.break_even):
        rates = [each.rate for each in result.break_even if each.batch == batch]
        lines.append(
            f"{batch:>10}" + "".join(f"{'-' if rate is None else f'{rate:.2f}':>10}" for rate in rates)
        )
    least = min(result.cells, key=lambda cell: cell.share)
    lines += [
        "",
        f"least: {least.share:.3f} at batch {least.batch} and acceptance {least.rate:g}; bar {BAR}",
        "",
        f"load that swings every {PHASE_S:g} s: {result.swing.adaptive:.1f} tokens/s,"
        f" {result.swing.share:.3f} times those of the best fixed length ({result.swing.best_length});"
        " bar: more than 1",
        "every bar is kept" if is_kept(result) else "A BAR IS MISSED",
    ]
    return "\n".join(lines) + "\n"


def plot_of(result: Result) -> str:
    """Three batch sizes: no drafts, the fixed lengths that are compared, and the controller."""
    panels = []
    for batch in dict.fromkeys(each.batch for each in result.break_even):
        cells = [cell for cell in result.cells if cell.batch == batch]
        lines = {"no drafts": [cell.fixed[0] for cell in cells]}
        lines |= {f"fixed {length}": [cell.fixed[length] for cell in cells] for length in BREAK_EVEN_LENGTHS}
        lines["controller"] = [cell.adaptive for cell in cells]
        panels.append(Panel(title=f"batch {batch}, tokens/s", lines=lines))
    return plot("Draft lengths on measured step times", panels, "acceptance of a draft token")


if __name__ == "__main__":
    app = App(name="bench-draft-lengths", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
