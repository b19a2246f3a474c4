"""What the engine knows of a request: the request itself, and one sequence for each of its choices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from surefoot.backends.types import (
    CacheUsage,
    GenerateRequest,
    SamplingParams,
    SpeculationUsage,
    Timings,
    TokenLogprob,
    Usage,
)
from surefoot.kernels.layout import BLOCK_TOKENS, FULL, CacheFormat

from .cache_rule import CacheRule, format_name
from .choice_stream import ChoiceStream
from .speculation.draft_counts import DraftCounts


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    HELD = auto()
    """Not queued yet: another choice of the request runs their prompt first."""
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Pace(Struct, frozen=True):
    """Since when a sequence's tokens are due one after the other, and how many it had then."""

    since_s: float
    num_tokens: int


class Part(Struct, frozen=True):
    """The tokens of a sequence that lie in one format, and in which blocks, of `capacity` tokens each."""

    num_tokens: int
    table: list[int]
    capacity: int


NOTHING = Part(0, [], 0)


class TokenMask(Protocol):
    """Which tokens may come next: structured output, of any kind."""

    def allowed(self, drafted: tuple[int, ...]) -> Tensor:
        """bool `[vocab_size]`, for the position after the sequence's tokens and then `drafted` ones. Nothing
        is remembered of drafts: they may be rejected.
        """

    def advance(self, token_id: int) -> None:
        """The sequence got a token."""


class Sequence:
    """One choice of a request: its tokens, how many are committed to the cache, and in which blocks.

    Of `token_ids` (prompt, then output) the first `num_committed` are in the cache. The rest must run
    before the next token can be sampled: for a decoding sequence that is the last token alone.

    Where the plan has a quantised format, `num_demoted` of the committed tokens are in it: they lie in
    `low_table`, but for the latest of a mixed plan, which lie in `high_table`. The others fill `block_table`.
    Each list is filled from its beginning, without gaps and, but for the places of `high_table`, in order of
    position: attention asks for no order.
    """

    def __init__(self, request: Request, choice: int, stream: ChoiceStream) -> None:
        self.request = request
        self.choice = choice
        self.stream = stream
        self.status = SequenceStatus.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_committed = 0
        self.block_table: list[int] = []
        self.num_found = 0
        """Blocks at the beginning of `block_table` that were in the cache when it started."""
        self.num_low = 0
        self.low_table: list[int] = []
        self.high_table: list[int] = []
        self.high_places: list[int] = []
        """Of each token there its place among the slots of `high_table`, in order of position."""
        self.cache_rule = request.cache_rule
        """What is demoted when; the request's, unless it lost its blocks under pressure."""
        self.num_to_reclaim = 0
        """Tokens that have to be demoted by now because blocks are short."""
        self.was_reclaimed = False
        """Whether its tokens depend on how short blocks were."""
        self.tokens_at_end: dict[CacheFormat, int] = {}
        """Tokens by format when the sequence ended."""
        self.block_keys: list[bytes] = []
        """Of the first full blocks of `token_ids`, as far as they were needed (prefix_cache.py)."""
        self.num_published = 0
        """Blocks of `block_table` that were published, or left unpublished for now."""
        self.output_counts: Counter[int] = Counter()
        self.mask: TokenMask | None = None
        self.num_preemptions = 0
        # The scheduler's notes.
        self.start_number = 0
        self.last_turn = 0
        self.paused_since_s: float | None = None
        self.pace: Pace | None = None
        self.charged_tokens = 0.0
        self.committed_at_start = 0

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.message.params

    @property
    def priority(self) -> int:
        """The request's: a higher one runs first."""
        return self.request.message.priority

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncommitted(self) -> int:
        """Tokens that must run before the next one can be sampled."""
        return len(self.token_ids) - self.num_committed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is missing from the cache."""
        return self.num_uncommitted == 1

    @property
    def num_runnable(self) -> int:
        """Uncommitted tokens that one step may run: those before the next boundary."""
        boundary = None if self.cache_rule is None else self.cache_rule.next_boundary(self.num_committed)
        if boundary is None:
            return self.num_uncommitted
        return min(self.num_uncommitted, boundary - self.num_committed)

    @property
    def num_to_demote(self) -> int:
        """Tokens that must be demoted before the next one runs."""
        if self.cache_rule is None:
            return 0
        due = max(self.cache_rule.num_demoted(self.num_committed), self.num_to_reclaim)
        return max(0, due - self.num_demoted)

    @property
    def num_demoted(self) -> int:
        """Committed tokens that are not in full precision any more."""
        return self.num_low + len(self.high_places)

    @property
    def held(self) -> dict[CacheFormat, Part]:
        """Full precision, and every other format that it has tokens in."""
        rule, parts = self.cache_rule, {FULL: Part(self.num_full, self.block_table, BLOCK_TOKENS)}
        if rule is not None and self.num_low:
            parts[rule.format.low] = Part(self.num_low, self.low_table, rule.capacity)
        if rule is not None and self.high_places:
            parts[rule.format.high] = Part(len(self.high_places), self.high_table, rule.high_capacity)
        return parts

    @property
    def is_under_pressure(self) -> bool:
        """Whether its tokens are demoted when blocks run out, and not before."""
        return self.cache_rule is not None and not self.cache_rule.eager

    @property
    def num_full(self) -> int:
        """Committed tokens in full precision."""
        return self.num_committed - self.num_demoted

    @property
    def num_blocks(self) -> int:
        """Blocks held, in all formats."""
        return len(self.block_table) + len(self.low_table) + len(self.high_table)

    @property
    def peak_blocks(self) -> int:
        """Blocks that it takes at most to hold all its tokens, and to demote what is due before the next."""
        rule, num_tokens = self.cache_rule, len(self.token_ids)
        return math.ceil(num_tokens / BLOCK_TOKENS) if rule is None else rule.peak(num_tokens + 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        request = self.request
        return request.scores_prompt and len(request.prompt_logprobs) < self.num_prompt_tokens

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` more tokens can be committed; none are left to demote."""
        return math.ceil((self.num_full + num_tokens) / BLOCK_TOKENS) - len(self.block_table)

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] += 1
        if self.mask is not None:
            self.mask.advance(token_id)


class Request:
    """A request inside the engine: the gateway's message, its prompt as tokens, and its sequences."""

    def __init__(
        self,
        message: GenerateRequest,
        prompt_token_ids: tuple[int, ...],
        *,
        key: int,
        max_tokens: int,
        seed: int,
        arrived_s: float,
        prediction_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`key` is unique in the engine, as a client's request id need not be; times are on its clock."""
        self.key = key
        self.message = message
        self.prompt_token_ids = prompt_token_ids
        self.prediction_token_ids = prediction_token_ids
        self.max_tokens = max_tokens
        self.seed = seed
        self.arrived_s = arrived_s
        self.first_step_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.sequences: list[Sequence] = []
        self.cache_rule: CacheRule | None = None
        """What is demoted when; None for full precision."""
        self.drafts: dict[str, DraftCounts] = {}
        """How drafts fared, by proposer."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's first tokens, as far as they are computed: once, for all choices."""
        self.root_key: bytes | None = None
        """What its chains of blocks begin with; None: they are shared with nobody (prefix_cache.py)."""
        self.has_run_prompt = False
        """Whether some choice has taken the prompt to its end."""
        self.num_queried_tokens = 0
        """Prompt tokens that other requests may have left in the cache, and those that were found there."""
        self.num_cached_tokens = 0

    def branch(self, streams: Iterable[ChoiceStream]) -> list[Sequence]:
        """Make a sequence for each choice; returns those to queue now.

        Where choices share the prompt the others are held until the first one has run it.
        """
        self.sequences = [Sequence(self, choice, stream) for choice, stream in enumerate(streams)]
        num_now = 1 if self.shares_prompt else len(self.sequences)
        for sequence in self.sequences[num_now:]:
            sequence.status = SequenceStatus.HELD
        return self.sequences[:num_now]

    def prompt_ran(self) -> list[Sequence]:
        """Note that the prompt is in the cache; returns the choices that were held, to queue now."""
        self.has_run_prompt = True
        held = [sequence for sequence in self.sequences if sequence.status is SequenceStatus.HELD]
        for sequence in held:
            sequence.status = SequenceStatus.WAITING
        return held

    @property
    def deadline_s(self) -> float:
        """When the request must end, on the engine's clock."""
        return math.inf if self.message.deadline_s is None else self.arrived_s + self.message.deadline_s

    @property
    def shares_prompt(self) -> bool:
        """Whether a choice can begin with what another one has computed: a full block at least."""
        return self.root_key is not None and len(self.prompt_token_ids) > BLOCK_TOKENS

    @property
    def scores_prompt(self) -> bool:
        """Whether the client wants log-probabilities of the prompt's tokens."""
        return self.message.echo and self.message.params.logprobs is not None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)

    @property
    def usage(self) -> Usage:
        """Tokens so far; output tokens are those that chunks carried."""
        return Usage(
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=sum(seq.stream.num_emitted for seq in self.sequences),
            num_cached_tokens=self.num_cached_tokens,
        )

    @property
    def cache_usage(self) -> CacheUsage | None:
        """How the tokens of the choices lay when each ended; None for full precision."""
        if self.cache_rule is None:
            return None
        rule_format = self.cache_rule.format
        formats = dict.fromkeys((FULL, rule_format.high, rule_format.low))
        tokens = {
            each: sum(sequence.tokens_at_end.get(each, 0) for sequence in self.sequences) for each in formats
        }
        return CacheUsage(
            tokens={format_name(each): number for each, number in tokens.items()},
            num_demoted_tokens=sum(number for each, number in tokens.items() if each != FULL),
            reproducible=not any(sequence.was_reclaimed for sequence in self.sequences),
        )

    @property
    def speculation(self) -> SpeculationUsage | None:
        """How drafts fared; None if there were none."""
        if not self.drafts:
            return None
        total = DraftCounts()
        for counts in self.drafts.values():
            total.add(counts)
        predicted = self.drafts.get("prediction", DraftCounts())
        return SpeculationUsage(
            num_drafts=total.num_drafts,
            num_draft_tokens=total.num_draft_tokens,
            num_accepted_tokens=total.num_accepted_tokens,
            accepted_at=tuple(total.accepted_at),
            num_predicted_tokens=predicted.num_draft_tokens,
            num_accepted_predicted_tokens=predicted.num_accepted_tokens,
        )

    def timings(self, now_s: float) -> Timings:
        """Where the time went; TPOT is the mean gap between tokens of the longest choice."""
        num_gaps = max(seq.num_output_tokens for seq in self.sequences) - 1
        tpot_s = None
        if num_gaps > 0 and self.first_token_s is not None and self.last_token_s is not None:
            tpot_s = (self.last_token_s - self.first_token_s) / num_gaps
        return Timings(
            queue_s=(now_s if self.first_step_s is None else self.first_step_s) - self.arrived_s,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            tpot_s=tpot_s,
            total_s=now_s - self.arrived_s,
        )
