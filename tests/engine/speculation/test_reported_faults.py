"""Faults of speculation that users of other engines reported, as kinds: they are impossible here."""

from __future__ import annotations

import json

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.types import SamplingParams, SpeculationUsage

from .test_engine_with_drafts import DRAFTS, REPEATING, Answer, add, finish, make_engine

FACT = "The combination of the blue locker in the east wing is"
CALL = '{"name": "find_train", "arguments": {"origin":'
TALK = (
    "Tools: find_train(origin, destination, day), find_hotel(city, day, nights)\n"
    "User: I go from Lyon to Turin on Friday.\n"
    'Call: {"name": "find_train", "arguments": {"origin": "Lyon", "destination": "Turin", "day": "Friday"}}\n'
    f"User: I go from Basel to Milan on Monday.\nCall: {CALL}"
)


def warehouse(num_days: int) -> str:
    """A long prompt that asks for a fact from its beginning."""
    lines = [
        f"Day {day}: the crew counted {day * 37 % 91} boxes and {day * 53 % 67} barrels in hall {day % 7}."
        for day in range(num_days)
    ]
    lines.insert(5, f"{FACT} 58-31-94-07.")
    return "Notes of the warehouse.\n" + "\n".join(lines) + f"\nEnd of the notes.\n\n{FACT}"


def usage_of(answer: Answer) -> SpeculationUsage:
    """How the answer's drafts fared."""
    assert answer.finished is not None
    return answer.finished.speculation or SpeculationUsage()


def test_long_prompts_lookups_and_calls(parts: EngineParts) -> None:
    """With drafts, greedy answers to a prompt of 3,000 tokens that asks for an early fact, and to one that
    makes a tool call, are what they are without, token for token (vLLM 40831, 53180).
    """
    params = SamplingParams(temperature=0.0, max_tokens=32)
    engine = make_engine(parts)
    answers = []
    for plan in (None, DRAFTS):
        asked = [add(engine, parts, prompt, params, plan) for prompt in (warehouse(130), TALK)]
        answers.append(finish(engine, asked))
    plain, drafted = answers
    for without, drafts in zip(plain, drafted, strict=True):
        assert (drafts.text, drafts.token_ids, drafts.ends) == (without.text, without.token_ids, without.ends)
        assert usage_of(drafts).num_accepted_tokens >= 8
    assert plain[0].finished is not None
    assert plain[0].finished.usage.num_prompt_tokens > 2900
    assert drafted[0].text[0].startswith(" 58-31-94-07.")
    call = json.loads(CALL + drafted[1].text[0].split("\n")[0])
    assert call["arguments"].keys() == {"origin", "destination", "day"}


def test_acceptance_after_a_pause(parts: EngineParts) -> None:
    """When drafts are forced to none for a while in the middle of an answer, acceptance afterwards is what it
    would have been (TensorRT-LLM PR 16888, vLLM 47930).
    """
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    shares, texts = [], []
    for pause in (range(0), range(6, 26)):
        engine = make_engine(parts)
        request = add(engine, parts, REPEATING, params, DRAFTS)
        answer, step = Answer(1), 0
        while engine.has_work:
            engine.speculator.controller.ceiling = 0 if step in pause else 16
            for output in engine.step():
                answer.observe(output.event)
            step += 1
        assert request.is_finished
        usage = usage_of(answer)
        shares.append(usage.num_accepted_tokens / usage.num_draft_tokens)
        texts.append(answer.text)
    assert texts[1] == texts[0]
    assert shares[1] >= shares[0] - 0.1
