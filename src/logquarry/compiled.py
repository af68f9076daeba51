"""The list of the compiled modules, and the switch that runs them interpreted.

The modules in :data:`MODULES` are Python code, with C types in a ``.pxd`` file beside each module.
During the installation ``hatch_build.py`` compiles them, if there are a C compiler and Python's
headers. Otherwise, and with ``LOGQUARRY_COMPILED=off``, the same code runs interpreted.
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

SWITCH: Final = "LOGQUARRY_COMPILED"
MODULES: Final = (
    "message_call",
    "log.lost_pages",
    "read.got_fields",
    "read.get_kernel",
    "disk.file_place",
    "write.put_parts",
    "write.frame_append",
    "write.log_appender",
    "write.put_path",
    "write.put_batch_path",
    "write.common_frames",
    "write.put_future",
    "write.settling",
    "store.call_counts",
    "store.log_growth",
    "store.single_put",
    "protocol.remoting_header",
    "protocol.remoting",
)
"""The compiled modules, below ``logquarry``. The C code of a module uses only modules that are
listed before it."""

_NAMES: Final = frozenset(f"logquarry.{name}" for name in MODULES)


class _Sources:
    """Finds the Python source of each module that may be compiled."""

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
    """Whether an environment variable is set to ``off`` (default: ``LOGQUARRY_COMPILED``)."""
    return os.environ.get(switch, "").lower() in ("off", "0", "no", "false")


def obey_switch() -> None:
    """If compiled modules are switched off, make later imports find the Python sources."""
    if is_switched_off():
        sys.meta_path.insert(0, _Sources())


def is_compiled() -> bool:
    """Whether the modules run compiled: either all of them do, or none."""
    return all(
        (spec := find_spec(name)) is not None and not str(spec.origin).endswith(".py")
        for name in _NAMES
    )


def description() -> str:
    """Whether single puts run compiled or interpreted, and why."""
    if is_compiled():
        return "single puts run compiled"
    if is_switched_off():
        return f"single puts run interpreted ({SWITCH} is off): each takes about five times as long"
    return (
        "single puts run interpreted: each takes about five times as long. At the installation "
        "there was no C compiler, or Python's headers (python3-dev) were missing. Install both, "
        "then install logquarry again"
    )
