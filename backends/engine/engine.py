"""The engine: one `step` at a time, from waiting requests to events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import structlog
import torch
from msgspec import Struct, field
from torch import Tensor

from surefoot.backends.errors import BackendError, DeadlineExceeded, RequestFault
from surefoot.backends.types import (
    ChatPrompt,
    Chunk,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptEcho,
    TextPrompt,
)
from surefoot.kernels.base import Ops
from surefoot.kernels.layout import BLOCK_TOKENS, FULL

from .admission import admit
from .block_pool import BlockPool
from .cache_rule import CacheSpace, format_name
from .choice_stream import ChoiceStream, joined
from .cost_model import CostModel, StepCost, StepSample, StepShape
from .demotion import Move
from .device import place
from .device_runner import bytes_of_block, make_runner
from .prefix_cache import PrefixCache
from .prepare import LoadedModel
from .promise_scheduler import PromiseScheduler
from .runner import build_step, in_step_order, kept_rows
from .sampler import NonFiniteLogits, Sampled, SampledRow, Sampler
from .scheduler import MakeScheduler, ScheduledChunk, Scheduler, shape_of
from .sequence import Request, Sequence, SequenceStatus
from .settings import EngineSettings
from .speculation.draft_model import DraftModel
from .speculation.speculator import Speculator
from .step_input import StepInput
from .warm_up import Shape, measured_cost, warm_up_requests

log = structlog.get_logger()


class Output(Struct, frozen=True):
    """Something to tell a request's client. An error or a `Finished` is the last thing said."""

    key: int
    event: Event | BackendError


class EngineCounters(Struct):
    """What only grows, across engines that replace one another."""

    num_steps: int = 0
    num_rows: int = 0
    """Tokens that steps ran, recomputed ones included."""
    num_sequence_steps: int = 0
    """Sequences of each step, summed over steps."""
    predicted_s: float = 0.0
    measured_s: float = 0.0
    """What steps took in all, by the cost model and by the clock."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_evictions: int = 0
    num_demoted_tokens: Counter[str] = field(default_factory=Counter)
    """By the format that they got; again each time that a sequence is computed again."""


class Engine:
    """Single-threaded: whoever calls `step` also calls `add` and `abort`.

    A fault in one request ends that request; an exception that leaves `step` means that the engine's state
    is in doubt and that it must be replaced.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ops: Ops,
        settings: EngineSettings,
        *,
        cache_dtype: torch.dtype,
        counters: EngineCounters,
        clock: Callable[[], float],
        make_scheduler: MakeScheduler = PromiseScheduler,
        speculator: Speculator | None = None,
        draft: LoadedModel | None = None,
    ) -> None:
        """What a `speculator` has learnt is worth keeping when an engine is replaced. `draft` is a model that
        drafts for `loaded`, of the same vocabulary.
        """
        self._tokenizer = loaded.tokenizer
        self._vocab_size = loaded.model.config.vocab_size
        self._clock = clock
        self._compiles_late = ops.is_asynchronous
        """A GPU's kernels are compiled when they are first launched, which is not what steps cost."""
        self._runner = make_runner(
            loaded.model,
            ops,
            settings,
            cache_dtype,
            block_bytes_beside=0 if draft is None else bytes_of_block(draft.model, cache_dtype),
        )
        self._sampler = Sampler(ops, loaded.tokenizer)
        self.speculator = speculator or Speculator(settings.speculation)
        self.speculator.draft_model = (
            None
            if draft is None
            else DraftModel(
                draft,
                loaded,
                ops,
                settings,
                cache_dtype=cache_dtype,
                num_blocks=self._runner.num_blocks,
                observe=self.speculator.controller.acceptance.observe,
            )
        )
        self.pool = BlockPool(self._runner.num_blocks)
        self.counters = counters
        self._prefix_cache = PrefixCache(
            self.pool,
            (loaded.fingerprint, str(cache_dtype), repr(FULL)),
            between_requests=settings.prefix_cache,
        )
        self.costs = CostModel(StepCost.guess(ops.row_tile))
        """What steps cost on this machine; fitted by `warm_up`."""
        self._settings = settings
        self._make_scheduler = make_scheduler
        self.scheduler = self._new_scheduler()
        self.last_step: StepSample | None = None
        self.cache_space = CacheSpace(
            layout=self._runner.layout,
            num_layers=loaded.model.config.num_layers,
            num_blocks=self.pool.num_blocks,
            max_context=min(
                settings.max_model_len or loaded.model.config.max_model_len,
                loaded.model.config.max_model_len,
            ),
        )
        self._requests: dict[int, Request] = {}

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output in full precision: what model, settings and whole cache allow."""
        return self.cache_space.max_full

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def keys(self) -> list[int]:
        """Of the requests that are waiting or running."""
        return list(self._requests)

    def warm_up(self) -> None:
        """Run steps of several shapes: first-time costs are met, and what steps cost is known."""
        counted, self.counters = self.counters, EngineCounters()
        guess = StepCost.guess(self.costs.cost.tile_rows)
        self.costs.refit(
            measured_cost(self._run_shape, self._clock, guess, compiles_late=self._compiles_late)
        )
        self.counters = counted
        if self.speculator.draft_model is not None:
            self.speculator.draft_model.warm_up()
        # What it has learned about arrivals and lengths is about throw-away requests.
        self.scheduler = self._new_scheduler()
        self.last_step = None

    def submit(
        self,
        message: GenerateRequest,
        prompt_token_ids: tuple[int, ...],
        *,
        key: int,
        prediction_token_ids: tuple[int, ...] = (),
    ) -> Request:
        """Check a request and queue it; for whoever has no thread between the two. Raises `RequestError`."""
        request = admit(
            message,
            prompt_token_ids,
            key=key,
            space=self.cache_space,
            vocab_size=self._vocab_size,
            now_s=self._clock(),
            prediction_token_ids=prediction_token_ids,
        )
        self.add(request)
        return request

    def add(self, request: Request) -> None:
        """Queue a request that `admission` has accepted."""
        params = request.message.params
        self._requests[request.key] = request
        request.cache_rule = self.cache_space.rule(
            request.message.plan.cache, len(request.prompt_token_ids), is_seeded=params.seed is not None
        )
        self._prefix_cache.enter(request)
        continues = not isinstance(request.message.prompt, ChatPrompt)
        streams = (
            ChoiceStream(
                choice,
                self._tokenizer.detokenizer(continues=continues),
                params.stop,
                has_logprobs=params.logprobs is not None,
            )
            for choice in range(params.n)
        )
        for sequence in request.branch(streams):
            self.scheduler.add(sequence)

    def abort(self, key: int) -> None:
        """Forget a request and free its blocks; one that has ended already is no error."""
        request = self._requests.pop(key, None)
        for sequence in request.sequences if request else ():
            if sequence.status in (SequenceStatus.WAITING, SequenceStatus.RUNNING):
                self._end(sequence)
            sequence.status = SequenceStatus.FINISHED

    def _end(self, sequence: Sequence) -> None:
        sequence.tokens_at_end = {each: part.num_tokens for each, part in sequence.held.items()}
        self.scheduler.finish(sequence)
        self.speculator.finish(sequence)

    def step(self) -> list[Output]:
        """Schedule, run the model, sample, commit, and say what came of it."""
        begun_s = self._clock()
        outputs = list(self._expire())
        chunks = in_step_order(self.scheduler.schedule())
        self._move(self.scheduler.take_moves())
        self.counters.num_preemptions += self.scheduler.take_preemptions()
        self.counters.num_evictions += self.pool.take_evictions()
        if not chunks:
            return outputs
        self._mark_started(chunks)
        drafting_s = -self._clock()
        chunks = self._add_drafts(chunks)
        drafting_s += self._clock()
        shape = shape_of(chunks)
        step = build_step(chunks)
        logits = self._runner.run(step)
        self._note_prompt_logprobs(chunks, step, logits)
        verified = self._verify(chunks, step, logits)
        self._runner.commit(step, kept_rows(chunks, verified))
        self._advance(chunks)
        for chunk, results in zip(chunks, verified, strict=True):
            outputs += self._postprocess(chunk, results)
        self._note_cost(shape, self._clock() - begun_s - drafting_s)
        if any(chunk.draft for chunk in chunks):
            self.speculator.counters.realise(sum(map(len, verified)), self._clock() - begun_s)
        return outputs

    def _move(self, moves: list[Move]) -> None:
        """Carry out what the scheduler demoted, whether or not the sequence kept its blocks after all."""
        self._runner.move(moves)
        for move in moves:
            if move.source.format != move.target.format:
                name = format_name(move.target.format)
                self.counters.num_demoted_tokens[name] += len(move.target.blocks)

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Let those that decode verify drafts, as far as that is expected to pay and there are blocks."""
        drafts = self.speculator.draft(chunks, self._settings.max_batched_tokens, self.costs, self._clock())
        if not drafts:
            return chunks
        added = []
        for chunk in chunks:
            draft = drafts.get(chunk.sequence)
            length = 0 if draft is None else self.scheduler.reserve(chunk.sequence, len(draft))
            added.append(
                ScheduledChunk(chunk.sequence, chunk.num_tokens, draft.cut(length))
                if draft is not None and length
                else chunk
            )
        return added

    def _verify(
        self, chunks: list[ScheduledChunk], step: StepInput, logits: Tensor
    ) -> list[list[Sampled | Exception]]:
        """For each chunk the tokens that it gets: those of its draft that are what sampling gives at their
        place, and the one that sampling gives after them. None for a chunk that does not sample.
        """
        rows: list[SampledRow] = []
        places: list[int] = []
        for chunk, span in zip(chunks, step.logit_spans, strict=True):
            places += span[len(span) - chunk.num_sampled :]
            rows += [SampledRow(chunk.sequence, chunk.draft_token_ids[:j]) for j in range(chunk.num_sampled)]
        if len(places) < len(logits):
            kept = torch.tensor(places, dtype=torch.int64)
            logits = logits.index_select(0, place(kept, logits.device))
        sampled = iter(self._sampler.sample(logits, rows))
        return [self.speculator.verify(chunk, list(islice(sampled, chunk.num_sampled))) for chunk in chunks]

    def _new_scheduler(self) -> Scheduler:
        return self._make_scheduler(self._settings, self._prefix_cache, self.costs, self._clock)

    def _run_shape(self, shape: Shape) -> list[StepSample]:
        for request in warm_up_requests(
            shape,
            max_sequences=self._settings.max_sequences,
            max_model_len=self.max_model_len,
            num_cache_tokens=self.pool.num_blocks * BLOCK_TOKENS,
            now_s=self._clock(),
        ):
            self.add(request)
        samples: list[StepSample] = []
        while self.has_work:
            self.step()
            if self.last_step is not None:
                samples.append(self.last_step)
        return samples

    def _note_cost(self, shape: StepShape, seconds: float) -> None:
        numbers = shape.num_rows, shape.num_sequences, shape.num_context_tokens
        self.counters.num_rows += shape.num_rows
        self.counters.num_sequence_steps += shape.num_sequences
        self.counters.predicted_s += self.costs.predict(*numbers)
        self.counters.measured_s += seconds
        self.costs.observe(*numbers, seconds)
        self.last_step = StepSample(shape, seconds)

    def _expire(self) -> Iterator[Output]:
        now = self._clock()
        for request in [request for request in self._requests.values() if now >= request.deadline_s]:
            self.abort(request.key)
            message = (
                f"The request's deadline passed, {request.message.deadline_s:.3g} s after the engine got it."
            )
            yield Output(request.key, DeadlineExceeded(message))

    def _mark_started(self, chunks: list[ScheduledChunk]) -> None:
        now = self._clock()
        for chunk in chunks:
            request = chunk.sequence.request
            if request.first_step_s is None:
                request.first_step_s = now
                self.counters.num_prompt_tokens += len(request.prompt_token_ids)
                self.counters.num_queried_tokens += request.num_queried_tokens
                self.counters.num_cached_tokens += request.num_cached_tokens

    def _note_prompt_logprobs(self, chunks: list[ScheduledChunk], step: StepInput, logits: Tensor) -> None:
        """The row at a prompt's position p predicts the token at p + 1. What is known already stays."""
        for chunk, span in zip(chunks, step.logit_spans, strict=True):
            seq = chunk.sequence
            if not seq.wants_prompt_logprobs:
                continue
            noted = seq.request.prompt_logprobs
            if not noted:
                noted.append(self._sampler.unpredicted(seq.token_ids[0]))
            for row, position in zip(span, range(seq.num_committed + 1, seq.num_prompt_tokens), strict=False):
                if position == len(noted):
                    noted.append(self._sampler.logprobs_of(logits[row], seq.token_ids[position], seq.params))

    def _advance(self, chunks: list[ScheduledChunk]) -> None:
        self.counters.num_steps += 1
        for chunk in chunks:
            seq = chunk.sequence
            seq.num_committed += chunk.num_tokens
            self._prefix_cache.publish(seq)
            if seq.num_committed >= seq.num_prompt_tokens and not seq.request.has_run_prompt:
                for held in seq.request.prompt_ran():
                    self.scheduler.add(held)

    def _postprocess(self, chunk: ScheduledChunk, results: list[Sampled | Exception]) -> list[Output]:
        """Turn a chunk's tokens into events. Whatever goes wrong here ends this request alone."""
        seq, key = chunk.sequence, chunk.sequence.request.key
        events: list[Event] = []
        try:
            for number, result in enumerate(results):
                if seq.status is SequenceStatus.FINISHED:  # or another choice of the request failed
                    break
                if isinstance(result, Exception):
                    raise result
                # The token before this one was drafted: its K and V are committed.
                seq.num_committed += number > 0
                events += self._events(seq, result)
        except Exception as error:
            if isinstance(error, NonFiniteLogits):
                self._prefix_cache.distrust(seq.request)
            self.abort(key)
            log.error("request.faulted", request_id=seq.request.message.request_id, exc_info=error)
            return [Output(key, RequestFault(f"{type(error).__name__} while the answer was generated"))]
        if len(results) > 1:
            self._prefix_cache.publish(seq)
        return [Output(key, event) for event in joined(events)]

    def _events(self, seq: Sequence, sampled: Sampled) -> Iterator[Event]:
        request = seq.request
        request.last_token_s = self._clock()
        if request.first_token_s is None:
            request.first_token_s = request.last_token_s
        if request.message.echo and seq.num_output_tokens == 0:
            yield self._echo(seq)
        for chunk in self._chunks(seq, sampled):
            self.counters.num_output_tokens += len(chunk.token_ids)
            yield chunk
            if chunk.finish_reason is not None:
                self._end(seq)
        if request.is_finished:
            del self._requests[request.key]
            yield Finished(
                usage=request.usage,
                timings=request.timings(self._clock()),
                num_preemptions=sum(sequence.num_preemptions for sequence in request.sequences),
                speculation=request.speculation,
                cache=request.cache_usage,
            )

    def _chunks(self, seq: Sequence, sampled: Sampled) -> Iterator[Chunk]:
        """The token's chunk, if its text may be sent yet, and the last one if the choice ends here."""
        params, token_id = seq.params, sampled.token_id
        if seq.request.max_tokens == 0:
            yield seq.stream.finish(FinishReason.LENGTH)
            return
        is_eos = token_id in self._tokenizer.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            yield seq.stream.finish(FinishReason.STOP)
            return
        seq.append(token_id)
        check_stop = seq.num_output_tokens >= params.min_tokens
        chunk, stopped = seq.stream.push(token_id, sampled.logprob, check_stop=check_stop)
        if chunk is not None:
            yield chunk
        if not stopped and seq.num_output_tokens >= seq.request.max_tokens:
            yield seq.stream.finish(FinishReason.LENGTH)

    def _echo(self, seq: Sequence) -> PromptEcho:
        token_ids, prompt = seq.request.prompt_token_ids, seq.request.message.prompt
        return PromptEcho(
            index=seq.choice,
            text=prompt.text if isinstance(prompt, TextPrompt) else self._tokenizer.spell(token_ids),
            token_ids=token_ids,
            logprobs=tuple(seq.request.prompt_logprobs) if seq.request.scores_prompt else None,
        )
