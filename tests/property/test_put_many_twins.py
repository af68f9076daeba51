"""A bulk put writes the bytes of single puts: compiled, with kernels, and in plain Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import LogquarryError, MessageRejected
from logquarry.format import frame, sys_flag
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.write import put_many
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.encode import MessageEncoder
from logquarry.write.put_many import ManyWriter
from logquarry.write.put_result import PutResult
from tests.helpers.twins import both

FILE_SIZE = 700
NOW = 1_700_000_000_000

text = st.text(
    st.sampled_from(["a", "B", " ", "\u00e9", "\u4e3b", "\U0001f600", "\x01"]), max_size=6
)
names = st.one_of(
    st.sampled_from(["KEYS", "TAGS", "WAIT", "DELAY", "UNIQ_KEY", "INNER_MULTI_DISPATCH"]), text
)
values = st.one_of(
    st.sampled_from(["true", "TRUE", "false", "3", "99", "0", "-1", "x", "%LMQ%a,b", "a/b"]), text
)
maps = st.dictionaries(names, values, max_size=4)
strings = maps.map(props.encode) | st.text("KEYSWAIT=DL\x01\x02\ud800", max_size=12)
ints = st.sampled_from([0, 1, -1, 7, 2**31 - 1, -(2**31)])
hosts = st.sampled_from(["127.0.0.1:40000", "[fe80::1]:9", bytes(8), bytes(range(20))])


@st.composite
def fields(draw: st.DrawFn, *, tame: bool) -> dict[str, Any]:
    """The fields of a message that are not its defaults. A put accepts most tame fields."""
    found: dict[str, Any] = {"topic": draw(st.sampled_from(["t", "u", "\u4e3b\u9898", "t" * 127]))}

    def maybe(name: str, strategy: st.SearchStrategy[Any]) -> None:
        if draw(st.integers(0, 2)) == 0:
            found[name] = draw(strategy)

    maybe("body", st.binary(max_size=60))
    maybe("queue_id", st.sampled_from([0, 1, 2, 31, 32, 63, 64, -5]))
    if draw(st.booleans()):
        maybe("tags", text)
        maybe("keys", text)
    else:
        maybe("properties_string", strings | strings.map(lambda s: s.encode("utf-8", "replace")))
    maybe("properties", maps)
    maybe("flag", ints)
    maybe(
        "sys_flag",
        st.sampled_from(
            [
                sys_flag.COMPRESSED,
                sys_flag.TRANSACTION_PREPARED,
                sys_flag.TRANSACTION_COMMIT,
                12,
                -1,
            ]
        ),
    )
    maybe("born_timestamp", st.sampled_from([0, NOW, -3]))
    maybe("born_host", hosts)
    maybe("store_host", hosts)
    maybe("reconsume_times", ints)
    maybe("prepared_transaction_offset", st.sampled_from([0, 5, 2**62]))
    maybe("delay_level", st.sampled_from([0, 0, 1, 99]))
    maybe("wait_store_ok", st.booleans())
    if not tame:
        maybe("topic", st.sampled_from(["", "a/b", "\u4e3b" * 50]))
        maybe("body", st.just(bytes(900)))
        maybe("sys_flag", st.just(sys_flag.BORN_HOST_V6))
        maybe("born_host", st.just("nowhere"))
        maybe("queue_id", st.just(2**31))
    return found


class Log:
    def __init__(self, root: str, **settings: Any) -> None:
        disk = Disk()
        self.root = Path(root)
        self.files = MappedFileQueue(disk, self.root / "commitlog", FILE_SIZE)
        self.waited: list[bool] = []
        self.offsets: dict[QueueKey, int] = {}
        self.writer = CommitLogWriter(
            self.files,
            StoreConfig(**settings),
            clock=lambda: NOW,
            queue_offsets=self.offsets,
            health=disk.health,
            settle=self.settle,
        )
        self.many = ManyWriter(self.writer)

    def settle(self, result: PutResult, wait: bool) -> PutResult:
        self.waited.append(wait)
        return result

    def state(self) -> Any:
        files = [path.read_bytes() for path in sorted((self.root / "commitlog").glob("0*"))]
        return files, self.files.max_offset, self.offsets


def singly(messages: Sequence[Message], *, by_reference: bool = False, **settings: Any) -> Any:
    """The result of single puts, or the number of the refused put."""
    with tempfile.TemporaryDirectory() as root:
        log = Log(root, **settings)
        results = []
        for number, message in enumerate(messages):
            try:
                if by_reference:
                    encoded = log.writer.encoder.encode(message)
                    results.append(log.settle(log.writer.append(encoded), encoded.wait))
                else:
                    results.append(log.writer.put(message))
            except LogquarryError as error:
                return number, str(error)
        return (
            log.state(),
            [(r.physical_offset, r.queue_offset, r.store_timestamp, r.size) for r in results],
            [r.message_id for r in results],
            any(log.waited),
        )


def at_once(messages: Any, **settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as root:
        log = Log(root, **settings)
        try:
            result = log.many.put_many(messages)
        except LogquarryError as error:
            assert log.state() == ([], 0, {}) or getattr(error, "appended", None) is not None
            if isinstance(error, MessageRejected) and error.index is not None:
                assert str(error).startswith(f"message {error.index}: ")
            number, _, text = str(error).removeprefix("message ").partition(": ")
            return int(number), text
        assert len(log.waited) == (1 if result.message_count else 0)
        rows = zip(
            result.physical_offset.tolist(),
            result.queue_offset.tolist(),
            result.store_timestamp.tolist(),
            result.size.tolist(),
            strict=True,
        )
        return log.state(), list(rows), list(result.message_ids), any(log.waited)


def same(messages: list[Message], many: Callable[[], Any], **settings: Any) -> None:
    interpreted = mock.patch.object(put_many, "IS_COMPILED", False)
    with interpreted, mock.patch.object(put_many, "_FEW", 0):
        kernel, reference = both(lambda: at_once(many(), **settings))
    assert kernel == reference == singly(messages, by_reference=True, **settings)
    assert kernel == singly(messages, **settings)
    assert kernel == at_once(many(), **settings)


@given(fields(tame=True))
def test_the_encoder_writes_what_the_reference_writes(found: dict[str, Any]) -> None:
    message = Message(**found)
    encoder = MessageEncoder(StoreConfig(), lambda: NOW)
    try:
        encoded = encoder.encode(message)
    except LogquarryError:
        return
    encoded.place(5, 64, NOW + 1)
    outcome = frame.decode_at(bytes(encoded.data), 0, base=64)
    assert isinstance(outcome, frame.Frame)
    assert frame.encode(outcome) == encoded.data
    assert (outcome.queue_offset, outcome.store_timestamp) == (5, NOW + 1)
    assert (outcome.body, outcome.flag) == (message.body, message.flag)
    assert (outcome.topic.decode(), outcome.queue_id) == encoded.key
    born = message.born_timestamp
    assert outcome.born_timestamp == (NOW if born is None else born)
    assert outcome.reconsume_times == message.reconsume_times
    assert outcome.prepared_transaction_offset == message.prepared_transaction_offset


@given(st.lists(fields(tame=True), max_size=12), st.booleans())
def test_messages(found: list[dict[str, Any]], copies: bool) -> None:
    messages = [Message(**fields) for fields in found]
    for many in (lambda: iter(messages), lambda: messages):
        same(messages, many, enable_multi_dispatch=copies, enable_lmq=copies)


@given(st.lists(fields(tame=False), min_size=1, max_size=6))
def test_messages_that_may_be_refused(found: list[dict[str, Any]]) -> None:
    messages = [Message(**fields) for fields in found]
    same(messages, lambda: messages)


TYPES: dict[str, list[pa.DataType]] = {
    "topic": [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())],
    "body": [pa.binary(), pa.large_binary(), pa.string_view()],
    "queue_id": [pa.int32(), pa.int64()],
    "tags": [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())],
    "keys": [pa.string()],
    "properties": [pa.map_(pa.string(), pa.string()), pa.map_(pa.string(), pa.large_string())],
    "properties_string": [pa.string(), pa.binary()],
    "flag": [pa.int32()],
    "sys_flag": [pa.int32()],
    "born_timestamp": [pa.int64(), pa.timestamp("ms", "UTC")],
    "born_host": [pa.binary()],
    "store_host": [pa.string(), pa.dictionary(pa.int8(), pa.string())],
    "reconsume_times": [pa.int64()],
    "prepared_transaction_offset": [pa.int64()],
    "delay_level": [pa.int32()],
    "wait_store_ok": [pa.bool_()],
}


def fitting(name: str, value: Any, kind: pa.DataType) -> Any:
    """A value in the form that a column of that type can hold."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    if isinstance(value, bytes) and (pa.types.is_string(kind) or kind == pa.string_view()):
        return value.decode("ascii", "ignore")
    if name == "store_host" and not isinstance(value, str):
        return None
    if name == "properties" and value is not None:
        return list(value.items())
    return value


@given(st.lists(fields(tame=True), max_size=12), st.data(), st.booleans(), st.integers(0, 3))
def test_record_batches(
    found: list[dict[str, Any]], data: st.DataObject, copies: bool, cut: int
) -> None:
    columns = {}
    for name in [*data.draw(st.lists(st.sampled_from(sorted(TYPES)), unique=True)), "topic"]:
        kind = data.draw(st.sampled_from(TYPES[name]))
        values = [fitting(name, one.get(name), kind) for one in found]
        if pa.types.is_dictionary(kind):
            columns[name] = pa.array(values, kind.value_type).cast(kind)
        else:
            columns[name] = pa.array(values, kind)
    columns["message_id"] = pa.nulls(len(found), pa.string())
    batch = pa.record_batch(columns)[min(cut, len(found)) :]
    rows: list[dict[str, Any]] = [
        {
            name: value.encode() if name == "body" and isinstance(value, str) else value
            for name, value in row.items()
            if value is not None and name in TYPES
        }
        for row in batch.to_pylist(maps_as_pydicts="lossy")
    ]
    for row in rows:
        if isinstance(row.get("born_timestamp"), datetime):
            row["born_timestamp"] = round(row["born_timestamp"].timestamp() * 1_000)
    messages = [Message(**row) for row in rows]
    table = pa.Table.from_batches([batch[:2], batch[2:]])
    many = data.draw(st.sampled_from([batch, table]))
    same(messages, lambda: many, enable_multi_dispatch=copies, enable_lmq=copies)
