"""Decodes frames to Arrow columns, with compiled kernels or with the pure-Python reference codec.

No RocketMQ client writes a topic or properties that are not UTF-8. If the properties of a frame are
not UTF-8, the reference codec, not a kernel, decodes the property columns of the whole batch.
Invalid bytes become U+FFFD, as in Java.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from logquarry.errors import DecompressionError
from logquarry.format import arrays as r
from logquarry.format import frame, java
from logquarry.format import properties as props
from logquarry.format.arrays import Bools, Bytes, Int32, Int64
from logquarry.format.sys_flag import DEFAULT_LIMIT, decompress, is_compressed
from logquarry.log import codec, schema
from logquarry.log.codec import Rows, Window
from logquarry.log.columns_kernel import MOST_MS, MS, WHOLE_PROPERTIES, KernelColumns, too_large
from logquarry.log.walk import Run
from logquarry.stored_message import StoredMessage

_EXACT: Final = schema.EXACT_PROPERTIES.name
_PROPERTY_COLUMNS: Final = WHOLE_PROPERTIES | {"tags", "keys", "uniq_key", "tags_code"}

MOST_CONTENT: Final = 8 << 20
"""Maximum bytes of decompressed bodies in one piece. A message with a larger body is the only
message of its piece.
"""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Settings for the decoding of frames to columns.

    ``on_bad_body`` is called with physical offset and reason if a body does not decompress. If the
    callback raises no exception, the column contains the body as it is stored in the log.
    """

    columns: Sequence[str] = schema.NAMES
    broker: str = ""
    delay_levels_ms: tuple[int, ...] = field(
        default_factory=lambda: props.parse_levels(props.DEFAULT_LEVELS)
    )
    decompress: bool = False
    decompress_limit: int = DEFAULT_LIMIT
    on_bad_body: Callable[[int, str], None] | None = None


def record_batch(
    window: Window, rows: Rows, decoding: Decoding, *, bodies: pa.Array | None = None
) -> pa.RecordBatch:
    """Decode frames to a batch. Raises LogquarryError if a column has more than 2 GiB."""
    ready = {} if bodies is None else {"body": bodies}
    if codec.kernels_if_worth(len(rows)) is not None:
        arrays = _kernel_arrays(window, rows, decoding, ready)
    else:
        arrays = _reference_arrays(window, rows, decoding, ready)
    return pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema(decoding.columns))


def _kernel_arrays(
    window: Window, rows: Rows, decoding: Decoding, ready: dict[str, pa.Array]
) -> list[pa.Array]:
    run = KernelColumns(window, rows)
    left = [name for name in decoding.columns if name not in ready]
    properties = [name for name in left if name in _PROPERTY_COLUMNS]
    if properties and run.has_bad_utf8:
        decoded = messages(window, rows, decoding)
        ready = ready | {name: _reference_column(name, decoded, decoding) for name in properties}
    if "body" in left and decoding.decompress:
        ready = ready | {"body": _whole_content(window, rows, decoding)}
    if "broker" in left:
        broker = pa.scalar(decoding.broker, pa.string())
        ready = ready | {"broker": pa.repeat(broker, len(rows))}
    made = run.arrays([name for name in left if name not in ready and name != "tags_code"])
    if "tags_code" in left and "tags_code" not in ready:
        made["tags_code"] = pa.array(_kernel_tags_codes(run, decoding))
    return [ready[name] if name in ready else made[name] for name in decoding.columns]


def _whole_content(window: Window, rows: Rows, decoding: Decoding) -> pa.Array:
    found = next(contents(window, rows, decoding, java.INT_MAX))
    if len(found) < len(rows):
        raise too_large()
    return found


def _kernel_tags_codes(run: KernelColumns, decoding: Decoding) -> Int64:
    codes, odd = run.tags_codes(decoding.delay_levels_ms)
    if len(odd):
        decoded = messages(run.window, run.rows[odd], decoding)
        codes[odd] = [message.tags_code for message in decoded]
    return codes


# --------------------------------------------------------------------------------- the reference
def messages(window: Window, rows: Rows, decoding: Decoding) -> list[StoredMessage]:
    """Decode frames of a window to message objects."""
    broker, levels = decoding.broker, decoding.delay_levels_ms
    return [
        StoredMessage(window.frame_at(position), broker=broker, delay_levels_ms=levels)
        for position in rows[:, r.POSITION].tolist()
    ]


def _reference_arrays(
    window: Window, rows: Rows, decoding: Decoding, ready: dict[str, pa.Array]
) -> list[pa.Array]:
    decoded = messages(window, rows, decoding)
    return [
        ready[name] if name in ready else _reference_column(name, decoded, decoding)
        for name in decoding.columns
    ]


def _reference_column(name: str, decoded: list[StoredMessage], decoding: Decoding) -> pa.Array:
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
        # A producer can send any number as a time. As in the kernels, the column has the nearest
        # time that it can hold.
        near = [min(max(value, -MOST_MS), MOST_MS) * MS for value in values]
        return pa.array(near, pa.int64()).cast(kind)
    column = pa.array(values, kind)
    if isinstance(column, pa.ChunkedArray):
        raise too_large()
    return column


def _exact_properties(message: StoredMessage) -> bytes | None:
    data = message.frame.properties
    return None if props.encode(message.properties).encode() == data else data


def body_of(message: StoredMessage, decoding: Decoding) -> bytes:
    """Return a message's body. Decompress the body if ``decoding`` requires decompressed bodies."""
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
    """Yield the bodies of all frames, decompressed, in arrays of at most ``most`` bytes. A body
    that is larger is the only element of its array. If no body is compressed, there is only one
    array.
    """
    flags = fixed_fields(window, rows, ["sys_flag"])["sys_flag"].tolist()
    if not any(map(is_compressed, flags)):
        stored = replace(decoding, columns=["body"], decompress=False)
        yield record_batch(window, rows, stored)["body"]
        return
    data, ends = bytearray(), [0]
    for row, flag in zip(rows.tolist(), flags, strict=True):
        stored_body = _part(window, row, r.BODY_AT, r.BODY_LENGTH)
        body = _content(stored_body, flag, window.offset_at(row[r.POSITION]), decoding)
        if len(ends) > 1 and len(data) + len(body) > most:
            yield _binary(data, ends)
            data, ends = bytearray(), [0]
        data += body
        ends.append(len(data))
    yield _binary(data, ends)


def pieces(
    window: Window, rows: Rows, decoding: Decoding, most: int | None = None
) -> Iterator[tuple[Rows, pa.Array | None]]:
    """Divide frames into pieces, for :func:`contents`. The decompressed bodies of a piece take at
    most ``most`` bytes. If one body is larger, its frame alone makes a piece.

    For each piece, yields the rows of its frames and the column ``body``. If the read does not
    decompress bodies, the function yields one piece without this column.
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
        raise too_large()
    offsets = pa.py_buffer(np.array(ends, np.int32))
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [None, offsets, pa.py_buffer(data)])


def topic_ids(window: Window, rows: Rows) -> tuple[Int32, list[str]]:
    """Return two results: for each frame, the index of its topic in a list, and this list of
    topics.
    """
    if codec.kernels_if_worth(len(rows)) is None:
        numbers: dict[bytes, int] = {}
        topics = (_part(window, row, r.TOPIC_AT, r.TOPIC_LENGTH) for row in rows.tolist())
        ids = [numbers.setdefault(topic, len(numbers)) for topic in topics]
        names = [topic.decode("utf-8", java.UTF8_ERRORS) for topic in numbers]
        return np.array(ids, np.int32), names
    return KernelColumns(window, rows).topic_ids()


def _part(window: Window, row: Sequence[int], at: int, length: int) -> bytes:
    start = row[r.POSITION] + row[at]
    return window.data[start : start + row[length]].tobytes()


def fixed_fields(window: Window, rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Decode fields of fixed width to NumPy arrays. Timestamps are in milliseconds."""
    if codec.kernels_if_worth(len(rows)) is not None:
        return KernelColumns(window, rows).numbers(names, ms=True)
    decoded = messages(window, rows, Decoding())
    return {
        name: np.array([getattr(message, name) for message in decoded], np.int64) for name in names
    }


def tags_codes(window: Window, rows: Rows, decoding: Decoding) -> tuple[Int64, Bools]:
    """Return the tags code of each frame, and whether the frame has KEYS or a UNIQ_KEY."""
    fast = codec.kernels_if_worth(len(rows))
    if fast is not None and not fast.bad_utf8(window.address, rows, len(rows)):
        run = KernelColumns(window, rows)
        return _kernel_tags_codes(run, decoding), run.has_key()
    decoded = messages(window, rows, decoding)
    codes = np.array([message.tags_code for message in decoded], np.int64)
    keyed = [m.keys is not None or m.uniq_key is not None for m in decoded]
    return codes, np.array(keyed, np.bool_)


def suspect_rows(window: Window, rows: Rows) -> list[int]:
    """Return the indexes of the frames whose topic or properties have NUL bytes or are not UTF-8.

    The frame's CRC covers only the body. So if a crash has torn the page with the topic or the
    properties, only this check finds the damage. A frame whose property CRC is right is not
    returned, even if its text has such bytes.
    """
    fast = codec.kernels_if_worth(len(rows))
    if fast is not None:
        marks = np.zeros(len(rows), np.uint8)
        fast.mark_suspects(window.address, rows, len(rows), marks)
        found = [int(i) for i in np.flatnonzero(marks)]
    else:
        found = [
            i
            for i, row in enumerate(rows.tolist())
            if any(
                _is_suspect(_part(window, row, at, length))
                for at, length in ((r.TOPIC_AT, r.TOPIC_LENGTH), (r.PROPS_AT, r.PROPS_LENGTH))
            )
        ]
    starts, sizes = rows[:, r.POSITION].tolist(), rows[:, r.SIZE].tolist()
    frames = ((i, window.data[starts[i] : starts[i] + sizes[i]].tobytes()) for i in found)
    return [i for i, data in frames if not props.matches_crc(data)]


_CRC_TAIL: Final = np.arange(props.CRC_SIZE)
_CRC_DIGITS: Final = slice(len(props.CRC_PREFIX), len(props.CRC_PREFIX) + props.CRC_DIGITS)
_CRC_POWERS: Final = 10 ** np.arange(props.CRC_DIGITS)


def crc_carriers(data: Bytes, starts: Int64, sizes: Int64) -> Int64:
    """Return the indexes of the frames that have a property CRC."""
    tails = starts + sizes - props.CRC_SIZE
    # Check one byte first. In a store without property CRCs, this byte already excludes almost
    # every frame.
    maybe = np.flatnonzero(data[tails] == props.CRC_PREFIX[0])
    if not len(maybe):
        return maybe
    heads = data[tails[maybe, None] + _CRC_TAIL[: len(props.CRC_PREFIX)]]
    found: Int64 = maybe[(heads == np.frombuffer(props.CRC_PREFIX, np.uint8)).all(axis=1)]
    return found


def _stated_crcs(data: Bytes, starts: Int64, sizes: Int64) -> Int64:
    """Return the property CRCs of frames that have one; -1 for a CRC that is not ten digits."""
    found = data[(starts + sizes - props.CRC_SIZE)[:, None] + _CRC_TAIL]
    digits = found[:, _CRC_DIGITS] - np.uint8(ord("0"))
    is_form = (digits <= 9).all(axis=1) & (found[:, -1] == props.CRC_END[0])
    crcs: Int64 = np.where(is_form, digits.astype(np.int64) @ _CRC_POWERS, -1)
    return crcs


def wrong_property_crcs(window: Window, rows: Rows) -> list[int]:
    """Return the indexes of the frames with a wrong property CRC."""
    if window.has_heads:
        # DLedger writes PHYSICALOFFSET into a frame after the CRC was computed, so the CRC is wrong
        # even in sound frames.
        return []
    starts, sizes = rows[:, r.POSITION].astype(np.int64), rows[:, r.SIZE].astype(np.int64)
    which = crc_carriers(window.data, starts, sizes)
    if not len(which):
        return []
    starts, sizes = starts[which], sizes[which]
    stated = _stated_crcs(window.data, starts, sizes)
    lengths = sizes - props.CRC_SIZE
    fast = codec.kernels_if_worth(len(rows))
    # A stated CRC below 0 means that the property with the CRC is malformed. These frames are wrong
    # too, but the kernel skips them.
    wrong = np.flatnonzero(stated < 0).tolist()
    if fast is None:
        view = window.data.data
        spans = enumerate(zip(starts.tolist(), lengths.tolist(), stated.tolist(), strict=True))
        wrong += [
            number
            for number, (start, length, crc) in spans
            if crc >= 0 and java.crc32(view[start : start + length]) & java.INT_MAX != crc
        ]
    else:
        function, at, done = codec.crc32_address(), starts + window.address, 0
        while (
            found := fast.first_wrong_crc(at[done:], lengths[done:], stated[done:], function)
        ) >= 0:
            wrong.append(done + found)
            done += found + 1
    return [int(which[number]) for number in sorted(wrong)]


def rows_with_property(window: Window, rows: Rows, name: str) -> Int64:
    """Return the indexes of the frames that have a property of this name."""
    fast = codec.kernels_if_worth(len(rows))
    marks = np.zeros(len(rows), np.uint8)
    if fast is not None:
        wanted = np.frombuffer(name.encode(), np.uint8)
        shifts = np.full(256, len(wanted), np.int64)
        shifts[wanted[:-1]] = np.arange(len(wanted) - 1, 0, -1)
        rows = np.ascontiguousarray(rows)
        fast.mark_named(window.address, rows, len(rows), wanted, shifts, marks)
        return np.flatnonzero(marks)
    start = f"{name}{props.NAME_VALUE_SEPARATOR}".encode()
    for number, row in enumerate(rows.tolist()):
        text = _part(window, row, r.PROPS_AT, r.PROPS_LENGTH)
        parts = text.split(props.PROPERTY_SEPARATOR.encode())
        marks[number] = any(part.startswith(start) for part in parts)
    return np.flatnonzero(marks)


def frames_with_property(runs: Iterable[Run], name: str) -> Iterator[frame.Frame]:
    """Yield the frames that have a property of this name."""
    for run in runs:
        for number in rows_with_property(run.window, run.rows, name).tolist():
            found = run.window.decode(int(run.rows[number, r.POSITION]))
            if isinstance(found, frame.Frame):
                yield found


def _is_suspect(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return b"\0" in data
