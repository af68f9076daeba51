"""RocketMQ opens stores recovered from a power cut, and has the same messages."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from logquarry.store.message_store import StoreWriter
from tests.conformance.oracle import require_oracle
from tests.conformance.test_store_java import check_nothing_was_recovered, check_reads_alike, dumped
from tests.crash.workload import STORE, recorded

pytestmark = pytest.mark.java

CASES = 20
FIRST_SEED = 4_000
_NAMES = (
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
    "message_index_enable",
)


@pytest.fixture(scope="module", autouse=True)
def oracle() -> None:
    require_oracle()


def as_rocketmq(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + CASES))
def test_the_real_store_reads_what_was_recovered(seed: int, tmp_path: Path) -> None:
    work = recorded(tmp_path / "live", seed)
    rng = random.Random(seed)
    # Early crashes leave nothing to recover.
    point = rng.choice(work.points[len(work.points) // 3 :])
    assert work.config.mapped_file_size_commit_log is not None
    point.state.crash(rng).write(tmp_path / "image")
    config = work.config
    with StoreWriter.start(tmp_path / "image" / STORE, config=config) as store:
        assert store.wait_dispatched(timeout=60)
        found = [message.physical_offset for message in store.scan()]
        ends_with_blank = store.max_offset % work.config.mapped_file_size_commit_log == 0
    shutil.move(tmp_path / "image" / STORE, tmp_path / "store")
    params: dict[str, Any] = {as_rocketmq(name): getattr(config, name) for name in _NAMES}
    scenario = dumped(tmp_path, params)
    assert [line["physicalOffset"] for line in scenario.expected] == found
    if not found:
        return
    check_reads_alike(scenario, ends_with_blank=ends_with_blank)
    check_nothing_was_recovered(scenario)
