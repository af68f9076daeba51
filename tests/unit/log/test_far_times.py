"""Times that do not fit into a column of microseconds."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.errors import UsageError
from tests.helpers.command import jsonl
from tests.helpers.small_store import config
from tests.helpers.twins import both

MOST = (2**63 - 1) // 1000
TIMES = [MOST, MOST + 1, 2**63 - 1, 1 << 62, -MOST, -MOST - 1, -(2**63), 0, 1_700_000_000_000]
NEAREST = [MOST, MOST, MOST, MOST, -MOST, -MOST, -MOST, 0, 1_700_000_000_000]


def test_a_column_has_the_nearest_time_that_it_can_hold(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path / "store", mode="rw", config=config()) as store:
        for time in TIMES:
            store.put(lq.Message("t", b"x", born_timestamp=time))

    def times() -> list[int]:
        with lq.MessageStore.open(tmp_path / "store") as store:
            column = store.to_arrow(columns=["born_timestamp"]).read_all()["born_timestamp"]
            found: list[int] = column.cast(pa.int64()).to_pylist()
        return found

    fast, plain = both(times)
    assert fast == plain == [time * 1000 for time in NEAREST]
    # JSON has milliseconds, and so every time exactly.
    assert [message["born_timestamp"] for message in jsonl(tmp_path / "store")] == TIMES


def test_seconds_that_exceed_64_bits_as_milliseconds_are_refused(tmp_path: Path) -> None:
    def table(seconds: int) -> pa.Table:
        times = pa.array([0, seconds], pa.timestamp("s"))
        return pa.table({"topic": ["t", "t"], "body": [b"", b""], "born_timestamp": times})

    with lq.MessageStore.open(tmp_path / "store", mode="rw", config=config()) as store:
        with pytest.raises(UsageError, match="the column born_timestamp is of timestamp"):
            store.put_many(table(1 << 60))
        store.put_many(table(1 << 50))
        assert [message.born_timestamp for message in store.scan()] == [0, 1000 << 50]
