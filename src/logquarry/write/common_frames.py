"""Makes the frames of many messages in memory, and appends them. This module is used only if it is
compiled.

``put_many`` checks all messages before it appends the first message. A message is common if the
store changes nothing in its properties. While ``put_many`` checks a common message, it makes the
message's frame, without offsets and store time. The append sets offsets and store time under the
log's lock. All other messages are *odd*: the encoder of single puts (the reference) makes their
frames. After its check, a common message is kept only as a frame, and not as a Python object: the
garbage collector would visit each such object again and again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from logquarry.errors import LogquarryError
from logquarry.format import frame
from logquarry.message import Message, require_message
from logquarry.write.message_rules import LONGEST_PROPERTIES

if TYPE_CHECKING:
    from logquarry.disk.mapped_file import MappedFile
    from logquarry.format.arrays import Int64
    from logquarry.read.log_queues import QueueKey
    from logquarry.write.commit_log_writer import CommitLogWriter

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.exc import PyErr_CheckSignals
    from cython.cimports.cpython.memoryview import PyMemoryView_GET_BUFFER
    from cython.cimports.libc.stdlib import free
    from cython.cimports.libc.string import memcpy

IS_COMPILED = cython.compiled
"""Whether :class:`CommonFrames` can be used."""
_BLANK = frame.BLANK.size
_QUEUE_OFFSET_AT = frame.HEAD.offsets["queue_offset"]
_PHYSICAL_OFFSET_AT = frame.HEAD.offsets["physical_offset"]
_LONGEST = LONGEST_PROPERTIES
_AT_FIRST = 64
_BYTES_AT_FIRST = 1 << 15
_PAUSE = (1 << 11) - 1
"""The check of messages releases the GIL after this number of messages (about a millisecond), so
that other threads can run.
"""
_Message = Message


class TopicQueues:
    """Holds the name of a topic as bytes, the topic's index, and the indexes of its queues."""

    first: Any

    def __init__(self, data: bytes | None, number: int) -> None:
        self.data = data
        self.number = number
        self.queues: dict[int, int] = {}
        for queue_id in range(_QUEUES):
            self.first[queue_id] = -1


class CommonFrames:
    """The frames of the messages of one ``put_many``.

    ``odd`` maps the position of an odd message to the message. The number of a topic is its
    position in ``topics``, and the number of a host is its position in ``hosts``.
    """

    _data: Any
    _length: int
    _room: int
    _appended: int
    _rows: Any
    _row_room: int
    _queues: Any
    _used: Any
    _queue_room: int
    _run: int

    def __init__(self, writer: CommitLogWriter) -> None:
        self._writer = writer
        self.count = 0
        self.odd: dict[int, Message] = {}
        self.topics: dict[str, TopicQueues] = {}
        self.hosts: dict[bytes, int] = {}
        self._keys: list[QueueKey] = []

    def __dealloc__(self) -> None:
        free(self._data)
        free(self._rows)
        free(self._queues)
        free(self._used)

    @property
    def queues(self) -> list[QueueKey]:
        """Topic and id of each queue that gets a message."""
        return self._keys

    def take(self, messages: Iterable[Any], field: str) -> None:
        """Check messages, and make the frames of the common messages. Raises WrongType for an
        object that is not a message.
        """
        writer = self._writer
        now = None
        head = None
        host = 0
        for given in messages:
            number = self.count
            if number & _PAUSE == _PAUSE:
                PyErr_CheckSignals()
                with cython.nogil:
                    pass
            if number == self._row_room:
                self._more_rows()
            row = cython.address(self._rows[number])
            row.size = row.host = row.queue = 0
            if type(given) is not _Message:
                require_message(given, f"{field}, message {number},")
            fields = cython.cast(tuple, given)
            name = fields[0]
            topic = cython.cast(TopicQueues, self.topics.get(name))
            if topic is None:
                topic = self._new_topic(name)
            row.topic = topic.number
            self.count = number + 1
            found = None
            if type(given) is _Message and topic.data is not None:
                body, store_host = fields[1], fields[14]
                if store_host is None:
                    store_host = writer._store_host
                try:
                    if type(body) is not bytes:
                        body = bytes(body)
                    # While this variable exists, the property string stays in memory.
                    owner = writer._fill(cython.address(item), given, body)
                    if owner is not None:
                        item.queue_id = fields[2]
                        item.reconsumed = fields[15]
                        item.prepared = fields[16]
                        if fields[12] is not None:
                            item.born = fields[12]
                        else:
                            if now is None:
                                now = writer.clock()
                            item.born = now
                        found = writer.head_of(fields[13], store_host, fields[10])
                except (OverflowError, ValueError, LogquarryError):
                    # The message is odd: the encoder of single puts raises an error, or replaces a
                    # lone surrogate.
                    pass
            if found is None:
                self.odd[number] = given
                continue
            if found is not head:
                head = found
                host = self.hosts.setdefault(head.store_bytes, len(self.hosts))
            size = measured(cython.address(item), head, topic.data)
            if item.properties_length > _LONGEST or size > writer._largest:
                self.odd[number] = given
                continue
            row.size = size
            row.host = host
            row.time_at = head.store_time_at
            row.advances = head.advances
            row.queue = self._queue(topic, name, item.queue_id)
            if self._length + size > self._room:
                self._more_bytes(size)
            write_frame(self._data + self._length, head, topic.data, cython.address(item), 0, 0, 0)
            self._length += size

    def _new_topic(self, name: str) -> TopicQueues:
        try:
            data = self._writer.topic_of(name).data
        except LogquarryError:
            # The topic is invalid. The encoder of single puts raises the error.
            data = None
        topic = TopicQueues(data, len(self.topics))
        self.topics[name] = topic
        return topic

    def _queue(self, topic: TopicQueues, name: str, queue_id: int) -> int:
        is_low = 0 <= queue_id < _QUEUES
        if is_low:
            number: int = topic.first[queue_id]
            if number >= 0:
                return number
        else:
            known = topic.queues.get(queue_id)
            if known is not None:
                return known
        number = len(self._keys)
        if number == self._queue_room:
            room = max(_AT_FIRST, 2 * number)
            queues = grown(self._queues, room * cython.sizeof(QueueRun))
            self._queues = cython.cast(queue_pointer, queues)
            used = grown(self._used, room * cython.sizeof(cython.int))
            self._used = cython.cast(cython.p_int, used)
            self._queue_room = room
        self._queues[number].run = 0
        self._keys.append((name, queue_id))
        if is_low:
            topic.first[queue_id] = number
        else:
            topic.queues[queue_id] = number
        return number

    def _more_rows(self) -> None:
        room = max(_AT_FIRST, 2 * self._row_room)
        self._rows = cython.cast(row_pointer, grown(self._rows, room * cython.sizeof(Row)))
        self._row_room = room

    def _more_bytes(self, size: int) -> None:
        room = max(_BYTES_AT_FIRST, 2 * self._room)
        while room < self._length + size:
            room *= 2
        self._data = cython.cast(cython.p_char, grown(self._data, room))
        self._room = room

    def fill_columns(self, columns: Int64) -> None:
        """Write the frame size (0 for an odd message), the topic number and the host number of each
        message to ``columns``.

        ``columns`` has three rows, and one column for each message.
        """
        column = cython.cast(number_pointer, cython.cast(cython.size_t, columns.ctypes.data))
        count = self.count
        for number in range(count):
            column[number] = self._rows[number].size
            column[count + number] = self._rows[number].topic
            column[2 * count + number] = self._rows[number].host

    def append(
        self,
        file: MappedFile,
        offsets: dict[QueueKey, int],
        start: int,
        stop: int,
        now: int,
        columns: Int64,
    ) -> int:
        """Append frames in order; see :meth:`logquarry.write.outgoing.FrameTable.append`."""
        step = columns.strides[0] // 8
        column = cython.cast(number_pointer, cython.cast(cython.size_t, columns.ctypes.data))
        last = cython.cast(FilePlace, file)
        at = last.wrote
        frames = self._data + self._appended
        whole = used = 0
        self._run += 1
        number = start
        while number < stop:
            row = cython.address(self._rows[number])
            if at + whole + row.size + _BLANK > last.size:
                break
            queue = cython.address(self._queues[row.queue])
            if queue.run != self._run:
                queue.run = self._run
                known = offsets.get(self._keys[row.queue])
                queue.next = 0 if known is None else known
                self._used[used] = row.queue
                used += 1
            queue_offset = queue.next if row.advances else 0
            queue.next += row.advances
            physical_offset = last.base + at + whole
            place = frames + whole
            store64(place + _QUEUE_OFFSET_AT, queue_offset)
            store64(place + _PHYSICAL_OFFSET_AT, physical_offset)
            store64(place + row.time_at, now)
            column[number] = physical_offset
            column[step + number] = queue_offset
            column[2 * step + number] = now
            column[3 * step + number] = row.size
            whole += row.size
            number += 1
        if number == start:
            return start
        if last.address:
            memcpy(cython.cast(cython.p_char, last.address) + at, frames, whole)
        else:
            # The file has no address if writes go to a buffer of the transient store pool or to a
            # copy of the file.
            view = file.buffer
            place = cython.cast(cython.p_char, PyMemoryView_GET_BUFFER(view).buf)
            memcpy(place + at, frames, whole)
            file.keep(at, at + whole)
        # Compiled code runs the next lines without interruption: Python runs no other thread and no
        # signal handler between them.
        for index in range(used):
            offsets[self._keys[self._used[index]]] = self._queues[self._used[index]].next
        self._appended += whole
        last.wrote = at + whole
        return number
