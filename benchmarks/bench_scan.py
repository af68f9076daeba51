"""Measure reading a 2 GiB log on one thread with ``logquarry bench scan``, and print the goals.

The store stays in the system's temporary folder for the next run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from logquarry.cli.main import app

GOALS = {"walk_crc": 3.0, "fixed_to_arrow": 4.0, "all_to_arrow": 1.0}
"""The speeds in GB/s that the scan should reach."""


def main(arguments: list[str]) -> None:
    folder = Path(tempfile.gettempdir()) / "logquarry-bench" / "scan"
    goals = ", ".join(f"{kind} {speed} GB/s" for kind, speed in GOALS.items())
    sys.stderr.write(f"bench scan (goals: {goals})\n")
    app(["bench", "scan", "--dir", str(folder), *arguments], standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1:])
