"""The list of the compiled modules, and the environment variable that makes all of them run
interpreted.

``hatch_build.py`` compiles the modules in :data:`MODULES` with the C types in the ``.pxd`` file
beside each module. If the C compiler or Python's headers are missing, or with
``LOGQUARRY_COMPILED=off``, the same code runs interpreted. Without Cython, the modules import this
module instead of the module ``cython``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

compiled: Final = False
"""If Cython is not installed, interpreted modules read this constant as ``cython.compiled``."""
SWITCH: Final = "LOGQUARRY_COMPILED"
MODULES: Final = (
    "message_call",
    "log.lost_pages",
    "disk.file_place",
    "read.got_fields",
    "read.get_kernel",
    "write.put_parts",
    "write.frame_append",
    "write.log_appender",
    "write.commit_log_writer",
    "write.common_frames",
    "write.settling",
    "store.single_calls",
    "protocol.remoting_header",
    "protocol.remoting",
)
"""Names of the modules, relative to the package ``logquarry``. The C code of a module may only use
modules that this list names before it.
"""

_NAMES: Final = frozenset(f"logquarry.{name}" for name in MODULES)


class _Sources:
    """An import finder that loads the Python source of a module, even if a compiled file exists."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _NAMES:
            return None
        for folder in path or ():
            source = Path(folder, name.rpartition(".")[2]).with_suffix(".py")
            if source.exists():
                return spec_from_file_location(name, source)
        return PathFinder.find_spec(name, path, target)


def is_switched_off(switch: str = SWITCH) -> bool:
    """Return whether an environment variable (default: ``LOGQUARRY_COMPILED``) is ``off``."""
    return os.environ.get(switch, "").lower() in ("off", "0", "no", "false")


def obey_switch() -> None:
    """If compiled modules are switched off, make later imports find the Python sources."""
    if is_switched_off():
        sys.meta_path.insert(0, _Sources())


def is_compiled() -> bool:
    """Return whether all modules run compiled."""
    return all(
        (spec := find_spec(name)) is not None and not str(spec.origin).endswith(".py")
        for name in _NAMES
    )


def description() -> str:
    """Describe in a sentence whether single puts run compiled or interpreted, and why."""
    if is_compiled():
        return "single puts run compiled"
    if is_switched_off():
        return f"single puts run interpreted ({SWITCH} is off): each takes about five times as long"
    return (
        "single puts run interpreted: each takes about five times as long. At the installation "
        "there was no C compiler, or Python's headers (python3-dev) were missing. Install both, "
        "then install logquarry again"
    )
