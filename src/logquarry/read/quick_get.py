"""The fast twin of :func:`logquarry.read.get_message.get_message`: one kernel call a ``get``.

The kernel is given the queue's units and the log's bytes as they lie in their maps. It gives up
where anything is not as it mostly is (damage, messages that are gone, a file's end within the
answer), and then the reference gives the answer.
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
"""Bytes of table and frames in one answer; a larger one is made by the reference."""
_MOST_AT_ONCE: Final = 1 << 12
_MASK: Final = (1 << COUNT_SHIFT) - 1
_PLAIN_GETS: Final = 64
"""Gets before the kernels, which take half a second to load, are worth it."""
_MOST_TAGS: Final = 1 << 10
_KERNELS: Final = "logquarry.format.kernels"
_NONE: Final = java.LONG_MIN
_new_result = tuple.__new__
_new_messages = object.__new__


class _Units:
    """Units of a queue that are at hand: those of the offsets from ``first`` up to ``stop``."""

    __slots__ = ("address", "first", "stop", "units")

    def __init__(self, first: int, units: Units) -> None:
        self.units = units
        self.first = first
        self.stop = first + len(units)
        self.address = int(units.ctypes.data)


class LogAtHand:
    """Bytes of the log that are at hand, as the kernel is told of them."""

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
    """Where the kernel writes."""

    __slots__ = ("address", "view")

    def __init__(self) -> None:
        data = np.empty(_ROOM, np.uint8)
        self.address = int(data.ctypes.data)
        self.view = data.data


class _Tags:
    """The tags that are wanted, as the kernel is told of them."""

    __slots__ = ("address", "data", "state")

    def __init__(self, tags: frozenset[str]) -> None:
        self.data = [np.frombuffer(tag.encode("utf-8"), np.uint8) for tag in tags]
        numbers = [len(tags)]
        for tag, data in zip(tags, self.data, strict=True):
            numbers += java.hash_code(tag), int(data.ctypes.data), len(data)
        self.state = np.array(numbers, np.int64)
        self.address = int(self.state.ctypes.data)


class QuickGet:
    """Answers the gets of one store that are as most are.

    Args:
        log: its log.
        limits: how much one answer gives.
        broker: what messages carry as such.
        delay_levels_ms: for their tags codes.

    Attributes:
        limits: as given.
    """

    def __init__(
        self, log: CommitLog, limits: TransferLimits, broker: str, delay_levels_ms: tuple[int, ...]
    ) -> None:
        self._log = log
        self.limits = limits
        self._broker = broker
        self._levels = delay_levels_ms
        self._kernel: Any = None
        self._plain_gets = 0
        self._free: list[_Scratch] = []
        self._units: dict[Queue, _Units] = {}
        self._tags: dict[frozenset[str], _Tags | None] = {}
        self._at_hand: LogAtHand | None = None
        # For which files of the log it is known whether all of it counts as in memory.
        self._files: object = None
        self._in_memory = False

    def forget(self) -> None:
        """Hold on to no file any more: the store is closed, or its files are looked at again."""
        self._units = {}
        self._at_hand = None
        self._files = None

    def get(
        self, queue: Queue, offset: int, max_count: int, tags: frozenset[str] | None = None
    ) -> GetResult | None:
        """Messages from a queue offset on; None where the reference has to be asked.

        Args and result as those of :func:`logquarry.read.get_message.get_message`.
        """
        kernel = self._kernel or self._loaded()
        low, high = queue.bounds()
        if kernel is None or not (low <= offset < high and 0 <= max_count <= _MOST_AT_ONCE):
            return None
        # Plain comparisons, and no min() and max(): each call of those takes as long as a message.
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
        # Whoever takes it has it for himself; what is not given back is made anew.
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
            # Only tags pass a message over without a question to the reference.
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
        """The kernel, None as long as it does not pay to load it."""
        self._plain_gets += 1
        if self._plain_gets > _PLAIN_GETS or _KERNELS in sys.modules:
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
                # Half a surrogate pair: what it can match, the reference knows.
                self._tags[tags] = None
        return self._tags[tags]

    def _look_at_units(self, queue: Queue, offset: int) -> _Units | None:
        """The units from an offset to the end of its file, or as many as there are."""
        next_file = offset + queue.units_per_file - offset % queue.units_per_file
        first, units = next(queue.runs(offset, next_file), (offset, None))
        if units is None or first != offset or units.dtype != UNIT_DTYPE:
            return None
        if not units.flags.c_contiguous:
            return None
        found = self._units[queue] = _Units(first, units)
        return found

    def _look_at_log(self, units: _Units, offset: int) -> LogAtHand:
        """The bytes of the log around the message of a queue offset."""
        place, size, _ = units.units[offset - units.first].item()
        found = self._at_hand = LogAtHand(*self._log.window_at(place, size), self.limits)
        return found
