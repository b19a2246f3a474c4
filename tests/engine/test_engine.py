"""The engine with the real model: answers do not depend on company or chunks, and end where they should."""

from __future__ import annotations

import pytest
import torch

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.output_lengths import UNKNOWN_OUTPUT
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.errors import DeadlineExceeded, RequestFault
from surefoot.backends.types import FinishReason, SamplingParams

from .harness import Answer, make_engine, raw_logits, run

TEXT = (
    "The history of the lighthouse begins with fires built on hilltops, since a raised fire is seen from"
    " farther away. Merchants paid for the first towers; later the ports did, and at last the states. A lamp"
    " burned oil, then gas, then an electric arc, and lenses of many rings bent its light into a beam."
)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is photosynthesis?\nA:",
    "Once upon a time, in a village by the sea, there lived",
    "1, 2, 3, 4, 5,",
    "The three laws of motion state that " * 8,
    "Ingredients: flour, sugar, butter, eggs.\nMethod:",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.9, seed=1234, top_p=0.95, max_tokens=24)


def test_chunks_change_no_bit(parts: EngineParts) -> None:
    """Logits have the same bits however a text is cut into steps."""
    token_ids = parts.loaded.tokenizer.encode(TEXT * 5)
    whole = raw_logits(make_engine(parts), parts, token_ids)
    for chunk in (1, 7, 100):
        assert torch.equal(raw_logits(make_engine(parts, max_prefill_chunk=chunk), parts, token_ids), whole)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_company_changes_no_token(parts: EngineParts, params: SamplingParams) -> None:
    """Answers are the same alone and among 16 others that start with them."""
    requests = [(prompt, params) for prompt in PROMPTS[:4]]
    company = [
        (prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=20))
        for i, prompt in enumerate(PROMPTS * 2)
    ]
    alone = [run(make_engine(parts), parts, [request])[0] for request in requests]
    accompanied = run(make_engine(parts), parts, [*company[:8], *requests, *company[8:]])[8:12]
    assert [each.chunks for each in accompanied] == [each.chunks for each in alone]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chunks_change_no_token(parts: EngineParts, params: SamplingParams) -> None:
    """An answer is the same for prefill chunks of 16, 100 and 512 tokens."""
    request = ((TEXT + "\n\n" + PROMPTS[6]) * 3, params)
    answers = [
        run(make_engine(parts, max_prefill_chunk=chunk), parts, [request])[0] for chunk in (16, 100, 512)
    ]
    assert answers[0].chunks == answers[1].chunks == answers[2].chunks


@pytest.mark.parametrize("make", [FirstComeScheduler, PromiseScheduler])
def test_preemption_changes_no_token(parts: EngineParts, make: MakeScheduler) -> None:
    """With too small a cache sequences are preempted, all end, and answers stay the same."""
    requests = [
        (prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)) for prompt in PROMPTS[:4]
    ]
    roomy = run(make_engine(parts), parts, requests)
    config = parts.loaded.model.config
    block = 16 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * parts.cache_dtype.itemsize
    engine = make_engine(parts, cache_bytes=6 * block, max_sequences=8, make_scheduler=make)
    # Answers have been short so far, so that more start than can end.
    short = (PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=1))
    run(engine, parts, [short] * 4)
    tight = run(engine, parts, requests)
    assert engine.counters.num_preemptions > 0
    assert [answer.chunks for answer in tight] == [answer.chunks for answer in roomy]


def test_promises_change_no_token(parts: EngineParts) -> None:
    """Priorities, targets, pauses and preemptions for a place decide when tokens come, never which."""
    requests = [(prompt, SEEDED) for prompt in PROMPTS]
    promises = [
        {"priority": priority, "flow": str(number), "ttft_target_s": ttft_s, "tpot_target_s": tpot_s}
        for number, (priority, ttft_s, tpot_s) in enumerate(
            [(0, None, None), (200, 0.001, 0.001), (100, 5.0, None), (0, None, 0.5)] * 2
        )
    ]
    equal = run(make_engine(parts), parts, requests)
    engine = make_engine(parts, max_sequences=3)
    unequal = run(engine, parts, requests, promises)
    assert [answer.chunks for answer in unequal] == [answer.chunks for answer in equal]


def test_steps_teach_the_cost_model(parts: EngineParts) -> None:
    """Warm-up fits what steps cost here, serving goes on learning, and both leave nothing behind."""
    engine = make_engine(parts)
    engine.warm_up()
    fitted = engine.costs.cost
    assert fitted != StepCost()
    assert engine.counters.num_steps == engine.pool.num_used == 0
    assert engine.scheduler.lengths.mean(0) == UNKNOWN_OUTPUT
    run(engine, parts, [(PROMPTS[0], GREEDY)])
    assert engine.costs.cost != fitted
    counters = engine.counters
    assert counters.num_rows == len(parts.loaded.tokenizer.encode(PROMPTS[0])) + counters.num_steps - 1
    assert counters.num_sequence_steps == counters.num_steps
    assert min(counters.predicted_s, counters.measured_s) > 0


def test_choices_differ_and_repeat(parts: EngineParts) -> None:
    """The same seed gives the same answer again; another seed or choice gives another one."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=16)
    first, again = (run(make_engine(parts), parts, [(PROMPTS[4], params)])[0] for _ in range(2))
    other = run(
        make_engine(parts), parts, [(PROMPTS[4], SamplingParams(temperature=1.0, seed=6, max_tokens=16))]
    )[0]
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


def finish(answer: Answer) -> FinishReason | None:
    """How the answer ended."""
    return answer.chunks[-1].finish_reason


def test_length_limit(parts: EngineParts) -> None:
    """`max_tokens` ends an answer with reason length; so does the context."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    answer = run(make_engine(parts), parts, [(PROMPTS[0], params)])[0]
    assert (len(answer.token_ids), finish(answer)) == (5, FinishReason.LENGTH)
    unlimited = SamplingParams(temperature=0.0, ignore_eos=True)
    num_prompt = len(parts.loaded.tokenizer.encode(PROMPTS[0]))
    answer = run(make_engine(parts, max_model_len=20), parts, [(PROMPTS[0], unlimited)])[0]
    assert (len(answer.token_ids), finish(answer)) == (20 - num_prompt, FinishReason.LENGTH)


def test_stop_strings_and_ids(parts: EngineParts) -> None:
    """A stop string that spans tokens, and a stop id, end the answer before themselves."""
    free = run(make_engine(parts), parts, [(PROMPTS[5], SamplingParams(temperature=0.0, max_tokens=12))])[0]
    assert free.text.startswith(" 6, 7, 8")
    stopped = run(
        make_engine(parts),
        parts,
        [(PROMPTS[5], SamplingParams(temperature=0.0, max_tokens=12, stop=(", 8",)))],
    )[0]
    assert (stopped.text, finish(stopped)) == (" 6, 7", FinishReason.STOP)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    stop_id = free.token_ids[2]
    by_id = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop_id,))
    answer = run(make_engine(parts), parts, [(PROMPTS[5], by_id)])[0]
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop_id)]
    assert finish(answer) == FinishReason.STOP


def test_min_tokens_puts_the_end_off(parts: EngineParts) -> None:
    """Neither end token, stop id nor stop string ends an answer before `min_tokens`."""
    free = run(make_engine(parts), parts, [(PROMPTS[5], SamplingParams(temperature=0.0, max_tokens=12))])[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=12, min_tokens=8, stop_token_ids=(free.token_ids[0],), stop=(",",)
    )
    assert len(run(make_engine(parts), parts, [(PROMPTS[5], params)])[0].token_ids) >= 7


def test_penalties_and_bias(parts: EngineParts) -> None:
    """A bias of -100 removes a token, +100 forces it; penalties make repetition rarer."""
    base = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    free = run(make_engine(parts), parts, [(PROMPTS[6], base)])[0]
    banned = free.token_ids[0]
    without = SamplingParams(temperature=0.0, max_tokens=16, logit_bias={banned: -100.0})
    assert banned not in run(make_engine(parts), parts, [(PROMPTS[6], without)])[0].token_ids
    forced = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={banned: 100.0})
    assert run(make_engine(parts), parts, [(PROMPTS[6], forced)])[0].token_ids == [banned] * 4
    for penalty in ({"repetition_penalty": 1.8}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **penalty)
        plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        penalised, unpenalised = run(make_engine(parts), parts, [(PROMPTS[5], params), (PROMPTS[5], plain)])
        assert len(set(penalised.token_ids)) > len(set(unpenalised.token_ids)), penalty


@pytest.mark.parametrize("temperature", [1e-21, 1e-37, 1e-40, 1e-45, 5e-324])
def test_a_temperature_near_zero_is_greedy(parts: EngineParts, temperature: float) -> None:
    """A temperature that float32 cannot divide by gives the greedy answer, and no other token."""
    requests = [(PROMPTS[0], SamplingParams(temperature=t, max_tokens=4)) for t in (0.0, temperature)]
    greedy, nearly = run(make_engine(parts), parts, requests)
    assert nearly.token_ids == greedy.token_ids


def test_logprobs_are_raw(parts: EngineParts) -> None:
    """Log-probabilities are of the model's own distribution, whatever the sampling parameters."""
    hot = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, logit_bias={260: 100.0})
    answer = run(make_engine(parts), parts, [(PROMPTS[0], hot)])[0]
    prompt = parts.loaded.tokenizer.encode(PROMPTS[0])
    rows = raw_logits(make_engine(parts), parts, [*prompt, *answer.token_ids])[
        len(prompt) - 1 : -1
    ].log_softmax(-1)
    entries = [entry for chunk in answer.chunks for entry in chunk.logprobs or ()]
    assert [entry.token_id for entry in entries] == answer.token_ids
    for row, entry in zip(rows, entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        assert [top.token_id for top in entry.top] == row.topk(3).indices.tolist()


def test_one_faulty_row_ends_one_request(parts: EngineParts) -> None:
    """When the logits of one sequence are not finite, its neighbours' answers do not change."""
    requests = [(prompt, GREEDY) for prompt in PROMPTS[:3]]
    healthy = run(make_engine(parts), parts, requests)
    engine = make_engine(parts)
    real_run = engine._runner.run

    def poisoned(step: object) -> torch.Tensor:
        logits = real_run(step).clone()  # type: ignore[arg-type]  # passed through
        if len(logits) == 3:
            logits[1] = torch.nan
        return logits

    engine._runner.run = poisoned  # type: ignore[method-assign]  # the fault under test
    answers = run(engine, parts, requests)
    assert isinstance(answers[1].error, RequestFault)
    assert [answers[i].token_ids for i in (0, 2)] == [healthy[i].token_ids for i in (0, 2)]


def test_a_deadline_ends_a_request(parts: EngineParts) -> None:
    """A request whose deadline has passed gets `DeadlineExceeded`, and its blocks are free."""
    from surefoot.backends.types import GenerateRequest, TokenPrompt

    engine = make_engine(parts)
    message = GenerateRequest(
        request_id="late",
        model="",
        prompt=TokenPrompt((1,)),
        params=SamplingParams(ignore_eos=True),
        deadline_s=60.0,
    )
    now = engine._clock()
    engine.submit(message, (1,), key=0)
    assert not any(isinstance(output.event, DeadlineExceeded) for output in engine.step())
    engine._clock = lambda: now + 61.0
    outputs = engine.step()
    assert [type(output.event) for output in outputs] == [DeadlineExceeded]
    assert engine.pool.num_used == 0
