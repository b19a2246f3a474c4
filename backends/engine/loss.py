"""What a form of the weights costs: nats per token against float32, on text that is given to both.

The text is cut into windows, and the engine scores each as it scores a prompt for a client that asks for
`echo` and `logprobs`: same steps, same ops, same 16-bit cache. So what is measured is what is served.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from surefoot.backends.errors import BackendError
from surefoot.backends.types import GenerateRequest, PromptEcho, SamplingParams, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS

from .backend import EngineParts
from .device_runner import bytes_of_block
from .engine import Engine, EngineCounters
from .loss_errors import LossError
from .loss_text import read_text
from .settings import EngineSettings
from .start import EngineOptions, Progress, load_parts
from .tokenizer import Tokenizer
from .weight_mode import WeightMode

MIN_WINDOWS = 2
"""A standard error is taken over windows."""

REPORT_EVERY_S = 5.0
"""Seconds between two sentences of progress."""


class LossSettings(Struct, frozen=True, kw_only=True):
    """What is scored: at least `num_tokens` of `files` (none: the default text), in windows of `window`.

    `LossError` if a number is of no use.
    """

    files: tuple[Path, ...] = ()
    num_tokens: int = 20_000
    window: int = 1024

    def __post_init__(self) -> None:
        if self.window < 2:
            raise LossError(f"a window has 2 tokens or more, got {self.window}")
        if self.num_tokens < 1:
            raise LossError(f"1 token or more must be scored, got {self.num_tokens}")

    @property
    def num_windows(self) -> int:
        """A window's first token is predicted by nothing, so all others are scored."""
        return max(MIN_WINDOWS, math.ceil(self.num_tokens / (self.window - 1)))


class Scores(Struct, frozen=True):
    """What a model says of each scored token: `[windows, window - 1]`, and how long that took."""

    logprobs: Tensor  # float64
    argmax: Tensor  # int64, the likeliest token in the scored one's place
    seconds: float

    @property
    def nats_per_token(self) -> float:
        """Minus the mean log-probability."""
        return -float(self.logprobs.mean())

    @property
    def tokens_per_s(self) -> float:
        """Tokens scored in a second."""
        return self.logprobs.numel() / self.seconds


class LossReport(Struct, frozen=True, kw_only=True):
    """A form of the weights against float32, token by token.

    `loss` is in nats per token, above 0 where float32 does better; `standard_error` is its own, from the
    spread between windows, since neighbouring tokens go together. `max_difference` is the largest of a token.
    `text_digest` says whether two reports are about the same tokens.
    """

    model: str
    weights: WeightMode
    ops: str
    text_digest: str
    num_windows: int
    num_tokens: int
    loss: float
    standard_error: float
    max_difference: float
    equal_argmax: float
    nats_per_token: float
    reference_nats_per_token: float
    tokens_per_s: float
    reference_tokens_per_s: float


class Comparison(Struct, frozen=True):
    """The figures of a `LossReport` that pair tokens."""

    loss: float
    standard_error: float
    max_difference: float
    equal_argmax: float


def measure_loss(options: EngineOptions, settings: LossSettings, progress: Progress) -> LossReport:
    """Score the text with the weights as `options` say, then with float32 ones of the same files.

    Takes minutes; one model is in memory at a time. Raises `LossError` and `ModelError`.
    """
    text = read_text(settings.files)
    parts = load_parts(options, progress)
    windows = cut_windows(parts.loaded.tokenizer, text, settings)
    measured = score(parts, _limits(options, parts, settings), windows, options.weights, progress)
    ops_name = parts.ops.name
    del parts
    exact = load_parts(replace(options, weights=WeightMode.FLOAT32), progress)
    reference = score(exact, _limits(options, exact, settings), windows, WeightMode.FLOAT32, progress)
    found = compare(measured, reference)
    return LossReport(
        model=options.model_id,
        weights=options.weights,
        ops=ops_name,
        text_digest=hashlib.blake2b(repr(windows).encode(), digest_size=6).hexdigest(),
        num_windows=len(windows),
        num_tokens=measured.logprobs.numel(),
        loss=found.loss,
        standard_error=found.standard_error,
        max_difference=found.max_difference,
        equal_argmax=found.equal_argmax,
        nats_per_token=measured.nats_per_token,
        reference_nats_per_token=reference.nats_per_token,
        tokens_per_s=measured.tokens_per_s,
        reference_tokens_per_s=reference.tokens_per_s,
    )


def cut_windows(tokenizer: Tokenizer, text: str, settings: LossSettings) -> list[tuple[int, ...]]:
    """The text's first tokens in windows of one length, each begun like a document of the model's.

    `LossError` if there are too few.
    """
    start = tokenizer.encode("")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    share = settings.window - len(start)
    if share < 1 or len(token_ids) < share * settings.num_windows:
        raise LossError(
            f"the text has {len(token_ids)} tokens, but {settings.num_windows} windows of {settings.window}"
            f" tokens take {share * settings.num_windows}: give more text, or score less of it"
        )
    pieces = (token_ids[at * share : (at + 1) * share] for at in range(settings.num_windows))
    return [(*start, *piece) for piece in pieces]


def score(
    parts: EngineParts,
    settings: EngineSettings,
    windows: Sequence[tuple[int, ...]],
    weights: WeightMode,
    progress: Progress,
) -> Scores:
    """Teacher forcing over windows of one length, one at a time; raises `LossError`."""
    engine = Engine(
        parts.loaded,
        parts.ops,
        settings,
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
    )
    if len(windows[0]) >= engine.max_model_len:
        raise LossError(
            f"windows of {len(windows[0])} tokens are too long: they must be shorter than the context of"
            f" {engine.max_model_len}"
        )
    logprobs = torch.empty(len(windows), len(windows[0]) - 1, dtype=torch.float64)
    argmax = torch.empty(logprobs.shape, dtype=torch.int64)
    tell = _score_progress(weights, logprobs.numel(), progress)
    started_s = time.monotonic()
    for number, window in enumerate(windows):
        predicted = [entry for entry in _prompt_logprobs(engine, number, window) if entry is not None]
        logprobs[number] = torch.tensor([logprob for logprob, _ in predicted], dtype=torch.float64)
        argmax[number] = torch.tensor([best for _, best in predicted])
        tell((number + 1) * len(predicted))
    seconds = time.monotonic() - started_s
    if not logprobs.isfinite().all():
        raise LossError(f"the model gives log-probabilities that are not finite with {weights} weights")
    return Scores(logprobs, argmax, seconds)


def compare(measured: Scores, reference: Scores) -> Comparison:
    """Pair two scores of the same windows."""
    differences = reference.logprobs - measured.logprobs
    by_window = differences.mean(1)
    return Comparison(
        loss=float(by_window.mean()),
        standard_error=float(by_window.std()) / math.sqrt(len(by_window)),
        max_difference=float(differences.abs().max()),
        equal_argmax=float((measured.argmax == reference.argmax).double().mean()),
    )


def report_text(report: LossReport) -> str:
    """A report for people."""
    rows = [
        ("", str(report.weights), "fp32"),
        ("nats per token", f"{report.nats_per_token:.5f}", f"{report.reference_nats_per_token:.5f}"),
        ("tokens/s", f"{report.tokens_per_s:.0f}", f"{report.reference_tokens_per_s:.0f}"),
    ]
    table = "".join(f"{name:<20}{ours:>12}{theirs:>12}\n" for name, ours, theirs in rows)
    return (
        f"{report.model}, {report.num_tokens} tokens in {report.num_windows} windows"
        f" (text {report.text_digest}), ops {report.ops}\n\n{table}\n"
        f"{'loss':<20}{report.loss:>12.5f} nats per token, standard error {report.standard_error:.5f}\n"
        f"{'largest difference':<20}{report.max_difference:>12.5f} nats, of one token\n"
        f"{'equal argmax':<20}{100 * report.equal_argmax:>11.2f} %\n"
    )


def _limits(options: EngineOptions, parts: EngineParts, settings: LossSettings) -> EngineSettings:
    """The server's limits, with a cache for the one window that is scored at a time."""
    num_blocks = settings.window // BLOCK_TOKENS + 1
    block_bytes = bytes_of_block(parts.loaded.model, parts.cache_dtype)
    return replace(options.settings, cache_bytes=num_blocks * block_bytes)


def _prompt_logprobs(engine: Engine, key: int, token_ids: tuple[int, ...]) -> list[tuple[float, int] | None]:
    """Each token's log-probability and the likeliest token in its place; None for the first one."""
    message = GenerateRequest(
        request_id=str(key),
        model="",
        prompt=TokenPrompt(token_ids),
        params=SamplingParams(logprobs=1, max_tokens=0),
        echo=True,
    )
    engine.submit(message, token_ids, key=key)
    entries: list[tuple[float, int] | None] = []
    while engine.has_work:
        for output in engine.step():
            if isinstance(output.event, BackendError):
                raise LossError(f"the engine could not score window {key + 1}: {output.event}")
            if isinstance(output.event, PromptEcho):
                entries += (
                    None if entry.logprob is None else (entry.logprob, entry.top[0].token_id)
                    for entry in output.event.logprobs or ()
                )
    return entries


def _score_progress(weights: WeightMode, num_tokens: int, progress: Progress) -> Callable[[int], None]:
    """Takes the number of tokens done; a sentence every few seconds."""
    started_s = last_s = time.monotonic()

    def tell(num_done: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if num_done == num_tokens or now_s - last_s >= REPORT_EVERY_S:
            rate = num_done / (now_s - started_s)
            progress(
                f"Scoring with {weights} weights: {num_done} of {num_tokens} tokens, {rate:.0f} a second."
            )
            last_s = now_s

    return tell
