"""Compiles the modules listed in ``compiled.py`` during an installation or the build of a wheel.

Without a C compiler or Python's headers, or with ``LOGQUARRY_COMPILED=off``, the package is
installed uncompiled; ``logquarry --version -v`` reports which. If the environment variable ``CC``
is set, it names the C compiler. ``python hatch_build.py`` compiles in place.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

SOURCES: Final = Path(__file__).parent / "src"
PACKAGE: Final = SOURCES / "logquarry"
RULES: Final = runpy.run_path(str(PACKAGE / "compiled.py"))
COMPILED: Final = tuple(name.replace(".", "/") for name in RULES["MODULES"])
STAMP: Final = PACKAGE / f"compiled.{sys.implementation.cache_tag}.stamp"
"""A file that contains the :func:`digest` of the sources from which the modules were compiled."""
DIRECTIVES: Final = {
    "language_level": 3,
    "annotation_typing": False,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
}

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    BuildHookInterface = object


class CompileHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles the modules for a wheel, or in place for an editable installation."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules and add their files to the wheel.

        Such a wheel fits only this version of Python and this system.
        """
        if self.target_name != "wheel" or RULES["is_switched_off"]():
            return
        failure = compile_modules()
        if failure is not None:
            self.app.display_warning(f"logquarry is installed uncompiled: {failure}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            for path in (STAMP, *map(extension, COMPILED)):
                build_data["force_include"][str(path)] = str(path.relative_to(SOURCES))


def extension(name: str) -> Path:
    """Return the path of a module's compiled file."""
    return PACKAGE / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def digest() -> str:
    """Return a hash of all sources of the compiled modules."""
    found = hashlib.sha256(sys.version.encode())
    for name in COMPILED:
        for suffix in (".py", ".pxd"):
            found.update((PACKAGE / f"{name}{suffix}").read_bytes())
    found.update(Path(__file__).read_bytes())
    return found.hexdigest()


def is_stale() -> bool:
    """Return whether Python would import modules that were compiled from other sources."""
    if RULES["is_switched_off"]():
        return False
    return any(extension(name).exists() for name in COMPILED) and not _is_current()


def _is_current() -> bool:
    paths = STAMP, *map(extension, COMPILED)
    return all(path.exists() for path in paths) and STAMP.read_text() == digest()


def compile_modules() -> str | None:
    """Compile all modules in place, unless their compiled files are up to date.

    Returns:
        None if the modules are compiled; else the reason why not. In that case no compiled file
        remains.
    """
    if _is_current():
        return None
    extensions = [extension(name) for name in COMPILED]
    for path in (STAMP, *extensions):
        path.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            # The C compiler runs beside Cython, which translates the next module.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                c_files = (_translate(name, Path(folder)) for name in COMPILED)
                made = list(pool.map(_compile, c_files))
            # Write all files or none, because the modules call each other's C functions and must
            # fit together.
            for source, path in zip(made, extensions, strict=True):
                path.write_bytes(source.read_bytes())
    except (OSError, ImportError, RuntimeError) as error:
        return str(error) or type(error).__name__
    STAMP.write_text(digest())
    return None


def _translate(name: str, folder: Path) -> Path:
    """Write a module's C file to ``folder`` and return its path."""
    cython = import_module("Cython.Compiler.Main")

    c_file = folder / f"{name.replace('/', '.')}.c"
    options = cython.CompilationOptions(
        compiler_directives=DIRECTIVES, include_path=[str(SOURCES)], output_file=str(c_file)
    )
    module = f"logquarry.{name.replace('/', '.')}"
    try:
        result = cython.compile_single(
            str(PACKAGE / f"{name}.py"), options, full_module_name=module
        )
    except cython.CompileError as error:
        raise RuntimeError(str(error)) from error
    if result.num_errors:
        raise RuntimeError(f"{name}.py: Cython reports {result.num_errors} errors")
    return c_file


def _compile(c_file: Path) -> Path:
    """Compile a C file and return the path of the extension module."""
    made = c_file.with_suffix(".so")
    shared, own, flags, pic = sysconfig.get_config_vars("LDSHARED", "CC", "CFLAGS", "CCSHARED")
    # As in setuptools, the environment variable CC replaces the compiler that compiled Python.
    if chosen := os.environ.get("CC"):
        replaced = own if own and shared.startswith(own) else shared.partition(" ")[0]
        shared = chosen + shared.removeprefix(replaced)
    command = [
        *shlex.split(f"{shared} {flags} {pic or ''}"),
        *("-O2", "-g0", "-fno-strict-aliasing", "-I", sysconfig.get_path("include")),
        *(str(c_file), "-o", str(made)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise RuntimeError(f"the C compiler failed: {lines[0].strip()}")
    return made


if __name__ == "__main__":
    why = compile_modules()
    print("compiled" if why is None else f"not compiled: {why}")
