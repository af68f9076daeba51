"""Runs a call twice, with numba's kernels and with the Python reference, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

import numpy as np
import pytest

from logquarry.format import frame
from logquarry.format.arrays import BLANK, NEED_MORE, REACHED_STOP, TABLE_FULL
from logquarry.log import codec
from logquarry.log.codec import Rows, Window

T = TypeVar("T")


def first_sound(data: bytes, start: int, stop: int, *, base: int, check_crc: bool = True) -> int:
    """The first position in ``[start, stop)`` at which a sound frame starts; -1 without one."""
    found = (frame.decode_at(data, at, base=base, check_crc=check_crc) for at in range(start, stop))
    sound = (at for at, one in enumerate(found, start) if isinstance(one, frame.Frame))
    return next(sound, -1)


@contextmanager
def plain_python() -> Iterator[None]:
    """Switch the kernels off."""
    with mock.patch.object(codec, "kernels", lambda: None):
        yield


def both(question: Callable[[], T]) -> tuple[T, T]:
    """The results of kernels and reference."""
    if not codec.kernels_enabled():
        pytest.skip("there is nothing to compare without kernels")
    fast = question()
    with plain_python():
        return fast, question()


def walked(
    window: Window, position: int, stop: int, *, check_crc: bool = True, room: int = 64
) -> tuple[list[list[int]], int, int]:
    """The result of a walk as lists: rows, the position after them, code."""
    rows = codec.empty_rows(room)
    count, after, code = codec.walk(window, position, stop, rows, check_crc=check_crc)
    return rows[:count].tolist(), after, code


def scanned(window: Window, *, check_crc: bool = True) -> list[tuple[str, object]]:
    """All events of a window: frames, and after each damage the next valid frame.

    The window must reach to the end of its file.
    """
    events: list[tuple[str, object]] = []
    position = 0
    while position < window.length:
        rows, position, code = walked(window, position, window.length, check_crc=check_crc)
        events.append(("rows", rows))
        events.append(("code", (position, code)))
        assert code != NEED_MORE, "all of the file is in the window"
        if code in (REACHED_STOP, BLANK):
            break
        if code == TABLE_FULL:
            continue
        place, found = codec.find_frame(window, position + 1, window.length, check_crc=check_crc)
        events.append(("found", (place, found)))
        if found != REACHED_STOP:
            break
        position = place
    return events


def sound_rows(window: Window, *, check_crc: bool = True) -> Rows:
    """The rows of every valid frame that a scan finds."""
    rows = [
        row
        for name, value in scanned(window, check_crc=check_crc)
        if name == "rows" and isinstance(value, list)
        for row in value
    ]
    return np.array(rows, np.int32).reshape(-1, codec.empty_rows(0).shape[1])
