"""What attention over the past costs per cache format: `python -m surefoot.kernels.bench`.

The default model's shape: 30 layers, 9 query heads on 3 KV heads of 64. Every layer has blocks of its own, in
random order, so that they come from memory as they do while serving. Formats take turns in every round;
printed is the fastest round, in milliseconds for all layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from .base import Ops, Past
from .layout import FORMATS, BlockLayout, CacheFormat
from .select import select_ops

LAYERS = 30
TOKENS = 2048
BATCHES = (1, 8)
ROUNDS = 15


class Workload(Struct, frozen=True, kw_only=True):
    """One decoding step's attention over the past in one format."""

    q: Tensor
    cu_rows: Tensor
    cache: Tensor
    layout: BlockLayout
    past: Past

    def run(self, ops: Ops) -> float:
        """Seconds for all layers."""
        begin = time.perf_counter()
        for layer in self.cache:
            ops.past_attention(self.q, self.cu_rows, layer, self.layout, self.past, 0.125)
        return time.perf_counter() - begin


def workload(ops: Ops, cache_format: CacheFormat, batch: int) -> Workload:
    """Sequences of `TOKENS` random tokens each."""
    layout = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    token, capacity = torch.arange(TOKENS), layout.capacity(cache_format)
    blocks = -(-TOKENS // capacity)
    table = torch.randperm(batch * blocks).int().view(batch, blocks)
    cache = torch.zeros(LAYERS, batch * blocks, layout.block_bytes, dtype=torch.uint8)
    k = torch.randn(1, TOKENS, 3, 64).expand(LAYERS, -1, -1, -1)
    for row in table:
        ops.commit(cache, layout, k, k, row[token // capacity], (token % capacity).int(), cache_format)
    return Workload(
        q=torch.randn(batch, 9, 64),
        cu_rows=torch.arange(batch + 1, dtype=torch.int32),
        cache=cache,
        layout=layout,
        past=Past(
            block_table=table,
            lengths=torch.full((batch,), TOKENS, dtype=torch.int32),
            format=cache_format,
        ),
    )


def main(cache_dir: Path | None) -> None:
    """Print what attention costs per format and batch."""
    ops = select_ops("cpu", cache_dir=cache_dir)
    sys.stdout.write(f"{ops.name}: attention over {TOKENS} past tokens, ms for {LAYERS} layers\n")
    for batch in BATCHES:
        loads = {f: workload(ops, f, batch) for f in FORMATS}
        best = {f: min(load.run(ops) for _ in range(2)) for f, load in loads.items()}
        for _ in range(ROUNDS):
            for cache_format, load in loads.items():
                best[cache_format] = min(best[cache_format], load.run(ops))
        for cache_format, seconds in best.items():
            bits = f"({cache_format.k_bits}, {cache_format.v_bits})"
            sys.stdout.write(f"batch {batch}  {bits:8}  {1000 * seconds:6.1f}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m surefoot.kernels.bench", description=main.__doc__)
    parser.add_argument("cache_dir", type=Path, nargs="?", help="folder that keeps the compiled kernels")
    main(parser.parse_args().cache_dir)
