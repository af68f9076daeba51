"""Decodes frames to columns with compiled kernels (reference: :mod:`logquarry.log.columns`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from logquarry.errors import LogquarryError
from logquarry.format import arrays as r
from logquarry.format import frame, java
from logquarry.format.arrays import Bools, Bytes, Int32, Int64
from logquarry.log import codec, schema

FIXED: Final = {
    name: (start, at)
    for start, shift, layout in (
        (r.FROM_FRAME, 0, frame.HEAD),
        (r.FROM_STORE_TIME, 0, frame.STORE_TIME),
        (r.FROM_BODY, -frame.TAIL.size, frame.TAIL),
    )
    for name, at in ((field, shift + at) for field, at in layout.offsets.items())
    if name in schema.NAMES
}
"""Column of fixed width -> place of its field: a part of the frame, and a position in this part."""
MS: Final = 1_000
"""Microseconds in a millisecond: Arrow's timestamps have microseconds, RocketMQ's milliseconds."""
MOST_MS: Final = java.LONG_MAX // MS
"""The last time in milliseconds that fits into an Arrow timestamp; ``-MOST_MS`` is the first. If a
time is outside this range, the column has the nearer of the two limits instead.
"""

_FEW: Final = 256
"""Number of distinct values for which :func:`interned` first makes room. If there are more values,
the function calls the kernel again with more room.
"""
_EXACT: Final = schema.EXACT_PROPERTIES.name
WHOLE_PROPERTIES: Final = frozenset({"properties", _EXACT})
"""Columns that need all properties of a message."""
_SMALLEST_PAIR: Final = 4
"""Minimum bytes of a property with both separators."""


def interned(count: int, intern: Callable[..., int]) -> tuple[list[int], Int64]:
    """Call a kernel that numbers the distinct values among ``count`` values.

    Returns:
        Two results. The first is a list of the distinct values, or of the indexes of their first
        occurrences. The second is an array of numbers: for each of the ``count`` values, the number
        of its distinct value.
    """
    ids, found = np.empty(count, np.int64), np.empty(0, np.int64)
    known, most = -1, _FEW
    while known < 0:
        found = np.empty(most, np.int64)
        known = intern(np.full(1 << (2 * most).bit_length(), -1, np.int32), found, ids)
        most = count
    return found[:known].tolist(), ids


def too_large() -> LogquarryError:
    """Make the error for a column that is too large for Arrow's 32-bit offsets."""
    return LogquarryError("one column of a batch takes more than 2 GiB")


def _places(names: Sequence[str]) -> tuple[Int64, Int64]:
    """Return two arrays: for each field, the part of the frame that contains the field, and the
    field's position in this part.
    """
    parts, positions = np.array([FIXED[name] for name in names], np.int64).reshape(-1, 2).T.copy()
    return parts, positions


@cache
def _gather_plan(
    names: tuple[str, ...], ms: bool
) -> tuple[list[str], tuple[Int64, Int64], list[str], tuple[Int64, Int64], Int64]:
    """Separate the 32-bit fields from the 64-bit fields. Return names and places of the 32-bit
    fields, names and places of the 64-bit fields, and the factors for the 64-bit fields.
    """
    kinds = schema.arrow_types()
    narrow = [name for name in names if kinds[name].bit_width == 32]
    wide = [name for name in names if name not in narrow]
    factors = [MS if pa.types.is_timestamp(kinds[n]) and not ms else 1 for n in wide]
    return narrow, _places(narrow), wide, _places(wide), np.array(factors, np.int64)


class KernelColumns:
    """Makes the columns of one run of frames with kernels."""

    def __init__(self, window: codec.Window, rows: codec.Rows) -> None:
        self.k = codec.require_kernels()
        self.window = window
        self.rows = rows if rows.flags.c_contiguous else np.ascontiguousarray(rows)
        self.address = window.address
        self.count = len(rows)
        self._properties: tuple[Int32, Int32] | None = None
        self._pairs: tuple[Int32, Int32] | None = None

    @property
    def has_bad_utf8(self) -> bool:
        """Whether the properties of a frame are not UTF-8."""
        return bool(self.k.bad_utf8(self.address, self.rows, self.count))

    def arrays(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return name -> column. If :attr:`has_bad_utf8` is true, do not request columns that are
        made from properties.
        """
        if not WHOLE_PROPERTIES.isdisjoint(names):
            self._parse(want_pairs=True)
        made = self._fixed([name for name in names if name in FIXED])
        return {name: made[name] if name in made else self._MAKERS[name](self) for name in names}

    # fixed fields
    def numbers(self, names: Sequence[str], *, ms: bool = False) -> dict[str, Any]:
        """Return name -> values of fixed fields. Timestamps are in microseconds; with ``ms``, they
        are in milliseconds.
        """
        narrow, places32, wide, places64, factors = _gather_plan(tuple(names), ms)
        out32 = np.empty((len(narrow), self.count), np.int32)
        out64 = np.empty((len(wide), self.count), np.int64)
        self.k.gather(
            *(self.address, self.rows, self.count, *places32, out32, *places64),
            *(factors, java.LONG_MAX // factors, out64),
        )
        return dict(zip(narrow + wide, [*out32, *out64], strict=True))

    def _fixed(self, names: Sequence[str]) -> dict[str, pa.Array]:
        kinds = schema.arrow_types()
        return {
            name: pa.Array.from_buffers(kinds[name], self.count, [None, pa.py_buffer(values)])
            for name, values in self.numbers(names).items()
        }

    # text
    def _topic(self) -> pa.Array:
        starts, lengths = np.empty(self.count, np.int32), np.empty(self.count, np.int32)
        if self.k.topic_spans(self.address, self.rows, self.count, starts, lengths):
            return self._ragged(starts, lengths, self.count, pa.string())
        ids, names = self.topic_ids()
        return pa.array(names, pa.string()).take(pa.array(ids))

    def topic_ids(self) -> tuple[Int32, list[str]]:
        """Return two results: for each frame, the index of its topic in a list, and this list of
        topics.
        """
        starts, lengths = self._spans(r.TOPIC_AT, r.TOPIC_LENGTH)
        at, length = starts + np.int64(self.address), lengths.astype(np.int64)
        firsts, ids = interned(self.count, lambda *tables: self.k.intern_spans(at, length, *tables))
        names = [
            self.window.data[start : start + length].tobytes().decode("utf-8", java.UTF8_ERRORS)
            for start, length in zip(starts[firsts].tolist(), lengths[firsts].tolist(), strict=True)
        ]
        return ids.astype(np.int32), names

    def _message_id(self) -> pa.Array:
        return self._text(
            2 * (frame.HOST_SIZE_V6 + 8),
            lambda offsets, out: self.k.message_ids(
                self.address, self.rows, self.count, offsets, out
            ),
        )

    def _host(self, store_host: bool) -> pa.Array:
        return self._text(
            self.k.HOST_TEXT_SIZE,
            lambda offsets, out: self.k.host_texts(
                self.address, self.rows, self.count, store_host, offsets, out
            ),
        )

    def _text(self, most: int, fill: Callable[[Int32, Bytes], int]) -> pa.Array:
        offsets = np.empty(self.count + 1, np.int32)
        out = np.empty(self.count * most, np.uint8)
        used = fill(offsets, out)
        return pa.StringArray.from_buffers(
            self.count, pa.py_buffer(offsets), pa.py_buffer(out[:used])
        )

    # Make a column of strings or bytes from the starts and lengths of its values in the frames.
    def _ragged(self, starts: Any, lengths: Any, count: int, kind: pa.DataType) -> pa.Array:
        offsets = np.empty(count + 1, np.int32)
        validity = np.zeros((count + 7) // 8, np.uint8)
        total, nulls = self.k.offsets_of(lengths, count, offsets, validity)
        if total < 0:
            raise too_large()
        # Allocate from Arrow's pool, because it reuses large buffers. NumPy would request new
        # memory from the system for each large array.
        data = pa.allocate_buffer(total)
        self.k.copy_spans(self.address, starts, count, offsets, data.address)
        return pa.Array.from_buffers(
            kind,
            count,
            [pa.py_buffer(validity) if nulls else None, pa.py_buffer(offsets), data],
            null_count=nulls,
        )

    def _body(self) -> pa.Array:
        return self._ragged(*self._spans(r.BODY_AT, r.BODY_LENGTH), self.count, pa.binary())

    def _spans(self, at: int, length: int) -> tuple[Int32, Int32]:
        starts, lengths = np.empty(self.count, np.int32), np.empty(self.count, np.int32)
        self.k.spans_of(self.rows, self.count, at, length, starts, lengths)
        return starts, lengths

    # properties
    def _parse(self, *, want_pairs: bool) -> None:
        starts = np.empty((4, self.count), np.int32)
        lengths = np.empty((4, self.count), np.int32)
        longest = int(self.rows[:, r.PROPS_LENGTH].max(initial=0)) if want_pairs else 0
        total = int(self.rows[:, r.PROPS_LENGTH].sum(dtype=np.int64)) if want_pairs else 0
        # A property has at least four bytes: a name, a value and two separators. The last property
        # has at least three bytes, because its second separator may be missing.
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
        """Find the values of TAGS, KEYS, UNIQ_KEY and DELAY in each frame. Return the starts and
        the lengths of the values; the length is -1 if a frame does not have the property.
        """
        if self._properties is None:
            self._parse(want_pairs=False)
        assert self._properties is not None
        return self._properties

    def _property(self, which: int) -> pa.Array:
        starts, lengths = self.all_property_spans()
        return self._ragged(starts[which], lengths[which], self.count, pa.string())

    def tags_codes(self, delay_levels_ms: Sequence[int]) -> tuple[Int64, Int64]:
        """Return the tags codes, and the indexes of frames that need the reference codec."""
        starts, lengths = self.all_property_spans()
        out, odd = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        left_over = self.k.tags_codes(
            self.address,
            self.rows,
            self.count,
            starts,
            lengths,
            self.numbers(["store_timestamp"], ms=True)["store_timestamp"],
            np.array(delay_levels_ms, np.int64),
            out,
            odd,
        )
        return out, odd[:left_over]

    def has_key(self) -> Bools:
        """Whether each frame has KEYS or a UNIQ_KEY."""
        _, lengths = self.all_property_spans()
        found: Bools = lengths[self.k.KEYS] >= 0
        found |= lengths[self.k.UNIQ_KEY] >= 0
        return found

    def _properties_map(self) -> pa.Array:
        assert self._pairs is not None
        pairs, pair_offsets = self._pairs
        used = int(pair_offsets[-1])
        keys = self._ragged(pairs[0], pairs[1], used, pa.string())
        values = self._ragged(pairs[2], pairs[3], used, pa.string())
        return pa.MapArray.from_arrays(pa.array(pair_offsets), keys, values)

    def _exact_properties(self) -> pa.Array:
        # Parse the string to pairs, and encode the pairs. If the result is the same string, the
        # column is null. It is enough to compare the lengths: the parser only drops empty and
        # repeated properties, so if the result differs, it is shorter than the string. All strings
        # must be UTF-8.
        assert self._pairs is not None
        pairs, ends = self._pairs
        used = int(ends[-1])
        pair_ends = np.cumsum(pairs[1, :used] + pairs[3, :used], dtype=np.int64)
        sums = np.concatenate(([0], pair_ends))[ends]
        count = np.diff(ends)
        # The encoding has one separator between the name and the value of each pair, and one
        # separator between two pairs.
        made = np.diff(sums) + np.maximum(2 * count - 1, 0)
        starts, lengths = self._spans(r.PROPS_AT, r.PROPS_LENGTH)
        lengths[lengths == made] = -1
        return self._ragged(starts, lengths, self.count, pa.binary())

    _MAKERS: ClassVar[dict[str, Callable[[KernelColumns], pa.Array]]] = {
        "topic": _topic,
        "message_id": _message_id,
        "born_host": lambda run: run._host(store_host=False),
        "store_host": lambda run: run._host(store_host=True),
        "tags": lambda run: run._property(run.k.TAGS),
        "keys": lambda run: run._property(run.k.KEYS),
        "uniq_key": lambda run: run._property(run.k.UNIQ_KEY),
        "properties": _properties_map,
        _EXACT: _exact_properties,
        "body": _body,
    }
