"""RocketMQ reads every message of a salvaged store."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import salvage_store
from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import require_oracle
from tests.conformance.test_import_java import SAME
from tests.conformance.test_store_facts import test_get as check_get
from tests.conformance.test_store_java import (
    CONFIG,
    PARAMS,
    check_nothing_was_recovered,
    dumped,
)

pytestmark = pytest.mark.java


@pytest.mark.parametrize("scenario", ["real-broker", "sysflags", "ipv6", "delay", "rollover"])
def test_the_real_store_reads_what_was_salvaged(
    scenario: str, golden: Path, tmp_path: Path
) -> None:
    require_oracle()
    before = Scenario(golden / scenario)
    found = salvage_store(StoreLayout.open(before.store, before.config), tmp_path / "store")
    assert found.plan.is_whole
    after = dumped(tmp_path, before.params)
    assert [{name: m[name] for name in SAME} for m in after.expected] == [
        {name: m[name] for name in SAME} for m in before.expected
    ]
    check_nothing_was_recovered(after)


def test_a_consumer_gets_all_that_is_left_of_a_queue(tmp_path: Path) -> None:
    require_oracle()
    source = tmp_path / "source"
    with lq.MessageStore.open(source, mode="rw", config=CONFIG) as store:
        put = [store.put(lq.Message("t", b"%d" % number, keys="k")) for number in range(10)]
    path = source / "commitlog" / "0".zfill(20)
    data = bytearray(path.read_bytes())
    data[put[3].physical_offset + 88] ^= 1
    path.write_bytes(data)
    salvage_store(StoreLayout.open(source, CONFIG), tmp_path / "store")
    after = dumped(tmp_path, PARAMS)
    assert [m["queueOffset"] for m in after.expected] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    (asked,) = (one for one in after.facts["getMessage"] if one["topic"] == "t")
    first = asked["gets"][0]
    assert (first["offset"], first["status"], first["nextBeginOffset"]) == (0, "FOUND", 10)
    assert len(first["physicalOffsets"]) == 9
    with lq.MessageStore.open(after.store, config=after.config) as store:
        check_get(after, store)
    check_nothing_was_recovered(after)
