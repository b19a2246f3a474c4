"""Shared blocks with the real scheduler and a model that runs instantly: content, order, holding, storms."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.backends.engine.block_pool import BlockPool
from surefoot.backends.engine.cost_model import CostModel
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.prefix_cache import PrefixCache
from surefoot.backends.engine.sequence import Request, Sequence, SequenceStatus
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.types import GenerateRequest, SamplingParams, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS

from .schedules import abort, advance, enter, preempt

Content = tuple[object, tuple[int, ...]]
"""Whose tokens, and all of them from the first to the block's newest: what K and V depend on."""

TOKENS = [(7 * at * at + at) % 251 for at in range(4096)]


class World:
    """Scheduler, pool and prefix cache as the engine joins them; a block's content is its tokens."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        prefix_cache: bool = True,
        max_sequences: int = 8,
        budget: int = 64,
        chunk: int | None = None,
    ) -> None:
        limits = EngineSettings(
            cache_bytes=1, max_sequences=max_sequences, max_batched_tokens=budget, max_prefill_chunk=chunk
        )
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, ("model", "dtype"), between_requests=prefix_cache)
        self.scheduler = FirstComeScheduler(limits, self.cache, CostModel(), lambda: 0.0)
        self.content: dict[int, Content] = {}
        self.requests: list[Request] = []
        self.num_rows = 0

    def add(
        self, tokens: list[int], *, salt: str = "", n: int = 1, max_tokens: int = 4, scored: bool = False
    ) -> Request:
        """Queue a request; `scored` wants the prompt's log-probabilities."""
        params = SamplingParams(n=n, logprobs=0 if scored else None)
        prompt = TokenPrompt(tuple(tokens))
        message = GenerateRequest(
            request_id="", model="", prompt=prompt, params=params, salt=salt, echo=scored
        )
        key = len(self.requests)
        request = Request(message, prompt.token_ids, key=key, max_tokens=max_tokens, seed=0, arrived_s=0.0)
        self.requests.append(request)
        enter(request, self.cache, self.scheduler)
        return request

    def step(self) -> dict[tuple[int, int], int]:
        """One step; returns the tokens that ran, by request and choice."""
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            chunk.sequence.request.first_step_s = 0.0
            self._run(chunk.sequence, chunk.num_tokens)
        for chunk in chunks:
            sequence = chunk.sequence
            token_id = len(set(sequence.token_ids[-5:])) + sequence.choice % 2
            advance(chunk, token_id, self.cache, self.scheduler)
        self.pool.check_integrity()
        return {(chunk.sequence.request.key, chunk.sequence.choice): chunk.num_tokens for chunk in chunks}

    def finish_all(self) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_work:
            assert self.step(), "a step did nothing although there is work"
        assert self.pool.num_used == 0
        statuses = {sequence.status for request in self.requests for sequence in request.sequences}
        assert statuses == {SequenceStatus.FINISHED}

    def _run(self, sequence: Sequence, num_tokens: int) -> None:
        """Read what is committed, write what is new."""
        for index in range(sequence.num_committed // BLOCK_TOKENS):
            end = (index + 1) * BLOCK_TOKENS
            assert self.content[sequence.block_table[index]] == self._content(sequence, end)
        for position in range(sequence.num_committed, sequence.num_committed + num_tokens):
            block = sequence.block_table[position // BLOCK_TOKENS]
            assert self.pool.ref_count(block) == 1, "a shared block was written"
            assert block not in self.pool._keys, "a published block was written"
            self.content[block] = self._content(sequence, position + 1)
            self.num_rows += 1

    def _content(self, sequence: Sequence, end: int) -> Content:
        request = sequence.request
        is_open = self.cache._between_requests and not request.scores_prompt
        return (request.message.salt if is_open else request.key), tuple(sequence.token_ids[:end])


def test_a_prompt_that_is_known_is_not_computed_again() -> None:
    """Of a repeated prompt only what does not fill a block runs, and the last token at least."""
    world = World(budget=512)
    prompt = TOKENS[:100]
    first = world.add(prompt)
    world.finish_all()
    again = world.add(prompt)
    assert world.step() == {(1, 0): 100 - 6 * BLOCK_TOKENS}
    assert (first.usage.num_cached_tokens, again.usage.num_cached_tokens) == (0, 96)
    assert (again.num_queried_tokens, again.usage.num_prompt_tokens) == (100, 100)
    world.add(prompt[:96])
    assert world.step()[2, 0] == BLOCK_TOKENS


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    """Output tokens are published like prompt tokens, up to the last one that was committed."""
    world = World(budget=512)
    first = world.add(TOKENS[:40], max_tokens=40)
    world.finish_all()
    dialogue = first.sequences[0].token_ids
    second = world.add([*dialogue, *TOKENS[200:220]])
    world.step()
    assert second.num_cached_tokens == (len(dialogue) - 1) // BLOCK_TOKENS * BLOCK_TOKENS == 64


def test_running_requests_share_with_new_ones() -> None:
    """Blocks can be found as soon as they are committed, and are held by both."""
    world = World(budget=512)
    world.add(TOKENS[:64], max_tokens=50)
    world.step()
    world.add(TOKENS[:64], max_tokens=50)
    world.step()
    first, second = (request.sequences[0] for request in world.requests)
    assert second.block_table[:3] == first.block_table[:3]
    assert [world.pool.ref_count(block) for block in first.block_table] == [2, 2, 2, 1, 1]
    world.scheduler.finish(first)
    assert [world.pool.ref_count(block) for block in second.block_table] == [1] * 4
    world.finish_all()


def test_of_blocks_computed_twice_at_once_the_first_is_found() -> None:
    """Each keeps its own; after both have ended the whole chain of either can be found."""
    world = World(budget=512)
    a, b = world.add(TOKENS[:48], max_tokens=20), world.add(TOKENS[:48] + TOKENS[90:122], max_tokens=20)
    world.step()
    tables = [request.sequences[0].block_table for request in (a, b)]
    assert not set(tables[0]) & set(tables[1])
    world.scheduler.finish(a.sequences[0])
    kept = tables[0][:3]
    world.finish_all()
    turn = world.add([*b.sequences[0].token_ids, *TOKENS[300:320]])
    world.step()
    assert turn.num_cached_tokens == 96
    assert turn.sequences[0].block_table[:3] == kept


def test_another_salt_meets_misses_and_the_same_salt_hits() -> None:
    """A request finds only what its own salt left, whatever the prompt; the work is that of a new prompt."""
    world = World(budget=512)
    world.add(TOKENS[:100], salt="a", n=2)
    world.finish_all()
    for n in (1, 3):
        rows = []
        for prompt in (TOKENS[:100], TOKENS[1000 * n : 1000 * n + 100]):
            before, steps = world.num_rows, []
            stranger = world.add(prompt, salt=f"b{n}", n=n)
            while world.scheduler.has_work:
                steps.append(sorted(world.step().items()))
            rows.append((world.num_rows - before, [[rows for _, rows in step] for step in steps]))
            assert stranger.num_cached_tokens == 0
        assert rows[0] == rows[1]
    friend = world.add(TOKENS[:100], salt="a")
    world.finish_all()
    assert friend.num_cached_tokens == 96


def test_scored_prompts_and_a_cache_that_is_off_find_nothing() -> None:
    """Prompts whose log-probabilities are wanted run whole; so does everything with the cache off."""
    for prefix_cache, scored in ((True, True), (False, False), (False, True)):
        world = World(budget=512, prefix_cache=prefix_cache)
        for _ in range(2):
            request = world.add(TOKENS[:64], scored=scored, max_tokens=1)
            assert world.step() == {(request.key, 0): 64}
            assert (request.num_queried_tokens, request.num_cached_tokens) == (0, 0)
        assert world.pool.num_cached == 0
    assert World().add(TOKENS[:64], scored=True).num_queried_tokens == 0


@given(
    num_prompt=st.integers(1, 150),
    n=st.integers(2, 5),
    prefix_cache=st.booleans(),
    scored=st.booleans(),
    max_tokens=st.integers(1, 3),
    chunk=st.none() | st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_choices_share_their_prompt(
    num_prompt: int, n: int, prefix_cache: bool, scored: bool, max_tokens: int, chunk: int | None
) -> None:
    """The prompt runs once and each other choice runs its part of the last block, whoever may share more."""
    world = World(prefix_cache=prefix_cache, budget=200, chunk=chunk)
    request = world.add(TOKENS[:num_prompt], n=n, scored=scored, max_tokens=max_tokens)
    world.finish_all()
    shared = (num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert world.num_rows == num_prompt + (n - 1) * (num_prompt - shared) + n * (max_tokens - 1)
    assert request.num_cached_tokens == 0


def test_choices_go_on_when_the_first_is_preempted() -> None:
    """They wait until it has run the prompt after all; then it may go, and they find what it left."""
    world = World(budget=32)
    request = world.add(TOKENS[:80], n=3)
    later = world.add(TOKENS[500:516])
    assert world.step() == {(0, 0): 32}
    preempt(request.sequences[0], world.scheduler)
    assert world.step() == {(0, 0): 32}, "the two blocks that it had were found again"
    assert [seq.status for seq in request.sequences[1:]] == [SequenceStatus.HELD] * 2
    assert world.step() == {(0, 0): 16, (later.key, 0): 16}
    world.scheduler.finish(request.sequences[0])
    assert world.step() == {(later.key, 0): 1, (0, 1): 16, (0, 2): 15}
    world.finish_all()
    assert [seq.num_output_tokens for seq in request.sequences] == [1, 4, 4]


def test_a_preempted_sequence_finds_what_it_had() -> None:
    """What it computed is found again if nobody needed the blocks; only the newest token has to run."""
    world = World(budget=512)
    request = world.add(TOKENS[:40], max_tokens=60)
    for _ in range(31):
        world.step()
    preempt(request.sequences[0], world.scheduler)
    assert (world.pool.num_used, world.pool.num_cached) == (0, 4)
    assert world.step() == {(0, 0): 71 - 64}
    assert request.num_cached_tokens == 0, "what it left itself was no help from others"


def test_a_hit_that_others_hold_takes_no_free_blocks() -> None:
    """A sequence starts beside a running one although its blocks alone would not fit twice."""
    world = World(num_blocks=6, budget=512)
    world.add(TOKENS[:64], max_tokens=8)
    world.step()
    world.add(TOKENS[:64], max_tokens=8)
    assert set(world.step()) == {(0, 0), (1, 0)}
    world.finish_all()


def test_nothing_is_found_after_a_fault() -> None:
    """A request whose numbers went wrong leaves nothing, and what others publish later is sound."""
    world = World(budget=512)
    bad, good = world.add(TOKENS[:64], max_tokens=40), world.add(TOKENS[300:364], max_tokens=40)
    world.step()
    world.cache.distrust(bad)
    world.scheduler.finish(bad.sequences[0])
    assert world.pool.num_cached == 0
    world.finish_all()
    again = world.add(TOKENS[:64]), world.add([*good.sequences[0].token_ids, *TOKENS[:16]])
    world.finish_all()
    assert [request.num_cached_tokens for request in again] == [0, 96]


def _prompts(most: int) -> st.SearchStrategy[list[int]]:
    """Few beginnings and few continuations, so that chains meet, part and are cut short."""
    return st.builds(
        lambda start, length, tail: TOKENS[start : start + length] + tail,
        st.sampled_from([0, 0, 0, 700]),
        st.integers(1, most),
        st.sampled_from([[], [1], [1, 2, 3] * 6, [4] * 17]),
    )


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(3, 14),
    max_sequences=st.integers(1, 5),
    spare=st.integers(0, 60),
    chunk=st.none() | st.integers(1, 40),
    prefix_cache=st.booleans(),
)
def test_no_storm_leaks_or_mixes_blocks(
    data: st.DataObject,
    num_blocks: int,
    max_sequences: int,
    spare: int,
    chunk: int | None,
    prefix_cache: bool,
) -> None:
    """Starts, ends, preemptions, aborts, faults at random: content stays right, and all is free at last."""
    world = World(
        num_blocks,
        prefix_cache=prefix_cache,
        max_sequences=max_sequences,
        budget=max_sequences + spare,
        chunk=chunk,
    )
    room = num_blocks * BLOCK_TOKENS

    def arrive() -> None:
        prompt = data.draw(_prompts(room))[: room - 1]
        world.add(
            prompt,
            salt=data.draw(st.sampled_from(["a", "a", "b"])),
            n=data.draw(st.sampled_from([1, 1, 2, 3])),
            max_tokens=data.draw(st.integers(1, min(40, room - len(prompt)))),
            scored=data.draw(st.integers(0, 4)) == 0,
        )

    def alive() -> Iterator[Sequence]:
        return (seq for seq in (*world.scheduler.running, *world.scheduler.waiting))

    for _ in range(data.draw(st.integers(1, 5))):
        arrive()
    for _ in range(data.draw(st.integers(0, 60))):
        if world.scheduler.has_work:
            assert world.step(), "a step did nothing although there is work"
        match data.draw(st.integers(0, 14)):
            case 0:
                arrive()
            case 1 if sequences := [seq for seq in alive() if seq.request.has_run_prompt]:
                world.scheduler.finish(data.draw(st.sampled_from(sequences)))
            case 2 if world.scheduler.running:
                preempt(data.draw(st.sampled_from(world.scheduler.running)), world.scheduler)
            case 3 if sequences := list(alive()):
                request = data.draw(st.sampled_from(sequences)).request
                if data.draw(st.booleans()):
                    world.cache.distrust(request)
                abort(request, world.scheduler)
        world.pool.check_integrity()
    world.finish_all()
    assert all(world.pool.ref_count(block) == 0 for block in range(num_blocks))
