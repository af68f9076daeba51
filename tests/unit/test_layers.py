"""The layers import downwards only: who reads the package from the top meets nothing unknown."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import logquarry

ROOT = Path(logquarry.__file__).parent

LAYERS = (
    "errors units documents text cache signals",
    "format",
    "protocol",
    "config message",
    "log",
    "disk",
    "read",
    "write",
    "dialect31",
    "repair",
    "store.load",
    "store.consumer",
    "store.transaction",
    "store.schedule",
    "store.retention",
    "store",
    "replication",
    "metrics",
    "ingest",
    "spark",
    "report",
    "testing",
    "bench",
    "cli",
)
"""From the top: what a layer imports at its modules' head stands above it, or in it."""

RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}


def rank(module: str) -> int:
    """The rank of the layer that a module is in."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        found = RANKS.get(".".join(parts[:length]))
        if found is not None:
            return found
    return len(LAYERS)


def imported(path: Path) -> list[str]:
    """What a module imports of the package, at any depth."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("logquarry"):
            assert node.module is not None
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split(".")[1:])
                is_module = (inner / alias.name).is_dir() or (inner / f"{alias.name}.py").is_file()
                found.append(f"{node.module}.{alias.name}" if is_module else node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("logquarry.")]
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layer(path: Path) -> None:
    name = ".".join(("logquarry", *path.relative_to(ROOT).with_suffix("").parts))
    own = rank(name.removesuffix(".__init__"))
    above = {module for module in imported(path) if rank(module) > own}
    # The command's group of commands, and the package itself, are asked for by name only.
    assert not above - {"logquarry"}, f"{name} imports what stands below it"


def test_every_module_has_a_layer() -> None:
    for path in ROOT.iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            assert path.stem in RANKS
        elif path.is_dir() and (path / "__init__.py").is_file():
            assert path.name in RANKS
