"""Every example of the README is run as it stands, against a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .server_process import ServerProcess

pytestmark = pytest.mark.xdist_group("server")

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
CURL = [text for language, text in BLOCKS if language == "bash" and text.startswith("curl")]
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text for language, text in BLOCKS if language == "bash" and not text.startswith("curl")]


def here(text: str, server: ServerProcess) -> str:
    """The example, pointed at the test's server."""
    assert "http://127.0.0.1:8000" in text
    return text.replace("http://127.0.0.1:8000", server.url)


@pytest.mark.parametrize("text", CURL)
def test_curl_example(text: str, server: ServerProcess) -> None:
    """A curl example is answered with the capital of France."""
    done = subprocess.run(
        ["bash", "-c", here(text, server)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Paris" in done.stdout


@pytest.mark.parametrize("text", PYTHON)
def test_python_example(text: str, server: ServerProcess) -> None:
    """A Python example runs to its end."""
    subprocess.run([sys.executable, "-c", here(text, server)], timeout=60, check=True)


def test_examples_were_found() -> None:
    """The README has the examples that this file means to run."""
    assert (len(CURL), len(PYTHON), len(SHELL)) == (1, 2, 2)


def test_commands_exist() -> None:
    """Every other line of the README's shell blocks is a make target or a command that explains itself."""
    makefile = (ROOT / "Makefile").read_text()
    surefoot = Path(sys.executable).with_name("surefoot")
    for line in "".join(SHELL).splitlines():
        words = line.split("#")[0].split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        else:
            assert words[0] == ".venv/bin/surefoot"
            subprocess.run([surefoot, words[1], "--help"], check=True, capture_output=True, timeout=60)
