"""Answers ``getMessage`` with one call of a compiled kernel. This module is compiled too, if
possible.

The kernel reads the queue's entries and the log's bytes directly from the memory-mapped files. The
kernel gives up if it finds damage, a deleted message, a filler or an inner batch, or if the answer
needs bytes of more than one log file. Then :func:`logquarry.read.get_message.get_message`, which is
written in pure Python, answers the get. This function is called the *reference*.
"""

from __future__ import annotations

import sys
from functools import cached_property, partial
from time import monotonic
from typing import Any, Final

import numpy as np

from logquarry.format import java
from logquarry.format.arrays import COUNT_SHIFT, NOT_AT_HAND, Bytes, Int64
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log import codec
from logquarry.log.layout import StoreLayout
from logquarry.log.lost_pages import lost
from logquarry.read.commit_log import CommitLog
from logquarry.read.compaction import CompactedGets
from logquarry.read.get_message import (
    LEAST_UNITS,
    GetMessageStatus,
    GetResult,
    GotMessages,
    TransferLimits,
    get_message,
    memory_start,
    read_message,
)
from logquarry.read.got_fields import GotBlock
from logquarry.read.log_end import DamageMap, known_damage
from logquarry.read.queue import UNIT_DTYPE, Queue, Units

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_FromStringAndSize

_FOUND: Final = GetMessageStatus.FOUND
_NO_MATCH: Final = GetMessageStatus.NO_MATCHED_MESSAGE
_ROOM: Final = 1 << 20
"""Maximum bytes of frames in an answer of the kernel. The reference makes larger answers."""
_MOST_AT_ONCE: Final = 1 << 12
_LONGEST: Final = 1 << 20
"""Maximum bytes of the log that are read for the messages of one get."""
_SHIFT, _MASK, _NOT_AT_HAND = COUNT_SHIFT, (1 << COUNT_SHIFT) - 1, NOT_AT_HAND
_LEAST, _UNIT = LEAST_UNITS, UNIT_SIZE
_REFERENCE_GETS: Final = 64
"""Number of gets that the reference answers before the kernels are loaded. Loading takes half a
second.
"""
_MOST_TAGS: Final = 1 << 10
_CHECK_EVERY: Final = 0.001
"""Seconds between two checks whether files were truncated. Gets in between skip the check, because
the check takes as long as a get.
"""
_KERNELS: Final = "logquarry.format.kernels"
_NONE: Final = java.LONG_MIN
_new_result = tuple.__new__
_new_messages = object.__new__


class _Entries:
    """A view of a queue's entries, from queue offset ``first`` to ``stop`` (exclusive)."""

    __slots__ = ("address", "first", "stop", "units")

    units: Units
    first: int
    stop: int
    address: int

    def __init__(self, first: int, units: Units) -> None:
        self.units = units
        self.first = first
        self.stop = first + len(units)
        self.address = int(units.ctypes.data)


class LogAtHand:
    """A view of a part of the log, and an array of numbers for the kernel. The array contains the
    view's address and bounds, and the limits of an answer.
    """

    __slots__ = ("address", "data", "end", "state")

    end: int
    data: Bytes
    state: Int64
    address: int

    def __init__(self, start: int, end: int, data: memoryview, limits: TransferLimits) -> None:
        self.end = end
        self.data = np.frombuffer(data, np.uint8)
        self.state = np.array(
            (
                int(self.data.ctypes.data),
                start,
                end,
                java.crc32_address(),
                limits.count,
                limits.size,
                limits.disk_count,
                limits.disk_size,
            ),
            np.int64,
        )
        self.address = int(self.state.ctypes.data)


class _Scratch:
    """Memory into which the kernel copies the frames of an answer."""

    __slots__ = ("address", "view")

    view: memoryview
    address: int

    def __init__(self) -> None:
        data = np.empty(_ROOM, np.uint8)
        self.address = int(data.ctypes.data)
        self.view = data.data


class _Tags:
    """The tags of a subscription, and an array for the kernel. The array contains the hash, the
    address and the length of each tag.
    """

    __slots__ = ("address", "data", "state")

    data: list[Bytes]
    state: Int64
    address: int

    def __init__(self, tags: frozenset[str]) -> None:
        self.data = [np.frombuffer(tag.encode("utf-8"), np.uint8) for tag in tags]
        numbers = [len(tags)]
        for tag, data in zip(tags, self.data, strict=True):
            numbers += java.hash_code(tag), int(data.ctypes.data), len(data)
        self.state = np.array(numbers, np.int64)
        self.address = int(self.state.ctypes.data)


class KernelGet:
    """Answers the gets of one store that the kernel can answer alone.

    Args:
        limits: maximum number of messages and bytes of one answer.
        broker: the ``broker`` of each message.
        delay_levels_ms: delay of each level; needed for the tags codes of delayed messages.
    """

    # In the compiled module, the attributes below are C fields that the .pxd file declares.
    def __init__(
        self, log: CommitLog, limits: TransferLimits, broker: str, delay_levels_ms: tuple[int, ...]
    ) -> None:
        self._log = log
        self.limits = limits
        self._broker = broker
        self._levels = delay_levels_ms
        self._kernel: Any = None
        self._kernel_address = 0
        self._reference_gets = 0
        self._free: list[_Scratch] = []
        self._entries: dict[Queue, _Entries] = {}
        self._tags: dict[frozenset[str], _Tags | None] = {}
        self._at_hand: LogAtHand | None = None
        # If _in_memory is true, the limits for messages in memory apply to the whole log.
        # _in_memory was computed for the list of log files in _files. If the log has a new list,
        # compute _in_memory again.
        self._files: object = None
        self._in_memory = False
        # If this process writes the log, use the writer's list of files, which costs nothing to
        # get.
        self._live_files = log.live_files
        self._may_shrink = log.may_shrink
        self._next_check = 0.0

    def release(self) -> None:
        """Release the views of all files. The store calls this when it is closed, and when it lists
        its files again.
        """
        self._entries = {}
        self._at_hand = None
        self._files = None

    def get(
        self, queue: Queue, offset: int, max_count: int, tags: frozenset[str] | None = None
    ) -> GetResult | None:
        """Return the messages that start at a queue offset. Return None if only the reference can
        answer.

        Arguments and result are those of :func:`logquarry.read.get_message.get_message`.
        """
        if self._kernel is None and not self._load():
            return None
        low, high = queue.bounds()
        if not (low <= offset < high and 0 <= max_count <= _MOST_AT_ONCE):
            return None
        # Use comparisons instead of min() and max(), because a call of either takes as long as
        # reading a message.
        most = max_count if max_count > _LEAST else _LEAST
        wanted, last = 0, offset + max_count
        if tags is not None:
            subscription = self._subscription(tags)
            if subscription is None:
                return None
            wanted, last = subscription.address, offset + most
        units = self._entries.get(queue)
        if units is None or offset < units.first or units.stop < (last if last < high else high):
            units = self._read_entries(queue, offset)
            if units is None:
                return None
        count = units.stop - offset
        if count > most:  # noqa: PLR1730
            count = most
        first = units.address + (offset - units.first) * _UNIT
        files = self._log.files if self._live_files is None else self._live_files.bases
        if files is not self._files:
            self._in_memory = memory_start(self._log, self.limits) == java.LONG_MIN
            self._files = files
        on_disk = _NONE if self._in_memory else memory_start(self._log, self.limits)
        at_hand = self._at_hand
        if at_hand is None:
            at_hand = self._read_log(units, offset)
        if self._may_shrink and (now := monotonic()) >= self._next_check:
            if not (queue.reaches(units.stop) and self._log.reaches(at_hand.end)):
                # Another program has truncated a file. Let the reference answer, because it reports
                # the error.
                self.release()
                return None
            self._next_check = now + _CHECK_EVERY
        # Take scratch memory out of the list, so that two threads never use the same memory. If an
        # exception prevents the return of the memory to the list, a later call allocates new
        # memory.
        free = self._free
        scratch = free.pop() if free else _Scratch()
        to = scratch.address
        found = self._run(first, count, max_count, on_disk, wanted, at_hand.address, to)
        if found == _NOT_AT_HAND:
            at_hand = self._read_log(units, offset, max_count)
            found = self._run(first, count, max_count, on_disk, wanted, at_hand.address, to)
        if found < 0:
            free.append(scratch)
            return None
        taken = found >> _SHIFT & _MASK
        after = offset + (found >> 2 * _SHIFT)
        if not taken:
            # No message was taken. The kernel skips a message only if its tag is not wanted, so the
            # status is NO_MATCHED_MESSAGE.
            free.append(scratch)
            return GetResult(_NO_MATCH, (), after, low, high)
        size = found & _MASK
        messages: GotBlock
        if cython.compiled:
            messages = new_of(GotMessages, ())
            messages.frames = PyBytes_FromStringAndSize(cython.cast(chars, to), size)
        else:
            messages = _new_messages(GotMessages)
            messages.frames = scratch.view[:size].tobytes()
        free.append(scratch)
        messages._count = taken
        messages._broker = self._broker
        messages._levels = self._levels
        messages._made = None
        return _new_result(GetResult, (_FOUND, messages, after, low, high))

    def _run(
        self, first: int, count: int, most: int, on_disk: int, wanted: int, log: int, to: int
    ) -> int:
        """Call the kernel; see ``get_frames``."""
        found: int
        if cython.compiled:
            address = self._kernel_address
            found = call_kernel(address, first, count, most, on_disk, wanted, log, to, _ROOM)
        else:
            found = self._kernel(first, count, most, on_disk, wanted, log, to, _ROOM)
        return found

    def _load(self) -> bool:
        """Load the kernel after _REFERENCE_GETS calls; return whether the kernel is loaded."""
        self._reference_gets += 1
        if self._reference_gets > _REFERENCE_GETS or _KERNELS in sys.modules:
            kernels = codec.kernels()
            if kernels is not None:
                if cython.compiled:
                    # Set the address before _kernel, because another thread uses the address as
                    # soon as _kernel is set.
                    self._kernel_address = kernels.get_frames_address()
                self._kernel = kernels.get_frames
        return self._kernel is not None

    def _subscription(self, tags: frozenset[str]) -> _Tags | None:
        if tags not in self._tags:
            if len(self._tags) >= _MOST_TAGS:
                self._tags = {}
            try:
                self._tags[tags] = _Tags(tags)
            except UnicodeEncodeError:
                # The tag contains half a surrogate pair, which UTF-8 cannot encode. For this
                # subscription, the reference answers the gets.
                self._tags[tags] = None
        return self._tags[tags]

    def _read_entries(self, queue: Queue, offset: int) -> _Entries | None:
        """Read the entries that start at a queue offset and end at the end of the queue file or of
        the queue. Return None if only the reference can read them.
        """
        next_file = offset + queue.units_per_file - offset % queue.units_per_file
        first, units = next(queue.runs(offset, next_file), (offset, None))
        if units is None or first != offset or units.dtype != UNIT_DTYPE:
            return None
        if not units.flags.c_contiguous:
            return None
        found = self._entries[queue] = _Entries(first, units)
        return found

    def _read_log(self, units: _Entries, offset: int, count: int = 1) -> LogAtHand:
        """Return a view of the log with ``count`` messages of the queue, starting at a queue
        offset.

        If these messages are spread over more than _LONGEST bytes of the log, the view may contain
        only the first of the messages.
        """
        at = offset - units.first
        place, size, _ = units.units[at].item()
        if count > 1:
            # The view must reach from the first to the last message, because messages of other
            # queues are in between.
            last, last_size, _ = units.units[min(at + count, len(units.units)) - 1].item()
            size = max(size, min(last + last_size - place, _LONGEST))
        start, end, data = self._log.window_at(place, size)
        if self._log.unreadable_at(place, size) is not None:
            # Give the kernel no bytes, so that the reference answers and reports the unreadable
            # bytes.
            start, end, data = 0, 0, memoryview(b"")
        found = self._at_hand = LogAtHand(start, end, data, self.limits)
        return found


class MessageGetter:
    """Answers the gets of one store.

    Args:
        limits: maximum number of messages and bytes of one answer.
        broker: the ``broker`` of each message.

    Attributes:
        kernel: answers a get if the kernel can answer it alone, else returns None.
        compacted: answers the gets of compaction topics.
    """

    def __init__(
        self, log: CommitLog, limits: TransferLimits, layout: StoreLayout, broker: str
    ) -> None:
        self.log = log
        self.kernel = KernelGet(log, limits, broker, layout.delay_levels_ms)
        self._limits = limits
        self._layout = layout
        self._read = partial(read_message, broker, layout.delay_levels_ms)
        self.compacted = CompactedGets(layout, limits, self._read)

    @cached_property
    def _known_damage(self) -> DamageMap:
        return known_damage(self._layout)

    def get(
        self, queue: Queue, offset: int, max_count: int, tags: frozenset[str] | None = None
    ) -> GetResult:
        """Return the messages that start at a queue offset.

        Raises:
            CorruptFrame: if the first message is damaged.
        """
        while True:
            before = lost()
            found = None
            if queue.topic in self.compacted.topics:
                found = self.compacted.get(queue, offset, max_count, tags)
            if found is None:
                found = self.kernel.get(queue, offset, max_count, tags)
            if found is None:
                found = self.reference(queue, offset, max_count, tags)
            if lost() == before:
                return found
            # A page of a mapped file became unreadable during this get
            # (:mod:`logquarry.log.lost_pages`), so the answer may contain wrong bytes. Release the
            # views, and read the messages again.
            self.release()

    def reference(
        self, queue: Queue, offset: int, max_count: int, tags: frozenset[str] | None = None
    ) -> GetResult:
        """Return the messages that start at a queue offset, without use of the kernel."""
        return get_message(
            self.log,
            queue,
            offset,
            max_count,
            tags=tags,
            limits=self._limits,
            read=self._read,
            known_damage=self._known_damage,
        )

    def release(self) -> None:
        """Release the views of all files."""
        self.kernel.release()
        self.compacted.release()
