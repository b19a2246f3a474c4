"""transformers' `generate` on a GGUF file's dequantised weights, for `peers`; prints one JSON object.

    python -m surefoot.bench.peer_transformers_loads --model model.gguf --threads 2

A process of its own and no HTTP, one sequence at a time: it has no server that batches.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

import cyclopts
import msgspec
import torch

from .peer_transformers import generate, load_llama, random_prompt
from .peers_memory import resident_bytes
from .peers_rounds import TransformersRound

WARM_UP_TOKENS = 8
REPEATS = 2


class TokenTimes:
    """A streamer, as `generate` takes it, that notes when each token was there. The prompt comes first."""

    def __init__(self) -> None:
        self.prompt_at = 0.0
        self.token_at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """`generate` calls this with the prompt and then with each token."""
        if self.prompt_at:
            self.token_at.append(time.perf_counter())
        else:
            self.prompt_at = time.perf_counter()

    def end(self) -> None:
        """`generate` calls this at the end."""


def main(
    *,
    model: Path,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    threads: int = 2,
    prompt_tokens: int = 16,
    output_tokens: int = 128,
    prefill_tokens: int = 512,
    past_tokens: int = 2048,
    past_output_tokens: int = 64,
) -> None:
    """Measure and print."""
    torch.set_num_threads(threads)
    llama = load_llama(model).to(getattr(torch, dtype)).eval()
    ready_at = time.time()
    generate(llama, random_prompt(llama, prompt_tokens, 0), WARM_UP_TOKENS)
    seconds = [generate(llama, random_prompt(llama, prompt_tokens, n), output_tokens) for n in range(REPEATS)]
    prefill = [generate(llama, random_prompt(llama, prefill_tokens, n), 1) for n in range(REPEATS)]
    times = token_times(llama, random_prompt(llama, past_tokens, 0), past_output_tokens)
    result = TransformersRound(
        ready_at=ready_at,
        values={
            "streams_1": REPEATS * output_tokens / sum(seconds),
            "prefill": REPEATS * prefill_tokens / sum(prefill),
            "after_past": (len(times) - 1) / (times[-1] - times[0]),
        },
        resident_bytes=resident_bytes(os.getpid()),
    )
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


def token_times(llama: Any, prompt: torch.Tensor, num_tokens: int) -> list[float]:
    """When each of exactly so many tokens was there."""
    streamer = TokenTimes()
    generate(llama, prompt, num_tokens, streamer)
    assert len(streamer.token_at) == num_tokens
    return streamer.token_at


if __name__ == "__main__":
    cyclopts.run(main)
