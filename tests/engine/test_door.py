"""Who is let in, who is not, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.backends.engine.door import MAX_RETRY_S, Door
from surefoot.backends.engine.scheduler_load import LevelLoad, SchedulerLoad, UnitCost
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.errors import Overloaded
from surefoot.backends.types import GenerateRequest, SamplingParams, TextPrompt

UNIT = UnitCost(prefill_s=0.001, output_s=0.01)


def door_of(*levels: LevelLoad, last_key: int = -1, **limits: Any) -> Door:
    """A door with two places behind it, and a published load."""
    door = Door(EngineSettings(cache_bytes=1, **{"max_sequences": 2, "max_waiting": 3, **limits}))
    door.load = SchedulerLoad(levels=levels, unit=UNIT, last_key=last_key)
    return door


def request(priority: int = 0, n: int = 1, **promised: float) -> GenerateRequest:
    """A request of a priority."""
    params = SamplingParams(n=n)
    return GenerateRequest(
        request_id="r", model="m", prompt=TextPrompt("x"), params=params, priority=priority, **promised
    )


def refusal(door: Door, message: GenerateRequest) -> Overloaded:
    """What the door says; it must refuse."""
    with pytest.raises(Overloaded) as refused:
        door.check(message)
    return refused.value


def test_requests_are_bounded_by_priority() -> None:
    """A flood fills its own queue: the same priority and those below are refused, one above is not."""
    door = door_of()
    for key in range(5):
        door.check(request(100))
        door.enter(key, request(100), 10, 50)
    assert refusal(door, request(100)).reason == "requests"
    assert refusal(door, request(0)).reason == "requests"
    door.check(request(200))
    door.leave(3)
    door.check(request(0))
    assert door.num_refused == {"requests": 2}


def test_choices_count_one_by_one() -> None:
    """A request with n choices takes n places of the bound, and gives them back."""
    door = door_of()
    door.enter(0, request(n=5), 10, 50)
    assert refusal(door, request()).reason == "requests"
    door.leave(0)
    door.check(request(n=5))


def test_seconds_of_waiting_work_are_bounded() -> None:
    """What waits at a priority and above is summed in predicted seconds; what only runs does not count."""
    waits = LevelLoad(priority=100, num_waiting=1, prefill_tokens=2000, waiting_output_tokens=500)
    runs = LevelLoad(priority=200, num_running=1, running_output_tokens=100_000)
    door = door_of(waits, runs, max_waiting_s=5.0)
    refused = refusal(door, request(100))
    assert refused.reason == "seconds"
    assert refused.retry_after_s == pytest.approx(2 + 5 - 5)
    assert "7 s of work are waiting, and 5 s is the limit" in str(refused)
    door.check(request(200))


def test_what_was_let_in_since_the_load_was_counted_counts() -> None:
    """A burst between two counts cannot slip in: the door adds what the load does not know of yet."""
    door = door_of(last_key=7, max_waiting=100, max_waiting_s=5.0)
    door.enter(7, request(), 1000, 2000)
    door.check(request())
    for key in (8, 9, 10):
        door.enter(key, request(), 1000, 100)
    assert refusal(door, request()).reason == "seconds"
    door.leave(9)
    door.check(request())


def test_a_first_token_that_would_be_late_is_refused() -> None:
    """With prefills of 3 s ahead, a target of 2 s cannot be kept; one of 4 s can, and no target always."""
    door = door_of(LevelLoad(priority=100, num_running=1, prefill_tokens=3000), max_sequences=8)
    refused = refusal(door, request(100, ttft_target_s=2.0))
    assert (refused.reason, refused.retry_after_s) == ("target", pytest.approx(1.0))
    door.check(request(100, ttft_target_s=4.0))
    door.check(request(100))
    door.check(request(200, ttft_target_s=0.1))


def test_taken_places_delay_the_first_token() -> None:
    """With both places taken half of the running work must be done before a newcomer starts."""
    door = door_of(LevelLoad(priority=0, num_running=2, running_output_tokens=200))
    door.check(request(ttft_target_s=1.1))
    assert refusal(door, request(ttft_target_s=0.9)).retry_after_s == pytest.approx(0.1)


def test_nobody_is_sent_away_for_longer_than_a_minute() -> None:
    """Whatever the backlog, `retry_after_s` is at most 60 and above 0."""
    door = door_of(LevelLoad(priority=0, num_waiting=3, waiting_output_tokens=1e9), max_waiting_s=1.0)
    assert refusal(door, request()).retry_after_s == MAX_RETRY_S == 60
    empty = door_of(max_waiting=0, max_sequences=1)
    empty.enter(0, request(), 1, 1)
    assert 0 < refusal(empty, request()).retry_after_s < 60


def test_an_idle_server_refuses_nobody() -> None:
    """A request's own prefill is not held against it, however long its prompt and short its target."""
    door_of().check(request(ttft_target_s=0.000001))
