"""The engine with shared blocks: hits, misses, choices and preemptions give the same bits, with less work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.sequence import SequenceStatus
from surefoot.backends.errors import RequestFault
from surefoot.backends.types import (
    PromptEcho,
    SamplingParams,
)

from .serving import Served, Server, blocks, load_tiny, message, prompt_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def tiny_parts(parts: EngineParts, tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    """A tiny model, for what does not depend on numbers."""
    return load_tiny("qwen3", parts, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["mistral", "qwen3", "real"])
def some_parts(
    request: pytest.FixtureRequest, parts: EngineParts, tmp_path_factory: pytest.TempPathFactory
) -> EngineParts:
    """Tiny models of several families, and the real one."""
    if request.param == "real":
        return parts
    return load_tiny(request.param, parts, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_hit_gives_the_bits_of_a_miss(some_parts: EngineParts, params: SamplingParams) -> None:
    """Tokens and log-probabilities are the same with all, some or nothing of the prompt in the cache."""
    server, prompt = Server(some_parts), prompt_of(150)
    cold = server.serve(prompt, params)
    server.serve(prompt[:70] + prompt_of(20, seed=1), params, salt="partly")
    for salt, cached in (("", 144), ("partly", 64), ("unknown", 0)):
        again = server.serve(prompt, params, salt=salt)
        assert again.num_cached_tokens == cached
        assert again.choices == cold.choices
    assert Server(some_parts, prefix_cache=False).serve(prompt, params).choices == cold.choices


def test_the_next_turn_gives_the_bits_of_a_miss(some_parts: EngineParts) -> None:
    """A prompt that goes on from an answer finds its blocks, which were filled one token at a time."""
    server, prompt = Server(some_parts), prompt_of(40)
    long = replace(GREEDY, max_tokens=60)
    turn = [*prompt, *server.serve(prompt, long).choices[0][0], *prompt_of(18, seed=2)]
    hit = server.serve(turn, SEEDED)
    assert hit.num_cached_tokens == 96
    assert hit.choices == Server(some_parts, prefix_cache=False).serve(turn, SEEDED).choices


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_have_the_bits_of_choices_that_share_nothing(
    some_parts: EngineParts, prefix_cache: bool
) -> None:
    """Four choices of one prompt run it once, and each is what it would be had it run alone."""
    server, prompt = Server(some_parts, prefix_cache=prefix_cache), prompt_of(100)
    together = server.serve(prompt, replace(SEEDED, n=4))
    assert sum(together.rows) == 100 + 3 * 4 + 4 * 19
    apart = Server(some_parts, prefix_cache=False)
    apart.engine._prefix_cache.enter = lambda request: None  # type: ignore[method-assign]  # shares nothing
    assert together.choices == apart.serve(prompt, replace(SEEDED, n=4)).choices
    assert len({tuple(tokens) for tokens, _ in together.choices}) > 1


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_are_computed_once_for_all_choices(tiny_parts: EngineParts, max_tokens: int) -> None:
    """Every choice echoes the log-probabilities that a request with one choice gets, cached prompt or not."""
    server, prompt = Server(tiny_parts), prompt_of(70)
    params = replace(SEEDED, max_tokens=max_tokens)
    server.serve(prompt, params)

    def echoes(served: Served) -> Iterator[PromptEcho]:
        return (event for event in served.events if isinstance(event, PromptEcho))

    single = server.serve(prompt, params, echo=True)
    triple = server.serve(prompt, replace(params, n=3), echo=True)
    assert (single.rows[0], single.num_cached_tokens) == (70, 0)
    assert sum(triple.rows) == 70 + 2 * 6 + 3 * max(0, max_tokens - 1)
    (expected,) = echoes(single)
    assert expected.logprobs is not None
    assert len(expected.logprobs) == 70
    assert [echo.logprobs for echo in echoes(triple)] == [expected.logprobs] * 3


def test_preempted_choices_have_the_same_bits(tiny_parts: EngineParts) -> None:
    """In half the cache that they want, choices of shared prompts are what they are with room."""
    requests = [message(prompt_of(50, seed), replace(SEEDED, n=3, max_tokens=40)) for seed in (1, 1, 2)]
    roomy = Server(tiny_parts).serve_all(requests)
    for prefix_cache in (True, False):
        # The other scheduler starts no more than will fit, and so has nothing to preempt.
        room = blocks(tiny_parts, 12)
        tight = Server(tiny_parts, FirstComeScheduler, cache_bytes=room, prefix_cache=prefix_cache)
        served = tight.serve_all(requests)
        assert tight.engine.counters.num_preemptions > 0
        assert [each.choices for each in served] == [each.choices for each in roomy]


@pytest.mark.parametrize("n", [1, 3])
def test_another_tenants_prompt_costs_what_a_new_prompt_costs(tiny_parts: EngineParts, n: int) -> None:
    """Step by step the same rows are computed, whether another salt has the prompt in the cache or nobody."""
    server, params = Server(tiny_parts, max_prefill_chunk=48), replace(SEEDED, n=n)
    secret, other = prompt_of(200, seed=3), prompt_of(200, seed=4)
    server.serve(secret, params, salt="victim")
    guess, control = (server.serve(prompt, params, salt="attacker") for prompt in (secret, other))
    assert guess.num_cached_tokens == control.num_cached_tokens == 0
    assert guess.rows == control.rows
    assert server.serve(secret, params, salt="victim").num_cached_tokens == 192


def test_counters_count_tokens_once_a_request(tiny_parts: EngineParts) -> None:
    """Queries and hits are prompt tokens of requests, however many choices; evictions are blocks."""
    server = Server(tiny_parts, cache_bytes=blocks(tiny_parts, 8))
    first, second = prompt_of(100, seed=5), prompt_of(100, seed=6)
    params = replace(GREEDY, max_tokens=1)
    server.serve(first, replace(params, n=2))
    server.serve(first, params)
    counters = server.engine.counters
    assert (counters.num_queried_tokens, counters.num_cached_tokens, counters.num_evictions) == (200, 96, 0)
    assert server.engine.pool.num_cached == 6
    server.serve(second, params)
    assert (counters.num_queried_tokens, counters.num_cached_tokens, counters.num_evictions) == (300, 96, 5)
    assert server.engine.pool.num_cached == 7


def test_a_fault_leaves_nothing_to_be_found(tiny_parts: EngineParts) -> None:
    """After a request whose logits were not finite the same prompt is computed anew, and answered as ever."""
    server, prompt = Server(tiny_parts), prompt_of(80, seed=7)
    healthy = Server(tiny_parts).serve(prompt, GREEDY)
    server.serve(prompt, GREEDY)
    run = server.engine._runner.run
    server.engine._runner.run = lambda step: run(step) * torch.nan  # type: ignore[method-assign]  # the fault
    assert isinstance(server.serve(prompt, GREEDY).events[-1], RequestFault)
    server.engine._runner.run = run  # type: ignore[method-assign]  # the fault is over
    assert server.engine.pool.num_cached == 0
    again = server.serve(prompt, GREEDY)
    assert (again.num_cached_tokens, again.choices) == (0, healthy.choices)


def test_held_choices_end_with_their_request(tiny_parts: EngineParts) -> None:
    """A client that leaves, or a fault, while choice 0 runs the prompt leaves no choice and no block."""
    server, params = Server(tiny_parts, max_prefill_chunk=16), replace(SEEDED, n=3)
    request = server.add(message(prompt_of(80, seed=8), params))
    server.engine.step()
    assert [seq.status for seq in request.sequences[1:]] == [SequenceStatus.HELD] * 2
    server.engine.abort(request.key)
    run = server.engine._runner.run
    server.engine._runner.run = lambda step: run(step) * torch.nan  # type: ignore[method-assign]  # the fault
    assert isinstance(server.serve(prompt_of(40, seed=9), params).events[-1], RequestFault)
    assert not server.engine.has_work
    assert {seq.status for seq in request.sequences} == {SequenceStatus.FINISHED}
