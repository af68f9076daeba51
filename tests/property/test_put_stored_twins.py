"""Messages of one store are put into another store unchanged, with kernels and without."""

from __future__ import annotations

import tempfile
from itertools import accumulate
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import LogquarryError, MessageRejected
from logquarry.format import frame, sys_flag
from logquarry.message import Message
from tests.helpers.twins import both
from tests.property.test_put_many_twins import FILE_SIZE, NOW, Log, ints, strings

Row = dict[str, Any]

SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "body": pa.binary(),
        "queue_id": pa.int32(),
        "queue_offset": pa.int64(),
        "flag": pa.int32(),
        "sys_flag": pa.int32(),
        "born_timestamp": pa.int64(),
        "store_timestamp": pa.int64(),
        "born_host": pa.binary(),
        "store_host": pa.binary(),
        "reconsume_times": pa.int32(),
        "prepared_transaction_offset": pa.int64(),
        "properties_string": pa.binary(),
    }
)

ADDRESSES = st.sampled_from([bytes(range(8)), bytes(range(20))])

stored = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["t", "SCHEDULE_TOPIC_XXXX", "主题", "t" * 127]),
        "body": st.binary(max_size=60),
        "queue_id": st.sampled_from([0, 1, -1]),
        "queue_offset": st.sampled_from([0, 7, 2**40]),
        "flag": ints,
        "sys_flag": st.sampled_from([0, sys_flag.COMPRESSED, 4, 8, 12, 0x700]),
        "born_timestamp": st.sampled_from([0, NOW, -3]),
        "store_timestamp": st.sampled_from([0, NOW - 5, NOW, NOW + 5, NOW + 9]),
        "born_host": ADDRESSES,
        "store_host": ADDRESSES,
        "reconsume_times": ints,
        "prepared_transaction_offset": st.sampled_from([0, 5, 2**62]),
        "properties_string": strings.map(lambda s: s.encode("utf-8", "replace"))
        | st.sampled_from([b"a\x01b\x02", b"\x02\x02", b"\xff\x01\xfe", b"DELAY\x01x"]),
    }
)


def frames_of(log: Log) -> list[frame.Frame]:
    found = []
    for number, path in enumerate(sorted((log.root / "commitlog").glob("0*"))):
        data, position = path.read_bytes(), 0
        while isinstance(
            outcome := frame.decode_at(data, position, base=number * FILE_SIZE), frame.Frame
        ):
            found.append(outcome)
            position += outcome.size
    return found


def batches_of(rows: list[Row], cut: int) -> list[pa.RecordBatch]:
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    return [batch[:cut], batch[cut:]]


def copied(rows: list[Row], least: int | None, cut: int, **settings: Any) -> Any:
    """The bytes in the log; the results must agree with them."""
    with tempfile.TemporaryDirectory() as root:
        log = Log(root, **settings)
        told: list[Any] = []
        for batch in batches_of(rows, cut):
            try:
                log.many.check_stored(batch)
                result = log.many.put_stored(batch, least)
            except LogquarryError as error:
                return str(error)
            told += zip(
                result.physical_offset.tolist(),
                result.queue_offset.tolist(),
                result.store_timestamp.tolist(),
                result.size.tolist(),
                result.message_ids,
                strict=True,
            )
        frames = frames_of(log)
        assert [entry[:4] for entry in told] == [
            (f.physical_offset, f.queue_offset, f.store_timestamp, f.size) for f in frames
        ]
        return [tuple(getattr(f, name) for name in FIELDS) for f in frames], told, log.state()


FIELDS = (
    *("topic", "body", "queue_id", "queue_offset", "flag", "sys_flag", "born_timestamp"),
    *("store_timestamp", "born_host", "store_host", "reconsume_times"),
    *("prepared_transaction_offset", "properties"),
)


def expected(rows: list[Row], least: int | None) -> list[tuple[Any, ...]]:
    next_offsets: dict[tuple[str, int], int] = {}
    times = (
        [NOW] * len(rows)
        if least is None
        else list(accumulate((row["store_timestamp"] for row in rows), max, initial=least))[1:]
    )
    found = []
    for row, time in zip(rows, times, strict=True):
        flags = row["sys_flag"]
        flags |= sys_flag.BORN_HOST_V6 if len(row["born_host"]) == 20 else 0
        flags |= sys_flag.STORE_HOST_V6 if len(row["store_host"]) == 20 else 0
        offset = row["queue_offset"]
        if sys_flag.advances_queue(flags):
            key = row["topic"], row["queue_id"]
            offset = next_offsets.get(key, 0)
            next_offsets[key] = offset + 1
        changed = row | {"sys_flag": flags, "queue_offset": offset, "store_timestamp": time}
        changed |= {"topic": row["topic"].encode(), "properties": row["properties_string"]}
        found.append(tuple(changed[name] for name in FIELDS))
    return found


@given(
    st.lists(stored, max_size=12),
    st.sampled_from([None, 0, NOW - 5, NOW + 5]),
    st.integers(0, 12),
)
def test_they_are_as_they_were(rows: list[Row], least: int | None, cut: int) -> None:
    fast, plain = both(lambda: copied(rows, least, cut))
    assert fast == plain
    assert fast[0] == expected(rows, least)


@given(st.lists(stored, min_size=1, max_size=4), st.data())
def test_what_no_store_takes_is_refused_by_both(rows: list[Row], data: st.DataObject) -> None:
    bad: Row = data.draw(
        st.sampled_from(
            [
                {"topic": "a/b"},
                {"topic": ""},
                {"body": bytes(FILE_SIZE)},
                {"properties_string": bytes(40_000)},
                {"sys_flag": sys_flag.STORE_HOST_V6, "store_host": bytes(8)},
                {"store_host": bytes(7)},
            ]
        )
    )
    number = data.draw(st.integers(0, len(rows) - 1))
    rows[number] |= bad
    fast, plain = both(lambda: copied(rows, None, 0))
    assert fast == plain
    assert fast.startswith(f"message {number}: ")


LMQ = {"enable_multi_dispatch": True, "enable_lmq": True}
DISPATCHED = b"INNER_MULTI_DISPATCH\x01%%LMQ%%a,b\x02INNER_MULTI_QUEUE_OFFSET\x01%d,%d"


def with_copies(*offsets: tuple[int, int]) -> list[Row]:
    row: Row = dict.fromkeys(("body",), b"") | {"topic": "t", "queue_id": 1}
    return [row | {"properties_string": DISPATCHED % pair} for pair in offsets]


def test_further_queues_go_on_where_the_string_says() -> None:
    fast, plain = both(lambda: copied(with_copies((0, 0), (1, 1), (2, 2)), None, 1, **LMQ))
    assert fast == plain
    assert fast[2][2] == {("t", 1): 3, ("%LMQ%a", 0): 3, ("b", 1): 3}


def test_further_queues_that_do_not_fit_are_refused() -> None:
    fast, plain = both(lambda: copied(with_copies((0, 0), (1, 7)), None, 0, **LMQ))
    assert fast == plain
    assert "offset 1,7 in the further queues %LMQ%a, b, and the next ones there are 1,1" in fast
    # Without multi-dispatch queues the property is plain text.
    assert isinstance(copied(with_copies((0, 0), (1, 7)), None, 0), tuple)


def test_a_batch_names_columns_that_there_are() -> None:
    with tempfile.TemporaryDirectory() as root:
        log = Log(root)
        try:
            log.many.put_stored(pa.record_batch({"topic": ["a/b"], "store_timestamp": [1]}), 5)
        except MessageRejected as error:
            assert error.index == 0
        result = log.many.put_stored(pa.record_batch({"topic": ["t", "t"]}))
        assert result.queue_offset.tolist() == [0, 1]
        assert log.many.put_many([Message("t")]).queue_offset.tolist() == [2]
