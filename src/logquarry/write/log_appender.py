"""Appends messages and raw bytes to the files of the commit log, under the log's lock, and ends a
full file with a blank.

The module is compiled if possible. The code follows ``DefaultAppendMessageCallback.doAppend``,
``appendData`` and ``DefaultMessageStore.checkStoreStatus`` of 4.9.3. A frame fits into a file only
if at least eight bytes remain after it. If a frame does not fit, a blank fills the rest of the
file: ``[bytes left 4][cbd43194]``, and then any bytes. If an append raises an error, none of its
frames is in the log, but the last file may end with a new blank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Final

from logquarry.arguments import Clock
from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Health, RunningFlags
from logquarry.errors import StoreUnavailable, WrongType
from logquarry.format import frame
from logquarry.format import properties as props
from logquarry.message import Message, require_message, require_messages
from logquarry.read.log_queues import QueueKey
from logquarry.write.encode import Encoded, MessageEncoder
from logquarry.write.encode_batch import encode_batch, encode_messages
from logquarry.write.frame_append import SLOW_PUT, FrameAppend, Settle, log_held
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus, refusal

logger = logging.getLogger(__name__)

_BLANK: Final = frame.BLANK.size
_MS: Final = 1_000
_monotonic = time.monotonic
_CLOSED: Final = "it is closed"
_FOREIGN: Final = "bytes of another store's log were appended and are not dispatched yet"


def settle_nothing(result: PutResult, wait: bool) -> PutResult:
    """Return the result unchanged. Used in a store whose puts do not wait for flush or replica."""
    return result


class AppendRules:
    """The rules for an append in 4.9.3. Subclasses have the rules for dialect 3.1 and for property
    CRCs.
    """

    def own_offset(self, encoded: Encoded) -> int:
        """Return the value of the field QUEUEOFFSET for a frame that uses up no queue offset."""
        return encoded.own_offset

    has_property_crc = False

    def placed(self, encoded: Encoded) -> None:
        """Called after the offsets and the store time of frames are set, to complete the frames."""

    def end_file(self, file: MappedFile) -> int:
        """Fill the rest of a file with a blank. Return the blank's size."""
        return end_file(file)

    def appended(self, encoded: Encoded) -> None:
        """Called when a frame is in the log. After Ctrl-C, it may be called twice for the same
        frame.
        """

    def adopted(self) -> None:
        """Called after bytes of another store's log were appended and dispatched, and before the
        log allows puts again.
        """


class LogAppender(FrameAppend):
    """Appends any message to the log. Faster code for common messages must do the same as this
    class (the reference). Any thread may append.

    ``rules`` contains the rules for a store of dialect 3.1, or for a store with property CRCs. With
    such rules, only this class writes frames; no compiled kernel does. See
    :class:`~logquarry.write.frame_append.FrameAppend` for the other arguments. The argument
    ``queue_offsets`` is RocketMQ's ``topicQueueTable``.
    """

    def __init__(
        self,
        files: MappedFileQueue,
        config: StoreConfig,
        *,
        clock: Clock,
        queue_offsets: dict[QueueKey, int] | None = None,
        flags: RunningFlags | None = None,
        health: Health | None = None,
        settle: Settle = settle_nothing,
        rules: AppendRules | None = None,
        claim_topic: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            files,
            config,
            clock,
            {} if queue_offsets is None else queue_offsets,
            flags or RunningFlags(),
            health or Health(),
            rules is None,
            settle,
            claim_topic,
        )
        self.config = config
        self.encoder = MessageEncoder(
            config, clock, has_property_crc=rules is not None and rules.has_property_crc
        )
        self.file_size = files.file_size
        self._rules = rules or AppendRules()
        self._ends_foreign = False
        self._busy_after = config.os_page_cache_busy_time_out_mills / _MS

    def end(self) -> None:
        """Wait until no put holds the log's lock, and refuse appends from then on."""
        with self._lock:
            self._ends_foreign = self.bar is _FOREIGN
            self.bar = _CLOSED

    def check_status(self) -> None:
        """Raise StoreUnavailable unless the store takes messages now (``checkStoreStatus``)."""
        if self._flags.refusals:
            raise refusal(
                PutStatus.SERVICE_NOT_AVAILABLE, f"the store takes no messages: {self._flags.why}"
            )
        self._health.require_writable()
        since = self._held_since
        # As in RocketMQ's isOSPageCacheBusy, refuse the message if another put has held the log's
        # lock for too long.
        if since > 0 and _monotonic() - since > self._busy_after:
            raise refusal(
                PutStatus.OS_PAGECACHE_BUSY,
                f"another put has held the log for more than {self._busy_after} s: the disk does "
                "not keep up",
            )

    # ---------------------------------------------------------------------------------- append
    def append_reference(self, message: Message) -> tuple[PutResult, bool]:
        """Append any message without waiting for flush and replica. Return the result, and whether
        the message requests these waits.
        """
        encoded = self.encoder.encode(message)
        return self.append(encoded), encoded.wait

    def append_batch_reference(
        self,
        messages: Sequence[Message] | None,
        wire: bytes | None,
        message: Message | None,
    ) -> tuple[PutResult, bool]:
        """Append any batch without waiting for flush and replica. Return the result, and whether
        the batch requests these waits.
        """
        if messages is not None:
            messages = require_messages(messages, "put_batch")
        if message is not None:
            require_message(message, "message")
        if self.config.is_3_1:
            raise refusal(PutStatus.MESSAGE_ILLEGAL, "dialect 3.1 has no batches", reason="dialect")
        if messages is not None and wire is None and message is None:
            encoded = encode_messages(self.encoder, self.config, messages)
        elif messages is None and wire is not None and message is not None:
            encoded = encode_batch(self.encoder, self.config, wire, message)
        else:
            raise WrongType("put_batch takes messages, or wire= together with message=")
        return self.append(encoded), encoded.wait

    def append(self, encoded: Encoded) -> PutResult:
        """Append frames to the last file, or to a new file if the last file has no room.

        Raises:
            StoreUnavailable: with the status CREATE_MAPEDFILE_FAILED, if no file could be created.
                The previous file may already end with a blank.
            MessageRejected: if the frames are too large for any file.
        """
        if encoded.size + _BLANK > self.file_size:
            require_fit(encoded, self.file_size)
        with self._lock:
            began = self._held_since = _monotonic()
            try:
                result = self.append_held(encoded, self.clock(), began)
            finally:
                self._held_since = 0.0
        if result.elapsed_ms > SLOW_PUT * _MS:
            log_held(encoded.body_size, result)
        return result

    def append_held(self, encoded: Encoded, now: int, began: float) -> PutResult:
        """Append frames under the log's lock (``doAppend``).

        ``now`` is the store time in milliseconds; ``began`` is the monotonic time at which the lock
        was taken.
        """
        file = self.file()
        copies = () if encoded.copies is None else encoded.copies.keys
        self.claim((encoded.key, *copies))
        # If the message takes no queue offset, still add its queue to the table.
        queue_offset = self.queue_offsets.setdefault(encoded.key, 0)
        copied = self._copied(encoded, queue_offset)
        if not encoded.hosts.advances:
            queue_offset = self._rules.own_offset(encoded)
        starts, size = encoded.starts, encoded.size
        if file.wrote + size + _BLANK > file.size and starts:
            self._rules.end_file(file)
            file.store_timestamp = now
            file = self.file()
        at = file.wrote
        physical_offset = file.base + at
        copying = _monotonic()
        try:
            encoded.write(file, queue_offset, physical_offset, now, self._rules.placed)
            self._appended(encoded, queue_offset, copied)
        except BaseException:
            # Ctrl-C may arrive at any line. If the message is already in the log, the queue's next
            # offset must still be raised.
            if file.wrote > at:
                self._appended(encoded, queue_offset, copied)
            raise
        file.store_timestamp = now
        ended = _monotonic()
        return PutResult(
            PutStatus.PUT_OK,
            AppendStatus.PUT_OK,
            encoded.hosts.store_host,
            physical_offset,
            queue_offset,
            size,
            encoded.messages,
            now,
            (ended - began) * _MS,
            starts,
            (ended - copying) * _MS,
        )

    def claim(self, keys: Iterable[QueueKey]) -> None:
        """For each new queue, claim the folder of its topic; the caller holds the lock. Raises
        MessageRejected if the folder belongs to another topic (:attr:`QueueTable.claim_topic`).
        """
        if self.claim_topic is not None:
            for key in keys:
                if key not in self.queue_offsets:
                    self.claim_topic(key[0])

    def _copied(self, encoded: Encoded, queue_offset: int) -> list[int]:
        """Make the frame of a message whose properties contain queue offsets. Return the message's
        offset in each further queue.
        """
        if encoded.copies is None:
            return []
        copied = [self.queue_offsets.setdefault(copy, 0) for copy in encoded.copies.keys]
        encoded.data = encoded.copies.frame(queue_offset, copied)
        require_fit(encoded, self.file_size)
        return copied

    def _appended(self, encoded: Encoded, queue_offset: int, copied: list[int]) -> None:
        """For frames that are now in the log, raise the next offsets of their queues. A second call
        for the same frames has no effect.
        """
        self._rules.appended(encoded)
        if encoded.hosts.advances:
            self.queue_offsets[encoded.key] = queue_offset + encoded.messages
            if encoded.copies is not None:
                for copy, offset in zip(encoded.copies.keys, copied, strict=True):
                    self.queue_offsets[copy] = offset + 1

    @contextmanager
    def holding(self) -> Iterator[tuple[int, float]]:
        """Hold the log's lock for several appends, which get the same store time.

        Yield the store time in milliseconds, and the monotonic time at which the lock was taken.
        """
        with self._lock:
            began = self._held_since = _monotonic()
            try:
                # If the clock does not return an integer, raise the error here, because a later
                # flush would fail otherwise.
                yield index(self.clock()), began
            finally:
                self._held_since = 0.0
        if (took := _monotonic() - began) > SLOW_PUT:
            logger.warning("a run of puts held the log for %d ms", took * _MS)

    def file(self) -> MappedFile:
        """Return the file for the next append, under the lock; create a file if necessary.

        Raises:
            StoreUnavailable: with the status SERVICE_NOT_AVAILABLE if there is a :attr:`bar`, or
                CREATE_MAPEDFILE_FAILED if no file could be created.
        """
        if self.bar is not None:
            raise self._barred()
        try:
            return self._files.writable()
        except StoreUnavailable as error:
            self._health.require_writable()
            raise refusal(PutStatus.CREATE_MAPEDFILE_FAILED, str(error)) from error

    def _barred(self) -> Exception:
        reason = f"the store takes no messages: {self.bar}"
        return refusal(PutStatus.SERVICE_NOT_AVAILABLE, reason)

    # ---------------------------------------------------------------------- another store's log
    def append_data(self, offset: int, data: bytes | bytearray | memoryview) -> bool:
        """Append bytes of another store's log at an offset (``appendData``).

        The bytes may end inside a frame, and may span files. After this call, the log refuses puts
        until :meth:`adopt`. If the log does not end at ``offset``, return False. An empty log
        accepts the start of any file as ``offset``. After :meth:`end`, raise StoreUnavailable.
        """
        with self._lock:
            if self.bar is _CLOSED:
                raise self._barred()
            end = self._files.wrote_offset
            try:
                return self._files.append_data(offset, data)
            finally:
                if self._files.wrote_offset != end:
                    self.bar = _FOREIGN

    @property
    def has_foreign(self) -> bool:
        """Whether bytes of another store's log were appended since the last :meth:`adopt`."""
        return self.bar is _FOREIGN or self._ends_foreign

    def adopt(self, end: int, next_offsets: Callable[[], Mapping[QueueKey, int]]) -> None:
        """Allow puts again after :meth:`append_data`, unless the log has grown beyond ``end``.

        Before the call, the caller must have dispatched the log up to ``end``. ``next_offsets`` is
        a function that returns the next offset of each queue.
        """
        with self._lock:
            if self.bar is _FOREIGN and self._files.wrote_offset == end:
                self.queue_offsets.update(next_offsets())
                self._rules.adopted()
                self.bar = None


class PropertyCrcRules(AppendRules):
    """Appends frames with a property CRC, like RocketMQ 5 with ``enabledAppendPropCRC``."""

    has_property_crc = True

    def placed(self, encoded: Encoded) -> None:
        """See :meth:`AppendRules.placed`."""
        starts, data = encoded.starts, encoded.data
        for start, end in zip(starts, (*starts[1:], len(data)), strict=True):
            props.fill_in_crc(data, start, end)


def require_fit(encoded: Encoded, file_size: int) -> None:
    """Raise MessageRejected if frames are too large for any file of a log."""
    # QUIRK: RocketMQ returns PUT_OK for such frames, but does not write them. Instead, it fills two
    # files with blanks (test_append_vectors: vectors 36 and 38).
    size = encoded.size
    if size > file_size - _BLANK:
        raise refusal(
            PutStatus.MESSAGE_ILLEGAL,
            f"{size} bytes do not fit into a file of {file_size}, of which "
            f"{_BLANK} are kept for its end",
            reason="larger_than_file",
        )


def end_file(file: MappedFile) -> int:
    """Append a blank to the end of a file, and return the blank's size.

    Only the first eight bytes of the blank are written; the bytes after them do not change.
    """
    left = file.room
    # If another program wrote the file, the room can be too small for a blank. Readers ignore
    # these last bytes.
    if left >= _BLANK:
        file.buffer[file.wrote : file.wrote + _BLANK] = frame.encode_blank(left)
    file.advance(left)
    return left
