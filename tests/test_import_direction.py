"""Imports go one way, optional packages load late, the environment is read in few places."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["pallas_kernels", "host_offload", "sparda_jax"]  # each may import those before it
# Inside sparda_jax: a part may import parts of its own or a lower rank. A module that is not a
# folder and not listed (config, typing, tokenization, ...) is at the bottom.
RANKS = {
    "models": 1,
    "checkpoints": 1,
    "sparse": 1,
    "training": 2,
    "forecast": 2,
    "engine": 2,
    "diffusion": 3,
    "herald": 4,
    "evaluation": 5,
    # Single modules above the bottom.
    "pretrained": 3,
    "cli": 5,
    "commands": 6,
    "serve": 6,
    "__init__": 6,  # of sparda_jax: offers from_pretrained, and imports it when asked for
}
OPTIONAL = {"gguf", "huggingface_hub", "matplotlib", "lm_eval", "orbax", "torch", "transformers"}
# Subclasses of a class of an optional package, so imported by those who have that only.
WHOLLY_OPTIONAL = {
    f"sparda_jax/evaluation/lm_eval_{part}.py" for part in ("adapter", "base", "blocks")
}
# XDG_CACHE_HOME in assets says, like HOME, where the user's files are.
MAY_READ_ENVIRONMENT = {"host_offload/memory.py", "host_offload/cache_folder.py"}


def sources() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in sorted((ROOT / name).rglob("*.py"))
    ]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class _OnImport(ast.NodeTransformer):
    """Keeps what runs on import: no function bodies, no `if TYPE_CHECKING`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def rank(parts: list[str]) -> int:
    """Rank of ["sparda_jax", part, ...]."""
    if len(parts) < 2 or parts[1] == "":
        return 0
    part = parts[1]
    if (ROOT / "sparda_jax" / part).is_dir() and part not in ("assets", *RANKS):
        raise AssertionError(f"sparda_jax.{part} has no rank: add it to RANKS")
    return RANKS.get(part, 0)


def violations(name: str, source: str) -> list[str]:
    """What is wrong with the imports of file `name` (relative to the root)."""
    tree = ast.parse(source)
    own = name.removesuffix(".py").split("/")
    found = []
    for imported in imports(tree):
        parts = imported.split(".")
        if parts[0] in ("scripts", "tests"):
            found.append(f"imports {imported}")
        if parts[0] not in PACKAGES:
            continue
        other_package = PACKAGES.index(parts[0]) > PACKAGES.index(own[0])
        if other_package or (parts[0] == own[0] == "sparda_jax" and rank(parts) > rank(own)):
            found.append(f"imports {imported}, which is above it")
    for imported in imports(_OnImport().visit(tree)):
        if imported.split(".")[0] in OPTIONAL and name not in WHOLLY_OPTIONAL:
            found.append(f"imports the optional {imported} at its top: import it where it is used")
    reads = any(word in source for word in ("os.environ", "os.getenv"))
    if reads and name not in MAY_READ_ENVIRONMENT:
        found.append("reads the environment")
    return found


@pytest.mark.parametrize("name", sources())
def test_imports_go_one_way(name: str) -> None:
    assert violations(name, (ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("pallas_kernels/a/api.py", "import host_offload.memory"),
        ("pallas_kernels/a/api.py", "from sparda_jax import config"),
        ("host_offload/fetch.py", "def f():\n    from sparda_jax.typing import Array"),
        ("sparda_jax/config.py", "from sparda_jax.models import decoder"),
        ("sparda_jax/models/rope.py", "from sparda_jax import engine"),
        ("sparda_jax/engine/state.py", "import sparda_jax.evaluation.ruler"),
        ("sparda_jax/engine/state.py", "from tests.helpers import x"),
        ("sparda_jax/checkpoints/gguf.py", "import gguf"),
        ("sparda_jax/engine/state.py", "import os\nos.environ['A']"),
    ],
)
def test_violations_are_seen(name: str, source: str) -> None:
    assert len(violations(name, source)) == 1


def run_python(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode


def test_importing_sparda_jax_is_light() -> None:
    assert run_python("import sys, sparda_jax; sys.exit('jax' in sys.modules)") == 0


def test_importing_the_modules_touches_no_device() -> None:
    """Otherwise a script could not choose platforms or memory limits after its imports."""
    names = [name for name in sources() if name not in WHOLLY_OPTIONAL]
    files = [name.removesuffix(".py").removesuffix("/__init__") for name in names]
    modules = [name.replace("/", ".") for name in files]
    # The Mosaic kernels need jax >= 0.11.
    modules = [name for name in modules if not name.endswith((".mosaic", "__main__"))]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        "sys.exit(xla_bridge.backends_are_initialized())"
    )
    assert run_python(code) == 0
