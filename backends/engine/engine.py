"""The engine: one `step` at a time, from waiting requests to events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import structlog
import torch
from msgspec import Struct
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
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from surefoot.kernels.base import Ops
from surefoot.kernels.layout import BLOCK_TOKENS, FULL

from .block_pool import BlockPool
from .choice_stream import ChoiceStream
from .prefix_cache import PrefixCache
from .prepare import LoadedModel
from .runner import ModelRunner, StepInput, build_step
from .sampler import NonFiniteLogits, Sampled, Sampler
from .scheduler import ScheduledChunk, Scheduler
from .sequence import Request, Sequence, SequenceStatus
from .settings import EngineSettings

log = structlog.get_logger()


class Output(Struct, frozen=True):
    """Something to tell a request's client. An error or a `Finished` is the last thing said."""

    key: int
    event: Event | BackendError


class EngineCounters(Struct):
    """What only grows, across engines that replace one another."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_evictions: int = 0


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
    ) -> None:
        self._tokenizer = loaded.tokenizer
        self._clock = clock
        self._runner = ModelRunner(loaded.model, ops, settings, cache_dtype)
        self._sampler = Sampler(ops, loaded.tokenizer)
        self.pool = BlockPool(self._runner.num_blocks)
        self.counters = counters
        self._prefix_cache = PrefixCache(
            self.pool,
            (loaded.fingerprint, str(cache_dtype), repr(FULL)),
            between_requests=settings.prefix_cache,
        )
        self.scheduler = Scheduler(settings, self.pool, self._prefix_cache)
        self.max_model_len = min(
            settings.max_model_len or loaded.model.config.max_model_len,
            loaded.model.config.max_model_len,
            self.pool.num_blocks * BLOCK_TOKENS,
        )
        """Tokens of prompt and output: what the model, the settings and the whole cache allow."""
        self._requests: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def keys(self) -> list[int]:
        """Of the requests that are waiting or running."""
        return list(self._requests)

    def warm_up(self) -> None:
        """Run two steps of a throw-away request, so that the first real one meets no first-time cost."""
        message = GenerateRequest(
            request_id="warm-up", model="", prompt=TokenPrompt((0,)), params=SamplingParams(ignore_eos=True)
        )
        request = Request(message, (0,), key=-1, max_tokens=2, seed=0, arrived_s=self._clock())
        counted, self.counters = self.counters, EngineCounters()
        self.add(request)
        while self.has_work:
            self.step()
        self.counters = counted

    def add(self, request: Request) -> None:
        """Queue a request that `admission` has accepted."""
        params = request.message.params
        self._requests[request.key] = request
        self._prefix_cache.enter(request)
        continues = not isinstance(request.message.prompt, ChatPrompt)
        for choice in range(params.n):
            detokenizer = self._tokenizer.detokenizer(continues=continues)
            stream = ChoiceStream(choice, detokenizer, params.stop, has_logprobs=params.logprobs is not None)
            sequence = Sequence(request, choice, stream)
            request.sequences.append(sequence)
            if choice > 0 and request.shares_prompt:
                sequence.status = SequenceStatus.HELD
            else:
                self.scheduler.add(sequence)

    def abort(self, key: int) -> None:
        """Forget a request and free its blocks; one that has ended already is no error."""
        request = self._requests.pop(key, None)
        for sequence in request.sequences if request else ():
            if sequence.status is SequenceStatus.HELD:
                sequence.status = SequenceStatus.FINISHED
            elif sequence.status is not SequenceStatus.FINISHED:
                self.scheduler.finish(sequence)

    def step(self) -> list[Output]:
        """Schedule, run the model, sample, commit, and say what came of it."""
        outputs = list(self._expire())
        chunks = self.scheduler.schedule()
        self.counters.num_preemptions += self.scheduler.take_preemptions()
        self.counters.num_evictions += self.pool.take_evictions()
        if not chunks:
            return outputs
        self._mark_started(chunks)
        step = build_step(chunks)
        logits = self._runner.run(step)
        self._note_prompt_logprobs(chunks, step, logits)
        sampling = [
            (chunk.sequence, span[-1])
            for chunk, span in zip(chunks, step.logit_spans, strict=True)
            if chunk.samples
        ]
        sampled = self._sampler.sample(logits[[row for _, row in sampling]], [seq for seq, _ in sampling])
        self._runner.commit(step)
        self._advance(chunks)
        for (sequence, _), result in zip(sampling, sampled, strict=True):
            outputs += self._postprocess(sequence, result)
        return outputs

    def _expire(self) -> Iterator[Output]:
        now = self._clock()
        for request in [request for request in self._requests.values() if now >= request.deadline_s]:
            self.abort(request.key)
            message = f"the request's deadline of {request.message.deadline_s:.3g} s passed"
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
                self._prompt_ran(seq.request)

    def _prompt_ran(self, request: Request) -> None:
        """The prompt is in the cache: the choices that were held can begin with it."""
        request.has_run_prompt = True
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.HELD:
                sequence.status = SequenceStatus.WAITING
                self.scheduler.add(sequence)

    def _postprocess(self, seq: Sequence, result: Sampled | Exception) -> list[Output]:
        """Turn a sampled token into events. Whatever goes wrong here ends this request alone."""
        key = seq.request.key
        if seq.status is SequenceStatus.FINISHED:  # another choice of the request failed in this step
            return []
        try:
            if isinstance(result, Exception):
                raise result
            return [Output(key, event) for event in self._events(seq, result)]
        except Exception as error:
            if isinstance(error, NonFiniteLogits):
                self._prefix_cache.distrust(seq.request)
            self.abort(key)
            log.error("request.faulted", request_id=seq.request.message.request_id, exc_info=error)
            return [Output(key, RequestFault(f"{type(error).__name__} while the answer was generated"))]

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
                self.scheduler.finish(seq)
        if request.is_finished:
            del self._requests[request.key]
            yield Finished(usage=request.usage, timings=request.timings(self._clock()))

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
