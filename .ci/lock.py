"""Write the lock files from what is installed in the environment that runs this (`make lock`).

`requirements.lock` pins everything that `pyproject.toml` needs to run and to be installed, and
`requirements-dev.lock` what its `dev` group adds. What else lies in the environment is left out, and so is
what only another build of torch brings along (nvidia-*): a lock made here must also install there.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEAD = "# Written by `make lock`. Edit pyproject.toml instead.\n"


def closure(roots: Iterable[Requirement]) -> dict[str, Version]:
    """Name and installed version of `roots` and all they need on this platform."""
    found: dict[str, Version] = {}
    done: set[tuple[str, str]] = set()
    queue = list(roots)
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in done:
                done.add((name, extra))
                queue.extend(needs(name, extra))
        # A local tag (`+cpu`) names one index's build; the lock must install from any.
        found[name] = Version(Version(distribution(name).version).public)
    return found


def needs(name: str, extra: str) -> Iterator[Requirement]:
    """The requirements of an installed distribution that hold here, `extra` switched on."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        holds = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if holds and not canonicalize_name(requirement.name).startswith(("nvidia-", "cuda-")):
            yield requirement


def pins(project_file: Path) -> tuple[list[str], list[str]]:
    """The lines of the two lock files."""
    project = tomllib.loads(project_file.read_text())
    runtime = [
        Requirement(r) for r in (*project["project"]["dependencies"], *project["build-system"]["requires"])
    ]
    dev = [Requirement(r) for r in project["dependency-groups"]["dev"]]
    markers = {canonicalize_name(r.name): f"; {r.marker}" for r in (*runtime, *dev) if r.marker}
    here = [r for r in runtime if r.marker is None or r.marker.evaluate()]
    needed = closure(here)
    added = {name: version for name, version in closure(dev).items() if name not in needed}
    return _lines(needed, markers), _lines(added, markers)


def _lines(versions: dict[str, Version], markers: dict[str, str]) -> list[str]:
    return [f"{name}=={version}{markers.get(name, '')}" for name, version in sorted(versions.items())]


def main() -> None:
    """Write both files beside `pyproject.toml`."""
    root = Path(__file__).resolve().parent.parent
    runtime, dev = pins(root / "pyproject.toml")
    for name, lines in (("requirements.lock", runtime), ("requirements-dev.lock", dev)):
        (root / name).write_text(HEAD + "\n".join(lines) + "\n")
        sys.stdout.write(f"{name}: {len(lines)} pins\n")


if __name__ == "__main__":
    main()
