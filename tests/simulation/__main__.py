"""Command that runs many seeds: ``python -m tests.simulation --first 1 --count 20000``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.simulation import run, silence
from tests.simulation.world import Violation

EACH = 500


def main() -> int:
    """Run seeds; return how many found a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--acknowledge", choices=("flushed", "received"), default="flushed")
    wanted = parser.parse_args()
    silence()
    began = time.monotonic()
    found: list[int] = []
    statuses: dict[str, int] = {}
    for seed in range(wanted.first, wanted.first + wanted.count):
        try:
            simulation = run(seed, acknowledge=wanted.acknowledge)
        except Violation as violation:
            found.append(seed)
            print(violation, flush=True)
        else:
            for status, count in simulation.checks.statuses.items():
                statuses[status.name] = statuses.get(status.name, 0) + count
        done = seed - wanted.first + 1
        if not done % EACH or done == wanted.count:
            took = time.monotonic() - began
            print(f"{done} seeds in {took:.0f} s, to {seed}: {len(found)} violations", flush=True)
    print(f"violations: {found}; puts: {statuses}")
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main()))
