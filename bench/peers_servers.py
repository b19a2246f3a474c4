"""Who is compared, and how each is started: the settings that serve it best, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from msgspec import Struct

from .errors import BenchError
from .peers_llama import find_llama_server, llama_version
from .peers_loads import PeerLoad, peer_loads
from .served import ServerJob

OURS = "surefoot"
LLAMA = "llama.cpp"
TRANSFORMERS = "transformers"
VLLM = "vLLM"

MAX_STREAMS = 32
LLAMA_CONTEXT_UNIT = 256
"""llama-server rounds a slot's context up to this."""
CONTEXT_SPARE = 64
"""Tokens beside prompt and answer: prompts of a wanted length are a few tokens off."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PeersJob(ServerJob):
    """What to measure, and where to put it."""

    rounds: Annotated[int, Parameter(help="Rounds of each in turn")] = 3
    output_tokens: Annotated[int, Parameter(help="Length of answers")] = 128
    prefill_tokens: Annotated[int, Parameter(help="Prompt whose prefill is measured")] = 512
    past_tokens: Annotated[int, Parameter(help="Prompt after which one stream is measured")] = 2048
    peers_venv: Annotated[Path, Parameter(help="Environment that `make peers` made")] = Path(".venv-peers")
    surefoot_args: Annotated[str, Parameter(help="Further flags for surefoot serve")] = ""
    llama_args: Annotated[str, Parameter(help="Further flags for llama-server")] = ""
    transformers: Annotated[bool, Parameter(help="Measure transformers too")] = True
    transformers_dtype: Annotated[
        Literal["bfloat16", "float32"], Parameter(help="What transformers computes in")
    ] = "bfloat16"
    folder: Annotated[Path | None, Parameter(help="Write peers.json and peers.svg into this folder")] = None

    def loads(self) -> tuple[PeerLoad, ...]:
        """All that is measured."""
        return peer_loads(self.output_tokens, self.prefill_tokens, self.past_tokens)


class Launch(Struct, frozen=True, kw_only=True):
    """One start of a server, and the loads that it gets. The port is added to the command."""

    command: list[str]
    loads: tuple[PeerLoad, ...]

    def described(self) -> str:
        """The command without the machine's folders."""
        return " ".join(re.sub(r"(^|=)/.*/", r"\1", part) for part in self.command)


class PeerServer(Struct, frozen=True, kw_only=True):
    """A server that takes `--port` and speaks the OpenAI API.

    `may_fail`: if it does not start it is left out, with the reason, and the measurement goes on.
    """

    name: str
    version: str
    launches: tuple[Launch, ...]
    ready_path: str
    may_fail: bool = False


def our_server(job: PeersJob, model: Path, loads: Sequence[PeerLoad]) -> PeerServer:
    """`surefoot serve`, gateway included, as anyone would start it."""
    command = job.command(model, f"--max-sequences={MAX_STREAMS}", *job.surefoot_args.split())
    launch = Launch(command=command, loads=tuple(loads))
    return PeerServer(name=OURS, version=version("surefoot"), launches=(launch,), ready_path="/health/ready")


def llama_server(job: PeersJob, model: Path, loads: Sequence[PeerLoad]) -> PeerServer:
    """llama.cpp, started once for the short prompts and once for the long ones.

    Continuous batching, weight repacking and flash attention where it finds it of use are its defaults. Each
    slot has a cache of its own (its default with a given number of slots), which is faster for many streams
    than one that all share; 32 such caches long enough for the long prompts would cost memory for nothing, so
    these get a start with one slot. Prompt caches are off: no prompt comes twice.
    """
    binary = find_llama_server(job.peers_venv)
    base = [
        str(binary.absolute()),
        *("-m", str(model)),
        *("-t", str(job.threads), "-tb", str(job.threads)),
        *("--cont-batching", "--flash-attn", "auto"),
        *("--no-cache-prompt", "--cache-ram", "0"),
        *("--no-webui", "--offline"),
        *job.llama_args.split(),
    ]
    short = tuple(load for load in loads if load.figure == "output")
    long = tuple(load for load in loads if load.figure != "output")
    launches = tuple(
        Launch(command=[*base, "-np", str(slots), "-c", str(slots * _context(group))], loads=group)
        for slots, group in ((MAX_STREAMS, short), (1, long))
    )
    return PeerServer(name=LLAMA, version=llama_version(binary), launches=launches, ready_path="/health")


def vllm_server(job: PeersJob, model: Path, loads: Sequence[PeerLoad]) -> PeerServer:
    """vLLM's CPU build, one CPU for each thread, its cache of a given size: else it takes much memory."""
    binary = job.peers_venv / "bin" / "vllm"
    sites = [str(site) for site in job.peers_venv.glob("lib/python*/site-packages")]
    installed = next((d.version for d in distributions(name="vllm", path=sites)), None)
    if installed is None or not binary.is_file():
        raise BenchError(f"vllm is not installed in {job.peers_venv.name}")
    command = [
        "env",
        "VLLM_CPU_KVCACHE_SPACE=2",
        f"VLLM_CPU_OMP_THREADS_BIND=0-{job.threads - 1}",
        *(str(binary.absolute()), "serve", str(model)),
        *("--max-num-seqs", str(MAX_STREAMS), "--max-model-len", str(_context(loads))),
        "--no-enable-prefix-caching",
    ]
    launch = Launch(command=command, loads=tuple(loads))
    return PeerServer(name=VLLM, version=installed, launches=(launch,), ready_path="/health", may_fail=True)


def _context(loads: Sequence[PeerLoad]) -> int:
    """Tokens that the longest of the loads' sequences needs, rounded up."""
    most = max(load.prompt_tokens + load.output_tokens for load in loads) + CONTEXT_SPARE
    return -(-most // LLAMA_CONTEXT_UNIT) * LLAMA_CONTEXT_UNIT
