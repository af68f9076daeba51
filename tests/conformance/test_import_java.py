"""RocketMQ reads every message of an imported store, and has nothing to recover."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import require_oracle
from tests.conformance.test_store_java import (
    PARAMS,
    check_nothing_was_recovered,
    check_reads_alike,
    dumped,
)
from tests.helpers.command import run
from tests.helpers.exports import export_parquet

pytestmark = pytest.mark.java

SAME = (
    *("topic", "queueId", "queueOffset", "size", "body", "propertiesString", "sysFlag", "flag"),
    *("bornTimestamp", "bornHost", "storeHost", "bodyCRC", "reconsumeTimes"),
    *("preparedTransactionOffset", "storeTimestamp"),
)


@pytest.mark.parametrize("scenario", ["real-broker", "sysflags", "ipv6", "delay"])
def test_the_real_store_reads_what_was_imported(
    scenario: str, golden: Path, tmp_path: Path
) -> None:
    require_oracle()
    before = Scenario(golden / scenario)
    (tmp_path / "sizes.json").write_text(str(PARAMS).replace("'", '"'))
    export_parquet(before.store, tmp_path / "out")
    options = ["--keep-times", "--config", tmp_path / "sizes.json"]
    run("import", tmp_path / "out", tmp_path / "store", *options)
    after = dumped(tmp_path, PARAMS)
    assert [{name: m[name] for name in SAME} for m in after.expected] == [
        {name: m[name] for name in SAME} for m in before.expected
    ]
    check_reads_alike(after)
    check_nothing_was_recovered(after)
