"""Runs short Python programs as child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run(code: str, *arguments: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the result has its output."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
