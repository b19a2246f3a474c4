"""From raw logits to the next tokens: penalties, biases and bans here, the Gumbel rule in the ops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn.functional import pad

from surefoot.backends.types import SamplingParams, TokenLogprob, TopLogprob
from surefoot.kernels.base import Ops, SampleRows

from .device import place
from .sequence import Sequence
from .tokenizer import Tokenizer

LEAST_TEMPERATURE = 1e-20
"""Below it a logit over the temperature could leave float32, where all are infinite and none the largest.
Noise is too small to matter long before."""


class NonFiniteLogits(Exception):
    """The model gave NaN or infinity for a row."""


class Sampled(Struct, frozen=True):
    """A sequence's next token, with its log-probability if the request wants them."""

    token_id: int
    logprob: TokenLogprob | None


class SampledRow(Struct, frozen=True):
    """A row to sample from: what follows the sequence's tokens and then `drafted` ones."""

    sequence: Sequence
    drafted: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Of the token that is sampled."""
        return len(self.sequence.token_ids) + len(self.drafted)


class Sampler:
    """Samples one token for each row. A faulty row spoils no other."""

    def __init__(self, ops: Ops, tokenizer: Tokenizer) -> None:
        self._ops = ops
        self._tokenizer = tokenizer

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[SampledRow]) -> list[Sampled | Exception]:
        """Row r of `logits` `[R, V]` (raw, changed in place) belongs to `rows[r]`."""
        if not rows:
            return []
        finite = self._ops.finite_rows(logits)
        # To ask a GPU now would be to wait for the model twice: there all rows are sampled from first.
        known = None if self._ops.is_asynchronous else finite.tolist()
        raw_rows = {
            r: logits[r].clone() for r, row in enumerate(rows) if row.sequence.params.logprobs is not None
        }
        faults: dict[int, Exception] = {}
        for r, row in enumerate(rows):
            try:
                if known is not None and not known[r]:
                    raise _not_finite(row)
                self._adjust(logits[r], row)
            except Exception as error:  # one request's fault must stay its own
                faults[r] = error
                logits[r] = 0.0
        if known is None:
            sampled = self._ops.sample(logits, _sample_rows(rows, logits.device))
            token_ids, found = torch.stack((sampled, finite)).tolist()
            faults |= {r: _not_finite(row) for r, row in enumerate(rows) if not found[r]}
        else:
            token_ids = self._ops.sample(logits, _sample_rows(rows)).tolist()
        return [
            faults.get(r)
            or Sampled(
                token_id,
                self.logprobs_of(raw_rows[r], token_id, row.sequence.params) if r in raw_rows else None,
            )
            for r, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        ]

    def logprobs_of(self, row: Tensor, token_id: int, params: SamplingParams) -> TokenLogprob:
        """The log-probability of `token_id` in a raw row `[V]`, and the likeliest tokens beside it."""
        logprobs, num_top = row.log_softmax(-1), params.logprobs or 0
        top = logprobs.topk(num_top)
        # In one look, as each has a GPU's work waited for; float64 holds them all exactly.
        own, *rest = torch.cat((logprobs[token_id, None].double(), top.values, top.indices)).tolist()
        return TokenLogprob(
            *self._named(token_id),
            logprob=own,
            top=tuple(
                TopLogprob(*self._named(int(top_id)), logprob)
                for logprob, top_id in zip(rest[:num_top], rest[num_top:], strict=True)
            ),
        )

    def unpredicted(self, token_id: int) -> TokenLogprob:
        """The entry of a prompt's first token, which nothing predicts."""
        return TokenLogprob(*self._named(token_id), logprob=None)

    def _named(self, token_id: int) -> tuple[int, str, bytes]:
        return token_id, self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)

    def _adjust(self, logits: Tensor, row: SampledRow) -> None:
        """Apply what the request asks to `logits` `[V]`, in vLLM's order: bias, bans and masks, penalties."""
        seq, params = row.sequence, row.sequence.params
        if params.logit_bias:
            bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
            logits[_ids(params.logit_bias, logits)] += place(bias, logits.device)
        if seq.num_output_tokens + len(row.drafted) < params.min_tokens:
            logits.index_fill_(0, _ids(self._banned_until_min_tokens(seq), logits), -math.inf)
        if seq.mask is not None:
            logits.masked_fill_(place(~seq.mask.allowed(row.drafted), logits.device), -math.inf)
        if params.repetition_penalty != 1.0:
            seen = _ids(sorted({*seq.token_ids, *row.drafted}), logits)
            values = logits[seen]
            logits[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if params.frequency_penalty or params.presence_penalty:
            counts = seq.output_counts + Counter(row.drafted) if row.drafted else seq.output_counts
            if counts:
                output_ids = _ids(counts, logits)
                times = place(torch.tensor(list(counts.values()), dtype=logits.dtype), logits.device)
                logits[output_ids] -= params.frequency_penalty * times + params.presence_penalty

    def _banned_until_min_tokens(self, seq: Sequence) -> list[int]:
        end_tokens = () if seq.params.ignore_eos else self._tokenizer.eos_token_ids
        return [*end_tokens, *seq.params.stop_token_ids]


def _not_finite(row: SampledRow) -> NonFiniteLogits:
    return NonFiniteLogits(f"the model's logits at position {row.position} are not finite")


def _ids(token_ids: Iterable[int], logits: Tensor) -> Tensor:
    """Token ids where the logits are."""
    return place(torch.tensor(list(token_ids), dtype=torch.int64), logits.device)


def _heat(params: SamplingParams) -> float:
    """The temperature; one that is too low to divide by is greedy."""
    return params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0


def _sample_rows(rows: list[SampledRow], device: torch.device | None = None) -> SampleRows:
    """On a `device` each row of parameters begins at a multiple of 16 bytes, whatever the number of rows: for
    other addresses Triton would compile other kernels.
    """
    params = [row.sequence.params for row in rows]
    reals = torch.tensor(
        [[_heat(p) for p in params], [p.top_p for p in params], [p.min_p for p in params]],
        dtype=torch.float32,
    )
    integers = torch.tensor(
        [
            [p.top_k for p in params],
            [row.sequence.request.seed for row in rows],
            [row.sequence.choice for row in rows],
            [row.position for row in rows],
        ]
    )
    if device is not None:
        padding = (0, -len(rows) % 4)
        reals, integers = (place(pad(x, padding), device)[:, : len(rows)] for x in (reals, integers))
    temperature, top_p, min_p = reals.unbind()
    top_k, seed, choice, position = integers.unbind()
    return SampleRows(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        choice=choice,
        position=position,
    )
