"""Makes the columns for ``put_many`` from an Arrow record batch or from message objects.

The columns are the fields of :class:`~logquarry.message.Message`. If a column is missing or a value
is null, the field has its default. Columns for fields that only a stored message has (offsets, CRC,
size) are ignored, so that users can put the rows of an export unchanged. Only properties that must
be joined to a string are copied. All other columns are used without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logquarry.arguments import keys
from logquarry.errors import UsageError
from logquarry.format.arrays import Bools, Int64
from logquarry.format.put_frames import ANY_TIME
from logquarry.log import codec, schema
from logquarry.message import DEFAULT_BORN_HOST, Message
from logquarry.write.outgoing import Columns, Spans, distinct, distinct_spans

_NUMBERS: Final = {
    "queue_id": 0,
    "flag": 0,
    "sys_flag": 0,
    "reconsume_times": 0,
    "prepared_transaction_offset": 0,
}
_NOT_TAKEN: Final = frozenset(schema.NAMES) - frozenset(Message._fields) | {"queue_offset"}
_TEXTS: Final = frozenset({"topic", "tags", "keys"})
_OF_STORED: Final = frozenset({"queue_offset", "store_timestamp"})
_TIMES: Final = frozenset({"born_timestamp", "store_timestamp"})
_INTEGERS: Final = frozenset(_NUMBERS) | _OF_STORED | _TIMES | {"delay_level"}
_KINDS: Final = {
    "topic": pa.string(),
    "body": pa.large_binary(),
    "tags": pa.large_string(),
    "keys": pa.large_string(),
    "properties": pa.map_(pa.string(), pa.large_string()),
    "properties_string": pa.large_binary(),
    "wait_store_ok": pa.bool_(),
    "born_host": None,
    "store_host": None,
}
"""Field of a message -> type of its Arrow column; None for text or bytes. The columns of all other
fields have the type int64.
"""
_DEFAULTS: Final = dict(zip(Message._fields[1:], Message("t")[1:], strict=True))
_PAIR_GLUE: Final = 2
_NAMED_PAIRS: Final = len("KEYS") + len("TAGS") + 2 * _PAIR_GLUE


def batches_of(source: Any) -> list[pa.RecordBatch]:
    """Return the record batches of an Arrow stream or array; raise UsageError for other data."""
    if isinstance(source, pa.RecordBatch):
        return [source]
    try:
        if hasattr(source, "__arrow_c_stream__"):
            table = pa.RecordBatchReader.from_stream(source).read_all()
        else:
            table = pa.Table.from_batches([pa.record_batch(source)])
    except MemoryError:
        raise
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = " ".join(str(part) for part in error.args).splitlines()
        raise UsageError(
            f"put_many: the {type(source).__name__} has no columns of messages: "
            f"{reason[0] if reason else error!r}"
        ) from error
    # pandas exports an unnamed index as a column __index_level_N__.
    index = [name for name in table.schema.names if re.fullmatch(r"__index_level_\d+__", name)]
    found: list[pa.RecordBatch] = (table.drop_columns(index) if index else table).to_batches()
    # A table without rows has no record batches. Return an empty batch, because its columns must
    # still be checked.
    return found or [pa.RecordBatch.from_pylist([], schema=table.schema)]


def check_columns(batch: pa.RecordBatch) -> None:
    """Raise UsageError for a batch without topics, or with an unknown or repeated column."""
    names = batch.schema.names
    if len(set(names)) != len(names):
        raise UsageError(f"a column is named twice in {', '.join(names)}")
    if "topic" not in names:
        raise UsageError("messages need a column topic")
    for name in names:
        if name not in Message._fields and name not in _NOT_TAKEN:
            raise UsageError(
                f"there is no column {name!r} to put; the columns are {', '.join(Message._fields)}"
            )


def messages_of(
    batch: pa.RecordBatch, first: int = 0, *, stored: bool = False
) -> Iterator[Message]:
    """Return the rows of a batch as messages. Errors name a row by its number; the first row has
    the number ``first``.
    """
    rows = _Rows(_columns(batch, stored=stored), first)
    return map(rows.message, range(batch.num_rows))


def store_times_of(batch: pa.RecordBatch) -> Int64:
    """Return the store time of each message; ANY_TIME if the batch has no such column."""
    column = _columns(batch, stored=True).get("store_timestamp")
    return np.full(batch.num_rows, ANY_TIME) if column is None else _integers(column, ANY_TIME)


def with_store_times(batch: pa.RecordBatch, now: int) -> pa.RecordBatch:
    """Return the batch with the store time ``now`` for each message that has no store time."""
    name = "store_timestamp"
    number = batch.schema.get_field_index(name)
    if number < 0:
        return batch.append_column(name, pa.array(np.full(batch.num_rows, now, np.int64)))
    if not batch.column(number).null_count:
        return batch
    is_missing = batch.column(number).is_null().to_numpy(zero_copy_only=False)
    times = pa.array(np.where(is_missing, now, store_times_of(batch)))
    return batch.set_column(number, name, times)


class _Rows:
    def __init__(self, columns: dict[str, pa.Array], first: int) -> None:
        self._first = first
        # :class:`Message` has no field for the store time.
        self._columns = {name: c for name, c in columns.items() if name != "store_timestamp"}

    def message(self, number: int) -> Message:
        try:
            values = {name: column[number].as_py() for name, column in self._columns.items()}
        except UnicodeDecodeError as error:
            raise UsageError(f"{self._name(number)}: {error}") from error
        given = {name: value for name, value in values.items() if value is not None}
        if "topic" not in given:
            raise UsageError(f"{self._name(number)}: it has no topic")
        if isinstance(given.get("body"), str):
            given["body"] = given["body"].encode()
        if "properties" in given:
            given["properties"] = pairs = dict(given["properties"])
            for name, value in pairs.items():
                if value is None:
                    raise UsageError(f"{self._name(number)}: the property {name!r} is null")
        try:
            return Message(**given)
        except TypeError as error:
            raise UsageError(f"{self._name(number)}: {error}") from error

    def _name(self, number: int) -> str:
        return f"message {self._first + number}"


def columns_of_batch(
    batch: pa.RecordBatch,
    clock: Callable[[], int],
    first: int = 0,
    *,
    stored: bool = False,
    look: bool = True,
) -> Columns:
    """Return the columns of a record batch that has at least one row. Call this only if kernels can
    be used.

    Args:
        clock: returns the time that a message without born time gets.
        first: number of the first row, for the texts of errors.
        stored: whether the messages come from a store, and the columns ``queue_offset`` and
            ``store_timestamp`` are used.
        look: whether to mark a message as odd if one of its properties makes the store change the
            message.

    Raises:
        UsageError: if a column has a wrong type.
    """
    count = batch.num_rows
    odd = np.zeros(count, np.bool_)
    found = _columns(batch, stored=stored)
    topics, topic_ids = _numbered(found["topic"], "topic", pa.string())
    if None in topics:
        # Rows without a topic are marked as odd, so that the encoder of single puts refuses them.
        odd |= np.array([topic is None for topic in topics])[topic_ids]
    numbers = {
        name: _integers(found[name], default)
        if name in found
        else np.full(count, default, np.int64)
        for name, default in _NUMBERS.items()
    }
    now = clock()
    numbers["born_timestamp"] = (
        _integers(found["born_timestamp"], now)
        if "born_timestamp" in found
        else np.full(count, now, np.int64)
    )
    if "queue_offset" in found:
        numbers["queue_offset"] = _integers(found["queue_offset"], 0)
    if "store_timestamp" in found:
        numbers["store_timestamp"] = _integers(found["store_timestamp"], ANY_TIME)
    hosts, host_ids = _hosts(found, count)
    bodies = binary_spans(found.get("body"), count, "body")
    np.maximum(bodies.length, 0, out=bodies.length)
    return Columns(
        count=count,
        topics=["" if topic is None else topic for topic in topics],
        topic_ids=topic_ids,
        hosts=hosts,
        host_ids=host_ids,
        numbers=numbers,
        bodies=bodies,
        properties=_properties(found, count, odd, look=look),
        odd=odd,
        message=_Rows(found, first).message,
        first=first,
    )


def columns_of_messages(messages: Sequence[Message], clock: Callable[[], int]) -> Columns | None:
    """Return the columns of messages (at least one); None if a value does not fit Arrow's types.

    Call this only if kernels can be used and :mod:`logquarry.write.common_frames` is not compiled.
    """
    arrays: dict[str, pa.Array] = {}
    try:
        for name, values in zip(Message._fields, zip(*messages, strict=True), strict=True):
            if name in _DEFAULTS and values.count(_DEFAULTS[name]) == len(values):
                continue
            given: Sequence[Any] = values
            if name == "properties":
                given = [None if pairs is None else list(pairs.items()) for pairs in values]
            arrays[name] = pa.array(given, _KINDS.get(name, pa.int64()))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        # A text has a lone surrogate, a number is too large, or some hosts are text and others are
        # bytes.
        return None
    columns = columns_of_batch(pa.record_batch(arrays), clock)
    columns.message = messages.__getitem__
    return columns


# ------------------------------------------------------------------------------- single columns
def _columns(batch: pa.RecordBatch, *, stored: bool) -> dict[str, pa.Array]:
    """Return the columns to put, in types that both the kernel and the reference can read."""
    left_out = _NOT_TAKEN - _OF_STORED if stored else _NOT_TAKEN
    return {
        name: _usable(column, name)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        # A column of type null is treated as missing.
        if name not in left_out and (name == "topic" or not pa.types.is_null(column.type))
    }


def _usable(column: pa.Array, name: str) -> pa.Array:
    kind = column.type
    if name in _INTEGERS:
        if name in _TIMES and pa.types.is_timestamp(kind):
            milliseconds = pa.timestamp("ms", kind.tz)
            # A cast of microseconds or nanoseconds cuts off digits, and Arrow's check would refuse
            # it. A cast of seconds can exceed 64 bits, so Arrow must check it.
            is_checked = kind.unit == "s"
            return cast_column(column, name, milliseconds, safe=is_checked).cast(pa.int64())
        if not pa.types.is_integer(kind):
            hint = ""
            if pa.types.is_floating(kind):
                hint = " (pandas makes floats of whole numbers with gaps: use its type Int64)"
            raise UsageError(f"the column {name} takes whole numbers, not {kind}{hint}")
        if pa.types.is_uint64(kind):
            return cast_column(column, name, pa.int64())
    elif name == "wait_store_ok":
        if not pa.types.is_boolean(kind):
            raise UsageError(f"the column {name} takes true and false, not {kind}")
    elif name == "properties":
        if pa.types.is_struct(kind) or (_is_list(kind) and _is_list(kind.value_type)):
            return _as_map(column)
        if not (pa.types.is_map(kind) and _is_text(kind.key_type) and _is_text(kind.item_type)):
            raise UsageError(f"the column properties is a map of text to text, not {kind}")
        if not (_is_string(kind.key_type) and _is_string(kind.item_type)):
            return cast_column(column, name, _KINDS[name])
    elif name == "keys" and _is_list(kind):
        return joined_keys(column)
    elif not _is_text(kind):
        raise UsageError(f"the column {name} takes text or bytes, not {kind}")
    elif name in _TEXTS and not _is_string(_value_type(kind)):
        if pa.types.is_dictionary(kind):
            column = column.dictionary_decode()
        return cast_column(column, name, pa.large_string())
    return column


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _as_map(column: pa.Array) -> pa.Array:
    """Convert a column of properties from pandas to Arrow maps. In pandas, a value is a dict (Arrow
    makes structs of dicts) or a list of pairs.
    """
    rows = column.to_pylist()
    if pa.types.is_struct(column.type):
        # Each struct has a field for each name in the dicts of all rows. If a name is not in the
        # row's own dict, its value is null.
        rows = [row and [pair for pair in row.items() if pair[1] is not None] for row in rows]
    try:
        return pa.array([row and list(map(tuple, row)) for row in rows], _KINDS["properties"])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(
            f"the column properties is a map of text to text, not {column.type}: {error}"
        ) from error


def joined_keys(column: pa.Array) -> pa.Array:
    """Join lists of words to KEYS properties. For an empty list, the message gets no KEYS property.

    Raise UsageError if a word is null, is empty or contains a space.
    """
    lists = cast_column(column, "keys", pa.list_(pa.string()))
    words = lists.flatten()
    if words.null_count:
        raise UsageError("the column keys has a list with a null word")
    wrong = words.filter(pc.or_(pc.equal(words, ""), pc.match_substring(words, " ")))
    if len(wrong):
        keys([wrong[0].as_py()], "the column keys")
    joined = pc.binary_join(lists, " ")
    return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_string(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_text(kind: pa.DataType) -> bool:
    kind, types = _value_type(kind), pa.types
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    is_bytes = is_bytes or types.is_fixed_size_binary(kind)
    return bool(_is_string(kind) or is_bytes or types.is_null(kind))


def cast_column(column: pa.Array, name: str, kind: pa.DataType, *, safe: bool = True) -> pa.Array:
    """Cast a column. Raise UsageError if a value does not fit the type."""
    if column.type == kind:
        return column
    try:
        return column.cast(kind, safe=safe)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(f"the column {name} is of {column.type}: {error}") from error


def _integers(column: pa.Array, default: int) -> Int64:
    if column.null_count:
        column = pc.fill_null(column, default)
    values: Int64 = column.to_numpy().astype(np.int64, copy=False)
    return values


def _numbered(column: pa.Array, name: str, kind: pa.DataType) -> tuple[list[Any], Int64]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = cast_column(column, name, kind)
    firsts, ids = distinct_spans(binary_spans(column, len(column), name))
    try:
        return [column[first].as_py() for first in firsts], ids
    except UnicodeDecodeError as error:
        raise UsageError(f"the column {name} holds text that is not UTF-8: {error}") from error


def _hosts(
    found: dict[str, pa.Array], count: int
) -> tuple[list[tuple[str | bytes, str | bytes | None]], Int64]:
    values: list[list[Any]] = []
    ids: list[Int64] = []
    for name, default in (("born_host", DEFAULT_BORN_HOST), ("store_host", None)):
        known: list[Any] = [default]
        numbers = np.zeros(count, np.int64)
        if name in found:
            known, numbers = _numbered(found[name], name, _text_kind(found[name]))
            known = [default if value is None else value for value in known]
        values.append(known)
        ids.append(numbers)
    pairs, host_ids = distinct(ids[0] * len(values[1]) + ids[1])
    hosts = [divmod(pair, len(values[1])) for pair in pairs]
    return [(values[0][born], values[1][store]) for born, store in hosts], host_ids


def _text_kind(column: pa.Array) -> pa.DataType:
    return pa.string() if _is_string(_value_type(column.type)) else pa.binary()


def binary_spans(column: pa.Array | None, count: int, name: str) -> Spans:
    """Return address and length of each value; length -1 for a null."""
    if column is None:
        return Spans(np.zeros(count, np.int64), np.full(count, -1, np.int64))
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
        width: Any = np.int64
    elif pa.types.is_binary(kind) or pa.types.is_string(kind):
        width = np.int32
    else:
        column = cast_column(column, name, pa.large_binary())
        width = np.int64
    _, offsets, data = column.buffers()
    if not len(column):
        return Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))
    ends = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1]
    address = 0 if data is None else data.address
    lengths = np.subtract(ends[1:], ends[:-1], dtype=np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = -1
    return Spans(np.add(ends[:-1], address, dtype=np.int64), lengths, (column,))


# ------------------------------------------------------------------------------------ properties
def _properties(found: dict[str, pa.Array], count: int, odd: Bools, *, look: bool) -> Spans:
    kernels = codec.require_kernels()
    strings = binary_spans(found.get("properties_string"), count, "properties_string")
    given = strings.length >= 0
    _mark_unusual(found, odd)
    if given.any():
        # A property string from the caller is written unchanged. If a row has a string and a map,
        # only the encoder of single puts reads the map.
        for name in ("tags", "keys", *(["properties"] if look else [])):
            if name in found:
                odd |= given & found[name].is_valid().to_numpy(zero_copy_only=False)
        if look:
            kernels.look_into(count, strings.at, strings.length, odd)
        if given.all():
            return strings
    made = _made_strings(found, count, odd)
    if given.any():
        return Spans(
            np.where(given, strings.at, made.at),
            np.where(given, strings.length, made.length),
            (strings, made),
        )
    return made


def _mark_unusual(found: dict[str, pa.Array], odd: Bools) -> None:
    for name, usual in (("delay_level", 0), ("wait_store_ok", True)):
        if name in found:
            same = pc.equal(found[name], pa.scalar(usual, found[name].type))
            odd |= ~pc.fill_null(same, True).to_numpy(zero_copy_only=False)


def _made_strings(found: dict[str, pa.Array], count: int, odd: Bools) -> Spans:
    keys = binary_spans(found.get("keys"), count, "keys")
    tags = binary_spans(found.get("tags"), count, "tags")
    first = stop = np.zeros(count, np.int64)
    pairs = np.zeros((4, 0), np.int64)
    if "properties" in found:
        first, stop, (names, values) = _pairs(found["properties"], count)
        pairs = np.stack((names.at, names.length, values.at, values.length))
    room = _PAIR_GLUE * pairs.shape[1] + _NAMED_PAIRS * count
    room += int(sum(np.maximum(part, 0).sum() for part in (*pairs[1::2], keys.length, tags.length)))
    data = np.empty(room, np.uint8)
    made = Spans(np.zeros(count, np.int64), np.zeros(count, np.int64), (data,))
    kernels = codec.require_kernels()
    # During this call, local variables must hold all spans, because they own the memory.
    kernels.property_strings(
        count,
        first,
        stop,
        pairs,
        keys.at,
        keys.length,
        tags.at,
        tags.length,
        data.ctypes.data,
        made.at,
        made.length,
        odd,
    )
    return made


def _pairs(column: pa.Array, count: int) -> tuple[Int64, Int64, tuple[Spans, Spans]]:
    """Return the range (first, stop) of the pairs of each map, and the names and the values of all
    pairs.
    """
    ends = np.frombuffer(column.buffers()[1] or bytes(4), np.int32)
    bounds: Int64 = ends[column.offset : column.offset + count + 1].astype(np.int64)
    begin, used = int(bounds[0]), int(bounds[-1] - bounds[0])
    bounds -= begin
    first, stop = bounds[:-1], bounds[1:]
    if column.null_count:
        stop = np.where(column.is_null().to_numpy(zero_copy_only=False), first, stop)
    names, values = (
        binary_spans(part.slice(begin, used), used, "properties")
        for part in (column.keys, column.items)
    )
    return first, stop, (names, values)
