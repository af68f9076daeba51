"""Readers of a randomly damaged store raise only documented exceptions, and neither hang nor flood.

Each case has a number; ``LOGQUARRY_FUZZ_SEED`` and ``LOGQUARRY_FUZZ_CASES`` choose others.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from pathlib import Path

import psutil
import pytest

from tests.fuzz.mutations import Bench
from tests.fuzz.readers import read_everything, time_bound

SEED = int(os.environ.get("LOGQUARRY_FUZZ_SEED", "1"))
QUICK = int(os.environ.get("LOGQUARRY_FUZZ_CASES", "125"))
ALL = 20_000
PARTS = 2
SECONDS = 20.0
WARM_UP = 60
MOST_GROWTH = 200 << 20

STORES = (
    "batch/store",
    "clean-restart/base/store",
    "clean-restart/retention/store",
    "clean-restart/prepad/store-recovered",
    "delay/store",
    "delay-deliver/store",
    "ipv6/store",
    "multidispatch/store",
    "real-broker/store",
    "sysflags/store",
    "unclean/abort-only/store",
    "unclean/crc-third-last-file/store-recovered",
    "v3-transactions-odd/store",
)


def run_cases(golden: Path, tmp_path: Path, numbers: range) -> None:
    logging.disable(logging.CRITICAL)
    try:
        benches = [Bench(golden / name, tmp_path / str(i)) for i, name in enumerate(STORES)]
        process = psutil.Process()
        start = most = 0
        slowest = 0.0
        for count, number in enumerate(numbers):
            began = time.monotonic()
            run_case(benches, number)
            slowest = max(slowest, time.monotonic() - began)
            if count % 20 == 0:
                gc.collect()
                used = process.memory_info().rss
                if count <= WARM_UP:
                    start = max(start, used)
                most = max(most, used)
                assert most - start < MOST_GROWTH, (
                    f"case {SEED}-{number}: {most - start} bytes more"
                )
        print(
            f"seed {SEED}: {len(numbers)} cases, slowest {slowest:.2f} s, {most - start} bytes more"
        )
    finally:
        logging.disable(logging.NOTSET)


def run_case(benches: list[Bench], number: int) -> None:
    rng = random.Random(f"{SEED}-{number}")
    bench = rng.choice(benches)
    with bench.harmed(rng) as told:
        try:
            with time_bound(SECONDS):
                read_everything(bench.root, rng)
        except BaseException as error:
            name = STORES[benches.index(bench)]
            error.add_note(f"case {SEED}-{number}, {name}: {'; '.join(told)}")
            raise


@pytest.mark.parametrize("part", range(PARTS))
def test_some_harms(golden: Path, tmp_path: Path, part: int) -> None:
    run_cases(golden, tmp_path, range(part, QUICK, PARTS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_harms(golden: Path, tmp_path: Path, part: int) -> None:
    run_cases(golden, tmp_path, range(part, ALL, PARTS))
