"""Frames as Arrow columns, by compiled kernels or by the reference codec.

Only the requested columns are decoded. If a frame's topic or properties are not UTF-8 (not written
by a RocketMQ client), the reference decodes the property columns of the whole batch; invalid bytes
become U+FFFD as in Java.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from logquarry.errors import DecompressionError, LogquarryError
from logquarry.format import delay, frame, java
from logquarry.format import properties as props
from logquarry.format import rows as r
from logquarry.format.compression import DEFAULT_LIMIT, decompress, is_compressed
from logquarry.log import codec, schema
from logquarry.log.codec import Rows, Window
from logquarry.message import StoredMessage

_FIXED: Final = {
    name: (start, at)
    for start, shift, layout in (
        (r.FROM_FRAME, 0, frame.HEAD),
        (r.FROM_STORE_TIME, 0, frame.STORE_TIME),
        (r.FROM_BODY, -frame.TAIL.size, frame.TAIL),
    )
    for name, at in ((field, shift + at) for field, at in layout.offsets.items())
    if name in schema.NAMES
}
"""Columns that are fields of fixed width: the part of the frame, and the position in it."""
_MS: Final = 1_000
"""Microseconds in a millisecond: Arrow's timestamps are in microseconds, RocketMQ's in ms."""

_MAX_TOPICS: Final = 4096
_TOPIC_TABLE: Final = 4 * _MAX_TOPICS
_EXACT: Final = schema.EXACT_PROPERTIES.name
_WHOLE_PROPERTIES: Final = frozenset({"properties", _EXACT})
_PROPERTY_COLUMNS: Final = _WHOLE_PROPERTIES | {"tags", "keys", "uniq_key", "tags_code"}
_SMALLEST_PAIR: Final = 4
"""Bytes of the shortest property with its separators."""

MOST_CONTENT: Final = 8 << 20
"""Most bytes of decompressed bodies in memory at one time. A larger body is decoded alone."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How frames become columns.

    Attributes:
        columns: names of the columns, in order.
        broker: value of the column ``broker``.
        delay_levels_ms: delay of each level, for the tags code of delayed messages.
        decompress: whether ``body`` is the decompressed content instead of the stored bytes.
        decompress_limit: most bytes of one decompressed body.
        on_bad_body: called with (physical offset, reason) for a body that does not decompress; it
            may raise. If it returns, the body stays as stored.
    """

    columns: Sequence[str] = schema.NAMES
    broker: str = ""
    delay_levels_ms: tuple[int, ...] = field(
        default_factory=lambda: delay.parse_levels(delay.DEFAULT_LEVELS)
    )
    decompress: bool = False
    decompress_limit: int = DEFAULT_LIMIT
    on_bad_body: Callable[[int, str], None] | None = None


def record_batch(
    window: Window, rows: Rows, decoding: Decoding, *, bodies: pa.Array | None = None
) -> pa.RecordBatch:
    """Decode frames of a window to a batch, in the order of ``rows``.

    Args:
        window: the bytes.
        rows: the frames.
        decoding: how they become columns.
        bodies: the column ``body`` if :func:`contents` has already made it.

    Raises:
        LogquarryError: if a column takes more than 2 GiB.
    """
    ready = {} if bodies is None else {"body": bodies}
    if codec.kernels_enabled():
        arrays = _Fast(window, rows, decoding).arrays(ready)
    else:
        arrays = _plain(window, rows, decoding, ready)
    return pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema(decoding.columns))


# --------------------------------------------------------------------------------- the reference
def messages(window: Window, rows: Rows, decoding: Decoding) -> list[StoredMessage]:
    """Decode frames of a window to message objects."""
    found: list[StoredMessage] = []
    for position in rows[:, r.POSITION].tolist():
        outcome = window.decode(position, check_crc=False)
        if not isinstance(outcome, frame.Frame):
            raise AssertionError("the walk found a sound frame here, the reference does not")
        found.append(
            StoredMessage(outcome, broker=decoding.broker, delay_levels_ms=decoding.delay_levels_ms)
        )
    return found


def _plain(
    window: Window, rows: Rows, decoding: Decoding, ready: dict[str, pa.Array]
) -> list[pa.Array]:
    decoded = messages(window, rows, decoding)
    return [
        ready[name] if name in ready else _plain_column(name, decoded, decoding)
        for name in decoding.columns
    ]


def _plain_column(name: str, decoded: list[StoredMessage], decoding: Decoding) -> pa.Array:
    kind = schema.arrow_types()[name]
    values: list[Any]
    if name == "body":
        values = [body_of(message, decoding) for message in decoded]
    elif name == "properties":
        values = [list(message.properties.items()) for message in decoded]
    elif name == _EXACT:
        values = [_exact_properties(message) for message in decoded]
    else:
        values = [getattr(message, name) for message in decoded]
    if pa.types.is_timestamp(kind):
        return pa.array([_wrapped(value * _MS) for value in values], pa.int64()).cast(kind)
    column = pa.array(values, kind)
    if isinstance(column, pa.ChunkedArray):
        raise _too_large()
    return column


def _exact_properties(message: StoredMessage) -> bytes | None:
    """The property string, or None if encoding the decoded properties gives the same bytes."""
    data = message.frame.properties
    return None if props.encode(message.properties).encode() == data else data


def _too_large() -> LogquarryError:
    return LogquarryError("one column of a batch takes more than 2 GiB")


def _wrapped(value: int) -> int:
    """A 64-bit product that wraps as in the kernels: hostile timestamps must not raise."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def body_of(message: StoredMessage, decoding: Decoding) -> bytes:
    """The body as stored or decompressed, as ``decoding`` asks."""
    if not decoding.decompress:
        return message.body
    return _content(message.body, message.sys_flag, message.physical_offset, decoding)


def _content(body: bytes, sys_flag: int, physical_offset: int, decoding: Decoding) -> bytes:
    try:
        return decompress(body, sys_flag, limit=decoding.decompress_limit)
    except DecompressionError as error:
        if decoding.on_bad_body is not None:
            decoding.on_bad_body(physical_offset, str(error))
        return body


def contents(window: Window, rows: Rows, decoding: Decoding, most: int) -> Iterator[pa.Array]:
    """Decompress the bodies of all frames in order, as arrays of at most ``most`` bytes.

    A larger body makes an array alone. If no body is compressed, there is one array.

    Raises:
        LogquarryError: if an array takes more than 2 GiB.
    """
    flags = fixed_fields(window, rows, ["sys_flag"])["sys_flag"].tolist()
    if not any(map(is_compressed, flags)):
        stored = replace(decoding, columns=["body"], decompress=False)
        yield record_batch(window, rows, stored)["body"]
        return
    data, ends = bytearray(), [0]
    for row, flag in zip(rows.tolist(), flags, strict=True):
        start = row[r.POSITION] + row[r.BODY_AT]
        stored_body = window.data[start : start + row[r.BODY_LENGTH]].tobytes()
        body = _content(stored_body, flag, window.base + row[r.POSITION], decoding)
        if len(ends) > 1 and len(data) + len(body) > most:
            yield _binary(data, ends)
            data, ends = bytearray(), [0]
        data += body
        ends.append(len(data))
    yield _binary(data, ends)


def pieces(
    window: Window, rows: Rows, decoding: Decoding, most: int | None = None
) -> Iterator[tuple[Rows, pa.Array | None]]:
    """Cut frames into pieces whose decompressed bodies take at most ``most`` bytes (MOST_CONTENT).

    Yields:
        Each piece with its column ``body`` for :func:`record_batch`. If ``decoding`` does not
        decompress, there is one piece and the column is None: the window bounds its size.
    """
    if not decoding.decompress or "body" not in decoding.columns:
        yield rows, None
        return
    start = 0
    for bodies in contents(window, rows, decoding, most or MOST_CONTENT):
        stop = start + len(bodies)
        yield rows[start:stop], bodies
        start = stop


def _binary(data: bytearray, ends: list[int]) -> pa.Array:
    if len(data) > java.INT_MAX:
        raise _too_large()
    offsets = pa.py_buffer(np.array(ends, np.int32))
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [None, offsets, pa.py_buffer(data)])


# ------------------------------------------------------------------------------------ the kernels
@dataclass(frozen=True, slots=True)
class _GatherPlan:
    """Arguments of the gather kernel for some fixed fields."""

    narrow: tuple[str, ...]
    wide: tuple[str, ...]
    from32: Int64
    at32: Int64
    from64: Int64
    at64: Int64
    factors: Int64


@cache
def _gather_plan(names: tuple[str, ...], ms: bool) -> _GatherPlan:
    kinds = schema.arrow_types()
    narrow = tuple(name for name in names if kinds[name].bit_width == 32)
    wide = tuple(name for name in names if name not in narrow)
    factors = [_MS if pa.types.is_timestamp(kinds[n]) and not ms else 1 for n in wide]
    return _GatherPlan(
        narrow,
        wide,
        np.array([_FIXED[name][0] for name in narrow], np.int64),
        np.array([_FIXED[name][1] for name in narrow], np.int64),
        np.array([_FIXED[name][0] for name in wide], np.int64),
        np.array([_FIXED[name][1] for name in wide], np.int64),
        np.array(factors, np.int64),
    )


class _Fast:
    """Columns of one run of frames by kernels; work that columns share is done once."""

    def __init__(self, window: Window, rows: Rows, decoding: Decoding) -> None:
        kernels = codec.kernels()
        assert kernels is not None
        self.k = kernels
        self.window = window
        self.rows = rows if rows.flags.c_contiguous else np.ascontiguousarray(rows)
        self.decoding = decoding
        self.address = window.address
        self.count = len(rows)
        self._properties: tuple[Int32, Int32] | None = None
        self._pairs: tuple[Int32, Int32] | None = None

    def arrays(self, made: dict[str, pa.Array]) -> list[pa.Array]:
        names = self.decoding.columns
        if _PROPERTY_COLUMNS.intersection(names) and self.k.bad_utf8(
            self.address, self.rows, self.count
        ):
            plain = [name for name in names if name in _PROPERTY_COLUMNS]
            decoded = messages(self.window, self.rows, self.decoding)
            ready = made | {name: _plain_column(name, decoded, self.decoding) for name in plain}
        else:
            ready = made
            if _PROPERTY_COLUMNS.intersection(names):
                self._parse(want_pairs=not _WHOLE_PROPERTIES.isdisjoint(names))
        ready = ready | self._fixed([name for name in names if name in _FIXED])
        return [ready[name] if name in ready else self._MAKERS[name](self) for name in names]

    # fixed fields
    def numbers(self, names: Sequence[str], *, ms: bool = False) -> dict[str, Any]:
        """Fixed fields by name; timestamps in microseconds, or in milliseconds with ``ms``."""
        plan = _gather_plan(tuple(names), ms)
        out32 = np.empty((len(plan.narrow), self.count), np.int32)
        out64 = np.empty((len(plan.wide), self.count), np.int64)
        self.k.gather(
            self.address,
            self.rows,
            self.count,
            plan.from32,
            plan.at32,
            out32,
            plan.from64,
            plan.at64,
            plan.factors,
            out64,
        )
        return dict(zip(plan.narrow + plan.wide, [*out32, *out64], strict=True))

    def _fixed(self, names: Sequence[str]) -> dict[str, pa.Array]:
        kinds = schema.arrow_types()
        return {
            name: pa.Array.from_buffers(kinds[name], self.count, [None, pa.py_buffer(values)])
            for name, values in self.numbers(names).items()
        }

    # text
    def _broker(self) -> pa.Array:
        return pa.repeat(pa.scalar(self.decoding.broker, pa.string()), self.count)

    def _topic(self) -> pa.Array:
        starts, lengths = np.empty(self.count, np.int32), np.empty(self.count, np.int32)
        if self.k.topic_spans(self.address, self.rows, self.count, starts, lengths):
            return self._ragged(starts, lengths, self.count, pa.string())
        ids, names = topic_ids(self.window, self.rows)
        return pa.array(names, pa.string()).take(pa.array(ids))

    def _message_id(self) -> pa.Array:
        return self._text(
            2 * (frame.HOST_SIZE_V6 + 8),
            lambda offsets, out: self.k.message_ids(
                self.address, self.rows, self.count, offsets, out
            ),
        )

    def _born_host(self) -> pa.Array:
        return self._host(store_host=False)

    def _store_host(self) -> pa.Array:
        return self._host(store_host=True)

    def _host(self, *, store_host: bool) -> pa.Array:
        return self._text(
            self.k.HOST_TEXT_SIZE,
            lambda offsets, out: self.k.host_texts(
                self.address, self.rows, self.count, store_host, offsets, out
            ),
        )

    def _text(self, most: int, fill: Callable[[Int32, npt.NDArray[np.uint8]], int]) -> pa.Array:
        offsets = np.empty(self.count + 1, np.int32)
        out = np.empty(self.count * most, np.uint8)
        used = fill(offsets, out)
        return pa.StringArray.from_buffers(
            self.count, pa.py_buffer(offsets), pa.py_buffer(out[:used])
        )

    # spans of the frame
    def _ragged(self, starts: Any, lengths: Any, count: int, kind: pa.DataType) -> pa.Array:
        offsets = np.empty(count + 1, np.int32)
        validity = np.zeros((count + 7) // 8, np.uint8)
        total, nulls = self.k.offsets_of(lengths, count, offsets, validity)
        if total < 0:
            raise _too_large()
        # Arrow's pool reuses large buffers; NumPy would allocate them from the system each time.
        data = pa.allocate_buffer(total)
        self.k.copy_spans(self.address, starts, count, offsets, data.address)
        return pa.Array.from_buffers(
            kind,
            count,
            [pa.py_buffer(validity) if nulls else None, pa.py_buffer(offsets), data],
            null_count=nulls,
        )

    def _body(self) -> pa.Array:
        if self.decoding.decompress:
            found = next(contents(self.window, self.rows, self.decoding, java.INT_MAX))
            if len(found) < self.count:
                raise _too_large()
            return found
        starts = np.empty(self.count, np.int32)
        lengths = np.empty(self.count, np.int32)
        self.k.spans_of(self.rows, self.count, r.BODY_AT, r.BODY_LENGTH, starts, lengths)
        return self._ragged(starts, lengths, self.count, pa.binary())

    # properties
    def _parse(self, *, want_pairs: bool) -> None:
        starts = np.empty((4, self.count), np.int32)
        lengths = np.empty((4, self.count), np.int32)
        longest = int(self.rows[:, r.PROPS_LENGTH].max(initial=0)) if want_pairs else 0
        total = int(self.rows[:, r.PROPS_LENGTH].sum(dtype=np.int64)) if want_pairs else 0
        # Each pair takes at least four bytes with its separators; the last one of a string three.
        pairs = np.empty((4, total // _SMALLEST_PAIR + self.count + 1), np.int32)
        pair_offsets = np.empty(self.count + 1, np.int32)
        size = 1 << max(4, (2 * (longest // _SMALLEST_PAIR + 1)).bit_length())
        table, stamps = np.empty(size, np.int32), np.zeros(size, np.int32)
        self.k.parse_properties(
            self.address,
            self.rows,
            self.count,
            want_pairs,
            starts,
            lengths,
            pairs,
            pair_offsets,
            table,
            stamps,
        )
        self._properties = starts, lengths
        self._pairs = pairs, pair_offsets

    def all_property_spans(self) -> tuple[Int32, Int32]:
        if self._properties is None:
            self._parse(want_pairs=False)
        assert self._properties is not None
        return self._properties

    def property_spans(self, which: int) -> tuple[Int32, Int32]:
        starts, lengths = self.all_property_spans()
        return starts[which], lengths[which]

    def _property(self, which: int) -> pa.Array:
        starts, lengths = self.property_spans(which)
        return self._ragged(starts, lengths, self.count, pa.string())

    def _tags(self) -> pa.Array:
        return self._property(self.k.TAGS)

    def _keys(self) -> pa.Array:
        return self._property(self.k.KEYS)

    def _uniq_key(self) -> pa.Array:
        return self._property(self.k.UNIQ_KEY)

    def tags_code_values(self) -> Int64:
        if self._properties is None:
            self._parse(want_pairs=False)
        assert self._properties is not None
        starts, lengths = self._properties
        out, odd = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        levels = np.array(self.decoding.delay_levels_ms, np.int64)
        left_over = self.k.tags_codes(
            self.address,
            self.rows,
            self.count,
            starts,
            lengths,
            self.numbers(["store_timestamp"], ms=True)["store_timestamp"],
            levels,
            out,
            odd,
        )
        if left_over:
            which = odd[:left_over]
            decoded = messages(self.window, self.rows[which], self.decoding)
            out[which] = [message.tags_code for message in decoded]
        return out

    def _tags_code(self) -> pa.Array:
        return pa.array(self.tags_code_values())

    def has_key(self) -> npt.NDArray[np.bool_]:
        _, keys = self.property_spans(self.k.KEYS)
        _, uniq = self.property_spans(self.k.UNIQ_KEY)
        return (keys >= 0) | (uniq >= 0)

    def _properties_map(self) -> pa.Array:
        assert self._pairs is not None
        pairs, pair_offsets = self._pairs
        used = int(pair_offsets[-1])
        keys = self._ragged(pairs[0], pairs[1], used, pa.string())
        values = self._ragged(pairs[2], pairs[3], used, pa.string())
        return pa.MapArray.from_arrays(pa.array(pair_offsets), keys, values)

    def _exact_properties(self) -> pa.Array:
        """The property strings that encoding their pairs does not reproduce.

        Their length differs: empty or repeated properties are missing among the pairs. Only for
        strings that are UTF-8; the reference decodes the others.
        """
        assert self._pairs is not None
        pairs, ends = self._pairs
        used = int(ends[-1])
        pair_ends = np.cumsum(pairs[1, :used] + pairs[3, :used], dtype=np.int64)
        sums = np.concatenate(([0], pair_ends))[ends]
        count = np.diff(ends)
        # One separator in each pair, and one between two pairs.
        made = np.diff(sums) + np.maximum(2 * count - 1, 0)
        starts, lengths = np.empty(self.count, np.int32), np.empty(self.count, np.int32)
        self.k.spans_of(self.rows, self.count, r.PROPS_AT, r.PROPS_LENGTH, starts, lengths)
        lengths[lengths == made] = -1
        return self._ragged(starts, lengths, self.count, pa.binary())

    _MAKERS: ClassVar[dict[str, Callable[[_Fast], pa.Array]]] = {
        "broker": _broker,
        "topic": _topic,
        "message_id": _message_id,
        "born_host": _born_host,
        "store_host": _store_host,
        "tags": _tags,
        "keys": _keys,
        "uniq_key": _uniq_key,
        "tags_code": _tags_code,
        "properties": _properties_map,
        _EXACT: _exact_properties,
        "body": _body,
    }


def topic_ids(window: Window, rows: Rows) -> tuple[Int32, list[str]]:
    """Number the topics of frames: a number for each frame, and the topics by number."""
    fast = codec.kernels()
    if fast is None:
        numbers: dict[bytes, int] = {}
        plain = [
            numbers.setdefault(_topic_bytes(window, row), len(numbers)) for row in rows.tolist()
        ]
        return np.array(plain, np.int32), [_text(topic) for topic in numbers]
    ids = np.empty(len(rows), np.int32)
    found = np.empty((_MAX_TOPICS, 2), np.int32)
    table = np.full(_TOPIC_TABLE, -1, np.int32)
    known = fast.intern_topics(window.address, rows, len(rows), table, found, ids)
    if known < 0:
        # More topics than the small table holds: size the table by the number of frames.
        found = np.empty((len(rows), 2), np.int32)
        table = np.full(1 << (2 * len(rows)).bit_length(), -1, np.int32)
        known = fast.intern_topics(window.address, rows, len(rows), table, found, ids)
    names = [
        _text(window.data[start : start + length].tobytes())
        for start, length in found[:known].tolist()
    ]
    return ids, names


def _topic_bytes(window: Window, row: Sequence[int]) -> bytes:
    start = row[r.POSITION] + row[r.TOPIC_AT]
    return window.data[start : start + row[r.TOPIC_LENGTH]].tobytes()


def _text(data: bytes) -> str:
    return data.decode("utf-8", java.UTF8_ERRORS)


def fixed_fields(window: Window, rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Decode fields of fixed width to NumPy arrays by name; timestamps in milliseconds."""
    if codec.kernels_enabled():
        return _Fast(window, rows, Decoding()).numbers(names, ms=True)
    decoded = messages(window, rows, Decoding())
    return {
        name: np.array([getattr(message, name) for message in decoded], np.int64) for name in names
    }


def tags_codes(
    window: Window, rows: Rows, decoding: Decoding
) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """The tags code of each frame, and whether the frame has KEYS or a UNIQ_KEY."""
    fast = codec.kernels()
    if fast is not None and not fast.bad_utf8(window.address, rows, len(rows)):
        run = _Fast(window, rows, decoding)
        return run.tags_code_values(), run.has_key()
    decoded = messages(window, rows, decoding)
    codes = np.array([message.tags_code for message in decoded], np.int64)
    keyed = [m.keys is not None or m.uniq_key is not None for m in decoded]
    return codes, np.array(keyed, np.bool_)


def property_spans(window: Window, rows: Rows) -> tuple[Int32, Int32]:
    """Positions of TAGS, KEYS, UNIQ_KEY and DELAY by kernel: starts and lengths, -1 for none."""
    return _Fast(window, rows, Decoding()).all_property_spans()


def suspect_rows(window: Window, rows: Rows) -> list[int]:
    """Frames whose topic or properties hold NUL bytes or are not UTF-8.

    The CRC covers only the body, so a torn page in the topic or properties shows only here.
    """
    fast = codec.kernels()
    if fast is not None:
        marks = np.zeros(len(rows), np.uint8)
        fast.mark_suspects(window.address, rows, len(rows), marks)
        return [int(i) for i in np.flatnonzero(marks)]
    return [
        i
        for i, row in enumerate(rows.tolist())
        if any(
            _is_suspect(window.data[row[r.POSITION] + row[at] :][: row[length]].tobytes())
            for at, length in ((r.TOPIC_AT, r.TOPIC_LENGTH), (r.PROPS_AT, r.PROPS_LENGTH))
        )
    ]


def _is_suspect(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return b"\0" in data
