"""The messages that pass between the gateway and a backend: plain, frozen, free of tensors.

A backend in another process or machine speaks exactly these, so nothing here may hold a live object.
Units: times in seconds (`_s`), counts `num_*`, limits `max_*`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct, field


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class CachePlan(Struct, frozen=True, kw_only=True):
    """How a request's KV cache is kept. `format` is `k<bits>v<bits>`.

    In a quantised format the first `sinks` tokens and the latest `recent` ones stay in full precision (and up
    to 63 more of the latest, until they are demoted together). `demote` says when the others are demoted:
    `eager` at once, `pressure` only when the cache runs out of blocks, which makes answers depend on what
    else the engine does. `max_context` is the longest that prompt and output may be together, None for as
    long as the model allows.
    """

    format: str = "k16v16"
    sinks: int = 4
    recent: int = 64
    demote: Literal["eager", "pressure"] = "eager"
    max_context: int | None = None


class SpeculationPlan(Struct, frozen=True, kw_only=True):
    """Bounds of a request's speculation. A `max_draft` of 0 means none.

    `proposers` are asked in this order. A draft is made only where it is expected to pay at least
    `min_gain` (0.02 is 2 % more tokens a second than without).
    """

    max_draft: int = 0
    proposers: tuple[str, ...] = ("ngram",)
    min_gain: float = 0.0


class ServingPlan(Struct, frozen=True, kw_only=True):
    """What a policy chose for one request, frozen when the request is admitted."""

    name: str
    cache: CachePlan = CachePlan()
    speculation: SpeculationPlan = SpeculationPlan()


BASELINE_PLAN = ServingPlan(name="baseline")
"""Full-precision cache, no speculation: always available, and where every fallback ends."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """What a client may ask of sampling. Ranges are checked where the request enters (gateway/limits.py).

    The token at a position is `argmax(processed_logits / temperature + Gumbel(seed, choice, position))`;
    `temperature` 0 is greedy and adds no noise. `logprobs` is None for none, else the number of
    alternatives to report beside the sampled token (0: the sampled token alone). Log-probabilities are of
    the raw distribution, before temperature, penalties and masks.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None


class ChatPrompt(Struct, frozen=True, tag=True):
    """A conversation: JSON objects with `role` and text `content`, which the model's own template renders."""

    messages: tuple[dict[str, Any], ...]


class TextPrompt(Struct, frozen=True, tag=True):
    """Raw text, tokenised as it stands."""

    text: str


class TokenPrompt(Struct, frozen=True, tag=True):
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One request to a backend.

    A higher `priority` runs first. `ttft_target_s` and `tpot_target_s` are what was promised for the first
    token and for each one after it, None for no promise; both, like `deadline_s` (None: no deadline), count
    from the moment the backend is asked. Requests of one `flow` share its `weight` with one another: between
    flows of one priority, service is proportional to weight. `kind` names traffic that resembles itself, so
    that what drafts were worth in it can be learnt. Prefix blocks are shared within one `salt` only. All of
    `flow`, `kind` and `salt` are opaque to a backend. `prediction` is text that much of the output may
    repeat. `echo` asks for a `PromptEcho` event (with log-probabilities of the prompt's tokens if
    `params.logprobs` is set).
    """

    request_id: str
    model: str
    prompt: Prompt
    params: SamplingParams = SamplingParams()
    plan: ServingPlan = BASELINE_PLAN
    priority: int = 0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    deadline_s: float | None = None
    flow: str = ""
    weight: float = 1.0
    kind: str = ""
    salt: str = ""
    prediction: str | None = None
    echo: bool = False


class TopLogprob(Struct, frozen=True):
    """One alternative at a position. `bytes` are the token's own, which may be part of a character."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True):
    """A sampled (or prompt) token with its raw log-probability and the `top` alternatives, best first.

    `logprob` is None only for a prompt's first token, which nothing predicts.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()


class Started(Struct, frozen=True, tag=True):
    """Always the first event: the request is valid and queued."""

    num_prompt_tokens: int
    system_fingerprint: str


class PromptEcho(Struct, frozen=True, tag=True):
    """The prompt, for `echo`: one event per choice, before that choice's first chunk."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


class Chunk(Struct, frozen=True, tag=True):
    """New output of choice `index`. `text`, `token_ids` and `logprobs` cover exactly the same tokens.

    The chunk that ends a choice carries `finish_reason`; it may have text as well. The end token and
    what follows a stop string are in none of the three.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of a request, over all its choices. Output tokens are those that chunks carried."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


class SpeculationUsage(Struct, frozen=True, kw_only=True):
    """Of one request: drafts that were verified, their tokens, and how many of those were accepted.

    `predicted` are those that came from the request's prediction. `accepted_at[j]` counts drafts whose token
    j was accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_predicted_tokens: int = 0
    num_accepted_predicted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()


class CacheUsage(Struct, frozen=True, kw_only=True):
    """Of one request in a quantised format: how its tokens lay in the cache when it ended.

    `tokens` counts them by format, over all choices; `num_demoted_tokens` those that were ever demoted. A
    request is `reproducible` if nothing that happened to its tokens depended on what else the engine did.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    num_demoted_tokens: int = 0
    reproducible: bool = True

    @property
    def protected_share(self) -> float:
        """The share of tokens in full precision; 1 if there are none."""
        total = sum(self.tokens.values())
        return self.tokens.get("k16v16", 0) / total if total else 1.0


class Timings(Struct, frozen=True, kw_only=True):
    """Where a request's time went: until its first step, its first token, and per token after that."""

    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    total_s: float


class Finished(Struct, frozen=True, tag=True):
    """Always the last event of a request that did not fail."""

    usage: Usage
    timings: Timings
    num_preemptions: int = 0
    speculation: SpeculationUsage | None = None
    cache: CacheUsage | None = None


Event = Started | PromptEcho | Chunk | Finished


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that a backend serves. `created` is a Unix time; `max_model_len` counts prompt and output."""

    id: str
    created: int
    max_model_len: int


class BackendState(StrEnum):
    """Whether a backend can take requests."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class BackendStatus(Struct, frozen=True):
    """A backend's state, with a sentence that says why when it is not ready."""

    state: BackendState
    detail: str = ""


class SequenceView(Struct, frozen=True, kw_only=True):
    """One choice of a request as the scheduler sees it. Ages in seconds."""

    request_id: str
    choice: int
    priority: int
    flow: str
    running: bool
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_preemptions: int
    slack_s: float | None
    """Until the next promise (first token, next token or deadline) is broken; negative when it is."""


class SchedulerView(Struct, frozen=True, kw_only=True):
    """A scheduler's queue and running set at one moment, and what it predicts."""

    waiting: tuple[SequenceView, ...] = ()
    running: tuple[SequenceView, ...] = ()
    backlog_s: float = 0.0
    """Predicted seconds of work that waits."""


class DraftStats(Struct, frozen=True, kw_only=True):
    """How the drafts of one flow and proposer fared. `drafted_at[j]` counts those that had a token j,
    `accepted_at[j]` those whose token j was accepted.
    """

    flow: str
    proposer: str
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


class SpeculationStats(Struct, frozen=True, kw_only=True):
    """What speculation did since the start, and what was learnt. Gains: 0.1 is 10 % more tokens a second.

    Of the steps that verified drafts, `step_s_total` is what they took, `plain_s_total` what they would have
    taken without, by prediction; likewise their tokens: those expected, those that came, and those that
    would have come anyway.
    """

    drafts: tuple[DraftStats, ...] = ()
    acceptance: dict[str, dict[str, float]] = field(default_factory=dict)
    """By flow and kind, the share of tried tokens that were accepted lately; absent where few were tried."""
    drafting_s_total: float = 0.0
    steps_total: int = 0
    step_s_total: float = 0.0
    plain_s_total: float = 0.0
    expected_tokens_total: float = 0.0
    realised_tokens_total: int = 0
    plain_tokens_total: int = 0
    expected_gain: float = 0.0
    realised_gain: float = 0.0
    is_synthetic: bool = False
    """Whether acceptance is made up, for a benchmark; outputs are then meaningless."""
    max_draft: int | None = None
    """The longest draft that is made for any plan; None where a backend does not say."""
    proposers: tuple[str, ...] | None = None
    """Who can draft; others that a plan names are not asked. None where a backend does not say."""


class FormatStats(Struct, frozen=True, kw_only=True):
    """What the running requests of one flow hold in one cache format now. Shared blocks count once for each
    holder.
    """

    flow: str
    format: str
    num_tokens: int = 0
    num_blocks: int = 0


class FormatTotal(Struct, frozen=True, kw_only=True):
    """What all running requests hold in one cache format now; shared blocks, and their tokens, count once.

    `fragmentation` is the share of the blocks' room for tokens that holds none.
    """

    format: str
    num_tokens: int = 0
    num_blocks: int = 0
    fragmentation: float = 0.0


class BackendStats(Struct, frozen=True, kw_only=True):
    """What a backend's metrics are made of. Counters only grow, across engine restarts too.

    A block is used, cached (free, with content that a request may find again) or plainly free. The prefix
    cache's queries and hits are prompt tokens: those that were looked up, and those found.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    prefix_cache_evictions_total: int = 0
    block_bytes: int = 0
    """Bytes of a block in all layers, the same in every format."""
    formats: tuple[FormatStats, ...] = ()
    format_totals: tuple[FormatTotal, ...] = ()
    demoted_tokens_total: dict[str, int] = field(default_factory=dict)
    """Tokens that were demoted, by the format they got."""
    steps_total: int = 0
    step_tokens_total: int = 0
    """Tokens that steps ran, prefill and recomputation included."""
    step_sequences_total: int = 0
    """Sequences of each step, summed over steps: by `steps_total` it is the mean batch size."""
    step_budget_total: int = 0
    """Tokens that the steps' budgets allowed: what `step_tokens_total` is a part of."""
    step_predicted_s_total: float = 0.0
    step_measured_s_total: float = 0.0
    last_step_sequences: int = 0
    last_step_tokens: int = 0
    refusals_total: dict[str, int] = field(default_factory=dict)
    """Requests that were not let in, by `Overloaded.reason`."""
    engine_restarts_total: int = 0
    speculation: SpeculationStats = SpeculationStats()
    """May be some tenths of a second old while requests run."""
