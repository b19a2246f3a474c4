"""A smaller model that drafts: it runs ahead of the served one, for all sequences of a step at once."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor

from surefoot.kernels.base import Ops
from surefoot.kernels.layout import BLOCK_TOKENS

from ..choice_stream import ChoiceStream
from ..cost_model import CostModel, StepCost, StepSample, StepShape
from ..device import place
from ..device_runner import bytes_of_block, make_runner
from ..prepare import LoadedModel
from ..runner import past_part
from ..sampler import SampledRow, Sampler
from ..sequence import Sequence
from ..settings import EngineSettings
from ..step_input import StepInput
from ..tokenizer import Tokenizer
from ..warm_up import Shape, measured_cost, warm_up_requests
from .base import Draft
from .draft_cache import Cached, DraftCache
from .drafting import CLOSE, Prospect, ahead

GRADES = (0.3, 0.5, 0.7, 0.9)
"""Where the draft model's own probability of a token begins to be a better grade of evidence."""

NEVER = -1e30
"""The logit of a token that the draft model does not have: finite, as faults are looked for by infinities."""

Observe = Callable[[Sequence, Draft, int], None]
"""Told how many tokens of a draft were right."""


class _Turn(Struct):
    """A sequence's part in a round: `pending` tokens run next, and draft tokens follow if it is caught up."""

    sequence: Sequence
    cached: Cached
    max_tokens: int
    pending: list[int]
    is_caught_up: bool
    drafted: list[int] = field(default_factory=list)
    strengths: list[int] = field(default_factory=list)


class DraftModel:
    """The proposer `draft`: a model with a cache of its own, whose tokens are sampled as the served model's
    are: by the same rule with the same noise, so that where the two agree, they agree on samples too.

    It may lack any of a sequence's tokens, after a pause, a prefix hit or at a start; they run before
    anything is drafted, a bounded number of them a step, of the sequences that lack the fewest first.
    """

    name = "draft"

    def __init__(
        self,
        loaded: LoadedModel,
        target: LoadedModel,
        ops: Ops,
        settings: EngineSettings,
        *,
        cache_dtype: torch.dtype,
        num_blocks: int,
        observe: Observe,
    ) -> None:
        """It drafts for `target`. Its cache has `num_blocks` blocks unless the settings give it bytes."""
        config, self._settings, self._observe = loaded.config, settings, observe
        self._max_catch_up = settings.speculation.max_catch_up
        cache_bytes = num_blocks * bytes_of_block(loaded.model, cache_dtype)
        own = replace(
            settings,
            cache_bytes=settings.speculation.draft_cache_bytes or cache_bytes,
            max_batched_tokens=CLOSE * settings.max_sequences + self._max_catch_up,
        )
        self._runner = make_runner(loaded.model, ops, own, cache_dtype)
        self.cache = DraftCache(self._runner.num_blocks)
        self._sampler = Sampler(ops, target.tokenizer)
        self._compiles_late = ops.is_asynchronous
        self._tokenizer: Tokenizer = target.tokenizer
        self._own_vocab_size, self._vocab_size = config.vocab_size, target.config.vocab_size
        self._max_len = min(
            settings.max_model_len or config.max_model_len, config.max_model_len, self.cache.num_tokens
        )
        self.costs = CostModel(StepCost.guess(ops.row_tile))
        """What its passes cost, sampling included."""
        self.passes: list[StepSample] = []
        """Of the last round."""

    def warm_up(self) -> None:
        """Run rounds of several shapes: first-time costs are met, and what passes cost is known."""
        guess = StepCost.guess(self.costs.cost.tile_rows)
        self.costs.refit(
            measured_cost(self._run_shape, time.perf_counter, guess, compiles_late=self._compiles_late)
        )

    def prospect(self, sequence: Sequence, max_tokens: int) -> Prospect | None:
        """What drafting for a sequence would take; None if its tokens are too many or not the model's own.

        Learns first from what became of the sequence's last draft.
        """
        self._settle(sequence)
        num_missing = self.cache.num_missing(sequence)
        max_tokens = min(max_tokens, self._max_len - len(sequence.token_ids) + 1)
        if max_tokens < 1:
            return None
        if self._own_vocab_size < self._vocab_size and any(
            token_id >= self._own_vocab_size for token_id in sequence.token_ids[-num_missing:]
        ):
            return None
        return Prospect(sequence, max_tokens, num_missing)

    def propose_all(
        self, wanted: Seq[tuple[Sequence, int]], max_catch_up: int | None = None
    ) -> list[Draft | None]:
        """A draft for each sequence, of at most so many tokens; None for one that is not caught up yet.

        `max_catch_up` may lower how many tokens are caught up with; each sequence's last two are free.
        """
        self.passes = []
        for sequence, _ in wanted:
            self._settle(sequence)
        limit = self._max_catch_up if max_catch_up is None else min(max_catch_up, self._max_catch_up)
        turns = self._turns(wanted, limit)
        running = list(turns.values())
        while running:
            running = self._run(running)
        return [self._draft(turns.get(sequence)) for sequence, _ in wanted]

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over: learn from its last draft, and free its blocks."""
        self._settle(sequence)
        self.cache.drop(sequence)

    def _settle(self, sequence: Sequence) -> None:
        if (settled := self.cache.settle(sequence)) is not None:
            tried, num_right = settled
            self._observe(sequence, ahead(tried), num_right)

    def _turns(self, wanted: Seq[tuple[Sequence, int]], max_catch_up: int) -> dict[Sequence, _Turn]:
        turns: dict[Sequence, _Turn] = {}
        for sequence, max_tokens in sorted(wanted, key=lambda pair: self.cache.num_missing(pair[0])):
            num_missing = self.cache.num_missing(sequence)  # it may have lost its blocks by now
            is_close = num_missing <= CLOSE
            num_rows = num_missing if is_close else min(num_missing, max_catch_up)
            is_caught_up = num_rows == num_missing
            # The last token of a draft does not run: nothing is drafted after it.
            num_more = num_rows + (max_tokens - 1 if is_caught_up else 0)
            if num_rows == 0 or (cached := self.cache.hold(sequence, num_more, turns)) is None:
                continue
            max_catch_up -= 0 if is_close else num_rows
            start = cached.num_committed
            pending = sequence.token_ids[start : start + num_rows]
            turns[sequence] = _Turn(sequence, cached, max_tokens, pending, is_caught_up)
        return turns

    def _run(self, turns: list[_Turn]) -> list[_Turn]:
        """One pass: run what is pending, draft a token for those that are caught up; who wants another."""
        begun_s, shape = time.perf_counter(), StepShape()
        for turn in turns:
            shape.add(len(turn.pending), turn.cached.num_committed)
        step = _step_of(turns)
        logits = self._runner.run(step)
        self._runner.commit(step)
        for turn in turns:
            turn.cached.num_committed += len(turn.pending)
        sampling = [turn for turn in turns if turn.is_caught_up]
        if sampling:
            places = [span[-1] for span in step.logit_spans if span]
            own = logits[place(torch.tensor(places), logits.device)]
            running = self._sample(sampling, self._fitted(own))
        else:
            running = []
        seconds = time.perf_counter() - begun_s
        self.costs.observe(shape.num_rows, shape.num_sequences, shape.num_context_tokens, seconds)
        self.passes.append(StepSample(shape, seconds))
        return running

    def _sample(self, turns: list[_Turn], logits: Tensor) -> list[_Turn]:
        """Add a token to each turn by its row of `logits` `[R, vocab_size]`; who wants another."""
        raw = logits.clone()
        log_totals = raw.logsumexp(-1)
        rows = [SampledRow(turn.sequence, tuple(turn.drafted)) for turn in turns]
        results = self._sampler.sample(logits, rows)
        token_ids = [0 if isinstance(sampled, Exception) else sampled.token_id for sampled in results]
        own = raw.gather(1, place(torch.tensor(token_ids), raw.device)[:, None])[:, 0]
        chances = (own - log_totals).exp().tolist()
        running = []
        for turn, sampled, chance in zip(turns, results, chances, strict=True):
            if isinstance(sampled, Exception):  # what it has is a draft all the same
                continue
            token_id = sampled.token_id
            turn.drafted.append(token_id)
            turn.strengths.append(bisect(GRADES, chance))
            turn.pending = [token_id]
            ends = token_id in self._tokenizer.eos_token_ids and not turn.sequence.params.ignore_eos
            if len(turn.drafted) < turn.max_tokens and not ends:
                running.append(turn)
        return running

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits over the served model's vocabulary: the two may be padded to different sizes."""
        missing = self._vocab_size - self._own_vocab_size
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=NEVER)
        return logits[:, : self._vocab_size].contiguous()

    def _draft(self, turn: _Turn | None) -> Draft | None:
        """What came of a turn, which is open until the sequence has got its next tokens."""
        if turn is None or not turn.drafted:
            return None
        turn.cached.num_before = len(turn.sequence.token_ids)
        turn.cached.drafted = tuple(turn.drafted)
        return Draft(self.name, turn.cached.drafted, tuple(turn.strengths))

    def _run_shape(self, shape: Shape) -> list[StepSample]:
        requests = warm_up_requests(
            shape,
            max_sequences=self._settings.max_sequences,
            max_model_len=self._max_len,
            num_cache_tokens=self.cache.num_tokens,
            now_s=0.0,
        )
        stream = ChoiceStream(0, self._tokenizer.detokenizer(), (), has_logprobs=False)
        wanted = [(Sequence(request, 0, stream), request.max_tokens) for request in requests]
        num_prompt_tokens = sum(sequence.num_prompt_tokens for sequence, _ in wanted)
        passes: list[StepSample] = []
        for _ in range(num_prompt_tokens // self._max_catch_up + 1):
            self.propose_all(wanted)
            passes += self.passes
        for sequence, _ in wanted:
            self.cache.drop(sequence)
        return passes


def _step_of(turns: list[_Turn]) -> StepInput:
    """A pass as tensors. Only a caught-up sequence's last row needs logits; where few rows are others, all
    get them, for a step in which every row does can be replayed.
    """
    num_rows = sum(len(turn.pending) for turn in turns)
    wants_all = num_rows <= CLOSE * len(turns) and all(turn.is_caught_up for turn in turns)
    positions: list[int] = []
    blocks: list[int] = []
    cu_rows = [0]
    logit_rows: list[int] = []
    logit_spans: list[range] = []
    for turn in turns:
        start, table = turn.cached.num_committed, turn.cached.block_table
        span = range(start, start + len(turn.pending))
        positions += span
        blocks += (table[position // BLOCK_TOKENS] for position in span)
        cu_rows.append(cu_rows[-1] + len(span))
        num_logits = len(span) if wants_all else int(turn.is_caught_up)
        logit_spans.append(range(len(logit_rows), len(logit_rows) + num_logits))
        logit_rows += range(cu_rows[-1] - num_logits, cu_rows[-1])
    position_ids = torch.tensor(positions)
    return StepInput(
        token_ids=torch.tensor([token_id for turn in turns for token_id in turn.pending]),
        positions=position_ids,
        cu_rows=torch.tensor(cu_rows, dtype=torch.int32),
        past=(
            past_part(
                [turn.cached.block_table for turn in turns], [turn.cached.num_committed for turn in turns]
            ),
        ),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        logit_spans=logit_spans,
        blocks=torch.tensor(blocks, dtype=torch.int32),
        slots=(position_ids % BLOCK_TOKENS).int(),
    )
