"""From a backend's events to OpenAI's answers.

There is one way: events become pieces of choices (`ChatAnswer`, `TextAnswer`). A stream sends each in a chunk
as it comes; a whole answer is folded from the very same pieces, so the two cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from surefoot.backends.types import CacheUsage, Chunk, PromptEcho, SpeculationUsage, TokenLogprob, Usage

from . import responses as body
from .text_offsets import token_offsets

ChunkBody = body.ChatChunk | body.TextCompletion
WholeBody = body.ChatCompletion | body.TextCompletion
P = TypeVar("P", bound=body.ChatChunkChoice | body.TextChoice)

# What OpenAI sends for a token whose probability is 0; JSON has no infinity.
LEAST_LOGPROB = -9999.0


class Label(Struct, frozen=True, kw_only=True):
    """What is known of an answer before it starts."""

    id: str
    created: int
    model: str
    num_choices: int
    includes_usage: bool
    service_tier: str = "default"
    includes_metrics: bool = False
    max_draft: int = 0
    """The longest draft of the plan."""
    cache_format: str = "k16v16"
    """The least precise format of the plan."""


class Totals(Struct, frozen=True):
    """What a whole answer took, over all its prompts and choices."""

    usage: Usage
    drafts: SpeculationUsage = SpeculationUsage()
    cache: CacheUsage | None = None


class Answer(Protocol[P]):
    """Makes pieces from events. `prompt` is the event's place in the request's list of prompts."""

    def opening(self, fingerprint: str) -> Iterator[P]:
        """The pieces before any token. Call it first."""

    def pieces(self, prompt: int, event: PromptEcho | Chunk) -> Iterator[P]:
        """What an event adds."""

    def empty(self) -> ChunkBody:
        """A chunk without a piece: what all chunks have in common."""

    def closing(self, totals: Totals) -> Iterator[ChunkBody]:
        """The chunk of token counts and metrics, if either is wanted."""

    def fold(self, pieces: Sequence[P], totals: Totals) -> WholeBody:
        """The whole answer; `pieces` are all that were made."""


def usage_body(totals: Totals) -> body.UsageBody:
    """Token counts in OpenAI's words."""
    usage, drafts = totals.usage, totals.drafts
    return body.UsageBody(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_output_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        prompt_tokens_details=body.PromptTokensDetails(usage.num_cached_tokens),
        completion_tokens_details=body.CompletionTokensDetails(
            drafts.num_accepted_predicted_tokens,
            drafts.num_predicted_tokens - drafts.num_accepted_predicted_tokens,
        ),
    )


def _usage(totals: Totals | None, label: Label) -> body.UsageBody | UnsetType | None:
    """Null before the end; absent where the client does not want it."""
    if not label.includes_usage:
        return UNSET
    return None if totals is None else usage_body(totals)


def _metrics(totals: Totals | None, label: Label, num_sequences: int) -> body.MetricsBody | UnsetType:
    """How drafts and the cache fared, at the end, where the client asked for it."""
    if totals is None or not label.includes_metrics:
        return UNSET
    has_drafts = label.max_draft > 0 and num_sequences == 1
    return body.MetricsBody(
        speculative_decoding=_drafts_body(totals.drafts, label.max_draft) if has_drafts else None,
        cache=None if totals.cache is None else _cache_body(totals.cache, label.cache_format),
    )


def _drafts_body(drafts: SpeculationUsage, max_draft: int) -> body.SpeculationBody:
    return body.SpeculationBody(
        mean_acceptance_length=1.0 + drafts.num_accepted_tokens / max(drafts.num_drafts, 1),
        draft_acceptance_rate=drafts.num_accepted_tokens / max(drafts.num_draft_tokens, 1),
        acceptance_histogram=_histogram(drafts, max_draft),
        num_spec_steps=drafts.num_drafts,
        num_accepted_draft_tokens=drafts.num_accepted_tokens,
        num_draft_tokens=drafts.num_draft_tokens,
        num_spec_tokens=max_draft,
    )


def _cache_body(cache: CacheUsage, cache_format: str) -> body.CacheBody:
    return body.CacheBody(
        format=cache_format,
        tokens=cache.tokens,
        num_demoted_tokens=cache.num_demoted_tokens,
        protected_share=round(cache.protected_share, 6),
        reproducible=cache.reproducible,
    )


def _histogram(drafts: SpeculationUsage, max_draft: int) -> list[int]:
    """Drafts of which exactly 0, 1, ... `max_draft` tokens were accepted."""
    at_least = [drafts.num_drafts, *drafts.accepted_at][: max_draft + 1]
    at_least += [0] * (max_draft + 2 - len(at_least))
    return [more - less for more, less in pairwise(at_least)]


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)


class ChatAnswer:
    """Pieces of a chat: the role first, then text, then why it ended."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._fingerprint: str | None = None

    def opening(self, fingerprint: str) -> Iterator[body.ChatChunkChoice]:
        """The assistant's role, for each choice."""
        self._fingerprint = fingerprint
        for index in range(self._label.num_choices):
            yield body.ChatChunkChoice(index=index, delta=body.Delta(role="assistant", content=""))

    def pieces(self, prompt: int, event: PromptEcho | Chunk) -> Iterator[body.ChatChunkChoice]:
        """Text (with its tokens' log-probabilities), then the finish reason alone."""
        assert isinstance(event, Chunk), "a chat has no echo"
        if event.text or event.logprobs:
            logprobs = (
                None
                if event.logprobs is None
                else body.ChatLogprobs([_chat_token(t) for t in event.logprobs])
            )
            yield body.ChatChunkChoice(
                index=event.index, delta=body.Delta(content=event.text), logprobs=logprobs
            )
        if event.finish_reason is not None:
            yield body.ChatChunkChoice(
                index=event.index, delta=body.Delta(), finish_reason=event.finish_reason
            )

    def empty(self) -> body.ChatChunk:
        """A chunk without choices."""
        return self._chunk()

    def closing(self, totals: Totals) -> Iterator[body.ChatChunk]:
        """A chunk without choices."""
        if self._label.includes_usage or self._label.includes_metrics:
            yield self._chunk(totals)

    def fold(self, pieces: Sequence[body.ChatChunkChoice], totals: Totals) -> body.ChatCompletion:
        """`chat.completion`."""
        of = _by_index(pieces)
        choices = [_fold_chat_choice(i, of[i]) for i in range(self._label.num_choices)]
        return body.ChatCompletion(
            id=self._label.id,
            object="chat.completion",
            created=self._label.created,
            model=self._label.model,
            system_fingerprint=self._fingerprint,
            service_tier=self._label.service_tier,
            usage=usage_body(totals),
            metrics=_metrics(totals, self._label, self._label.num_choices),
            choices=choices,
        )

    def _chunk(self, totals: Totals | None = None) -> body.ChatChunk:
        return body.ChatChunk(
            id=self._label.id,
            object="chat.completion.chunk",
            created=self._label.created,
            model=self._label.model,
            system_fingerprint=self._fingerprint,
            service_tier=self._label.service_tier,
            usage=_usage(totals, self._label),
            metrics=_metrics(totals, self._label, self._label.num_choices),
            choices=[],
        )


class TextAnswer:
    """Pieces of a raw completion. A prompt's choices follow those of the prompt before it."""

    def __init__(self, label: Label, num_prompts: int) -> None:
        self._label = label
        self._fingerprint: str | None = None
        self._num_chars = [0] * (num_prompts * label.num_choices)

    def opening(self, fingerprint: str) -> Iterator[body.TextChoice]:
        """Nothing: text starts with text."""
        self._fingerprint = fingerprint
        return iter(())

    def pieces(self, prompt: int, event: PromptEcho | Chunk) -> Iterator[body.TextChoice]:
        """Text and why it ended, together."""
        index = prompt * self._label.num_choices + event.index
        finish_reason = event.finish_reason if isinstance(event, Chunk) else None
        if event.text or event.logprobs or finish_reason is not None:
            logprobs = (
                None
                if event.logprobs is None
                else text_logprobs(event.logprobs, self._num_chars[index], event.text)
            )
            self._num_chars[index] += len(event.text)
            yield body.TextChoice(
                index=index, text=event.text, logprobs=logprobs, finish_reason=finish_reason
            )

    def empty(self) -> body.TextCompletion:
        """A chunk without choices."""
        return self._completion([])

    def closing(self, totals: Totals) -> Iterator[body.TextCompletion]:
        """A chunk without choices."""
        if self._label.includes_usage or self._label.includes_metrics:
            yield self._completion([], totals)

    def fold(self, pieces: Sequence[body.TextChoice], totals: Totals) -> body.TextCompletion:
        """`text_completion`, whole."""
        of = _by_index(pieces)
        choices = [_fold_text_choice(i, of[i]) for i in range(len(self._num_chars))]
        return self._completion(choices, totals)

    def _completion(
        self, choices: list[body.TextChoice], totals: Totals | None = None
    ) -> body.TextCompletion:
        return body.TextCompletion(
            id=self._label.id,
            object="text_completion",
            created=self._label.created,
            model=self._label.model,
            system_fingerprint=self._fingerprint,
            service_tier=self._label.service_tier,
            usage=_usage(totals, self._label),
            metrics=_metrics(totals, self._label, len(self._num_chars)),
            choices=choices,
        )


def text_logprobs(tokens: Sequence[TokenLogprob], num_before: int, text: str) -> body.TextLogprobs:
    """The older form for tokens whose text is `text` and comes after `num_before` characters."""
    offsets = token_offsets([token.bytes for token in tokens], text, begins=num_before == 0)
    return body.TextLogprobs(
        tokens=[_old_name(token.token, token.bytes) for token in tokens],
        token_logprobs=[None if token.logprob is None else finite(token.logprob) for token in tokens],
        top_logprobs=[_old_top(token) for token in tokens],
        text_offset=[num_before + offset for offset in offsets],
    )


def _old_top(token: TokenLogprob) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {_old_name(each.token, each.bytes): finite(each.logprob) for each in token.top}
    return {**top, _old_name(token.token, token.bytes): finite(token.logprob)}


def _old_name(token: str, raw: bytes) -> str:
    """Part of a character has no name as text; two such tokens must not share an entry in a dict."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return token


def _chat_token(token: TokenLogprob) -> body.TokenLogprobBody:
    assert token.logprob is not None, "only a prompt's first token has no log-probability"
    top = [body.TopLogprobBody(each.token, finite(each.logprob), list(each.bytes)) for each in token.top]
    return body.TokenLogprobBody(token.token, finite(token.logprob), list(token.bytes), top)


def _by_index(pieces: Iterable[P]) -> Mapping[int, list[P]]:
    grouped: dict[int, list[P]] = defaultdict(list)
    for piece in pieces:
        grouped[piece.index].append(piece)
    return grouped


def _fold_chat_choice(index: int, pieces: list[body.ChatChunkChoice]) -> body.ChatChoice:
    text = "".join(piece.delta.content for piece in pieces if piece.delta.content is not UNSET)
    tokens = [piece.logprobs.content for piece in pieces if piece.logprobs is not None]
    return body.ChatChoice(
        index=index,
        message=body.ChatMessage(role="assistant", content=text),
        logprobs=body.ChatLogprobs([token for each in tokens for token in each]) if tokens else None,
        finish_reason=_finish_reason(pieces),
    )


def _fold_text_choice(index: int, pieces: list[body.TextChoice]) -> body.TextChoice:
    parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = body.TextLogprobs(
        [each for part in parts for each in part.tokens],
        [each for part in parts for each in part.token_logprobs],
        [each for part in parts for each in part.top_logprobs],
        [each for part in parts for each in part.text_offset],
    )
    return body.TextChoice(
        index=index,
        text="".join(piece.text for piece in pieces),
        logprobs=logprobs if parts else None,
        finish_reason=_finish_reason(pieces),
    )


def _finish_reason(pieces: Sequence[body.ChatChunkChoice | body.TextChoice]) -> str | None:
    return next((piece.finish_reason for piece in reversed(pieces) if piece.finish_reason is not None), None)
