"""The import rule: gateway -> policies -> backends -> kernels, down only, and bench on its own.

The checker reads source with `ast`, so imports inside functions and under `TYPE_CHECKING` count too.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("gateway", "policies", "backends", "kernels")

MESSAGES = ("backends.types", "backends.errors", "backends.base", "backends.fake", "backends.catalog")
"""What the gateway may know of backends: messages and their interface, no engine behind them."""

CATALOG = ("backends/catalog.py", "backends.engine.model_errors")
"""The catalogue answers for models that do not load, in the engine's own (plain) words."""

WIRING = "gateway/start.py"
"""The one file of the gateway that may name the engine."""

ALONE = "bench"
"""A client of any server over HTTP: knows nothing of ours, and only the command line knows it."""

PEERS = "bench/peer_"
"""Programs that run another engine, with that engine's libraries, to be compared with."""

DEVICE = "bench/device"
"""Programs that measure our kernels and engine from inside, on a GPU."""

POLICY_DAY = "bench/policy_day"
"""A program that puts policies and the engine's simulator together, which know nothing of each other."""

LIBRARY_HOMES = {
    "litestar": ("gateway/",),
    "torch": ("backends/engine/", "kernels/", PEERS, DEVICE),
    "transformers": ("backends/engine/", PEERS, DEVICE),
    "gguf": ("backends/engine/", PEERS),
    "safetensors": ("backends/engine/",),
    "numba": ("kernels/",),
    "triton": ("kernels/",),
}
"""Where a library may be imported. What is not listed may be imported anywhere."""

OP_FILES_ONLY = ("numba", "triton")
"""Libraries of single ops, which the ops' interface and meaning do without."""

PLAIN_KERNEL_FILES = (
    "kernels/__init__.py",
    "kernels/base.py",
    "kernels/reference.py",
    "kernels/layout.py",
    "kernels/noise.py",
)


class Import(Struct, frozen=True):
    """One imported module, by its full name, and where that stands."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def violations(root: Path) -> list[str]:
    """What breaks the rule in our folders under `root`, with the reason."""
    return [
        f"{found}: {reason}"
        for folder in (*FOLDERS, ALONE)
        for path in sorted((root / folder).rglob("*.py"))
        for found in imports(path, root)
        if (reason := why_forbidden(found))
    ]


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import of a file. `from package import module` counts as `package.module` where that is one."""
    file = path.relative_to(root).as_posix()
    package = ("surefoot", *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module.split(".") if node.module else ())))
            for alias in node.names:
                longer = f"{module}.{alias.name}"
                yield Import(file, node.lineno, longer if is_module(longer, root) else module)


def is_module(name: str, root: Path) -> bool:
    """Whether a full name is one of our modules or packages."""
    parts = name.split(".")
    place = root.joinpath(*parts[1:])
    return parts[0] == "surefoot" and (place.is_dir() or place.with_suffix(".py").is_file())


def why_forbidden(found: Import) -> str | None:
    """The rule that an import breaks, None if it breaks none."""
    top, _, rest = found.module.partition(".")
    if top in (*FOLDERS, ALONE):
        return f"our packages are called surefoot.*; a top-level `{top}` is somebody else's"
    if top == "surefoot":
        return why_forbidden_inside(found.file, rest)
    homes = LIBRARY_HOMES.get(top, ("",))
    if not found.file.startswith(homes):
        return f"{top} belongs in {' and '.join(homes)} only"
    if top in OP_FILES_ONLY and found.file in PLAIN_KERNEL_FILES:
        return f"{top} belongs in the op files only"
    return None


def why_forbidden_inside(file: str, module: str) -> str | None:
    """The same for an import of `surefoot.<module>`."""
    source, target = file.split("/")[0], module.split(".")[0]
    if ALONE in (source, target) and source != target:
        is_command = file == "gateway/cli.py" and module == "bench.cli"
        is_inside = file.startswith(DEVICE) and module.startswith(("kernels.", "backends."))
        is_day = file.startswith(POLICY_DAY) and module.startswith(("policies.", "backends."))
        return (
            None
            if is_command or is_inside or is_day
            else "bench stands alone; the command line alone mounts it"
        )
    if source == ALONE:
        return None
    if target not in FOLDERS:
        return "name the module, not the namespace"
    if source == target:
        return None if source != "backends" else why_forbidden_in_backends(file, module)
    if FOLDERS.index(target) < FOLDERS.index(source):
        return "imports go down only: " + " -> ".join(FOLDERS)
    if target == "kernels":
        return None if file.startswith("backends/engine/") else "only backends/engine imports kernels"
    if target == "backends" and source == "policies":
        return None if module == "backends.types" else "policies know backends.types only"
    if target == "backends" and module not in MESSAGES:
        named_engine = module == "backends.engine" or module.startswith("backends.engine.")
        return None if file == WIRING and named_engine else f"the gateway knows {', '.join(MESSAGES)} only"
    return None


def why_forbidden_in_backends(file: str, module: str) -> str | None:
    """Beside the engine, the backends are plain: what a policy or the gateway imports must not load torch."""
    if file.startswith("backends/engine/") or not module.startswith("backends.engine"):
        return None
    if (file, module) == CATALOG:
        return None
    return "only the wiring in gateway/start.py names the engine"


def test_the_rule_holds() -> None:
    """No import in our folders goes up, sideways into the engine, or to a library out of its place."""
    assert violations(ROOT) == []


def test_every_folder_is_read() -> None:
    """The walk finds each folder, so the rule cannot hold for want of files."""
    for folder in (*FOLDERS, ALONE):
        assert any(
            found.file.startswith(f"{folder}/")
            for p in (ROOT / folder).rglob("*.py")
            for found in imports(p, ROOT)
        )


BAD_LINES = [
    ("kernels/a.py", "import surefoot.backends.types", "imports go down only"),
    ("backends/a.py", "from surefoot.policies.base import Policy", "imports go down only"),
    ("backends/engine/a.py", "from surefoot import gateway", "imports go down only"),
    ("policies/a.py", "from surefoot.gateway import app", "imports go down only"),
    ("backends/a.py", "from surefoot.kernels.base import Ops", "only backends/engine imports kernels"),
    ("gateway/app.py", "import surefoot.kernels.base", "only backends/engine imports kernels"),
    (
        "gateway/a.py",
        "def f():\n    from surefoot.backends.engine.backend import EngineBackend",
        "the gateway knows",
    ),
    ("gateway/a.py", "from surefoot.backends import engine", "the gateway knows"),
    ("gateway/a.py", "from ..backends.engine import backend", "the gateway knows"),
    ("backends/types.py", "from .engine.backend import EngineBackend", "only the wiring"),
    ("policies/a.py", "from surefoot.backends.base import Backend", "policies know backends.types only"),
    ("policies/a.py", "import torch", "torch belongs in"),
    ("gateway/a.py", "import torch.nn.functional as F", "torch belongs in"),
    ("backends/types.py", "from torch import Tensor", "torch belongs in"),
    ("backends/engine/a.py", "import litestar", "litestar belongs in"),
    ("backends/engine/a.py", "import triton.language as tl", "triton belongs in"),
    ("kernels/base.py", "import numba", "the op files only"),
    ("kernels/a.py", "import transformers", "transformers belongs in"),
    ("backends/engine/a.py", "import kernels", "somebody else's"),
    ("backends/engine/a.py", "from kernels.base import Ops", "somebody else's"),
    ("gateway/a.py", "import surefoot", "name the module"),
    ("bench/a.py", "from surefoot.gateway.settings import ServeSettings", "bench stands alone"),
    ("gateway/a.py", "from surefoot.bench.cli import build_bench_app", "bench stands alone"),
    ("gateway/cli.py", "from surefoot.bench.run import run_bench", "bench stands alone"),
    ("bench/a.py", "import torch", "torch belongs in"),
    ("bench/a.py", "from surefoot.kernels.base import Ops", "bench stands alone"),
    ("bench/device.py", "from surefoot.gateway.settings import ServeSettings", "bench stands alone"),
]

GOOD_LINES = [
    ("gateway/a.py", "from surefoot.backends.types import Event\nfrom surefoot.policies.base import Policy"),
    ("gateway/start.py", "from surefoot.backends.engine.backend import EngineBackend"),
    ("gateway/a.py", "from litestar import get\nfrom .app import create_app"),
    ("policies/a.py", "from surefoot.backends.types import ServingPlan\nfrom .base import Policy"),
    ("backends/engine/a.py", "import torch\nfrom surefoot.kernels import base\nfrom ..types import Event"),
    ("kernels/a.py", "import numba\nimport triton\nfrom .base import Ops"),
    ("gateway/cli.py", "from surefoot.bench.cli import build_bench_app"),
    ("bench/a.py", "from .cli import build_bench_app"),
    ("bench/peer_a.py", "import torch"),
    ("bench/device.py", "import torch\nfrom surefoot.kernels.base import Ops"),
]


def tree(root: Path, file: str, source: str) -> Path:
    """A small project of four folders with one file that says `source`."""
    for name in (
        "gateway/app.py",
        "policies/base.py",
        "backends/types.py",
        "backends/engine/backend.py",
        "kernels/base.py",
        "bench/cli.py",
        "bench/run.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / file).write_text(source)
    return root


@pytest.mark.parametrize(("file", "source", "reason"), BAD_LINES)
def test_the_checker_finds(tmp_path: Path, file: str, source: str, reason: str) -> None:
    """Each way to break the rule is found, once, and named with its file and line."""
    (found,) = violations(tree(tmp_path, file, source))
    assert reason in found
    assert found.startswith(f"{file}:{source.count(chr(10)) + 1} ")


@pytest.mark.parametrize(("file", "source"), GOOD_LINES)
def test_the_checker_accepts(tmp_path: Path, file: str, source: str) -> None:
    """What the rule allows is not complained about."""
    assert violations(tree(tmp_path, file, source)) == []


def test_plain_parts_do_not_load_torch() -> None:
    """The command line, the catalogue, the policies and the messages load no torch and no web framework."""
    program = (
        "import sys, surefoot.gateway.cli, surefoot.backends.catalog, surefoot.policies.baseline;"
        "print(sorted({'torch', 'transformers', 'numba', 'litestar'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_root_is_not_importable() -> None:
    """The root is not on `sys.path`, where `kernels` would be taken for Hugging Face's package."""
    assert str(ROOT) not in [str(Path(entry).resolve()) for entry in sys.path]


KERNELS_PROBE = """
import importlib.util, sys
if sys.argv[1] == "without":
    sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
    sys.path = [entry for entry in sys.path if "__editable__" not in entry]
    assert importlib.util.find_spec("surefoot") is None
else:
    import surefoot.kernels
from transformers.utils import is_kernels_available
print(is_kernels_available(), importlib.util.find_spec("kernels"))
"""


@pytest.mark.parametrize("place", ["elsewhere", "parent"])
def test_transformers_does_not_see_our_kernels(tmp_path: Path, place: str) -> None:
    """Whether transformers finds a package `kernels` does not depend on ours, wherever a program starts."""
    cwd = {"elsewhere": tmp_path, "parent": ROOT.parent}[place]
    assert run_probe("with", cwd) == run_probe("without", cwd)


def run_probe(how: str, cwd: Path) -> str:
    """Ask a new process that starts in `cwd`, where a `-c` program looks for modules first."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")
    }
    done = subprocess.run(
        [sys.executable, "-c", KERNELS_PROBE, how],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
