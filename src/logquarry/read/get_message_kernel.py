"""The kernel twin of :func:`logquarry.read.get_message.get_message`: one kernel call per ``get``.

The kernel reads the queue's entries and the log's bytes in their maps. It handles the common case.
Otherwise (damage, deleted messages, a file's end within the answer) the reference gives the
answer.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from logquarry.format import java
from logquarry.format.got_rows import COUNT_SHIFT, NOT_AT_HAND
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log import codec
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import UNIT_DTYPE, Queue, Units
from logquarry.read.get_message import (
    LEAST_UNITS,
    GetMessageStatus,
    GetResult,
    TransferLimits,
    memory_start,
)
from logquarry.read.messages import GotMessages

_FOUND: Final = GetMessageStatus.FOUND
_NO_MATCH: Final = GetMessageStatus.NO_MATCHED_MESSAGE
_ROOM: Final = 1 << 20
"""Bytes of table and frames in one answer; the reference makes larger answers."""
_MOST_AT_ONCE: Final = 1 << 12
_MASK: Final = (1 << COUNT_SHIFT) - 1
_REFERENCE_GETS: Final = 64
"""Gets by the reference before the kernels are loaded, which takes half a second."""
_MOST_TAGS: Final = 1 << 10
_KERNELS: Final = "logquarry.format.kernels"
_NONE: Final = java.LONG_MIN
_new_result = tuple.__new__
_new_messages = object.__new__


class _Units:
    """Mapped entries of a queue, of the queue offsets from ``first`` up to ``stop``."""

    __slots__ = ("address", "first", "stop", "units")

    def __init__(self, first: int, units: Units) -> None:
        self.units = units
        self.first = first
        self.stop = first + len(units)
        self.address = int(units.ctypes.data)


class LogAtHand:
    """Mapped bytes of the log, and the numbers that describe them to the kernel."""

    __slots__ = ("address", "data", "state")

    def __init__(self, start: int, end: int, data: memoryview, limits: TransferLimits) -> None:
        from logquarry.format.native import crc32_address

        self.data = np.frombuffer(data, np.uint8)
        self.state = np.array(
            (
                int(self.data.ctypes.data),
                start,
                end,
                crc32_address(),
                limits.count,
                limits.size,
                limits.disk_count,
                limits.disk_size,
            ),
            np.int64,
        )
        self.address = int(self.state.ctypes.data)


class _Scratch:
    """The buffer that the kernel writes to."""

    __slots__ = ("address", "view")

    def __init__(self) -> None:
        data = np.empty(_ROOM, np.uint8)
        self.address = int(data.ctypes.data)
        self.view = data.data


class _Tags:
    """The wanted tags in the form that the kernel reads."""

    __slots__ = ("address", "data", "state")

    def __init__(self, tags: frozenset[str]) -> None:
        self.data = [np.frombuffer(tag.encode("utf-8"), np.uint8) for tag in tags]
        numbers = [len(tags)]
        for tag, data in zip(tags, self.data, strict=True):
            numbers += java.hash_code(tag), int(data.ctypes.data), len(data)
        self.state = np.array(numbers, np.int64)
        self.address = int(self.state.ctypes.data)


class GetMessageKernel:
    """Answers common gets of one store by a kernel.

    Args:
        log: the store's log.
        limits: the most messages and bytes of one answer.
        broker: the ``broker`` of the messages.
        delay_levels_ms: delay of each level, for tags codes.
    """

    def __init__(
        self, log: CommitLog, limits: TransferLimits, broker: str, delay_levels_ms: tuple[int, ...]
    ) -> None:
        self._log = log
        self.limits = limits
        self._broker = broker
        self._levels = delay_levels_ms
        self._kernel: Any = None
        self._reference_gets = 0
        self._free: list[_Scratch] = []
        self._units: dict[Queue, _Units] = {}
        self._tags: dict[frozenset[str], _Tags | None] = {}
        self._at_hand: LogAtHand | None = None
        # The files of the log for which _in_memory holds: whether all of it counts as in memory.
        self._files: object = None
        self._in_memory = False

    def forget(self) -> None:
        """Release all files, because the store is closed or its folder is read again."""
        self._units = {}
        self._at_hand = None
        self._files = None

    def get(
        self, queue: Queue, offset: int, max_count: int, tags: frozenset[str] | None = None
    ) -> GetResult | None:
        """Messages from a queue offset on; None if the reference has to give the answer.

        Args and result as those of :func:`logquarry.read.get_message.get_message`.
        """
        kernel = self._kernel or self._loaded()
        low, high = queue.bounds()
        if kernel is None or not (low <= offset < high and 0 <= max_count <= _MOST_AT_ONCE):
            return None
        # Comparisons instead of min() and max(): each of those calls takes as long as a message.
        most = max_count if max_count > LEAST_UNITS else LEAST_UNITS
        wanted, last = 0, offset + max_count
        if tags is not None:
            told = self._told(tags)
            if told is None:
                return None
            wanted, last = told.address, offset + most
        units = self._units.get(queue)
        if units is None or offset < units.first or units.stop < (last if last < high else high):
            units = self._look_at_units(queue, offset)
            if units is None:
                return None
        count = units.stop - offset
        count = min(count, most)
        first = units.address + (offset - units.first) * UNIT_SIZE
        files = self._log.files
        if files is not self._files:
            self._in_memory = memory_start(self._log, self.limits) == java.LONG_MIN
            self._files = files
        on_disk = _NONE if self._in_memory else memory_start(self._log, self.limits)
        at_hand = self._at_hand or self._look_at_log(units, offset)
        # A thread that takes a buffer owns it. One that is not given back is replaced.
        free = self._free
        scratch = free.pop() if free else _Scratch()
        to = scratch.address
        found = kernel(first, count, max_count, on_disk, wanted, at_hand.address, to, _ROOM)
        if found == NOT_AT_HAND:
            at_hand = self._look_at_log(units, offset)
            state = at_hand.address
            found = kernel(first, count, max_count, on_disk, wanted, state, to, _ROOM)
        taken = found >> COUNT_SHIFT & _MASK
        if found < 0:
            free.append(scratch)
            return None
        after = offset + (found >> 2 * COUNT_SHIFT)
        if not taken:
            # The kernel skips messages only because of their tags.
            free.append(scratch)
            return GetResult(_NO_MATCH, (), after, low, high)
        block = scratch.view[: found & _MASK].tobytes()
        free.append(scratch)
        messages = _new_messages(GotMessages)
        messages._block = block
        messages._count = taken
        messages._broker = self._broker
        messages._levels = self._levels
        messages._made = None
        return _new_result(GetResult, (_FOUND, messages, after, low, high))

    def _loaded(self) -> Any:
        """The kernel, None as long as loading it is not worth it."""
        self._reference_gets += 1
        if self._reference_gets > _REFERENCE_GETS or _KERNELS in sys.modules:
            kernels = codec.kernels()
            if kernels is not None:
                self._kernel = kernels.get_frames
        return self._kernel

    def _told(self, tags: frozenset[str]) -> _Tags | None:
        if tags not in self._tags:
            if len(self._tags) >= _MOST_TAGS:
                self._tags = {}
            try:
                self._tags[tags] = _Tags(tags)
            except UnicodeEncodeError:
                # Half a surrogate pair: the reference decides what it matches.
                self._tags[tags] = None
        return self._tags[tags]

    def _look_at_units(self, queue: Queue, offset: int) -> _Units | None:
        """The entries from an offset to the end of its file, or to the queue's end."""
        next_file = offset + queue.units_per_file - offset % queue.units_per_file
        first, units = next(queue.runs(offset, next_file), (offset, None))
        if units is None or first != offset or units.dtype != UNIT_DTYPE:
            return None
        if not units.flags.c_contiguous:
            return None
        found = self._units[queue] = _Units(first, units)
        return found

    def _look_at_log(self, units: _Units, offset: int) -> LogAtHand:
        """The mapped bytes of the log around the message of a queue offset."""
        place, size, _ = units.units[offset - units.first].item()
        found = self._at_hand = LogAtHand(*self._log.window_at(place, size), self.limits)
        return found
