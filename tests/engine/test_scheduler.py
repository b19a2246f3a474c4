"""What holds of every scheduler, and the order of the naive one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.kernels.layout import BLOCK_TOKENS

from .schedules import SCHEDULERS, Driver

every_scheduler = pytest.mark.parametrize("make", SCHEDULERS)


@every_scheduler
def test_a_long_prompt_is_cut_into_chunks_beside_decodes(make: MakeScheduler) -> None:
    """Decoding sequences get their token first; a prefill takes what the budget leaves."""
    driver = Driver(make, max_batched_tokens=16)
    driver.add(0, 5)
    assert driver.shares() == {0: 5}
    driver.add(1, 40)
    assert driver.shares() == {0: 1, 1: 15}
    assert driver.shares() == {0: 1, 1: 15}
    assert driver.shares() == {0: 1, 1: 10}


@every_scheduler
def test_a_chunk_limit_holds_per_sequence(make: MakeScheduler) -> None:
    """`max_prefill_chunk` bounds one sequence's share, not the step's."""
    driver = Driver(make, max_batched_tokens=64, max_prefill_chunk=16)
    for key in range(3):
        driver.add(key, 40)
    assert driver.shares() == {0: 16, 1: 16, 2: 16}


@every_scheduler
def test_no_more_than_max_sequences_run(make: MakeScheduler) -> None:
    """The rest wait in order of arrival, and the next starts when one ends."""
    driver = Driver(make, max_sequences=2)
    for key in range(4):
        driver.add(key, 3, max_tokens=1 + key)
    assert driver.shares() == {0: 3, 1: 3}
    assert driver.shares() == {1: 1, 2: 3}


@every_scheduler
def test_a_prompt_that_does_not_fit_yet_waits(make: MakeScheduler) -> None:
    """A waiting sequence starts only when all of its tokens have blocks, and nothing overtakes it."""
    driver = Driver(make, num_blocks=4)
    driver.add(0, 3 * BLOCK_TOKENS, max_tokens=1)
    driver.add(1, 2 * BLOCK_TOKENS - 1, max_tokens=1)
    driver.add(2, 1, max_tokens=1)
    assert set(driver.shares()) == {0}
    assert set(driver.shares()) == {1, 2}


def test_the_latest_started_is_preempted_when_blocks_run_out() -> None:
    """The oldest keeps its blocks and goes on; the victim waits at the front with nothing committed."""
    driver = Driver(FirstComeScheduler, num_blocks=2)
    driver.add(0, BLOCK_TOKENS)
    second = driver.add(1, BLOCK_TOKENS)
    assert driver.shares() == {0: BLOCK_TOKENS, 1: BLOCK_TOKENS}
    assert driver.shares() == {0: 1}
    assert next(iter(driver.scheduler.waiting)) is second
    assert (second.num_committed, second.block_table, second.num_preemptions) == (0, [], 1)
    assert driver.scheduler.take_preemptions() == 1
    assert driver.scheduler.take_preemptions() == 0


targets = st.none() | st.sampled_from([0.001, 0.02, 0.05, 0.5])


@every_scheduler
@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(1, 12),
    max_sequences=st.integers(1, 5),
    spare=st.integers(0, 40),
    chunk=st.none() | st.integers(1, 20),
    headroom=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_everything_ends_and_nothing_leaks(
    make: MakeScheduler,
    data: st.DataObject,
    num_blocks: int,
    max_sequences: int,
    spare: int,
    chunk: int | None,
    headroom: float,
) -> None:
    """Any load whose parts fit the cache ends with all blocks free, whatever was promised and aborted.

    No step exceeds its budget or does nothing, and no sequence is preempted again and again.
    """
    driver = Driver(
        make,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_batched_tokens=max_sequences + spare,
        max_prefill_chunk=chunk,
        headroom=headroom,
    )
    scheduler, room = driver.scheduler, num_blocks * BLOCK_TOKENS
    to_come = data.draw(st.integers(1, 8))
    for _ in range(20_000):
        if to_come and (not scheduler.has_work or data.draw(st.integers(0, 3)) == 0):
            num_prompt = data.draw(st.integers(1, room - 1))
            driver.add(
                to_come,
                num_prompt,
                data.draw(st.integers(1, min(20, room - num_prompt))),
                priority=data.draw(st.sampled_from([0, 100, 200])),
                flow=data.draw(st.sampled_from(["a", "b"])),
                weight=data.draw(st.sampled_from([1.0, 3.0])),
                ttft_target_s=data.draw(targets),
                tpot_target_s=data.draw(targets),
            )
            to_come -= 1
        if not scheduler.has_work:
            break
        chunks = driver.step()
        assert chunks, "a step did nothing although there is work"
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        assert sum(chunk.num_tokens for chunk in chunks) <= max_sequences + spare
        assert len(scheduler.running) <= max_sequences
        assert sum(len(seq.block_table) for seq in scheduler.running) == driver.pool.num_used
        driver.pool.check_integrity()
        if data.draw(st.integers(0, 30)) == 0 and scheduler.has_work:
            open_sequences = [*scheduler.running, *scheduler.waiting]
            scheduler.finish(open_sequences[data.draw(st.integers(0, len(open_sequences) - 1))])
    assert not scheduler.has_work
    assert to_come == 0
    assert driver.pool.num_used == 0
