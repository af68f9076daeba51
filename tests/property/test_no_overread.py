"""The kernels read only the bytes that they get, also if lengths in them are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_guarded(amount: int, seed: int, **environ: str) -> None:
    command = [sys.executable, "-m", "tests.property.guarded_reads", str(amount), str(seed)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    # -11 is SIGSEGV: the kernel read a forbidden page; the traceback shows where.
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert done.stdout.endswith("cases\n")


def test_nothing_is_read_beyond_the_bytes() -> None:
    run_guarded(int(os.environ.get("GUARDED_READS", "60")), 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_read_or_written_beyond_any_table(tmp_path: Path) -> None:
    # Compile all kernels again, with numba's bounds checks.
    run_guarded(20, 2, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path))
