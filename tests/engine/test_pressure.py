"""Plans that demote when blocks run out: who loses bits, when, for whom, and who may start beside them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from surefoot.backends.engine.cache_rule import GRID_TOKENS
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.sequence import SequenceStatus
from surefoot.backends.types import CachePlan
from surefoot.kernels.layout import BLOCK_TOKENS

from .cache_world import PRESSED, World, demoter_of, runs, space_of
from .schedules import SCHEDULERS, preempt


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("priority", [0, 1, 2])
def test_nobody_is_demoted_for_a_lower_priority(make: MakeScheduler, priority: int) -> None:
    """One that waits for blocks has those demoted that are of its own priority or below, and no others."""
    world = World(make, num_blocks=32, max_batched_tokens=512)
    world.add([1] * 240, PRESSED, n=1, max_tokens=9, priority=1)
    world.step()
    (sequence,) = world.scheduler.running
    world.add([2] * 300, CachePlan(), n=1, max_tokens=9, priority=priority)
    assert sequence.num_demoted == 0
    world.step()
    assert (sequence.num_demoted > 0) == (priority >= 1)


@pytest.mark.parametrize(("num_blocks", "num_requests"), [(40, 2), (160, 8)])
@pytest.mark.parametrize("make", SCHEDULERS)
def test_an_eighth_of_the_cache_or_what_a_step_takes_is_kept_free(
    make: MakeScheduler, num_blocks: int, num_requests: int
) -> None:
    """Nobody waits: tokens are demoted in the step before which fewer blocks are free than that, and no
    sooner, until that many are.
    """
    world = World(make, num_blocks, max_batched_tokens=64, max_sequences=8)
    sequences = runs(world, *[(PRESSED, 100 + 5 * number, 0) for number in range(num_requests)])
    demoter, kept = demoter_of(world), []
    for _ in range(250):
        taken = max(demoter.num_taken(each) for each in sequences)
        needed = taken + 2 + sum(demoter.num_wanted(each, 1) for each in sequences)
        least = max(num_blocks // 8, needed)
        before, gains = [each.num_demoted for each in sequences], [demoter.gain(each) for each in sequences]
        is_short = world.pool.num_free < least
        world.scheduler._reclaim()  # type: ignore[attr-defined]
        demoted = [each.num_demoted for each in sequences] != before
        assert demoted == (is_short and max(gains) > 0)
        kept.append(is_short)
        assert world.step()
        if any(each.status is not SequenceStatus.RUNNING for each in sequences):
            break
    assert {True, False} == set(kept)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_nobody_is_demoted_for_who_has_no_place(make: MakeScheduler) -> None:
    """One that waits for a place, and not for blocks, costs nobody a bit."""
    world = World(make, num_blocks=60, max_sequences=1, max_batched_tokens=512)
    (sequence,) = runs(world, (PRESSED, 300, 0))
    world.add([2] * 600, PRESSED, n=1, max_tokens=9, priority=1)
    for _ in range(5):
        world.step()
    assert sequence.num_demoted == 0


@pytest.mark.parametrize("make", SCHEDULERS)
def test_who_waits_has_just_so_much_room_made(make: MakeScheduler) -> None:
    """Beside what is kept free, its blocks: those of lower rank are demoted one by one until it has them."""
    world = World(make, num_blocks=80, max_batched_tokens=1024)
    first, second = runs(world, (PRESSED, 300, 0), (PRESSED, 300, 0))
    world.add([2] * 520, CachePlan(), n=1, max_tokens=9, priority=0)
    waiting = world.requests[-1].sequences[0]
    world.step()
    assert waiting.status is SequenceStatus.RUNNING
    assert (first.num_demoted > 0, second.num_demoted > 0) == (False, True)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_what_must_repeat_is_not_demoted_for_want_of_blocks(make: MakeScheduler) -> None:
    """With a seed a `pressure` plan has boundaries: tokens are demoted there alone, however full it is."""
    world = World(make, num_blocks=32, max_batched_tokens=512)
    rule = world.space.rule(PRESSED, 200, is_seeded=True)
    assert rule is not None
    world.add([1] * 200, replace(PRESSED, demote="eager"), n=1, max_tokens=150, priority=0)
    world.add([2] * 200, PRESSED, n=1, max_tokens=150, priority=0)
    seeded, pressed = (request.sequences[0] for request in world.requests)
    assert seeded.cache_rule == rule
    while world.scheduler.has_work:
        if seeded.status is SequenceStatus.RUNNING and seeded.is_decoding:
            due = {rule.num_demoted(seeded.num_committed - back) for back in (0, 1)}
            assert seeded.num_demoted in due
        assert world.step()
    assert (seeded.was_reclaimed, pressed.was_reclaimed) == (False, True)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_start_leaves_room_to_demote_those_under_pressure(make: MakeScheduler) -> None:
    """One of a lower priority, for whom nobody is demoted, starts if it leaves the blocks that demoting those
    takes, and not otherwise.
    """
    for num_beyond in (1, -3):
        world = World(make, num_blocks=60, max_batched_tokens=1024)
        (sequence,) = runs(world, (PRESSED, 300, 1))
        num_free = world.pool.num_free - demoter_of(world).num_taken(sequence)
        world.add([2] * (BLOCK_TOKENS * (num_free + num_beyond)), CachePlan(), n=1, max_tokens=1, priority=0)
        world.step()
        assert sequence.num_demoted == 0
        has_started = world.requests[-1].sequences[0].status is not SequenceStatus.WAITING
        assert has_started == (num_beyond < 0)


@pytest.mark.parametrize(("num_blocks", "num_prompt", "starts"), [(60, 240, True), (60, 460, False)])
def test_a_start_leaves_room_for_a_prompt_under_pressure(
    num_blocks: int, num_prompt: int, starts: bool
) -> None:
    """One that still reads its prompt will want the blocks of the rest of it, but none to demote it by way of
    beside those that are kept free for all.
    """
    world = World(PromiseScheduler, num_blocks, max_batched_tokens=100, max_prefill_chunk=50)
    world.add([1] * 480, PRESSED, n=1, max_tokens=9, priority=1)
    world.step()
    world.add([2] * num_prompt, CachePlan(), n=1, max_tokens=9, priority=0)
    reading, waiting = (request.sequences[0] for request in world.requests)
    for _ in range(4):
        world.step()
        assert reading.num_committed < 300
        assert (waiting.status is SequenceStatus.RUNNING) == starts


@pytest.mark.parametrize("make", SCHEDULERS)
def test_nobody_is_demoted_for_a_prompts_later_steps(make: MakeScheduler) -> None:
    """Of a long prompt, what the next step reads counts."""
    world = World(make, num_blocks=71, max_batched_tokens=64)
    (sequence,) = runs(world, (PRESSED, 300, 1))
    world.add([2] * 700, CachePlan(), n=1, max_tokens=1, priority=0)
    for _ in range(4):
        world.step()
    reading = world.requests[-1].sequences[0]
    assert 0 < reading.num_committed < 300
    assert sequence.num_demoted == 0


def test_room_is_made_for_who_would_start_first() -> None:
    """Of several that wait, the highest priority."""
    world = World(PromiseScheduler, num_blocks=60, max_batched_tokens=1024)
    (sequence,) = runs(world, (PRESSED, 300, 1))
    for priority in (0, 2):
        world.add([2 + priority] * 600, CachePlan(), n=1, max_tokens=1, priority=priority)
    world.step()
    assert sequence.num_demoted > 0
    assert world.requests[-1].sequences[0].status is SequenceStatus.FINISHED


def test_who_is_alone_and_stuck_starts_again_with_boundaries() -> None:
    """Blocks reserved for drafts may be the last ones: then there is none to demote by way of, and no other
    sequence to take any from. It is computed again, and comes to its end.
    """
    world = World(PromiseScheduler, num_blocks=24)
    (sequence,) = runs(world, (PRESSED, 150, 0))
    world.scheduler.reserve(sequence, 24 * BLOCK_TOKENS)
    assert world.pool.num_free == 0
    num_still = 0
    while world.scheduler.has_work:
        num_still = 0 if world.step() else num_still + 1
        assert num_still <= 1, "nothing moves"
    assert (sequence.num_preemptions, sequence.is_under_pressure) == (1, False)


def test_who_is_stuck_in_company_stands_still() -> None:
    """The one of least rank waits for blocks of the others, and loses none of its own."""
    world = World(PromiseScheduler, num_blocks=33, max_batched_tokens=512, headroom=0)
    for number in range(9):  # so that short answers are expected of the others
        world.add([number] * 9, CachePlan(), n=1, max_tokens=1, priority=0)
        world.step()
    world.add([1] * 290, CachePlan(), n=1, max_tokens=26, priority=1)
    world.add([2] * 188, replace(PRESSED, recent=190), n=1, max_tokens=60, priority=0)
    high, low = (request.sequences[0] for request in world.requests[-2:])
    has_stood_still = False
    while world.scheduler.has_work:
        before = low.num_committed
        assert world.step()
        has_stood_still |= low.is_decoding and low.num_committed == before and low in world.scheduler.running
    assert has_stood_still
    assert high.num_preemptions == low.num_preemptions == 0


def test_a_start_leaves_room_for_the_first_demotions_to_come() -> None:
    """One that still reads its prompt holds few blocks, and will want many before it demotes: until then none
    starts that would take them, and nobody is preempted.
    """
    world, plan = World(PromiseScheduler, num_blocks=60), CachePlan(format="k4v4", sinks=2, recent=5)
    for number, length in enumerate((480, 300)):
        world.add([number] * length, plan, n=1, max_tokens=200, priority=0)
    first, second = (request.sequences[0] for request in world.requests)
    while second.status is SequenceStatus.WAITING:
        assert world.step()
    assert first.num_demoted > 0
    while world.scheduler.has_work:
        assert world.step()
    assert first.num_preemptions == second.num_preemptions == 0


def test_who_is_preempted_under_pressure_starts_again_with_boundaries() -> None:
    """What it held cannot be had again; with boundaries it is known to fit, and the answer says so."""
    world = World(FirstComeScheduler, num_blocks=24)
    world.add([1] * 60, PRESSED, n=1, max_tokens=9, priority=0)
    world.step()
    (sequence,) = world.scheduler.running
    assert isinstance(world.scheduler, FirstComeScheduler)
    preempt(sequence, world.scheduler)
    assert not sequence.is_under_pressure
    while world.scheduler.has_work:
        world.step()
    usage = sequence.request.cache_usage
    assert usage is not None
    assert not usage.reproducible
    assert sequence.num_preemptions == 1


def test_one_choice_that_lost_bits_makes_the_answer_one_that_need_not_repeat() -> None:
    """Whatever became of the others."""
    world = World(FirstComeScheduler, num_blocks=60)
    world.add([1] * 100, PRESSED, n=2, max_tokens=9, priority=0)
    (request,) = world.requests
    for was_reclaimed in (False, True):
        request.sequences[1].was_reclaimed = was_reclaimed
        assert request.cache_usage is not None
        assert request.cache_usage.reproducible == (not was_reclaimed)


def test_a_prompt_beyond_the_cache_has_boundaries_under_pressure_too() -> None:
    """Only so does it fit."""
    rule = space_of(80).rule(PRESSED, 1500)
    assert rule is not None
    assert (rule.eager, rule.grid) == (True, GRID_TOKENS)


def test_drafts_have_room_beside_demoted_tokens() -> None:
    """Blocks are reserved for as many tokens as were asked for, as long as there are free ones."""
    world = World(FirstComeScheduler, num_blocks=60, max_batched_tokens=512)
    (sequence,) = runs(world, (PRESSED, 300, 0))
    demoter_of(world).reclaim([sequence], world.pool.num_blocks)
    assert sequence.num_demoted > 200
    assert world.scheduler.reserve(sequence, 40) == 40
    room = (len(sequence.block_table) + world.pool.num_free) * BLOCK_TOKENS
    assert world.scheduler.reserve(sequence, 2000) == room - sequence.num_full - sequence.num_uncommitted
