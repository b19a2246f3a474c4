"""What the kernels do on a GPU, from inside: `python -m surefoot.bench.device`, in under five minutes.

It checks first: every op against its plain form, and graphs of steps against the steps. The verdict is
printed within a minute, and nothing is timed if it is bad. Then it times a random model in Llama-3.1-8B's
shape, served by the whole engine with and without drafts, and by transformers: from a token to the next,
beside the bytes that a step cannot but read. Last comes attention in that shape: decoding over committed
tokens, in useful bytes a second beside a copy's, per cache format, and prefill beside torch's own attention.
`--reference` runs it all on a CPU, with the plain ops and small shapes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from surefoot.kernels.base import Ops
from surefoot.kernels.layout import FORMATS
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.select import select_ops

from .device_checks import Check, run_checks
from .device_engine import SMALL_LOAD, EngineLoad, time_engine
from .device_loads import SMALL, DecodeLoad, Shape, decode_load

ROUNDS = 7
"""Timings of which the median counts."""

MAX_SECONDS = 240.0
"""Nothing further is timed after so long."""


class Timing(Struct, frozen=True, kw_only=True):
    """One measurement: the useful bytes or operations done in some seconds, and the rate to compare with."""

    name: str
    seconds: float
    amount: float
    unit: str
    baseline: float

    @property
    def line(self) -> str:
        """For a reader."""
        rate = self.amount / self.seconds
        share = 100.0 * rate / self.baseline
        return f"{self.name:36}{1e6 * self.seconds:12.1f} us{rate / 1e9:12.2f} G{self.unit}/s{share:8.1f} %"


class Report(Struct, frozen=True, kw_only=True):
    """All that was found; rates in bytes a second."""

    device: str
    ops: str
    copy_rate: float
    checks: list[Check]
    timings: list[Timing]
    is_whole: bool = True
    """Whether there was time for everything."""


def measure_copy(shape: Shape, device: torch.device) -> float:
    """Bytes read and written a second by a copy within the device's memory."""
    source = torch.ones(shape.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * shape.copy_bytes / measure(partial(target.copy_, source), device)


def time_decoding(ops: Ops, device: torch.device, shape: Shape, copy_rate: float) -> Iterator[Timing]:
    """Attention over the past per context, batch and format."""
    for context in shape.contexts:
        for batch in shape.batches:
            for cache_format in FORMATS:
                load = decode_load(shape, cache_format, batch, context, device)
                yield Timing(
                    name=f"decode {context} x {batch}, ({cache_format.k_bits}, {cache_format.v_bits})",
                    seconds=measure(partial(_decode, ops, shape, load), device),
                    amount=load.useful_bytes,
                    unit="B",
                    baseline=copy_rate,
                )


def time_prefill(ops: Ops, device: torch.device, shape: Shape) -> Iterator[Timing]:
    """Causal attention of one prompt among itself, beside torch's."""
    for length in shape.prompts:
        q = torch.randn(length, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
        k, v = torch.randn(2, length, shape.num_kv_heads, shape.head_dim, dtype=q.dtype, device=device)
        cu_rows = torch.tensor([0, length], dtype=torch.int32, device=device)
        operations = 2 * length * (length + 1) * shape.num_heads * shape.head_dim
        torch_s = measure(partial(_attend_in_torch, *(x.transpose(0, 1)[None] for x in (q, k, v))), device)
        ours_s = measure(partial(ops.present_attention, q, k, v, cu_rows, shape.scale), device)
        for who, seconds in (("torch", torch_s), ("ours", ours_s)):
            yield Timing(
                name=f"prefill {length}, {who}",
                seconds=seconds,
                amount=operations,
                unit="FLOP",
                baseline=operations / torch_s,
            )


def time_serving(ops: Ops, device: torch.device, load: EngineLoad, copy_rate: float) -> Iterator[Timing]:
    """Tokens of a whole engine. A share is that of the rate at which a step without drafts could be read."""
    for each in time_engine(ops, device, load):
        yield Timing(
            name=f"{each.who} x {each.batch}, token to token",
            seconds=each.seconds,
            amount=load.step_bytes(each.batch),
            unit="B",
            baseline=copy_rate,
        )


def measure(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the median of some; on a GPU replayed from a graph, so that launches are free."""
    if device.type != "cuda":
        return statistics.median(_wall_s(run) for _ in range(ROUNDS))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()  # compiles, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return statistics.median(milliseconds) / 1000.0


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m surefoot.bench.device", description=__doc__)
    parser.add_argument("--reference", action="store_true", help="the plain ops on a CPU, in small shapes")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to store all that was found, as JSON"
    )
    args = parser.parse_args(arguments)
    if not args.reference and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --reference runs on a CPU")
    device = torch.device("cpu") if args.reference else torch.device("cuda", 0)
    ops: Ops = ReferenceOps() if args.reference else select_ops(device)
    loads = (SMALL, SMALL_LOAD) if args.reference else (Shape(), EngineLoad())
    report = run(ops, device, *loads)
    if args.output is not None:
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0 if all(check.is_good for check in report.checks) else 1


def run(ops: Ops, device: torch.device, shape: Shape, load: EngineLoad) -> Report:
    """Check, and if all is well time; print each result as it is there."""
    begun_s = time.monotonic()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    _print(f"{ops.name} on {name}, torch {torch.__version__}")
    checks = list(run_checks(ops, device, shape))
    for check in checks:
        _print(f"{'ok ' if check.is_good else 'BAD'} {check.name:24}{check.error:10.2e} of {check.limit:.0e}")
    bad = sum(not check.is_good for check in checks)
    _print(
        f"VERDICT: {bad} of {len(checks)} checks failed" if bad else f"VERDICT: {len(checks)} checks passed"
    )
    if bad:
        return Report(device=name, ops=ops.name, copy_rate=0.0, checks=checks, timings=[])
    copy_rate = measure_copy(shape, device)
    _print(f"copy: {copy_rate / 1e9:.0f} GB/s, read and written")
    report = Report(device=name, ops=ops.name, copy_rate=copy_rate, checks=checks, timings=[])
    for timing in chain(
        time_serving(ops, device, load, copy_rate),
        time_decoding(ops, device, shape, copy_rate),
        time_prefill(ops, device, shape),
    ):
        _print(timing.line)
        report.timings.append(timing)
        if time.monotonic() - begun_s > MAX_SECONDS:
            _print(f"stopped after {MAX_SECONDS:.0f} s")
            return replace(report, is_whole=False)
    return report


def _decode(ops: Ops, shape: Shape, load: DecodeLoad) -> None:
    for layer in load.cache:
        ops.past_attention(load.q, load.cu_rows, layer, shape.layout, load.past, shape.scale)


def _attend_in_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _wall_s(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
