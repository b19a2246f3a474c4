"""Answers as OpenAI's clients expect them."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, frozen=True):
    """How much of the prompt was not computed anew."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """What became of the tokens that were tried because the request predicted them."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(Struct, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculationBody(Struct, frozen=True, kw_only=True):
    """How one sequence's drafts fared, as vLLM says it (its docs, "Per-Request Acceptance Metrics").

    `acceptance_histogram[j]` counts the verification steps that accepted exactly j draft tokens, for j up to
    `num_spec_tokens`, the longest draft that the plan allows. A mean acceptance length counts the token that
    a step gives anyway.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class CacheBody(Struct, frozen=True, kw_only=True):
    """How a request's tokens lay in the cache when it ended, over all its sequences.

    `tokens` counts them by format, `num_demoted_tokens` those that lost bits on the way, `protected_share` is
    the share that has all of them. A request that is not `reproducible` lost some when the cache was full, so
    the same one may be answered otherwise at another time.
    """

    format: str
    tokens: dict[str, int]
    num_demoted_tokens: int
    protected_share: float
    reproducible: bool


class MetricsBody(Struct, frozen=True, kw_only=True):
    """What a request can learn of itself.

    `speculative_decoding` is null for a plan without drafts and for several sequences, `cache` for one that
    keeps all bits.
    """

    speculative_decoding: SpeculationBody | None = None
    cache: CacheBody | None = None


class Head(Struct, frozen=True, kw_only=True):
    """What every chunk of an answer and the whole of it carry.

    `usage` is null in all chunks but the last when the client asked for it, else absent. `metrics` is absent
    but in the last one, and there too unless the client asked for it.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str
    usage: UsageBody | UnsetType | None = UNSET
    metrics: MetricsBody | UnsetType = UNSET


class TopLogprobBody(Struct, frozen=True):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(Struct, frozen=True):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobBody]


class ChatLogprobs(Struct, frozen=True):
    """The tokens of a chat's answer, or of a piece of one."""

    content: list[TokenLogprobBody]
    refusal: None = None


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """A piece of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Head, frozen=True, kw_only=True):
    """`chat.completion.chunk`."""

    choices: list[ChatChunkChoice]


class ChatMessage(Struct, frozen=True, kw_only=True):
    """The answer to a conversation."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One choice, whole."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(Head, frozen=True, kw_only=True):
    """`chat.completion`."""

    choices: list[ChatChoice]


class TextLogprobs(Struct, frozen=True):
    """The older form: four lists with an entry per token. Only a prompt's first token has nulls."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True, kw_only=True):
    """One choice, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class TextCompletion(Head, frozen=True, kw_only=True):
    """`text_completion`, a chunk of it or the whole."""

    choices: list[TextChoice]


class ModelBody(Struct, frozen=True, kw_only=True):
    """A model. `max_model_len` is vLLM's name for the most tokens of prompt and answer together."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "surefoot"


class ModelList(Struct, frozen=True, kw_only=True):
    """All models that the caller may use."""

    data: list[ModelBody]
    object: str = "list"


class Health(Struct, frozen=True):
    """`reason` says why the server is not ready."""

    status: str
    reason: str | UnsetType = UNSET


class Version(Struct, frozen=True):
    """What is installed."""

    version: str
