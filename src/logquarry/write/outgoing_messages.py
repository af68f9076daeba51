"""Makes columns of messages that are Python objects, for ``put_many``, if it runs interpreted.

Compiled, :mod:`logquarry.write.common_frames` makes their frames.

Most fields have the same value in all messages: one comparison shows that. Properties that the
store acts on are searched for in all property strings at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from logquarry.errors import LogquarryError
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.write.frame_table import Int64
from logquarry.write.message_rules import (
    acts_on,
    given_properties,
    is_timed,
    looked_at,
    utf8,
    waits,
)
from logquarry.write.outgoing import Bools, Columns, Spans

_NUMBERS: Final = (
    "queue_id",
    "flag",
    "sys_flag",
    "reconsume_times",
    "prepared_transaction_offset",
)
_FIELDS: Final = Message._fields
_KEYS: Final = f"{props.KEYS}{props.NAME_VALUE_SEPARATOR}"
_TAGS: Final = f"{props.TAGS}{props.NAME_VALUE_SEPARATOR}"
_SEPARATOR: Final = props.PROPERTY_SEPARATOR
_None: Final = type(None)
_AT_ONCE: Final = 256
"""Messages alive at once: fewer than the new objects after which Python's collector runs."""

Values = Sequence[Any]


class Taken(Sequence[Message]):
    """The messages of an iterable, stored as one list per field.

    Python's garbage collector would visit each of thousands of message objects, which takes a third
    of the time. It does not visit text, bytes and numbers.

    Args:
        messages: the messages.
    """

    def __init__(self, messages: Iterable[Message]) -> None:
        self.fields: list[list[Any]] = [[] for _ in _FIELDS]
        extends = [values.extend for values in self.fields]
        rest = iter(messages)
        while some := list(islice(rest, _AT_ONCE)):
            for extend, values in zip(extends, zip(*some, strict=True), strict=True):
                extend(values)

    def __len__(self) -> int:
        return len(self.fields[0])

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return Message.of_checked(values[index] for values in self.fields)


def columns_of_messages(messages: Sequence[Message], clock: Callable[[], int]) -> Columns:
    """The columns of some messages.

    Args:
        messages: at least one.
        clock: the born time of messages that have none.
    """
    columns = messages.fields if isinstance(messages, Taken) else zip(*messages, strict=True)
    fields: dict[str, Values] = dict(zip(_FIELDS, columns, strict=True))
    count = len(messages)
    odd = np.zeros(count, np.bool_)
    topics, topic_ids = _numbered(fields["topic"])
    hosts, host_ids = _host_pairs(fields["born_host"], fields["store_host"])
    born = fields["born_timestamp"]
    if None in born:
        now = clock()
        born = tuple(now if value is None else value for value in born)
    numbers = {name: _integers(fields[name], odd) for name in _NUMBERS}
    numbers["born_timestamp"] = _integers(born, odd)
    return Columns(
        count=count,
        topics=topics,
        topic_ids=topic_ids,
        hosts=hosts,
        host_ids=host_ids,
        numbers=numbers,
        bodies=_joined(_bodies(fields["body"])),
        properties=_property_spans(messages, fields, odd),
        odd=odd,
        message=messages.__getitem__,
    )


def _is_constant(values: Values) -> bool:
    return values.count(values[0]) == len(values)


def _numbered(values: Values) -> tuple[list[Any], Int64]:
    """The distinct values, and for each message the index of its value."""
    if _is_constant(values):
        return [values[0]], np.zeros(len(values), np.int64)
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    ids = np.fromiter(map(numbers.__getitem__, values), np.int64, len(values))
    return list(numbers), ids


def _host_pairs(
    born: Values, store: Values
) -> tuple[list[tuple[str | bytes, str | bytes | None]], Int64]:
    if _is_constant(born) and _is_constant(store):
        return [(born[0], store[0])], np.zeros(len(born), np.int64)
    return _numbered(tuple(zip(born, store, strict=True)))


def _integers(values: Values, odd: Bools) -> Int64:
    """Numbers as an array. If a value is not a number, or too large, all messages are odd."""
    count = len(values)
    if type(values[0]) is int and _is_constant(values):
        values = (values[0],)
    try:
        array = np.array(values)
    except (ValueError, TypeError):
        array = np.empty(0, object)
    if array.dtype == np.int64:
        return array if len(array) == count else np.full(count, array[0])
    odd[:] = True
    return np.zeros(count, np.int64)


def _bodies(bodies: Values) -> Sequence[bytes]:
    if set(map(type, bodies)) == {bytes}:
        return bodies
    # The items of a view may be larger than bytes. (And bytes(5) is five zeros.)
    return [bytes(memoryview(body)) for body in bodies]


def _joined(parts: Sequence[bytes], data: bytes | None = None) -> Spans:
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return _spans(b"".join(parts) if data is None else data, lengths)


def _spans(data: bytes, lengths: Int64) -> Spans:
    kept: npt.NDArray[np.uint8] = np.frombuffer(data or b"\0", np.uint8)
    ends = np.cumsum(lengths)
    return Spans(ends - lengths + kept.ctypes.data, lengths, (kept,))


def _property_spans(messages: Sequence[Message], fields: dict[str, Values], odd: Bools) -> Spans:
    strings = fields["properties_string"]
    if all(
        _is_constant(fields[name]) and fields[name][0] == default
        for name, default in (("properties", None), ("delay_level", 0), ("wait_store_ok", True))
    ):
        has_named = any(len(set(map(type, fields[name])) - {_None}) for name in ("tags", "keys"))
        if not has_named:
            return _given(messages, strings, odd)
        if _is_constant(strings) and strings[0] is None:
            # The store never acts on KEYS and TAGS, whatever their values hold.
            return _given(messages, _named(fields["keys"], fields["tags"]), odd, can_act=False)
    parts: list[bytes] = []
    for number, message in enumerate(messages):
        try:
            parts.append(given_properties(message))
        except LogquarryError:
            odd[number] = True
            parts.append(b"")
    _look_into(messages, odd)
    return _joined(parts)


def _named(keys: Values, tags: Values) -> list[str]:
    """The property strings of messages with keys and tags only."""
    glue = _SEPARATOR + _TAGS
    if _is_constant(tags) and tags[0] is not None and None not in keys:
        end = glue + tags[0]
        return [f"{_KEYS}{key}{end}" for key in keys]
    return [
        ("" if tag is None else _TAGS + tag)
        if key is None
        else _KEYS + key + ("" if tag is None else glue + tag)
        for key, tag in zip(keys, tags, strict=True)
    ]


def _given(
    messages: Sequence[Message], strings: Values, odd: Bools, *, can_act: bool = True
) -> Spans:
    """Property strings that are written unchanged."""
    if set(map(type, strings)) == {str}:
        text = "".join(strings)
        if text.isascii():
            if can_act and acts_on(text):
                _look_into(messages, odd)
            lengths = np.fromiter(map(len, strings), np.int64, len(strings))
            return _spans(text.encode(), lengths)
    made = [_bytes(string) for string in strings]
    data = b"".join(made)
    if can_act and acts_on(data):
        _look_into(messages, odd)
    return _joined(made, data)


def _bytes(string: str | bytes | None) -> bytes:
    if string is None:
        return b""
    return utf8(string) if isinstance(string, str) else bytes(string)


def _look_into(messages: Sequence[Message], odd: Bools) -> None:
    for number, message in enumerate(messages):
        values = looked_at(message)
        if values and (
            props.DELAY in values
            or props.INNER_MULTI_DISPATCH in values
            or is_timed(values)
            or not waits(values)
        ):
            odd[number] = True
