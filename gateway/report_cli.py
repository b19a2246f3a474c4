"""`surefoot loss`, `quality` and `simulate`: reports on what the engine does, without serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from surefoot.policies.bounds import Format

from .setting_flags import ConfigFlag, JsonFlag, settled, with_flags

LOSS = """\
Measure what a form of the weights costs, in nats per token against float32.

Both score the same text, token by token, the way that the server scores prompts.
The text is that of this installation's licences, descriptions and Python modules,
or of files. This takes minutes; the exit status does not depend on the result.

The default model in its own groups, and in 8 bits:

    surefoot loss
    surefoot loss --weights int8 --json

Another one, on text like that of its users:

    surefoot loss --model ~/models/Qwen3-0.6B --text letters.txt news.txt --tokens 50000
"""

QUALITY = """\
Measure what a quantised KV cache costs in quality, against full precision.

A text is read in full precision; then all but its first and latest tokens are
demoted, as the server would do it, and the model predicts what follows, answers
questions about facts at ten depths, and writes on. Full precision does the same,
and so does a window of equal bytes that drops old tokens, to compare with.

loss: log-probability of the text's own tokens, in nats per token; its sign is real,
and within the interval it is noise. divergence: how far the predictions are from full
precision's (Kullback-Leibler), never below 0 and far less noisy: judge by it.
A default run takes minutes; the exit status does not depend on the result.

The default plans, with a report and a plot in a folder:

    surefoot quality --output report

Is a shorter window of recent tokens enough for k8v4?

    surefoot quality --formats k8v4 --recent 16 64 256

On the model and the texts of your users, in their length:

    surefoot quality --model ~/models/Qwen3-0.6B --text a.txt b.txt --context 4096 --texts 12
"""

SIMULATE = """\
Tell what this machine, or a faster one, would promise: trace in, report out.

The server's own scheduler runs in virtual time over what steps cost on this machine,
as a served engine measured and kept it; nothing is computed, so an hour takes seconds.
Served within target counts as goodput; what the server would refuse counts against it.

So many requests a second of each class, on this machine and on one ten times as fast:

    surefoot simulate --rate interactive=1 --rate batch=8
    surefoot simulate --rate interactive=1 --rate batch=80 --speed 10

More requests in the same cache, and a GPU by its data sheet instead of this machine:

    surefoot simulate --rate batch=4 --prompt-tokens 2000 --cache-format k8v4
    surefoot simulate --gpu h100 --rate batch=20 --cache-format k4v4

A trace, and how first-come-first-served would do on it:

    surefoot simulate --trace day.jsonl --json
    surefoot simulate --trace day.jsonl --scheduler first-come

A trace has a request a line. Needed are arrival_s, prompt_tokens and output_tokens; also
known are class, priority, ttft_target_s, tpot_target_s, flow, weight, max_tokens and
prompt_group (requests of one begin with the same tokens):

    {"arrival_s": 0.25, "prompt_tokens": 400, "output_tokens": 60, "class": "interactive"}
"""

SIMULATE_SETTINGS = (
    "model",
    "served_model_id",
    "weights",
    "device",
    "threads",
    "scheduler",
    "prefix_cache",
    "max_sequences",
    "max_batched_tokens",
    "max_waiting",
    "max_waiting_s",
    "headroom",
    "classes",
    "cache_dir",
)
"""The settings that can be flags of `simulate`."""

LOSS_SETTINGS = ("model", "weights", "device", "threads", "max_batched_tokens", "cache_dir")
"""The settings that can be flags of `loss`."""

QUALITY_SETTINGS = ("model", "weights", "device", "threads", "cache_dir")
"""The settings that can be flags of `quality`."""

TextFlag = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--text",
        negative="",
        consume_multiple=True,
        show_default=False,
        help="Files of UTF-8 text to score [text of this installation]",
    ),
]
OutputFlag = Annotated[
    Path | None,
    Parameter(name="--output", help="Folder for quality.md, quality.json and quality.svg"),
]
TokensFlag = Annotated[
    int, Parameter(name="--tokens", show_default=False, help="Score so many tokens or a few more [20000]")
]
WindowFlag = Annotated[
    int,
    Parameter(
        name="--window", show_default=False, help="Tokens of a window, whose first is not scored [1024]"
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimulateFlags:
    """What to simulate."""

    trace: Annotated[Path | None, Parameter(help="File of requests, a JSON object a line")] = None
    rate: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="Without a trace: requests a second of a class [interactive=1 batch=4]",
        ),
    ] = ("interactive=1", "batch=4")
    duration: Annotated[float, Parameter(help="Without a trace: seconds in which requests arrive")] = 300.0
    prompt_tokens: Annotated[int, Parameter(help="Without a trace: mean length of prompts")] = 128
    output_tokens: Annotated[int, Parameter(help="Without a trace: mean length of answers")] = 128
    seed: Annotated[int, Parameter(help="Without a trace: another seed, other requests")] = 0
    speed: Annotated[float, Parameter(help="How many times as fast as measured the machine is")] = 1.0
    cost: Annotated[
        Path | None, Parameter(help="File of step costs [what the model's server kept, else measured now]")
    ] = None
    gpu: Annotated[
        Literal["l40s", "h100", "h200"] | None,
        Parameter(show_default=False, help="Instead: Llama-3.1-8B on this GPU, by its data sheet"),
    ] = None
    cache_format: Annotated[
        Format,
        Parameter(help="How precise the cache is, for all requests"),
    ] = "k16v16"
    cache_blocks: Annotated[
        int | None, Parameter(help="Blocks of 16 tokens that the cache has [as the server had]")
    ] = None


DEFAULT_SIMULATION = SimulateFlags()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QualityFlags:
    """What to compare. Names are those of `QualitySettings`."""

    formats: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", consume_multiple=True, show_default=False, help="Formats [k8v8 k8v4 mixed k4v4]"
        ),
    ] = ("k8v8", "k8v4", "mixed", "k4v4")
    sinks: Annotated[int, Parameter(help="First tokens that stay in full precision")] = 4
    recent: Annotated[
        tuple[int, ...],
        Parameter(
            negative="", consume_multiple=True, show_default=False, help="Latest tokens that stay so [64]"
        ),
    ] = (64,)
    context: Annotated[int, Parameter(help="Tokens of a text before the first demotion")] = 2048
    texts: Annotated[int, Parameter(help="Texts; more make intervals narrower")] = 6
    tokens: Annotated[int, Parameter(help="Tokens that are predicted after each text")] = 128
    tasks: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            consume_multiple=True,
            show_default=False,
            help="What facts are asked for [retrieval look-alikes variable-tracking copying]",
        ),
    ] = ("retrieval", "look-alikes", "variable-tracking", "copying")
    haystacks: Annotated[int, Parameter(help="Texts in which ten facts a task are hidden")] = 2
    generated: Annotated[int, Parameter(help="Tokens that are written after each text")] = 96
    seed: Annotated[int, Parameter(help="Another seed, other facts and other writing")] = 0


DEFAULT_QUALITY = QualityFlags()


def add_reports(app: App, environ: Mapping[str, str]) -> None:
    """Add the three commands to an app, for an environment."""
    # Torch, which `start` brings along, takes seconds to import.

    def loss(
        *,
        text: TextFlag = (),
        tokens: TokensFlag = 20_000,
        window: WindowFlag = 1024,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> int:
        from .start import run_loss

        return run_loss(settled(flags, config, environ).settings, text, tokens, window, as_json=json)

    def quality(
        *,
        text: TextFlag = (),
        what: QualityFlags = DEFAULT_QUALITY,
        output: OutputFlag = None,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> int:
        from .start import run_quality

        settings = settled(flags, config, environ).settings
        return run_quality(settings, {"files": text, **asdict(what)}, output, as_json=json)

    def simulate(
        *,
        what: SimulateFlags = DEFAULT_SIMULATION,
        json: JsonFlag = False,
        config: ConfigFlag = None,
        flags: Any = None,
    ) -> int:
        from .start import run_simulation

        return run_simulation(settled(flags, config, environ).settings, asdict(what), as_json=json)

    app.command(with_flags(loss, LOSS_SETTINGS), name="loss", help=LOSS)
    app.command(with_flags(quality, QUALITY_SETTINGS), name="quality", help=QUALITY)
    app.command(with_flags(simulate, SIMULATE_SETTINGS), name="simulate", help=SIMULATE)
