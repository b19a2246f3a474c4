"""The runner for GPUs, as far as a CPU can tell: its padding, its programs, its one look at results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from surefoot.backends.engine import device_runner, start
from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.device import (
    CPU,
    Called,
    Memory,
    capture_on,
    find_device,
    measure_memory,
)
from surefoot.backends.engine.device_runner import DeviceRunner, bytes_of_block, make_runner
from surefoot.backends.engine.model_errors import DeviceNotFound
from surefoot.backends.engine.prepare import load_model
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.start import EngineOptions, cost_file, engine_settings
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.backends.errors import BackendError
from surefoot.backends.types import (
    CachePlan,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    SpeculationPlan,
    TokenPrompt,
)
from surefoot.kernels.reference import ReferenceOps

from .serving import Served, Server, message, prompt_of
from .tiny_models import tiny_hf_model, write_gguf

DRAFTS = SpeculationPlan(max_draft=6, proposers=("prediction", "ngram"))


class AsynchronousOps(ReferenceOps):
    """The reference, treated as if it ran on a GPU."""

    is_asynchronous = True


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineParts, EngineParts]:
    """A tiny model with the reference ops: on the runner of a CPU, and on that of a GPU."""
    folder = tmp_path_factory.mktemp("pair")
    write_gguf(folder / "tiny.gguf", tiny_hf_model("qwen3"))
    return tuple(  # type: ignore[return-value]
        EngineParts(
            loaded=load_model(
                folder / "tiny.gguf", mode=WeightMode.FLOAT32, ops=ops, cache_dir=folder, progress=print
            ),
            ops=ops,
            cache_dtype=torch.bfloat16,
        )
        for ops in (ReferenceOps(), AsynchronousOps())
    )


def ask(seed: int, cache_format: str, *, drafts: bool = False, max_tokens: int = 30) -> GenerateRequest:
    """A greedy request of its own prompt."""
    plan = ServingPlan(
        name=cache_format,
        cache=CachePlan(format=cache_format, sinks=4, recent=32),  # type: ignore[arg-type]
        speculation=DRAFTS if drafts else SpeculationPlan(),
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return message(prompt_of(60 + 7 * seed, seed % 3), params, plan=plan)


def tokens(served: list[Served]) -> list[list[int]]:
    """Of each answer."""
    return [each.choices[0][0] for each in served]


def test_answers_are_those_of_the_other_runner(pair: tuple[EngineParts, EngineParts]) -> None:
    """Padded steps, programs and packed metadata change no token: batches that grow and shrink, formats
    mixed, drafts, prompts in chunks and from the prefix cache.
    """
    kinds = ("k16v16", "k4v4", "k8v4", "k16v16", "k8v8")
    requests = [ask(i, kind, drafts=i % 2 == 1, max_tokens=12 + 9 * i) for i, kind in enumerate(kinds)]
    answers = []
    for parts in pair:
        server = Server(parts, max_prefill_chunk=48, max_batched_tokens=64)
        answers.append(tokens([*server.serve_all(requests), *server.serve_all(requests[:2])]))
        runner = server.engine._runner
    assert answers[0] == answers[1]
    assert isinstance(runner, DeviceRunner)
    assert sum(program is not None for program in runner._programs.values()) > 5


def test_a_draft_model_runs_there_too(pair: tuple[EngineParts, EngineParts]) -> None:
    """A model that drafts for itself is right nearly always, and changes no token; both share the cache."""
    plan = ServingPlan(name="draft", speculation=SpeculationPlan(max_draft=4, proposers=("draft",)))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    requests = [message(prompt_of(30 + i, i), params, plan=plan) for i in range(3)]
    alone = tokens(Server(pair[0]).serve_all(requests))
    server = Server(replace(pair[1], draft=pair[1].loaded))
    server.engine.warm_up()
    drafter = server.engine.speculator.draft_model
    assert drafter is not None
    for costs in (server.engine.costs, drafter.costs):
        costs.frozen = True
        costs.refit(StepCost(fixed_s=1.0 if costs is server.engine.costs else 1e-9, row_s=1e-9))
    assert tokens(server.serve_all(requests)) == alone
    (counts,) = server.engine.speculator.counters.by_source.values()
    assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens > 40
    assert isinstance(drafter._runner, DeviceRunner)


def test_a_size_is_captured_when_it_comes_again(pair: tuple[EngineParts, EngineParts]) -> None:
    """Sizes of decoding in full precision are captured at the start, others at their second step."""
    server = Server(pair[1], max_sequences=4, max_batched_tokens=64)
    runner = server.engine._runner
    assert isinstance(runner, DeviceRunner)
    assert [size.num_rows for size in runner._programs] == [4, 2, 1]
    captured = []
    runner._capture = lambda run: captured.append(run) or Called(run)  # type: ignore[func-returns-value]
    server.serve_all([ask(0, "k16v16", max_tokens=4)])
    assert captured == []
    server.serve_all([ask(0, "k4v4", max_tokens=3)])  # the first token comes from the prompt's step
    assert len(captured) == 1


def test_a_fault_stays_its_own_where_logits_are_seen_late(pair: tuple[EngineParts, EngineParts]) -> None:
    """Where all rows are sampled before any is checked, a request whose logits are not finite fails alone."""
    server = Server(pair[1])
    alone = tokens(server.serve_all([ask(0, "k16v16")]))
    requests = [server.add(ask(i, "k16v16")) for i in range(2)]
    run = server.engine._runner.run

    @torch.inference_mode()
    def faulty(step: object) -> torch.Tensor:
        logits = run(step)  # type: ignore[arg-type]
        if len(logits) == 2:
            logits[1] = math.nan
        return logits

    server.engine._runner.run = faulty  # type: ignore[method-assign]
    good, bad = server.finish({request.key: Served([], []) for request in requests})
    assert tokens([good]) == alone
    assert isinstance(bad.events[-1], BackendError)


LOOKS = {"tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "__bool__", "__int__", "__float__"}
"""What makes the host wait for a GPU, and indexing by a mask beside them."""


def noting(looks: list[str]) -> type[torch.Tensor]:
    """A kind of tensor that stands for what lies on a GPU, as does all that is computed of it: who looks at
    its numbers is noted.
    """

    class OnDevice(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            is_masked = func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) == torch.bool
            if func.__name__ in LOOKS or is_masked:
                looks.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    return OnDevice


class DeviceOps:
    """An op set whose results lie on a GPU; what goes on inside its ops is not looked at."""

    def __init__(self, ops: AsynchronousOps, kind: type[torch.Tensor]) -> None:
        self._ops, self._kind = ops, kind

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if not callable(op):
            return op

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                result = op(*args, **kwargs)
            return result.as_subclass(self._kind) if isinstance(result, torch.Tensor) else result

        return run


def looks_by_step(parts: EngineParts, requests: list[GenerateRequest]) -> list[int]:
    """How often the host looks at what would lie on a GPU, in each step that serves them."""
    looks: list[str] = []
    kind = noting(looks)
    ops, model = DeviceOps(AsynchronousOps(), kind), copy(parts.loaded.model)
    model._ops = ops  # type: ignore[assignment]
    parts = replace(parts, ops=ops, loaded=replace(parts.loaded, model=model))
    engine = Server(parts, max_prefill_chunk=48, max_batched_tokens=64).engine
    for name in ("_words", "_cache", "_step_k", "_step_v", "_logits"):
        setattr(engine._runner, name, getattr(engine._runner, name).as_subclass(kind))
    for key, each in enumerate(requests):
        assert isinstance(each.prompt, TokenPrompt)
        engine.submit(each, each.prompt.token_ids, key=key)
    counts = []
    while engine.has_work:
        looks.clear()
        engine.step()
        counts.append(len(looks))
    return counts


def test_a_step_looks_once(pair: tuple[EngineParts, EngineParts]) -> None:
    """The host looks at a GPU's numbers once a step, for the sampled tokens, whatever requests ask for:
    chunks, drafts, formats that are demoted, filters, penalties, biases.
    """
    wishes = SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias={5: 2.0},
        min_tokens=4,
        max_tokens=30,
        ignore_eos=True,
    )
    plain, *others = (ask(i, own, drafts=True) for i, own in enumerate(("k16v16", "k4v4", "k8v4")))
    counts = looks_by_step(pair[1], [plain, *(replace(each, params=wishes) for each in others)])
    assert set(counts) == {0, 1}  # none where a step has but chunks of prompts


def test_log_probabilities_are_one_more_look(pair: tuple[EngineParts, EngineParts]) -> None:
    """A token's log-probability and those of the likeliest beside it come in one piece."""
    wishes = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
    assert looks_by_step(pair[1], [replace(ask(0, "k16v16"), params=wishes)]) == [0, *[2] * 5]


def test_the_largest_step_runs(pair: tuple[EngineParts, EngineParts]) -> None:
    """What the memory of a step is measured with is a step that runs."""
    runner = Server(pair[1], max_batched_tokens=64).engine._runner
    assert isinstance(runner, DeviceRunner)
    runner.run_largest()


def test_a_cache_has_what_steps_leave() -> None:
    """A step's memory counts twice, as graphs have their own, and a twentieth of the device is left alone."""
    assert Memory(total=1000, free=900, peak=100).for_cache == 650
    assert Memory(total=1000, free=100, peak=100).for_cache == 0


@pytest.mark.parametrize("beside", [0, 96])
def test_a_cache_is_sized_by_what_the_largest_step_leaves(
    pair: tuple[EngineParts, EngineParts], monkeypatch: pytest.MonkeyPatch, beside: int
) -> None:
    """Where no size is said, the largest step runs beside the step buffer and a cache of one block; the cache
    is what that leaves, less what a draft model's takes. Where nothing is left the start says so.
    """
    model, settings = pair[1].loaded.model, EngineSettings(cache_bytes=None, max_batched_tokens=64)
    memory = Memory(total=1 << 20, free=1 << 20, peak=1 << 16)
    profiled = []

    def measured(run: Any, device: torch.device) -> Memory:
        runner = run.__self__
        assert run.__name__ == "run_largest"
        run()
        profiled.append((device, runner.num_blocks, runner._step_k.shape[1], runner._step_v.shape[1]))
        return memory

    monkeypatch.setattr(device_runner, "measure_memory", measured)
    runner = make_runner(model, AsynchronousOps(), settings, torch.bfloat16, block_bytes_beside=beside)
    assert profiled == [(CPU, 1, 64, 64)]
    block_bytes = bytes_of_block(model, torch.bfloat16)
    assert runner.num_blocks == memory.for_cache // (block_bytes + beside) > 1
    assert runner._cache.numel() == runner.num_blocks * block_bytes
    memory = Memory(total=1 << 20, free=1 << 17, peak=1 << 16)
    with pytest.raises(ValueError, match=r"a step can take 65536 bytes, .* only 131072 are free"):
        make_runner(model, AsynchronousOps(), settings, torch.bfloat16)


class FakeCuda:
    """Stands in for torch.cuda, and notes in what order it is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.peak = 0
        for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, self._noting(name))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + self.peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        stream = SimpleNamespace(wait_stream=self._noting("wait"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._within("side"))
        monkeypatch.setattr(
            torch.cuda, "graph", lambda graph, pool, stream: self._within(f"capture in {pool}")
        )
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=self._noting("replay")))

    def _noting(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append(name)

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.calls.append(f"{name} begins")
        yield
        self.calls.append(f"{name} ends")


def test_a_graph_is_captured_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function runs on a side stream, which waits and is waited for, and then once more to be captured, in
    the pool of all graphs. A replay is one call and gives the captured result.
    """
    cuda = FakeCuda(monkeypatch)
    program = capture_on(torch.device("cuda", 0))(lambda: cuda.calls.append("run") or torch.ones(1))  # type: ignore[func-returns-value]
    assert cuda.calls == [
        *("wait", "side begins", "run", "side ends", "wait"),
        *("capture in (0, 1) begins", "run", "capture in (0, 1) ends"),
    ]
    assert program.replay().item() == 1.0
    assert cuda.calls[8:] == ["replay"]


def test_memory_is_measured_at_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run loads what stays; the peak is the second's, and what is free is asked last of all."""
    cuda = FakeCuda(monkeypatch)

    def run() -> None:
        cuda.calls.append("run")
        cuda.peak = 50

    assert measure_memory(run, torch.device("cuda", 0)) == Memory(total=1000, free=700, peak=50)
    assert cuda.calls == [
        *("run", "synchronize", "reset_peak_memory_stats", "run", "synchronize", "empty_cache"),
    ]


def test_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`auto` takes a GPU that computes in bfloat16. Its cache is measured later, and its step costs are kept
    apart from the CPU's.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for is_able, kind in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda able=is_able, **_: able)
        assert find_device("auto").type == kind
    options = EngineOptions(model=tmp_path, model_id="m", cache_dir=tmp_path, device=find_device("cuda"))
    assert engine_settings(options).cache_bytes is None
    assert cost_file(options).name == "step-cost-m-native-cuda.json"
    invariant = replace(options, batch_invariant=True)
    assert cost_file(invariant).name == "step-cost-m-native-cuda-batch-invariant.json"


def test_a_start_says_what_it_computes_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The log names the GPU and its op set, and whether matrix products are batch-invariant."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(start, "_load", lambda *_: None)
    options = EngineOptions(
        model=tmp_path, model_id="m", cache_dir=tmp_path, device=torch.device("cuda", 0), threads=1
    )
    for chosen, name in ((False, "triton"), (True, "triton (batch-invariant)")):
        said: list[str] = []
        parts = start.load_parts(replace(options, batch_invariant=chosen), said.append)
        assert f"Computing with the op set {name} on cuda:0 (NVIDIA H200)." in said
        assert parts.ops.name == name


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Without a GPU `auto` is the CPU, and asking for one says what is missing and what to do."""
    assert not torch.cuda.is_available()
    assert find_device("auto") == find_device("cpu") == CPU
    with pytest.raises(DeviceNotFound, match=r"sees no GPU .* or set device = cpu"):
        find_device("cuda")
