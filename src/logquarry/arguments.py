"""Checks of the arguments of public calls, and the types of clocks and progress callbacks.

Each function checks one argument and returns the converted argument: an integer of Python or NumPy
becomes an int, a path becomes text, and names become a list. A wrong type raises WrongType (a
TypeError); a wrong value raises UsageError (a ValueError).
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from datetime import date
from functools import cache
from operator import index
from typing import Any, Final, NoReturn, TypeGuard, TypeVar

from logquarry.errors import UsageError, WrongType
from logquarry.text import time_ms as parse_time

Progress = Callable[[int, int], None]
"""Callback of long operations: (amount done, total amount)."""
Bars = Callable[[str], AbstractContextManager[Progress | None]]
"""Function that takes the name of a part of the work, and returns a context manager that yields the
part's progress callback.
"""


Clock = Callable[[], int]
"""Function that returns the time in milliseconds since 1970 (``System.currentTimeMillis()``)."""

_NS_PER_MS: Final = 1_000_000
# Each put calls this function. A put would be slower if the function looked up ``time.time``.
_time_ns = time.time_ns


def now_ms() -> int:
    """The current time in milliseconds."""
    return _time_ns() // _NS_PER_MS


INT_MIN: Final = -(1 << 31)
INT_MAX: Final = (1 << 31) - 1
LONG_MIN: Final = -(1 << 63)
LONG_MAX: Final = (1 << 63) - 1

_LONGEST_SHOWN: Final = 80
_LARGEST_PORT: Final = 65_535
_LONGEST_FILE_NAME: Final = 255
_LATEST: Final = 253_402_214_399_999
"""The latest time that a clock may return: the end of 9999-12-30 in UTC. The name of an index file
contains a local time with a year of four digits, and local time can be a day ahead of UTC.
"""
_LONGEST_WAIT: Final = 86_400.0 * 365 * 100

_Kind = TypeVar("_Kind")
_Value = TypeVar("_Value")


def refuse_type(value: object, field: str, takes: str) -> NoReturn:
    """Raise WrongType.

    ``takes`` describes the accepted types in words, for the error's text.
    """
    shown = _shown(value)
    kind = type(value).__name__
    what = f"an object of type {kind}" if shown is None else f"{shown} ({kind})"
    raise WrongType(f"{field} takes {takes}, not {'None' if value is None else what}")


def _shown(value: object) -> str | None:
    if not isinstance(value, (bool, int, float, str, bytes, list, tuple, dict, set, type(None))):
        return None
    try:
        shown = repr(value)
    except Exception:
        return None
    return shown if len(shown) <= _LONGEST_SHOWN and shown.isprintable() else None


def optional(
    check: Callable[..., _Value], value: Any, field: str, /, **rules: Any
) -> _Value | None:
    """Check an argument, unless it is None."""
    return None if value is None else check(value, field, **rules)


# ------------------------------------------------------------------------------------- numbers
def integer(
    value: object,
    field: str,
    *,
    least: int = LONG_MIN,
    most: int = LONG_MAX,
    takes: str = "a whole number",
) -> int:
    """Check an integer of Python or NumPy; booleans are rejected."""
    if type(value) is not int:
        if isinstance(value, bool):
            refuse_type(value, field, takes)
        try:
            value = index(value)  # type: ignore[arg-type]
        except TypeError:
            refuse_type(value, field, takes)
    if not least <= value <= most:
        limits = f"at least {least}" if value < least else f"at most {most}"
        # ``str`` raises ValueError for an int with more than 4,300 digits.
        shown = _shown(value) or "a longer number"
        raise UsageError(f"{field} is {shown}, and must be {limits}")
    return value


def int32(value: object, field: str) -> int:
    """Check a signed 32-bit integer."""
    return integer(value, field, least=INT_MIN, most=INT_MAX)


def offset(value: object, field: str = "offset") -> int:
    """Check a physical offset or a queue offset: 0 or more."""
    return integer(value, field, least=0)


def count(value: object, field: str = "max_count", *, least: int = 1) -> int:
    """Check an integer that must be at least ``least``."""
    return integer(value, field, least=least)


def port(value: object, field: str = "port") -> int:
    """Check a TCP port; 0 lets the system choose."""
    return integer(value, field, least=0, most=_LARGEST_PORT)


def seconds(value: object, field: str = "timeout") -> float:
    """Check a waiting time in seconds; return at most 100 years."""
    # Limit the time, because each platform has a maximum for the time that a thread waits.
    found = max(min(number(value, field, takes="seconds"), _LONGEST_WAIT), -_LONGEST_WAIT)
    if math.isnan(found):
        raise UsageError(f"{field} takes seconds, not nan")
    return found


def number(value: object, field: str, *, takes: str = "a number") -> float:
    """Check an integer or a float."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(type(value), "__float__"):
        refuse_type(value, field, takes)
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # For a NumPy array, float() raises an error unless the array has exactly one value.
        refuse_type(value, field, takes)


def flag(value: object, field: str) -> bool:
    """Check a boolean; any other value raises WrongType, even 1 or "false"."""
    return instance(value, field, bool, "True or False")


# ---------------------------------------------------------------------------------------- text
def text(value: object, field: str, *, takes: str = "text") -> str:
    """Check a text, and return it as a ``str``, not as an object of a subclass."""
    if type(value) is str:
        return value
    # Compiled functions refuse subclasses of str. For a member of an enumeration, str() can return
    # the member's name instead of its text, so call str's own method.
    return str.__str__(instance(value, field, str, takes))


def topic(value: object, field: str = "topic") -> str:
    """Check the name of one topic."""
    return text(value, field, takes="the name of a topic")


def queue(topic_name: object, queue_id: object) -> tuple[str, int]:
    """Check the name of a topic and a queue id."""
    return topic(topic_name), int32(queue_id, "queue_id")


def names(value: object, field: str) -> list[str]:
    """Check one name or several names."""
    if isinstance(value, str):
        return [text(value, field)]
    is_other = isinstance(value, (bytes, bytearray, memoryview, Mapping))
    if is_other or not is_iterable(value):
        refuse_type(value, field, "a name, or a sequence of names")
    return [text(name, f"each name of {field}") for name in value]


def is_iterable(value: object) -> TypeGuard[Iterable[object]]:
    """Return whether a value is iterable. A NumPy array without dimensions is not iterable."""
    return isinstance(value, Iterable) and getattr(value, "shape", None) != ()


_KEYS: Final = "text, or a sequence of words"


def keys(value: object, field: str = "keys") -> str | None:
    """Check the KEYS property, and join a sequence of words with spaces.

    Returns:
        None for an empty sequence.

    Raises:
        UsageError: if a word of a sequence is empty or contains a space. RocketMQ splits KEYS at
            spaces, so it would index other words than the caller passed.
    """
    if isinstance(value, str):
        return text(value, field)
    if not isinstance(value, (Sequence, Set)) or isinstance(value, (bytes, bytearray, memoryview)):
        refuse_type(value, field, _KEYS)
    words = [text(word, f"each word of {field}") for word in value]
    for word in words:
        if not word or " " in word:
            raise UsageError(
                f"{field} takes words without spaces, not {word!r}: RocketMQ separates keys by "
                "spaces"
            )
    return " ".join(words) or None


def choice(value: object, field: str, known: Collection[str]) -> str:
    """Check that a text is one of the allowed values."""
    takes = f"one of {', '.join(known)}"
    found = text(value, field, takes=takes)
    if found not in known:
        raise UsageError(f"{field} takes {takes}, not {value!r}")
    return found


# --------------------------------------------------------------------------------------- times
def time_ms(value: object, field: str) -> int:
    """Convert a time to milliseconds since 1970.

    Accepts milliseconds, a date or datetime (in UTC if it has no zone), and the texts that the
    option ``--since`` accepts.
    """
    takes = "milliseconds since 1970, a datetime, or ISO 8601 text (UTC without a zone)"
    if isinstance(value, (str, date)):
        try:
            return parse_time(value)
        except (UsageError, ValueError, OverflowError):
            raise UsageError(f"{field} takes {takes}, not {value!r}") from None
    return integer(value, field, takes=takes)


def time_range(since: object, until: object) -> tuple[int | None, int | None]:
    """Convert the start and end of a time range to milliseconds since 1970; None stays None."""
    return optional(time_ms, since, "since"), optional(time_ms, until, "until")


# ------------------------------------------------------------------------------------- records
_OF_ANNOTATION: Final[Mapping[str, Callable[..., Any]]] = {
    "int": integer,
    "float": number,
    "bool": flag,
    "str": text,
    "tuple[str, ...]": lambda value, field: tuple(names(value, field)),
}


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass by their annotations, and convert NumPy's numbers.

    Only fields whose type is a number, bool, text or a tuple of texts are checked.

    Raises:
        WrongType: if a field has a wrong type; the error names the field.
    """
    for name, check, is_optional in _checks(record.__class__):
        value = getattr(record, name)
        if value is None and is_optional:
            continue
        found = check(value, name)
        if found is not value:
            object.__setattr__(record, name, found)


@cache
def _checks(kind: type[Any]) -> tuple[tuple[str, Callable[..., Any], bool], ...]:
    found = []
    for field in dataclasses.fields(kind):
        first, *others = str(field.type).split(" | ")
        if first in _OF_ANNOTATION:
            found.append((field.name, _OF_ANNOTATION[first], "None" in others))
    return tuple(found)


# ------------------------------------------------------------------------------------- objects
def instance(value: object, field: str, kind: type[_Kind], takes: str) -> _Kind:
    """Check that an argument is an object of a class."""
    if not isinstance(value, kind):
        refuse_type(value, field, takes)
    return value


def function(value: _Value, field: str) -> _Value:
    """Check that an argument can be called."""
    if not callable(value):
        refuse_type(value, field, "a function")
    return value


def clock(value: Callable[[], object], field: str) -> Callable[[], int]:
    """Check a clock, and return a clock that checks each returned time.

    Without this check, a wrong time could cause an error only later, in a background thread, and so
    end all writes.
    """
    function(value, field)
    takes = "a function that returns whole milliseconds since 1970"
    return lambda: integer(value(), field, least=0, most=_LATEST, takes=takes)


def mapping(
    value: object, field: str, takes: str, *, has_secrets: bool = False
) -> Mapping[Any, Any]:
    """Check that an argument is a mapping. With ``has_secrets``, the error omits the value."""
    if not isinstance(value, Mapping):
        if has_secrets:
            kind = type(value).__name__
            raise WrongType(f"{field} takes {takes}, not an object of type {kind}")
        refuse_type(value, field, takes)
    return value


def storage_options(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Check the storage options of a URL, which can contain credentials."""
    takes = "a mapping of names to values"
    return optional(mapping, value, "storage_options", takes=takes, has_secrets=True)


def data(value: object, field: str) -> bytes | bytearray | memoryview:
    """Check that an argument is bytes, a bytearray or a memoryview."""
    if isinstance(value, memoryview):
        _require_held(value, field)
        return value
    if isinstance(value, (bytes, bytearray)):
        return value
    takes = "bytes, a bytearray or a memoryview"
    refuse_type(value, field, f"{takes} (for text: text.encode())" if type(value) is str else takes)


def as_bytes(value: bytes | bytearray | memoryview, field: str) -> bytes:
    """Return the bytes of an argument that :func:`data` accepts."""
    if type(value) is memoryview:
        _require_held(value, field)
    return bytes(value)


def _require_held(value: memoryview, field: str) -> None:
    try:
        _ = value.nbytes
    except ValueError as error:
        raise UsageError(
            f"{field}: the memoryview was released: release it only after the call has returned"
        ) from error


def path(value: object, field: str = "path", *, may_be_long: bool = False) -> str:
    """Check a path or URL, and return it as text. With ``may_be_long``, the length of the names
    is not checked here: the file system itself rejects names that are too long.
    """
    try:
        found = text(os.fsdecode(value), field)  # type: ignore[arg-type]
    except TypeError:
        refuse_type(value, field, "a path")
    if "\0" in found:
        raise UsageError(f"{field}: a path cannot have a null character")
    if not found:
        raise UsageError(f"{field}: the path is empty")
    try:
        is_long = any(len(os.fsencode(name)) > _LONGEST_FILE_NAME for name in found.split("/"))
    except UnicodeEncodeError as error:
        raise UsageError(f"{field}: {found!r} cannot be encoded: {error.reason}") from error
    if is_long and not may_be_long and "://" not in found:
        raise UsageError(f"{field}: a name in the path has more than {_LONGEST_FILE_NAME} bytes")
    return found
