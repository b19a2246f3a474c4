"""What tenants cost: `python -m surefoot.gateway.tenants_bench` prints a line for each bar.

Times are CPU times of this process, so that other work on the machine does not count. It stands here and not
in `bench/`, which knows servers over HTTP only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import App, Parameter

from surefoot.policies.base import Observation
from surefoot.policies.bounds import CacheBounds, PlanBounds, SpeculationBounds
from surefoot.policies.registry import load_policies, serving_policy

from .tenant_folder import TenantFolder
from .tenants import Tenants, hash_key

DEFAULTS_TEXT = """\
models = ["smollm2"]

[limits]
max_concurrent_requests = 16
max_n = 4
"""
TENANT_TEXT = """\
# Tenant number {number}.
id = "tenant-{number}"
policy = "adaptive"
weight = 2.0

[classes]
default = "interactive"
allowed = ["interactive", "standard"]

[limits]
max_tokens = 1024
requests_per_minute = 600

[cache]
format = "k16v16"

[[keys]]
label = "ci, old"
hash = "{old}"
expires = 2027-01-31T00:00:00Z

[[keys]]
label = "ci"
hash = "{new}"
"""
REPEATS = 2000


def measure(num_files: int) -> Iterator[tuple[str, float, str]]:
    """What was measured, the figure, and its unit."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "defaults.toml", DEFAULTS_TEXT, 1)
        for number in range(num_files):
            _write_tenant(folder, number, 1)
        reader = TenantFolder(folder, load_policies())
        yield f"load {num_files} files", _cpu_s(reader.load), "s"
        tenants = reader.state.tenants
        reader.reload()  # Python's garbage collector catches up once after a load.
        yield "look, nothing changed", _cpu_s(reader.reload) * 1000, "ms"
        _write_tenant(folder, 0, 2)
        read_before = reader.num_read
        yield "look, one file changed", _cpu_s(reader.reload) * 1000, "ms"
        yield "  files read by it", reader.num_read - read_before, ""
        _write(folder / "defaults.toml", DEFAULTS_TEXT + "max_tokens = 2048\n", 2)
        yield "look, defaults changed", _cpu_s(reader.reload) * 1000, "ms"
    for count in sorted({1, 100, num_files}):
        authenticate = partial(Tenants(tenants[:count]).authenticate, "Bearer key-0")
        yield f"authenticate, {count} tenants", _cpu_us(authenticate), "us"
    policy = serving_policy(load_policies())
    yield "decide a plan (adaptive)", _cpu_us(partial(policy.decide, OBSERVATION)), "us"


OBSERVATION = Observation(
    tenant_id="acme",
    model="smollm2",
    policy="adaptive",
    num_prompt_tokens=3000,
    cache_pressure=0.8,
    acceptance=0.6,
    quality_loss=0.03,
    bounds=PlanBounds(speculation=SpeculationBounds(max_draft=8), cache=CacheBounds(format="k4v4")),
)
"""One in which every rule has something to say, and everything is clamped."""


def _write_tenant(folder: Path, number: int, time_s: int) -> None:
    text = TENANT_TEXT.format(number=number, old=hash_key(f"old-{number}"), new=hash_key(f"key-{number}"))
    _write(folder / f"tenant-{number}.toml", text, time_s)


def _write(file: Path, text: str, time_s: int) -> None:
    """With a time stamp of long ago: a file of this moment is read twice."""
    file.write_text(text)
    os.utime(file, (time_s, time_s))


def _cpu_s(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _cpu_us(work: Callable[[], object]) -> float:
    """Of one call, the mean of many."""
    return _cpu_s(lambda: [work() for _ in range(REPEATS)]) / REPEATS * 1e6


def run(*, files: Annotated[int, Parameter(help="How many tenant files to write and load")] = 10_000) -> None:
    """Measure loading, reloading, authenticating and deciding."""
    for what, figure, unit in measure(files):
        sys.stdout.write(f"{what:32} {figure:10.3f} {unit}\n")


if __name__ == "__main__":
    App(name="tenants_bench", default_command=run, help_format="plaintext")()
