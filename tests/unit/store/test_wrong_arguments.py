"""Wrong types and values in each call of a store: an error names the argument, nothing changes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import logquarry as lq
from logquarry.errors import UsageError
from tests.helpers.small_store import config as small_config
from tests.helpers.wrong_arguments import (
    HUGE,
    NO_BYTES,
    NO_FLAG,
    NO_FUNCTION,
    NO_INT,
    NO_NAMES,
    NO_OBJECT,
    NO_SECONDS,
    NO_TEXT,
    NO_TIME,
    NUMPY,
    THING,
    Wrong,
    cases,
    refused,
    with_wrong,
)

QUEUE: Final = {"topic": (*NO_TEXT, None), "queue_id": (*NO_INT, None, 1 << 31)}
FILTER: Final = {
    "topics": NO_NAMES,
    "queue_id": (*NO_INT, 1 << 31),
    "tags": NO_TEXT,
    "keys": NO_NAMES,
    "since": NO_TIME,
    "until": NO_TIME,
    "on_damage": ("ignore", 5, None),
    "damage": NO_OBJECT,
}
MESSAGE: Final = NO_OBJECT

READS: Final[dict[str, tuple[dict[str, Any], Wrong]]] = {
    "message_at": ({"physical_offset": 0}, {"physical_offset": (*NO_INT, None)}),
    "message_size_at": ({"physical_offset": 0}, {"physical_offset": (*NO_INT, None, -1)}),
    "roll_next_file": ({"physical_offset": 0}, {"physical_offset": (*NO_INT, None, -1)}),
    "get_data": (
        {"physical_offset": 0, "size": 1},
        {"physical_offset": (*NO_INT, None, -1), "size": (*NO_INT, None, -1)},
    ),
    "message_by_id": ({"message_id": "0" * 32}, {"message_id": (*NO_TEXT, None, "", "zz" * 16)}),
    "queue": ({"topic": "t", "queue_id": 0}, QUEUE),
    "queue_offsets": ({"topic": "t", "queue_id": 0}, QUEUE),
    "offset_by_time": (
        {"topic": "t", "queue_id": 0, "timestamp_ms": 0},
        QUEUE | {"timestamp_ms": (*NO_TIME, None)},
    ),
    "get": (
        {"topic": "t", "queue_id": 0},
        QUEUE | {"offset": (*NO_INT, None), "max_count": (*NO_INT, None), "tag": NO_TEXT},
    ),
    "query": (
        {"topic": "t", "key": "k"},
        {
            "topic": (*NO_TEXT, None),
            "key": (*NO_TEXT, None),
            "since": NO_TIME,
            "until": NO_TIME,
            "max_count": (*NO_INT, None, -1),
            "exact": NO_FLAG,
        },
    ),
    "scan": ({}, FILTER),
    "to_arrow": (
        {},
        FILTER | {"columns": (*NO_NAMES, ["nope"], []), "decompress": (*NO_FLAG, None)},
    ),
    "consumer": (
        {"group": "g", "topics": "t"},
        {
            "group": (*NO_TEXT, None, "", "a/b"),
            "topics": (*NO_NAMES, None, []),
            "tags": NO_TEXT,
            "sql": NO_TEXT,
            "start": ("first", 1.5, True, b"x", [], None, THING, HUGE),
            "timestamp": NO_TIME,
            "auto_commit": (*NO_FLAG, None),
            "timeout": NO_SECONDS,
            "max_reconsume_times": (*NO_INT, None, -1),
        },
    ),
}

RULES = lq.RetentionRules(keep_bytes=0)
NO_LISTS: Final = (
    "x",
    5,
    ["x"],
    lq.Message("t"),
    np.array(1),
    memoryview(b"abcd").cast("B", (2, 2)),
)
WRITES: Final[dict[str, tuple[dict[str, Any], Wrong]]] = {
    "put": ({}, {"message": (*MESSAGE, None, ("t",) * 17)}),
    "put_async": ({}, {"message": (*MESSAGE, None, ("t",) * 17)}),
    "put_batch": (
        {},
        {"messages": (*NO_LISTS, [None]), "wire": NO_BYTES} | {"message": MESSAGE},
    ),
    "put_batch_async": (
        {},
        {"messages": (*NO_LISTS, [None]), "wire": NO_BYTES} | {"message": MESSAGE},
    ),
    "put_many": ({}, {"messages": (*NO_LISTS, [None] * 99, {}, None, THING)}),
    "append_data": (
        {"offset": 0, "data": b""},
        {"offset": (*NO_INT, None, -1), "data": (*NO_BYTES, None)},
    ),
    "wait_dispatched": ({}, {"offset": (*NO_INT, -1), "timeout": NO_SECONDS}),
    "add_arrival_listener": ({}, {"listener": (*NO_FUNCTION, None)}),
    "remove_arrival_listener": ({}, {"listener": (*NO_FUNCTION, None)}),
    "retain": ({"rules": RULES}, {"rules": (*NO_OBJECT, None), "apply": (*NO_FLAG, None)}),
    "transaction": (
        {"message": lq.Message("t")},
        {"message": (*MESSAGE, None), "group": (*NO_TEXT, None)},
    ),
    "put_half": (
        {"message": lq.Message("t"), "group": "g"},
        {"message": (*MESSAGE, None), "group": (*NO_TEXT, None)},
    ),
    "end_transaction": (
        {"physical_offset": 0, "state": "commit", "group": "g"},
        {
            "physical_offset": (*NO_INT, None, -1),
            "state": ("unknown", "", 5, None, b"commit", THING),
            "group": (*NO_TEXT, None),
            "queue_offset": (*NO_INT, -1),
        },
    ),
    "check_transactions": ({}, {"listener": (*NO_FUNCTION, None)}),
    "start_transaction_checks": ({}, {"listener": (*NO_FUNCTION, None)}),
}
NO_ARGUMENTS: Final = frozenset(
    ("close", "refresh", "queues", "stats", "flush", "deliver_due", "start_delivery")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wrong") / "store"
    with lq.MessageStore.open(root, mode="rw", config=small_config()) as store:
        store.put(lq.Message("t", b"body", tags="a", keys="k"))
    return root


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lq.StoreWriter]:
    root = tmp_path_factory.mktemp("wrong") / "written"
    with lq.MessageStore.open(root, mode="rw", config=small_config()) as store:
        store.put(lq.Message("t", b"body", tags="a", keys="k"))
        store.wait_dispatched()
        store.flush()
        yield store


def state(store: lq.StoreWriter) -> object:
    return (
        store.max_offset,
        store.queues(),
        store._engine.writer.queue_offsets,
        sorted(str(path) for path in Path(store.root).rglob("*")),
    )


@pytest.mark.parametrize(("name", "argument"), cases(READS))
def test_reads_of_a_reader(folder: Path, name: str, argument: str) -> None:
    with lq.MessageStore.open(folder) as store:
        for arguments in with_wrong(READS, name, argument):
            refused(getattr(store, name), arguments, argument)


@pytest.mark.parametrize(("name", "argument"), cases(READS | WRITES))
def test_calls_of_a_writer(writer: lq.StoreWriter, name: str, argument: str) -> None:
    before = state(writer)
    for arguments in with_wrong(READS | WRITES, name, argument):
        refused(getattr(writer, name), arguments, argument)
    assert state(writer) == before


def test_every_public_method_is_here() -> None:
    methods = {
        name
        for name, kind in inspect.getmembers(lq.StoreWriter, inspect.isroutine)
        if not name.startswith("_")
    }
    internal = {"check_stored", "config_tables", "free_room_at_close", "load_staged", "log_feed"}
    internal |= {"put_stored", "start"}
    assert methods - internal - NO_ARGUMENTS - {"open"} == READS.keys() | WRITES.keys()
    for name, (_, wrong) in (READS | WRITES).items():
        parameters = set(inspect.signature(getattr(lq.StoreWriter, name)).parameters)
        assert parameters - {"self", "topic" if name == "scan" else ""} == wrong.keys(), name


FIELDS: Final[Wrong] = {
    "topic": (*NO_TEXT, None),
    "body": (*NO_BYTES, None),
    "queue_id": (*NO_INT, None),
    "tags": NO_TEXT,
    "keys": (b"k", 5, True, THING, [5], [b"k"], {"k": 1}, ["a b"], [""]),
    "properties": ("x", 5, [("a", "b")], {"a": 1}, {1: "a"}, THING),
    "properties_string": (5, ["x"], True, THING, {}),
    "delay_level": (*NO_INT, None),
    "wait_store_ok": (*NO_FLAG, None),
    "flag": (*NO_INT, None),
    "sys_flag": (*NO_INT, None),
    "queue_offset": (*NO_INT, None),
    "born_timestamp": NO_INT,
    "born_host": (5, None, ["h"], THING, True),
    "store_host": (5, ["h"], THING, True),
    "reconsume_times": (*NO_INT, None),
    "prepared_transaction_offset": (*NO_INT, None),
}


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_of_a_message(writer: lq.StoreWriter, name: str) -> None:
    before = state(writer)

    def put(**fields: Any) -> object:
        return writer.put(lq.Message(**fields))

    for value in FIELDS[name]:
        refused(put, {"topic": "t", name: value}, "propert" if name == "properties" else name)
        with pytest.raises(UsageError):
            lq.Message("t")._replace(**{name: value})
    assert state(writer) == before


@pytest.mark.parametrize("name", ["queue_id", "flag", "sys_flag", "reconsume_times"])
@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
@pytest.mark.parametrize("count", [1, 100])
def test_numbers_of_more_than_32_bits(
    writer: lq.StoreWriter, name: str, value: int, count: int
) -> None:
    before = state(writer)
    message = lq.Message("t", **{name: value})  # type: ignore[arg-type]
    for put in (
        lambda: writer.put(message),
        lambda: writer.put_many([message] * count),
        lambda: writer.put_async(message).result(),
    ):
        refused(put, {}, name)
    assert state(writer) == before


def test_what_is_for_users(folder: Path, writer: lq.StoreWriter) -> None:
    with lq.MessageStore.open(folder) as store:
        assert repr(store) == (
            f"<StoreReader {str(folder)!r}, mode 'r', physical offsets 0 to {store.max_offset}>"
        )
        public = {name for name in dir(store) if not name.startswith("_")}
    assert repr(store) == f"<StoreReader {str(folder)!r}, closed>"
    assert f"mode 'rw', physical offsets 0 to {writer.max_offset}" in repr(writer)
    assert {"get", "scan", "consumer", "get_data"} <= public
    assert not public & (WRITES.keys() | {"load_staged", "log_feed", "start", "flush"})
    assert WRITES.keys() <= set(dir(writer))
    assert dir(lq) == sorted(lq.__all__)


def test_every_field_of_a_message_is_here() -> None:
    assert FIELDS.keys() == set(lq.Message._fields)


def test_numbers_of_numpy_and_sequences_of_keys(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=small_config()) as store:
        body = bytearray(b"body")
        one = lq.Message("t", body, queue_id=NUMPY.int64(3), keys=("a", "b"), flag=NUMPY.uint8(7))
        assert (type(one.queue_id), one.keys, type(one.flag)) == (int, "a b", int)
        store.put(one)
        store.put_many([one._replace(body=memoryview(b"view"))] * 100)
        assert lq.Message("t", keys=[]).keys is None
        store.wait_dispatched()
        found = store.get("t", NUMPY.int32(3), NUMPY.int64(0), NUMPY.int8(2))
        assert [m.body for m in found.messages] == [b"body", b"view"]
        assert store.query("t", "b", max_count=NUMPY.int64(1))[0].keys == "a b"
        assert store.message_at(NUMPY.int64(0)).queue_id == 3
        assert all(type(queue_id) is int for _, queue_id in store.queues())


def test_times(folder: Path) -> None:
    with lq.MessageStore.open(folder) as store:
        at = store.message_at(0).store_timestamp
        moment = datetime.fromtimestamp(at / 1000, UTC)
        for since in (at, str(at), moment, moment.replace(tzinfo=None), moment.isoformat()):
            assert len(list(store.scan(since=since))) == 1, since
            assert store.query("t", "k", since=since)
            assert list(store.scan(until=since)) == []
        assert len(list(store.scan(since=moment.date(), until="2999-01-01"))) == 1


def test_the_previous_name_of_topics(folder: Path) -> None:
    with lq.MessageStore.open(folder) as store:
        with pytest.warns(DeprecationWarning, match="topics"):
            assert len(list(store.scan(topic="t"))) == 1
        with pytest.raises(UsageError, match="topics"):
            store.scan("t", topic="t")


def test_consumers(writer: lq.StoreWriter) -> None:
    before = state(writer)
    with writer.consumer("wrong", "t") as consumer:
        (message,) = consumer.poll()
        for value in (*NO_INT, None, 0, -1):
            refused(consumer.poll, {"max_count": value}, "max_count")
        for value in NO_SECONDS:
            refused(consumer.poll, {"timeout": value}, "timeout")
        for value in (*NO_INT, None, -1):
            seek = {"topic": "t", "queue_id": 0, "offset": value}
            refused(consumer.seek, seek, "offset")
        for name, values in QUEUE.items():
            for value in values:
                place = {"topic": "t", "queue_id": 0} | {name: value}
                refused(consumer.position, place, name)
                refused(consumer.seek, place | {"offset": 0}, name)
        for value in (*NO_OBJECT, None, lq.Message("t")):
            refused(consumer.retry, {"message": value}, "message")
        for value in (*NO_INT, 1 << 31):
            refused(consumer.retry, {"message": message, "delay_level": value}, "delay_level")
    assert state(writer)[:3] == before[:3]  # type: ignore[index]


def test_futures(writer: lq.StoreWriter) -> None:
    future = writer.put_async(lq.Message("t"))
    for value in NO_SECONDS:
        refused(future.result, {"timeout": value}, "timeout")
        refused(future.exception, {"timeout": value}, "timeout")
    for value in (*NO_FUNCTION, None):
        refused(future.add_done_callback, {"function": value}, "function")


@pytest.mark.parametrize("time", [1.7e12, None, "5", -1, 1 << 63, 253_402_214_400_000])
def test_a_clock_that_returns_no_time(tmp_path: Path, time: Any) -> None:
    message = lq.Message("t", keys="k")
    store = lq.MessageStore.open(
        tmp_path / "s", mode="rw", config=small_config(), clock=lambda: time
    )
    with store:
        for put in (
            lambda: store.put(message),
            lambda: store.put_async(message).result(),
            lambda: store.put_batch([message]),
            lambda: store.put_many([message]),
            lambda: store.put_many([message] * 100),
        ):
            refused(put, {}, "clock")
        assert store.max_offset == 0
    assert not (tmp_path / "s" / "abort").exists()


def test_a_clock_may_return_integers_of_numpy(tmp_path: Path) -> None:
    """The table of topics is a JSON file, which stores such an integer as a time."""
    store = lq.MessageStore.open(
        tmp_path / "s", mode="rw", config=small_config(), clock=lambda: NUMPY.int64(5)
    )
    with store:
        assert store.put(lq.Message("t", keys="k")).store_timestamp == 5
    assert not (tmp_path / "s" / "abort").exists()


def released(**fields: Any) -> lq.Message:
    view = memoryview(bytearray(b"abc"))
    message = lq.Message("t", view, **fields)
    view.release()
    return message


PUTS: Final[dict[str, Callable[[lq.StoreWriter], object]]] = {
    "put": lambda store: store.put(released()),
    "put a delayed message": lambda store: store.put(released(delay_level=1)),
    "put_async": lambda store: store.put_async(released()).result(),
    "put_batch": lambda store: store.put_batch([lq.Message("t", b"x"), released()]),
    "put_many": lambda store: store.put_many([lq.Message("t", b"x"), released()]),
    "put_half": lambda store: store.put_half(released(), group="g"),
    "append_data": lambda store: store.append_data(0, released().body),
}


@pytest.mark.parametrize("name", PUTS)
def test_a_released_memoryview(tmp_path: Path, name: str) -> None:
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=small_config()) as store:
        field = {"append_data": "data", "put_many": "message 1: body"}.get(name, "body")
        with pytest.raises(UsageError, match=f"^{field}: the memoryview was released: "):
            PUTS[name](store)
        assert store.max_offset == 0
        store.put(lq.Message("t", memoryview(b"abc")))
        assert [message.body for message in store.scan()] == [b"abc"]


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_an_open_store_cannot_be_pickled(tmp_path: Path, mode: Any) -> None:
    root = tmp_path / "s"
    lq.MessageStore.open(root, mode="rw", config=small_config()).close()
    with lq.MessageStore.open(root, mode=mode, config=small_config()) as store:
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError) as raised:
                call(store)
            assert isinstance(raised.value, UsageError)
            assert str(raised.value).startswith(f"{root}: an open store cannot be pickled")
            assert f"MessageStore.open({str(root)!r})" in str(raised.value)
