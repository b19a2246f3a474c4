"""Servers side by side on the same model file, with the same client, in one run.

    make peers         once: llama.cpp, built from source
    make bench-peers
    python -m surefoot.bench.peers --help

Starts `surefoot serve`, llama.cpp's `llama-server`, transformers' `generate` and, where installed, vLLM's CPU
build, one after the other in interleaved rounds, and holds our medians against llama.cpp's.
"""

from __future__ import annotations

import sys
from statistics import median

import msgspec
from cyclopts import App
from msgspec import Struct

from .bars import EXIT_FAILED, EXIT_MISSED, say
from .command_line import run_app
from .errors import BenchError
from .loop import run_async
from .peers_loads import PeerLoad
from .peers_plot import Panel, plot
from .peers_rounds import PeerRound, PeersResult, measure_peers
from .peers_servers import LLAMA, OURS, PeersJob
from .report import table

DEFAULT_JOB = PeersJob()
MIB = 2**20
NO_VALUE = "-"


class Comparison(Struct, frozen=True, kw_only=True):
    """One load: medians in tokens per second by server, and how many times llama.cpp's ours is, by round."""

    load: PeerLoad
    medians: dict[str, float]
    ratios: list[float]

    @property
    def kept(self) -> bool | None:
        """Whether the median ratio keeps the bar; None if llama.cpp was not measured."""
        return median(self.ratios) >= self.load.bar if self.ratios else None

    def cells(self, names: list[str]) -> list[str]:
        """A line of the table."""
        values = [f"{self.medians[name]:.1f}" if name in self.medians else NO_VALUE for name in names]
        verdict = {None: "not measured", True: "kept", False: "MISSED"}[self.kept]
        return [f"{self.load.title}, tok/s", *values, *self._ratio_cells(), f">= {self.load.bar:g}", verdict]

    def _ratio_cells(self) -> list[str]:
        if not self.ratios:
            return [NO_VALUE, NO_VALUE]
        return [f"{median(self.ratios):.2f}", f"{min(self.ratios):.2f}-{max(self.ratios):.2f}"]


def main(*, job: PeersJob = DEFAULT_JOB) -> int:
    """Measure servers side by side: streams, prefill, a long past, memory, time to ready.

    The exit status is 0 if every bar is kept, 1 if one is missed, 2 if the measurement failed or llama.cpp,
    which the bars are held against, is not installed.
    """
    try:
        if job.folder is not None:
            job.folder.mkdir(parents=True, exist_ok=True)
        result = run_async(measure_peers(job, lambda text: say(f"{text} ...\n")))
        compared = compare_peers(result)
        sys.stdout.write(text_of(result, compared))
        if job.folder is not None:
            (job.folder / "peers.json").write_bytes(msgspec.json.encode(result) + b"\n")
            (job.folder / "peers.svg").write_text(plot_of(result, compared), encoding="utf-8")
    except (BenchError, OSError) as error:
        say(f"bench-peers: {error}\n")
        return EXIT_FAILED
    verdicts = {each.kept for each in compared}
    if False in verdicts:
        return EXIT_MISSED
    return EXIT_FAILED if None in verdicts else 0


def compare_peers(result: PeersResult) -> list[Comparison]:
    """A comparison for each load. Ratios are taken round by round."""
    return [_comparison(result, load) for load in result.loads]


def _comparison(result: PeersResult, load: PeerLoad) -> Comparison:
    values = {
        name: [each.values[load.key] for each in rounds]
        for name, rounds in result.rounds.items()
        if all(load.key in each.values for each in rounds)
    }
    theirs = values.get(LLAMA, [])
    return Comparison(
        load=load,
        medians={name: median(each) for name, each in values.items()},
        ratios=[mine / peer for mine, peer in zip(values[OURS], theirs, strict=True)] if theirs else [],
    )


def text_of(result: PeersResult, compared: list[Comparison]) -> str:
    """The result for people."""
    names = list(result.rounds)
    lines = [
        ["", *names, f"/ {LLAMA}", "rounds", "bar", ""],
        *(each.cells(names) for each in compared),
        ["ready, s", *(f"{_ready_s(result.rounds[name]):.1f}" for name in names), "", "", "", ""],
        ["resident memory, MiB", *(_memory(result.rounds[name]) for name in names), "", "", "", ""],
    ]
    machine = f"{result.machine.cpu}, {result.machine.num_cpus} CPUs, {result.threads} threads each"
    rounds = len(result.rounds[OURS])
    head = (
        f"{result.model} on {machine}; medians of {rounds} round{'s'[: rounds != 1]}, {result.date}\n"
        f"our first start was ready in {result.first_ready_s:.1f} s\n"
    )
    notes = [f"{name}: {told}" for name, told in result.versions.items()]
    notes += [f"{name}: {command}" for name, commands in result.commands.items() for command in commands]
    notes += [f"{name} was not measured: {reason}" for name, reason in result.skipped.items()]
    return f"{head}\n{table(lines)}\n" + "\n".join(notes) + "\n"


def plot_of(result: PeersResult, compared: list[Comparison]) -> str:
    """The same as a picture."""
    panels = [
        Panel(
            title=each.load.title,
            values=each.medians,
            note=f"{median(each.ratios):.2f} x {LLAMA}" if each.ratios else "",
        )
        for each in compared
    ]
    title = f"{result.model}, {result.threads} CPU threads each"
    footer = f"{result.machine.cpu}; medians of {len(result.rounds[OURS])} rounds; {result.date[:10]}"
    return plot(title, panels, footer)


def _ready_s(rounds: list[PeerRound]) -> float:
    return median(each.ready_s for each in rounds)


def _memory(rounds: list[PeerRound]) -> str:
    sizes = [each.resident_bytes for each in rounds if each.resident_bytes is not None]
    return f"{median(sizes) / MIB:.0f}" if sizes else NO_VALUE


def run(arguments: list[str]) -> int:
    """Run one command line; returns the process's exit status."""
    app = App(name="bench-peers", help_format="plaintext", version_flags=[], default_command=main)
    return run_app(app, arguments, bad_usage=EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
