"""Reference and kernel make the same Arrow columns of the same frames."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import properties as props
from logquarry.format import sys_flag
from logquarry.format.arrays import POSITION, SIZE
from logquarry.format.frame import Frame
from logquarry.log import columns, schema
from logquarry.log.codec import Rows, Window
from logquarry.log.columns import Decoding
from logquarry.stored_message import JSON_NAMES, StoredMessage
from logquarry.testing import strategies
from tests.helpers.small_log import small_log
from tests.helpers.twins import both, sound_rows

DEFAULT_LEVELS_MS = props.parse_levels(props.DEFAULT_LEVELS)


def assert_same_batches(
    window: Window, decoding: Decoding, *, check_crc: bool = True
) -> pa.RecordBatch:
    rows = sound_rows(window, check_crc=check_crc)
    fast, plain = both(lambda: columns.record_batch(window, rows, decoding))
    fast.validate(full=True)
    if not fast.equals(plain):
        for name in decoding.columns:
            assert fast[name].to_pylist() == plain[name].to_pylist(), name
    assert fast.equals(plain)
    return fast


@given(strategies.logs())
def test_all_columns_of_sound_logs(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        assert_same_batches(Window.of(data, base), Decoding(broker="b"))


@given(strategies.logs(items=strategies.plain_frames()))
def test_all_columns_of_what_a_broker_writes(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        assert_same_batches(Window.of(data, base), Decoding())


@pytest.mark.parametrize("check_crc", [True, False])
def test_flips_of_single_bits(check_crc: bool) -> None:
    log = small_log()
    # Without the CRC, two or three bits of each byte, and all eight in turn. With the CRC, nearly
    # all flips in the body make the frame invalid.
    step = 8 if check_crc else 3
    for base, sound in zip(log.bases(), log.files, strict=True):
        data = bytearray(sound)
        for place in range(0, 8 * len(data), step):
            data[place // 8] ^= 1 << place % 8
            window = Window.of(bytes(data), base)
            assert_same_batches(window, Decoding(), check_crc=check_crc)
            data[place // 8] ^= 1 << place % 8


@given(strategies.logs(min_frames=1), st.data())
def test_some_columns_are_those_of_all_columns(log: strategies.Log, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from(schema.NAMES), unique=True))
    window = Window.of(log.files[0], log.start)
    batch = assert_same_batches(window, Decoding(columns=wanted))
    assert batch.schema == schema.arrow_schema(wanted)
    every = columns.record_batch(window, sound_rows(window), Decoding())
    assert batch.num_rows == every.num_rows or not wanted
    for name in wanted:
        assert batch[name].equals(every[name])


@given(strategies.logs(min_frames=2), st.data())
def test_some_rows_are_those_of_all_rows(log: strategies.Log, data: st.DataObject) -> None:
    window = Window.of(log.files[0], log.start)
    rows = sound_rows(window)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    every = columns.record_batch(window, rows, Decoding())
    fast, plain = both(
        lambda: columns.record_batch(window, rows[np.array(picked, np.int64)], Decoding())
    )
    assert fast.equals(plain)
    assert fast.equals(every.take(pa.array(picked, pa.int64())))


@given(strategies.logs())
def test_columns_say_what_the_messages_say(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        window = Window.of(data, base)
        rows = sound_rows(window)
        batch = columns.record_batch(window, rows, Decoding(broker="b"))
        messages = columns.messages(window, rows, Decoding(broker="b"))
        frames = [item for item in log.frames if base <= item.physical_offset < base + len(data)]
        assert messages == [StoredMessage(item, broker="b") for item in frames]
        for name in schema.NAMES:
            if name not in JSON_NAMES or name.endswith("timestamp"):
                continue
            found = batch[name].to_pylist()
            if name == "properties":
                found = [dict(pairs) for pairs in found]
            assert found == [getattr(message, name) for message in messages], name


TIMES = [0, 1, -1, 1_700_000_000_123, (1 << 63) - 1, -(1 << 63), (1 << 63) // 1000, -(1 << 62)]


@pytest.mark.parametrize("time", TIMES)
def test_any_timestamp(time: int) -> None:
    item = dataclasses.replace(
        small_log().frames[0], store_timestamp=time, born_timestamp=-1 - time
    )
    log = strategies.place([item], file_size=400)
    batch = assert_same_batches(Window.of(log.files[0], 0), Decoding())
    micros = batch["store_timestamp"].cast(pa.int64())[0].as_py()
    most = ((1 << 63) - 1) // 1000
    assert micros == min(max(time, -most), most) * 1000


DELAYS = ["0", "1", "3", "18", "19", "99", "-1", "+2", "007", "1234567890", "2147483648", "", "x"]
DELAYS += ["1 ", "١٢", "𝟎", "999999999", "0000000001"]


@pytest.mark.parametrize("levels", [DEFAULT_LEVELS_MS, (5_000,), ()])
@pytest.mark.parametrize("topic", [props.SCHEDULE_TOPIC, "SCHEDULE_TOPIC_XXXY", "orders"])
def test_tags_code_of_any_delay(topic: str, levels: tuple[int, ...]) -> None:
    items = [
        Frame(
            topic=topic.encode(),
            properties=f"TAGS\x01TagA\x02DELAY\x01{text}".encode(),
            store_timestamp=1_700_000_000_000 + number,
        )
        for number, text in enumerate(DELAYS)
    ]
    log = strategies.place(items, file_size=1 << 14)
    decoding = Decoding(columns=["tags_code"], delay_levels_ms=levels)
    batch = assert_same_batches(Window.of(log.files[0], 0), decoding)
    expected = [
        props.tags_code(topic, props.decode_bytes(item.properties), item.store_timestamp, levels)
        for item in log.frames
    ]
    assert batch["tags_code"].to_pylist() == expected


@given(st.lists(st.text(max_size=5), max_size=10))
def test_tags_code_of_any_tag(tags: list[str]) -> None:
    items = [Frame(topic=b"t", properties=f"TAGS\x01{tag}".encode()) for tag in tags]
    log = strategies.place(items, file_size=4096)
    assert_same_batches(Window.of(log.files[0], 0), Decoding(columns=["tags", "tags_code"]))


@given(st.lists(strategies.property_strings(), min_size=1, max_size=12))
def test_any_property_string(texts: list[bytes]) -> None:
    log = strategies.place([Frame(topic=b"t", properties=text) for text in texts], file_size=8192)
    window = Window.of(log.files[0], 0)
    batch = assert_same_batches(
        window, Decoding(columns=["tags", "keys", "uniq_key", "properties"])
    )
    expected = [props.decode_bytes(text) for text in texts]
    assert [dict(pairs) for pairs in batch["properties"].to_pylist()] == expected
    assert [list(dict(pairs)) for pairs in batch["properties"].to_pylist()] == [
        list(pairs) for pairs in expected
    ]


@given(strategies.logs())
def test_suspect_rows(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        window = Window.of(data, base)
        fast, plain = both(partial(columns.suspect_rows, window, sound_rows(window)))
        assert list(fast) == list(plain)


def test_many_properties_of_one_message() -> None:
    rng = np.random.default_rng(1)
    for count in (0, 1, 3, 4, 31, 32, 100, 1000):
        names = rng.integers(0, max(1, count), count).tolist()
        text = "\x02".join(f"{name:x}\x01{i}" for i, name in enumerate(names)).encode()
        assert len(text) < 32_768
        log = strategies.place([Frame(topic=b"t", properties=text)] * 2, file_size=1 << 17)
        assert_same_batches(Window.of(log.files[0], 0), Decoding())


@pytest.mark.parametrize("count", [3, 5000])
def test_topic_ids(count: int) -> None:
    names = [b"t%d" % (number % max(1, count - 2)) for number in range(count)] + [b"", b"\xff"]
    log = strategies.place([Frame(topic=name) for name in names], file_size=1 << 20)
    window = Window.of(log.files[0], 0)
    rows = np.array(
        [
            [item.physical_offset, item.size, 88, 0, 89, len(item.topic), 0, 0]
            for item in log.frames
        ],
        np.int32,
    )

    def named() -> list[str]:
        ids, topics = columns.topic_ids(window, rows)
        assert len(set(topics)) == len(topics)
        return [topics[number] for number in ids.tolist()]

    fast, plain = both(named)
    assert fast == plain == [name.decode("utf-8", "replace") for name in names]


@given(strategies.logs())
def test_fixed_fields(log: strategies.Log) -> None:
    names = [
        "queue_id",
        "store_timestamp",
        "prepared_transaction_offset",
        "sys_flag",
        "born_timestamp",
    ]
    window = Window.of(log.files[0], log.start)
    rows = sound_rows(window)

    def fields() -> dict[str, list[int]]:
        found = columns.fixed_fields(window, rows, names)
        return {name: values.tolist() for name, values in found.items()}

    fast, plain = both(fields)
    assert fast == plain
    assert fast["store_timestamp"] == [item.store_timestamp for item in log.frames[: len(rows)]]


@given(
    strategies.logs(
        items=strategies.frames(
            flags=st.sampled_from([sys_flag.COMPRESSED, 0x101, 0x201, 0x701, 0])
        )
    )
)
def test_decompressing_what_does_not_decompress(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        window = Window.of(data, base)
        assert_same_contents(window, sound_rows(window))


def assert_same_contents(window: Window, rows: Rows) -> None:
    def decompressed() -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
        told: list[tuple[int, str]] = []
        decoding = Decoding(
            columns=["body"],
            decompress=True,
            on_bad_body=lambda offset, reason: told.append((offset, reason)),
        )
        return columns.record_batch(window, rows, decoding), told

    (fast, fast_told), (plain, plain_told) = both(decompressed)
    assert fast.equals(plain)
    assert fast_told == plain_told


@given(strategies.logs(), st.sets(st.integers(0, 40)), st.integers(1, 255))
def test_wrong_property_crcs(log: strategies.Log, harmed: set[int], mask: int) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        window = Window.of(data, base)
        rows = sound_rows(window)
        pieces, at = [], 0
        for number, row in enumerate(rows.tolist()):
            frame = data[row[POSITION] : row[POSITION] + row[SIZE]]
            if number % 3:
                frame += props.encode_crc(frame)
                if number in harmed:
                    # Any byte before the prefix, of the digits or of the end.
                    place = number * 7 % row[SIZE] if number % 2 else -1 - number % 11
                    changed = bytearray(frame)
                    changed[place] ^= mask
                    frame = bytes(changed)
            pieces.append(frame)
            rows[number, POSITION], rows[number, SIZE] = at, len(frame)
            at += len(frame)
        made = Window.of(b"".join(pieces), base)
        fast, plain = both(partial(columns.wrong_property_crcs, made, rows))
        assert fast == plain
        assert fast == [n for n, frame in enumerate(pieces) if props.matches_crc(frame) is False]
