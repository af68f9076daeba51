"""The rules of the package's layers, one test for each.

Layers import downwards only, so that the package can be read from the top. No modules import each
other. Public names are imported when they are first used.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import logquarry
from tests.helpers.source_code import statements

ROOT = Path(logquarry.__file__).parent

LAYERS = (
    "errors compiled text arguments systems paths standard_streams",
    "format",
    "protocol",
    "layout_config config message_call stored_message message",
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
    "broker",
    "metrics",
    "ingest",
    "spark",
    "report",
    "testing",
    "bench",
    "cli",
    "__main__",
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


@cache
def imported(name: str) -> set[str]:
    """The modules of the package that a module imports, at its head, lazily, or for types only."""
    found = set()
    for node in statements(MODULES[name].read_text("utf-8")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "logquarry":
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return found - {name}


def name_of(path: Path) -> str:
    parts = ("logquarry", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
BELOW_ROOT = [name for name in MODULES if name != "logquarry"]


def cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or not."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        found: set[str] = set()
        left = [name]
        while left:
            new = imports.get(left.pop(), set()) - found
            found |= new
            left += new
        reached[name] = found
    groups = {
        tuple(sorted(other for other in found if name in reached[other]))
        for name, found in reached.items()
        if name in found
    }
    return sorted(map(list, groups))


@pytest.mark.parametrize("name", BELOW_ROOT)
def test_a_module_imports_from_its_layer_and_those_above(name: str) -> None:
    below = {module for module in imported(name) if rank(module) > rank(name)}
    # The package itself is imported for its version.
    assert not below - {"logquarry"}, f"{name} imports what stands below it"


def test_no_modules_import_each_other() -> None:
    """Neither lazily nor only for types: a cycle is one module in several files."""
    # The package names the home of each public name, and imports none of them itself.
    assert not cycles({name: imported(name) - {"logquarry"} for name in BELOW_ROOT})


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_the_package_imports_nothing_before_it_is_asked_for() -> None:
    """``import logquarry`` is quick: each public name is imported when it is first used."""
    code = "import sys, logquarry; print(*(m for m in sys.modules if m.startswith('logquarry.')))"
    # LOGQUARRY_COMPILED=off needs the module that finds the sources.
    environ = {name: value for name, value in os.environ.items() if name != "LOGQUARRY_COMPILED"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ
    )
    assert done.stdout.split() == []


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    """Until then Python prints a traceback."""
    code = (
        "import sys; before = set(sys.modules); import logquarry.cli.interrupts; "
        "print(*{'typing', 're', 'click', 'signal', 'contextlib'} & (set(sys.modules) - before))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "LOGQUARRY_COMPILED"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    assert done.stdout.split() == []


def test_public_names_have_homes() -> None:
    for name in logquarry.__all__:
        assert getattr(logquarry, name) is not None
    # mypy reads the same homes from the imports under TYPE_CHECKING.
    homes = logquarry._HOMES
    assert set(homes) == set(logquarry.__all__) - {"__version__", "errors"}
    assert set(homes.values()) | {"logquarry.errors", "logquarry.compiled"} == imported("logquarry")


def test_no_layer_name_is_left_over() -> None:
    """Each name of a layer is a module or a folder."""
    for name in RANKS:
        assert f"logquarry.{name}" in MODULES


def test_every_module_has_a_layer() -> None:
    for path in ROOT.iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            assert path.stem in RANKS
        elif path.is_dir() and (path / "__init__.py").is_file():
            assert path.name in RANKS
