"""Python programs of a few lines, run beside the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run(code: str, *arguments: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A program that ran to its end, with what it printed."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
