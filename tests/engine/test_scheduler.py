"""The scheduler against a model that runs instantly: budgets, order, preemption, progress."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.backends.engine.block_pool import BlockPool
from surefoot.backends.engine.choice_stream import ChoiceStream
from surefoot.backends.engine.scheduler import ScheduledChunk, Scheduler
from surefoot.backends.engine.sequence import Request, Sequence
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.types import GenerateRequest, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS


class NoText:
    """A detokeniser for tests that look at token counts alone."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def sequence(key: int, num_prompt: int, max_tokens: int = 4) -> Sequence:
    """A request with one choice."""
    message = GenerateRequest(request_id=str(key), model="m", prompt=TokenPrompt((0,)))
    request = Request(message, (0,) * num_prompt, key=key, max_tokens=max_tokens, seed=0, arrived_s=0.0)
    request.sequences.append(Sequence(request, 0, ChoiceStream(0, NoText(), (), has_logprobs=False)))
    return request.sequences[0]


def make(
    num_blocks: int = 64, max_sequences: int = 4, budget: int = 64, chunk: int | None = None
) -> Scheduler:
    """A scheduler over a pool of its own."""
    limits = EngineSettings(
        cache_bytes=1, max_sequences=max_sequences, max_batched_tokens=budget, max_prefill_chunk=chunk
    )
    return Scheduler(limits, BlockPool(num_blocks))


def run_step(scheduler: Scheduler) -> list[ScheduledChunk]:
    """Schedule, and do to the sequences what the engine would."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        seq, samples = chunk.sequence, chunk.samples
        seq.num_committed += chunk.num_tokens
        assert seq.blocks_missing(0) <= 0, "tokens were committed beyond the sequence's blocks"
        if samples:
            seq.append(0)
            if seq.num_output_tokens >= seq.request.max_tokens:
                scheduler.finish(seq)
    return chunks


def shares(chunks: list[ScheduledChunk]) -> dict[int, int]:
    """Tokens of the step by the request's key."""
    return {chunk.sequence.request.key: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_is_cut_into_chunks_beside_decodes() -> None:
    """Decoding sequences get their token first; a prefill takes what the budget leaves."""
    scheduler = make(budget=16)
    scheduler.add(sequence(0, 5))
    assert shares(run_step(scheduler)) == {0: 5}
    scheduler.add(sequence(1, 40))
    assert shares(run_step(scheduler)) == {0: 1, 1: 15}
    assert shares(run_step(scheduler)) == {0: 1, 1: 15}
    assert shares(run_step(scheduler)) == {0: 1, 1: 10}


def test_a_chunk_limit_holds_per_sequence() -> None:
    """`max_prefill_chunk` bounds one sequence's share, not the step's."""
    scheduler = make(budget=64, chunk=16)
    for key in range(3):
        scheduler.add(sequence(key, 40))
    assert shares(run_step(scheduler)) == {0: 16, 1: 16, 2: 16}


def test_no_more_than_max_sequences_run() -> None:
    """The rest wait in order of arrival, and the next starts when one ends."""
    scheduler = make(max_sequences=2)
    for key in range(4):
        scheduler.add(sequence(key, 3, max_tokens=1 + key))
    assert shares(run_step(scheduler)) == {0: 3, 1: 3}
    assert shares(run_step(scheduler)) == {1: 1, 2: 3}


def test_the_latest_started_is_preempted_when_blocks_run_out() -> None:
    """The oldest keeps its blocks and goes on; the victim waits at the front with nothing committed."""
    scheduler = make(num_blocks=2)
    first, second = sequence(0, BLOCK_TOKENS), sequence(1, BLOCK_TOKENS)
    scheduler.add(first)
    scheduler.add(second)
    assert shares(run_step(scheduler)) == {0: BLOCK_TOKENS, 1: BLOCK_TOKENS}
    assert shares(run_step(scheduler)) == {0: 1}
    assert scheduler.waiting[0] is second
    assert (second.num_committed, second.block_table) == (0, [])
    assert scheduler.take_preemptions() == 1
    assert scheduler.take_preemptions() == 0


def test_a_prompt_that_does_not_fit_yet_waits() -> None:
    """A waiting sequence starts only when all of its tokens have blocks, and nothing overtakes it."""
    scheduler = make(num_blocks=3)
    scheduler.add(sequence(0, 2 * BLOCK_TOKENS, max_tokens=1))
    scheduler.add(sequence(1, 2 * BLOCK_TOKENS, max_tokens=1))
    scheduler.add(sequence(2, 1, max_tokens=1))
    assert set(shares(run_step(scheduler))) == {0}
    assert set(shares(run_step(scheduler))) == {1, 2}


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(1, 12),
    max_sequences=st.integers(1, 5),
    spare=st.integers(0, 40),
    chunk=st.none() | st.integers(1, 20),
)
def test_everything_ends_and_nothing_leaks(
    data: st.DataObject, num_blocks: int, max_sequences: int, spare: int, chunk: int | None
) -> None:
    """Any load whose parts fit the cache, with aborts at random, ends with all blocks free."""
    scheduler = make(num_blocks, max_sequences, max_sequences + spare, chunk)
    room = num_blocks * BLOCK_TOKENS
    open_sequences: list[Sequence] = []
    for key in range(data.draw(st.integers(1, 8))):
        num_prompt = data.draw(st.integers(1, room - 1)) if room > 1 else 1
        open_sequences.append(
            sequence(key, num_prompt, data.draw(st.integers(1, min(20, room - num_prompt) or 1)))
        )
    for seq in open_sequences:
        scheduler.add(seq)
    for _ in range(20_000):
        if not scheduler.has_work:
            break
        chunks = run_step(scheduler)
        assert chunks, "a step did nothing although there is work"
        assert sum(c.num_tokens for c in chunks) <= max_sequences + spare
        assert len(scheduler.running) <= max_sequences
        scheduler._pool.check_integrity()
        if data.draw(st.integers(0, 30)) == 0 and scheduler.running:
            scheduler.finish(scheduler.running[0])
    assert not scheduler.has_work
    assert scheduler._pool.num_used == 0
