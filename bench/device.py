"""What the kernels do on a GPU, from inside: `make bench-device`, in under five minutes.

It checks first: every op against its plain form, graphs of steps against the steps, an engine's answers. The
verdict is printed within a minute; what is timed after a bad one is not to be believed. Then it times
attention in Llama-3.1-8B's shape: decoding over committed tokens, in useful bytes a second beside a copy's,
per cache format, and prefill beside torch's own attention. Last comes a random model in that shape, served by
the whole engine with and without drafts, and by transformers: from a token to the next, beside the bytes that
a step cannot but read; and a layer's matrix products, the library's beside batch-invariant ones. Every
section has a process of its own, and none needs another one to succeed.
`--reference` runs it all on a CPU, with the plain ops and small shapes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from surefoot.kernels.layout import FULL, INT4

from .device_checks import CHECKS
from .device_engine import time_drafts, time_engine, time_transformers, token_name
from .device_kernels import decoding_name, time_decoding, time_linear, time_prefill
from .device_rows import Part, Ratio, Row, timing
from .device_sections import Apart, Here, Section
from .device_setup import ON_A_GPU, REFERENCE, Setup

TIMINGS = (
    Section("decoding", time_decoding),
    Section("prefill", time_prefill),
    Section("the engine", time_engine),
    Section("the engine with drafts", time_drafts),
    Section("transformers", time_transformers),
    Section("a layer's products", time_linear),
)
"""One after the other."""

CHECK_SECONDS = 55.0
"""After so long a check counts as failed. What it compiled is kept, so another run gets further."""

MAX_SECONDS = 280.0
"""What still runs after so long is stopped."""

FASTER_THAN_GENERATE = 3.0
FASTER_IN_4_BITS = 2.5


class Report(Struct, kw_only=True):
    """All that was found."""

    device: str
    ops: str
    torch: str
    parts: list[Part]

    @property
    def is_good(self) -> bool:
        """Whether all that was checked is right, and all could be tried."""
        return not any(part.num_bad for part in self.parts)


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 if a check failed or something could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m surefoot.bench.device", description=__doc__)
    parser.add_argument("--reference", action="store_true", help="the plain ops on a CPU, in small shapes")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to store all that was found, as JSON"
    )
    args = parser.parse_args(arguments)
    if not args.reference and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --reference runs on a CPU")
    return 0 if run(REFERENCE if args.reference else ON_A_GPU, args.output).is_good else 1


def run(
    setup: Setup,
    output: Path | None = None,
    checks: Sequence[Section] = CHECKS,
    timings: Sequence[Section] = TIMINGS,
) -> Report:
    """Check, then time. Each row is printed as it is there, and `output` written after each section."""
    begun_s = time.monotonic()
    report = _new_report(setup)
    _print(f"{report.ops} on {report.device}, torch {report.torch}")
    # On a CPU, where all would share two or three cores, one after the other in this process.
    kind = Here if setup.is_reference else Apart
    runs = {section.name: kind(section, setup) for section in (*checks, *timings)}
    try:
        for section in checks:
            runs[section.name].begin()
        for section in checks:
            _collect(report, section.name, runs[section.name].rows(begun_s + CHECK_SECONDS))
        _print(_verdict(report.parts, time.monotonic() - begun_s))
        for section in timings:
            _store(report, output)
            runs[section.name].begin()
            _collect(report, section.name, runs[section.name].rows(begun_s + MAX_SECONDS))
    finally:
        for each in runs.values():
            each.stop()
    _collect(report, "beside one another", _compare(setup, report.parts))
    _store(report, output)
    _print(f"\nin {time.monotonic() - begun_s:.1f} s:")
    for part in report.parts:
        _print(part.line)
    return report


def _collect(report: Report, name: str, rows: Iterator[Row]) -> None:
    found: list[Row] = []
    begun_s = time.monotonic()
    _print(f"\n{name}:")
    for row in rows:
        _print(row.line)
        found.append(row)
    part = Part(name=name, seconds=time.monotonic() - begun_s, rows=found)
    _print(f"    {part.seconds:.1f} s")
    report.parts.append(part)


def _verdict(parts: list[Part], seconds: float) -> str:
    total, bad = sum(len(part.rows) for part in parts), sum(part.num_bad for part in parts)
    found = f"{bad} of {total} checks failed: believe no timing" if bad else f"{total} checks passed"
    return f"\nVERDICT after {seconds:.1f} s: {found}"


def _compare(setup: Setup, parts: list[Part]) -> Iterator[Ratio]:
    """Rates of the rows above beside one another."""
    for batch in setup.load.batches:
        ours, other = (timing(parts, token_name(who, batch)) for who in ("engine", "transformers"))
        if ours is not None and other is not None:
            yield Ratio(
                name=f"the engine beside generate x {batch}",
                ratio=other.seconds / ours.seconds,
                least=FASTER_THAN_GENERATE,
            )
    context, layout = max(setup.shape.contexts), setup.shape.layout
    for batch in setup.shape.batches:
        few, full = (timing(parts, decoding_name(context, batch, own)) for own in (INT4, FULL))
        if few is not None and full is not None:
            tokens, full_tokens = (
                few.rate / layout.bytes_per_token(INT4),
                full.rate / layout.bytes_per_token(FULL),
            )
            yield Ratio(
                name=f"tokens in 4 bits beside 16, {context} x {batch}",
                ratio=tokens / full_tokens,
                least=None if few.least is None else FASTER_IN_4_BITS,
            )


def _new_report(setup: Setup) -> Report:
    name = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "cpu"
    return Report(device=name, ops=setup.ops().name, torch=str(torch.__version__), parts=[])


def _store(report: Report, output: Path | None) -> None:
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
