"""Bulk puts: what ends them, their results, and other threads' puts in between."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from logquarry.disk.service import Refusal
from logquarry.errors import MessageRejected, StoreUnavailable, UsageError
from logquarry.log import codec
from logquarry.message import Message
from logquarry.write import put_many as put_many_module
from logquarry.write.common_frames import IS_COMPILED
from logquarry.write.put_many import ManyWriter
from logquarry.write.put_result import PutStatus
from tests.helpers.twins import plain_python
from tests.unit.write.test_append import Log


@pytest.fixture(params=["compiled", "kernels", "plain"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    if request.param == "compiled":
        if not IS_COMPILED:
            pytest.skip("the modules are not compiled")
        yield Log(tmp_path)
        return
    with mock.patch.object(put_many_module, "IS_COMPILED", False):
        if request.param == "plain":
            with plain_python():
                yield Log(tmp_path)
        else:
            assert codec.kernels_enabled()
            yield Log(tmp_path)


def put(log: Log, messages: Any) -> Any:
    return ManyWriter(log.writer).put_many(messages)


def test_nothing(log: Log) -> None:
    nothings: list[Any] = [[], iter(()), pa.table({"topic": pa.array([], pa.string())})]
    for nothing in nothings:
        result = put(log, nothing)
        assert result.ok and result.status is PutStatus.PUT_OK
        assert (result.message_count, result.end_offset, result.message_ids) == (0, 0, ())
    assert log.files.max_offset == 0


def test_what_a_result_says(log: Log) -> None:
    messages = [Message("t", b"x", queue_id=n % 2) for n in range(20)]
    messages.append(Message("u", b"late", delay_level=1))
    result = put(log, messages)
    assert result.queue_offset.tolist() == [n // 2 for n in range(20)] + [0]
    assert result.topics == {"t": (20, 20 * 93), "u": (1, int(result.size[-1]))}
    assert result.end_offset == log.files.max_offset
    assert [int(message_id[-16:], 16) for message_id in result.message_ids] == (
        result.physical_offset.tolist()
    )
    assert len(log.files.bases) > 1


def test_more_queues_hosts_and_bytes_than_fit_at_first(tmp_path: Path, log: Log) -> None:
    """The tables grow; the bytes stay those of single puts."""
    messages = [
        Message(
            f"t{number % 70}",
            bytes(number % 900),
            queue_id=number % 90 - 5,
            born_host=f"10.0.0.{number % 3}:1",
            store_host=None if number % 2 else "10.0.0.9:2",
            born_timestamp=number,
            properties={"number": str(number)} if number % 5 == 0 else None,
        )
        for number in range(400)
    ]
    result = put(log, iter(messages))
    single = Log(tmp_path / "single")
    found = [single.writer.put(message) for message in messages]
    assert log.frames() == single.frames()
    assert log.offsets == single.offsets
    assert result.physical_offset.tolist() == [one.physical_offset for one in found]
    assert result.queue_offset.tolist() == [one.queue_offset for one in found]
    assert result.message_ids == tuple(one.message_id for one in found)


def test_an_iterable_that_fails(log: Log) -> None:
    def some(last: Any) -> Iterator[Any]:
        yield from (Message("t", b"x", delay_level=number % 2) for number in range(100))
        yield last()

    with pytest.raises(ZeroDivisionError):
        put(log, some(lambda: 1 // 0))
    with pytest.raises(TypeError, match="put_many, message 100, "):
        put(log, some(lambda: "no message"))
    assert log.files.max_offset == 0 and log.offsets == {}


def test_bodies_that_are_views(log: Log) -> None:
    numbers = memoryview(array("H", [1, 2, 3]))
    put(log, [Message("t", body) for body in (bytearray(b"ab"), memoryview(b"cd"), numbers)])
    assert [frame.body for frame in log.frames()] == [b"ab", b"cd", numbers.tobytes()]


def test_one_that_is_refused_leaves_the_log_as_it_was(log: Log) -> None:
    messages = [Message("t"), Message("t"), Message("a/b"), Message("")]
    with pytest.raises(MessageRejected, match="message 2: not a topic") as error:
        put(log, messages)
    assert (error.value.index, error.value.reason, error.value.appended) == (2, "topic", None)
    table = pa.Table.from_batches(
        [pa.record_batch({"topic": [topic]}) for topic in ("t", "t", "a/b")]
    )
    with pytest.raises(MessageRejected, match="message 2: ") as error:
        put(log, table)
    assert error.value.index == 2
    with pytest.raises(UsageError, match="message 1: "):
        put(log, [Message("t"), Message("t", queue_id=1 << 40)])
    with pytest.raises(UsageError, match="message 1: it has no topic"):
        put(log, pa.record_batch({"topic": ["t", None]}))
    assert log.files.max_offset == 0 and log.offsets == {}


def test_columns_that_nobody_knows(log: Log) -> None:
    for columns, words in (
        ({"body": [b"x"]}, "need a column topic"),
        ({"topic": ["t"], "bodies": [b"x"]}, "no column 'bodies'"),
    ):
        with pytest.raises(UsageError, match=words):
            put(log, pa.record_batch(columns))
    with pytest.raises(TypeError, match="several"):
        put(log, Message("t"))


NO_USE: dict[str, tuple[Any, str]] = {
    "queue_id": (pa.array([True]), "takes whole numbers, not bool"),
    "flag": (pa.array([1]).dictionary_encode(), "takes whole numbers, not dictionary"),
    "born_timestamp": (pa.array([1], pa.date32()), "takes whole numbers, not date32"),
    "delay_level": (pa.array(["1"]), "takes whole numbers, not string"),
    "wait_store_ok": (pa.array([1]), "takes true and false, not int64"),
    "tags": (pa.array([1]), "takes text or bytes, not int64"),
    "keys": (pa.array([b"\xff"]), "column keys is of binary"),
    "body": (pa.array([[1]]), "takes text or bytes, not list"),
    "properties": (pa.array([{"a": 1}]), "a map of text to text, not struct"),
    "sys_flag": (pa.array([1 << 63], pa.uint64()), "column sys_flag is of uint64"),
}


@pytest.mark.parametrize("name", NO_USE)
def test_columns_of_no_use(log: Log, name: str) -> None:
    column, words = NO_USE[name]
    with pytest.raises(UsageError, match=words):
        put(log, pa.record_batch({"topic": ["t"], name: column}))
    assert log.files.max_offset == 0 and log.offsets == {}


@pytest.mark.parametrize("delay_level", [0, 1])
def test_columns_of_unusual_types(log: Log, delay_level: int) -> None:
    """The fast path for columns and the path for single messages (here delayed ones) agree."""
    pairs = pa.array([[(b"city", "Zürich".encode())]], pa.map_(pa.binary(), pa.binary()))
    columns = {
        "topic": pa.array([b"t"]),
        "tags": pa.array([b"a"]).dictionary_encode(),
        "keys": pa.array([b"k"], pa.binary_view()),
        "body": pa.array([b"xy"], pa.binary(2)),
        "properties": pairs,
        "born_host": pa.array(["10.0.0.1:5"], pa.string_view()),
        "delay_level": pa.array([delay_level]),
    }
    named = ["queue_id", "flag", "born_timestamp", "store_host", "wait_store_ok"]
    put(log, pa.record_batch(columns | {name: pa.nulls(1) for name in named}))
    message = Message(
        "t",
        b"xy",
        tags="a",
        keys="k",
        properties={"city": "Zürich"},
        born_host="10.0.0.1:5",
        delay_level=delay_level,
    )
    log.writer.put(message)
    first, second = log.frames()
    assert (first.topic, first.body, first.properties, first.born_host) == (
        (second.topic, second.body, second.properties, second.born_host)
    )


def test_a_body_that_is_none(log: Log) -> None:
    for body in ("text", 5):
        with pytest.raises(TypeError):
            put(log, [Message("t"), Message("t", body)])  # type: ignore[arg-type]
    assert log.files.max_offset == 0 and log.offsets == {}


def test_a_file_that_cannot_be_made(log: Log, tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    taken = tmp_path / f"commitlog/{1000:020d}"
    taken.mkdir()
    with pytest.raises(StoreUnavailable) as error:
        put(log, [Message("t", bytes(300)) for _ in range(4)])
    appended = error.value.appended
    assert error.value.status == "CREATE_MAPEDFILE_FAILED"
    assert appended.message_count == len(log.frames()) == 2
    assert log.offsets == {("t", 0): 2}


def test_a_store_that_is_closed_meanwhile(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_many_module, "CHUNK_BYTES", 1)
    calls = iter(range(10))

    def clock() -> int:
        if next(calls) == 3:
            log.flags.set(Refusal.CLOSED)
        return 1_700_000_000_000

    log.writer.clock = clock
    with pytest.raises(StoreUnavailable) as error:
        put(log, [Message("t", born_timestamp=1) for _ in range(9)])
    assert error.value.appended.message_count == len(log.frames())
    assert 0 < len(log.frames()) < 9
    with pytest.raises(StoreUnavailable) as error:
        put(log, [Message("t")])
    assert error.value.appended is None


def test_chunks_have_their_own_times(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_many_module, "CHUNK_BYTES", 200)
    times = iter(range(100, 200))
    log.writer.clock = lambda: next(times)
    result = put(log, [Message("t", b"x", born_timestamp=1) for _ in range(5)])
    assert len(set(result.store_timestamp.tolist())) == 3
    assert sorted(result.store_timestamp) == list(result.store_timestamp)
    assert [frame.store_timestamp for frame in log.frames()] == list(result.store_timestamp)


def test_others_put_in_between(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_many_module, "CHUNK_BYTES", 500)
    messages = [Message("t", bytes(60)) for _ in range(500)]
    threads = [threading.Thread(target=put, args=[log, messages]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        log.writer.put(Message("t", properties_string="a\x01b"))
    for thread in threads:
        thread.join()
    assert [frame.queue_offset for frame in log.frames()] == list(range(1_600))
