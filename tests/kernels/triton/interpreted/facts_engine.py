"""The whole engine on the Triton ops: scheduler, cache, drafts, sampling, and the runner for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.device import Called
from surefoot.backends.engine.device_runner import DeviceRunner
from surefoot.backends.engine.prepare import load_model
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.backends.types import CachePlan, SamplingParams, ServingPlan, SpeculationPlan
from surefoot.bench.device_loads import verification_step
from surefoot.bench.device_model import TINY, random_model
from surefoot.kernels.base import Ops
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton import linear
from surefoot.kernels.triton.ops import TritonOps

from ....engine.serving import Served, Server, message, prompt_of
from ....engine.tiny_models import tiny_hf_model, write_gguf

DRAFTS = SpeculationPlan(max_draft=4, proposers=("prediction",))
PROMPT = prompt_of(52)


def plan(cache_format: str, *, drafts: bool = False) -> ServingPlan:
    """A format whose window is short enough for the prompt."""
    return ServingPlan(
        name=cache_format,
        cache=CachePlan(format=cache_format, sinks=4, recent=16),  # type: ignore[arg-type]
        speculation=DRAFTS if drafts else SpeculationPlan(),
    )


def parts_of(file: Path, ops: Ops, dtype: torch.dtype) -> EngineParts:
    """Weights and cache in `dtype`."""
    mode = WeightMode.FLOAT32 if dtype == torch.float32 else WeightMode.BFLOAT16
    loaded = load_model(file, mode=mode, ops=ops, cache_dir=file.parent, progress=print)
    return EngineParts(loaded=loaded, ops=ops, cache_dtype=dtype)


def answers(parts: EngineParts, predictions: list[list[int]]) -> tuple[list[list[int]], Server]:
    """A prompt in chunks, which then becomes a prefix, beside another in a quantised format; each drafted
    from a prediction.
    """
    server = Server(parts, max_prefill_chunk=40, cache_bytes=1 << 22, max_sequences=4, max_batched_tokens=64)
    server.engine.costs.frozen = True
    server.engine.costs.refit(StepCost(fixed_s=1.0, row_s=1e-9, further_row_s=1e-9, sequence_s=0.0))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = [server.serve(PROMPT, params).choices[0][0]]
    requests = [
        server.add(message(PROMPT[:32] + PROMPT[40:], params, plan=plan("k16v16", drafts=True))),
        server.add(message(PROMPT[8:], params, plan=plan("k8v4", drafts=True))),
    ]
    for request, prediction in zip(requests, predictions, strict=False):
        request.prediction_token_ids = tuple(prediction)
    served = server.finish({request.key: Served([], []) for request in requests})
    assert requests[0].num_cached_tokens == 32
    return found + [each.choices[0][0] for each in served], server


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers, with norms of heads."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    write_gguf(path, tiny_hf_model("qwen3", num_hidden_layers=2, **heads))
    return path


@pytest.mark.parametrize(("dtype", "batch_invariant"), [(torch.float32, False), (torch.bfloat16, True)])
def test_the_engine_gives_the_references_tokens(
    file: Path, dtype: torch.dtype, batch_invariant: bool
) -> None:
    """A quantised cache, drafts, prompts in chunks and a prefix hit: greedy tokens are those of the reference
    ops on the runner of a CPU, and some of the drafts are accepted.
    """
    expected, _ = answers(parts_of(file, ReferenceOps(), dtype), [])
    ops = TritonOps(dtype, batch_invariant=batch_invariant)
    actual, server = answers(parts_of(file, ops, dtype), expected[1:])
    assert actual == expected
    assert isinstance(server.engine._runner, DeviceRunner)
    drafts = server.engine.speculator.counters.by_source.values()
    assert sum(counts.num_accepted_tokens for counts in drafts) > 3
    assert server.engine.counters.num_demoted_tokens["k8v4"] > 0


def test_invariant_steps_have_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch-invariant products none is the library's, and a row's logits have the same bits whoever
    shares its step and whatever bucket that is padded to, before and after its sequence has a past.
    """
    monkeypatch.setattr(linear.F, "linear", None)
    ops = TritonOps(batch_invariant=True)
    model = random_model(TINY, ops, torch.device("cpu"), torch.bfloat16).model
    settings = EngineSettings(cache_bytes=1 << 20, max_sequences=4, max_batched_tokens=16)
    logits = []
    for num_others in (0, 1, 2):
        runner = DeviceRunner(model, ops, settings, torch.bfloat16, Called)
        others = [5] * num_others
        prompt = verification_step([0] * (1 + num_others), [3, *others])
        logits.append([runner.run(prompt)[:3].clone()])
        runner.commit(prompt)
        step = verification_step([3, *others], [1] * (1 + num_others))
        logits[-1].append(runner.run(step)[:1].clone())
    for alone, together in zip(logits[0] * 2, logits[1] + logits[2], strict=True):
        assert torch.equal(alone, together)
