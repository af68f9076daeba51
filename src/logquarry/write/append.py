"""The commit log, written: messages, batches and replicated bytes, one put after the other.

Follows ``CommitLog.asyncPutMessage(s)``, ``DefaultAppendMessageCallback.doAppend``, ``appendData``
and ``DefaultMessageStore.checkStoreStatus`` of 4.9.3. What a message's bytes are is told outside
the lock (:mod:`logquarry.write.encode`); inside it come store time, queue offset and physical
offset, so that the log is ordered by all three.

A frame fits if eight bytes are left behind it: room for the blank that ends the file.

::

    | frame | frame | ... | blank: [bytes left 4][cbd43194] and anything |

Guarantees: a put that raises has not put its message into the log. It may have ended a file with
a blank.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Final

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Health, RunningFlags
from logquarry.errors import StoreUnavailable
from logquarry.format import frame
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.units import Clock
from logquarry.write.encode import Encoded, MessageEncoder
from logquarry.write.encode_batch import encode_batch, encode_messages
from logquarry.write.plain_put import PlainEncoder
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus, refusal

logger = logging.getLogger(__name__)

Settle = Callable[[PutResult, bool], PutResult]

SLOW_PUT: Final = 0.5
"""Seconds in the lock, or for the whole put, over which a put is logged."""
_BLANK: Final = frame.BLANK.size
_MS: Final = 1_000
_PUT_OK, _APPENDED = PutStatus.PUT_OK, AppendStatus.PUT_OK
_MAGIC: Final = frame.MAGIC_V1
_FIRST: Final = (0,)
_new_result = tuple.__new__
_monotonic = time.monotonic
_CLOSED: Final = "it is closed"
_FOREIGN: Final = "bytes of another store's log have come, and what they hold is not known yet"


def _settled(result: PutResult, wait: bool) -> PutResult:
    """Nothing to wait for: what becomes of a put without flush and replica."""
    return result


class AppendRules:
    """What an append does otherwise in another dialect; here it is 4.9.3's way."""

    def own_offset(self, encoded: Encoded) -> int:
        """QUEUEOFFSET of a frame that takes no place in a queue."""
        return encoded.own_offset

    def end_file(self, file: MappedFile) -> int:
        """Fill a file with a blank; how many bytes it takes."""
        return end_file(file)

    def appended(self, encoded: Encoded) -> None:
        """A frame is in the log; told again of the same one where Ctrl-C came in between."""

    def adopted(self) -> None:
        """Bytes of another store's log are dispatched, and what is put next follows them."""


class CommitLogWriter:
    """Appends to the log (the writing half of ``CommitLog``). Any thread may put.

    Args:
        files: the log's files.
        config: the store's settings.
        clock: gives store times, in milliseconds. Asked inside the lock.
        queue_offsets: the next offset of each queue (``topicQueueTable``); the writer's from now
            on.
        flags: what keeps the store from taking messages.
        health: whether the disk still takes them.
        settle: waits for flush and replica as far as the put asks for it, outside the lock, and
            gives the result with their status.
        rules: of another dialect. There is no short way in it.

    Attributes:
        queue_offsets: the next offset of each queue, by topic and queue id.
        encoder: makes the frames.
        clock: gives the store times.
        config: the store's settings.
        file_size: bytes of each file of the log.
        settle: waits for flush and replica.
        has_short_way: whether frames may be written by kernels, and past the reference.
        bar: why nothing may be appended now, None where it may. Looked at with the log held: a
            put may have passed all other checks before that came up.
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
        settle: Settle = _settled,
        rules: AppendRules | None = None,
    ) -> None:
        self.queue_offsets = {} if queue_offsets is None else queue_offsets
        self._files = files
        self.config = config
        self.clock = clock
        self.file_size = files.file_size
        self._flags = flags or RunningFlags()
        self._health = health or Health()
        self.settle = settle
        self.encoder = MessageEncoder(config, clock)
        self._plain = PlainEncoder(config, clock, files.file_size - _BLANK)
        self.has_short_way = rules is None
        self._rules = rules or AppendRules()
        self.bar: str | None = None
        self._ends_foreign = False
        self._lock = threading.Lock()
        self._held_since = 0.0
        self._busy_after = config.os_page_cache_busy_time_out_mills / _MS

    def end(self) -> None:
        """Append no more, for good. What is being appended comes to its end first."""
        with self._lock:
            self._ends_foreign = self.bar is _FOREIGN
            self.bar = _CLOSED

    # ------------------------------------------------------------------------------------- put
    def put(self, message: Message) -> PutResult:
        """Put one message.

        Raises:
            StoreUnavailable: if the store takes no messages now.
            MessageRejected: if it does not take this one.
        """
        began = _monotonic()
        # Mostly nothing of that is so, and then not even a call is made for it.
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        result = self._put_plain(message)
        if result is None:
            return self._put(self.encoder.encode(message), began)
        result = self.settle(result, True)
        if _monotonic() - began > SLOW_PUT:
            self._note_slow(began, len(message.body), result)
        return result

    def append_message(self, message: Message) -> tuple[PutResult, bool]:
        """The same, settled by the caller: what it came to, and whether it waits for that.

        Raises:
            StoreUnavailable, MessageRejected: as :meth:`put`.
        """
        began = _monotonic()
        # As in put.
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        result, wait = self._put_plain(message), True
        if result is None:
            encoded = self.encoder.encode(message)
            result, wait = self.append(encoded), encoded.wait
        if _monotonic() - began > SLOW_PUT:
            self._note_slow(began, len(message.body), result)
        return result, wait

    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """Put messages of one topic and queue: all of them into one file, or none.

        Args:
            messages: the messages; or else
            wire: the wire form of them,
            message: and what they share.

        Raises:
            StoreUnavailable: if the store takes no messages now.
            MessageRejected: if it does not take these.
            UsageError: if the messages are not of one queue.
        """
        began = time.monotonic()
        self.check_status()
        if self.config.is_3_1:
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL, "dialect 3.1 knows no batches", reason="dialect"
            )
        if messages is not None and wire is None and message is None:
            encoded = encode_messages(self.encoder, self.config, messages)
        elif messages is None and wire is not None and message is not None:
            encoded = encode_batch(self.encoder, self.config, wire, message)
        else:
            raise TypeError("a batch is messages, or a wire form and a message")
        return self._put(encoded, began)

    def check_status(self) -> None:
        """Raise StoreUnavailable unless the store takes messages now (``checkStoreStatus``)."""
        if not self._flags.is_writeable:
            raise refusal(
                PutStatus.SERVICE_NOT_AVAILABLE, f"the store takes no messages: {self._flags.why}"
            )
        self._health.require_writable()
        if self._is_busy:
            raise refusal(
                PutStatus.OS_PAGECACHE_BUSY,
                f"another put has held the log for more than {self._busy_after} s: the disk does "
                "not keep up",
            )

    @property
    def _is_busy(self) -> bool:
        """Whether a put holds the log for long (``isOSPageCacheBusy``)."""
        since = self._held_since
        return since > 0 and time.monotonic() - since > self._busy_after

    def _put(self, encoded: Encoded, began: float) -> PutResult:
        result = self.settle(self.append(encoded), encoded.wait)
        if _monotonic() - began > SLOW_PUT:
            self._note_slow(began, encoded.body_size, result)
        return result

    @staticmethod
    def _note_slow(began: float, body_size: int, result: PutResult) -> None:
        took = (time.monotonic() - began) * _MS
        logger.warning("a put took %d ms: %d bytes of body, %s", took, body_size, result)

    def _put_plain(self, message: Message) -> PutResult | None:
        """The short way (:mod:`logquarry.write.plain_put`).

        None, and nothing is changed, where a message does not go it, or a file comes to its end.
        """
        parts = self._plain.parts(message) if self.has_short_way else None
        if parts is None:
            return None
        target, size, crc, queue_id, flag, born, reconsumed, prepared, length, body, rest = parts
        key, pack, flags, born_host, store_host, _, _, advances = target
        with self._lock:
            began = self._held_since = _monotonic()
            try:
                file = self._files.last
                if file is None or self._health.reason is not None or self.bar is not None:
                    return None
                at = file.wrote
                end = at + size
                if end + _BLANK > file.size:
                    return None
                now = self.clock()
                # Also a message that takes no place makes its queue known.
                offset = self.queue_offsets.setdefault(key, 0)
                if not advances:
                    offset = 0
                physical_offset = file.base + at
                head = pack(
                    size,
                    _MAGIC,
                    crc,
                    queue_id,
                    flag,
                    offset,
                    physical_offset,
                    flags,
                    born,
                    born_host,
                    now,
                    store_host,
                    reconsumed,
                    prepared,
                    length,
                )
                try:
                    # As MappedFile.append does it.
                    file.buffer[at:end] = b"".join((head, body, rest))
                    file.wrote = end
                    if advances:
                        self.queue_offsets[key] = offset + 1
                except BaseException:
                    # Ctrl-C comes anywhere. A message in the log has its queue offset.
                    if advances and file.wrote > at:
                        self.queue_offsets[key] = offset + 1
                    raise
                file.store_timestamp = now
            except struct.error:
                # A number does not fit its field: the reference says which.
                return None
            finally:
                self._held_since = 0.0
        held = (_monotonic() - began) * _MS
        result = _new_result(
            PutResult,
            (_PUT_OK, _APPENDED, store_host, physical_offset, offset, size, 1, now, held, _FIRST),
        )
        if held > SLOW_PUT * _MS:
            self._note_held(result, length)
        return result

    # ---------------------------------------------------------------------------------- append
    def append(self, encoded: Encoded) -> PutResult:
        """Append what is encoded: to the last file, or to a new one where it does not fit there.

        Raises:
            StoreUnavailable: if no file could be made: CREATE_MAPEDFILE_FAILED. Where the file
                before had no room, it has its blank by then.
            MessageRejected: if no file could hold it.
        """
        self.require_fit(encoded)
        with self._lock:
            began = self._held_since = time.monotonic()
            try:
                result = self.append_held(encoded, self.clock(), began)
            finally:
                self._held_since = 0.0
        if result.elapsed_ms > SLOW_PUT * _MS:
            self._note_held(result, encoded.body_size)
        return result

    @staticmethod
    def _note_held(result: PutResult, body_size: int) -> None:
        logger.warning(
            "a put held the log for %d ms: %d bytes of body, %s",
            result.elapsed_ms,
            body_size,
            result,
        )

    def append_held(self, encoded: Encoded, now: int, began: float) -> PutResult:
        """The same with the log held, and a store time."""
        result = self._append_to(self.file(), encoded, now, began)
        if result.append_status is AppendStatus.END_OF_FILE:
            result = self._append_to(self.file(), encoded, now, began)
        return result

    @contextmanager
    def holding(self) -> Iterator[tuple[int, float]]:
        """Hold the log for several appends of one store time, which comes with the start."""
        with self._lock:
            began = self._held_since = time.monotonic()
            try:
                # A time that is no integer would stay in the log's files, and fail their flush.
                yield index(self.clock()), began
            finally:
                self._held_since = 0.0
        if (took := time.monotonic() - began) > SLOW_PUT:
            logger.warning("a run of puts held the log for %d ms", took * _MS)

    def append_once(self, encoded: Encoded) -> PutResult:
        """One append to the last file (``MappedFile.appendMessage(s)``).

        Where it has no room it gets its blank, and the result END_OF_FILE, with no message in the
        log: ``size`` is then what the blank takes.
        """
        self.require_fit(encoded)
        with self._lock:
            return self._append_to(self.file(), encoded, self.clock(), time.monotonic())

    def append_data(self, offset: int, data: bytes | memoryview) -> bool:
        """Append bytes of another store's log that belong at an offset (``appendData``).

        Whether they were taken: the log has to end at that offset, or be empty and the offset a
        file's first. They may end within a frame, and reach over a file's end. Nothing else is
        appended behind them before :meth:`adopt`.

        Raises:
            StoreUnavailable: as :meth:`MappedFileQueue.append_data`; or after :meth:`end`.
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
        """Whether bytes of another store's log came since the last :meth:`adopt`."""
        return self.bar is _FOREIGN or self._ends_foreign

    def adopt(self, end: int, next_offsets: Callable[[], Mapping[QueueKey, int]]) -> None:
        """Go on behind another store's bytes, unless more of them have come.

        Args:
            end: where the log ended when all of it was dispatched.
            next_offsets: gives the next offset of each queue.
        """
        with self._lock:
            if self.bar is _FOREIGN and self._files.wrote_offset == end:
                self.queue_offsets.update(next_offsets())
                self._rules.adopted()
                self.bar = None

    def require_fit(self, encoded: Encoded) -> None:
        """Refuse a frame that no file could hold.

        Raises:
            MessageRejected: if it is one.
        """
        require_fit(encoded, self._files.file_size)

    def file(self) -> MappedFile:
        """The file to append to, made if the last one is full; with the log held.

        Raises:
            StoreUnavailable: CREATE_MAPEDFILE_FAILED; SERVICE_NOT_AVAILABLE where :attr:`bar` says
                why.
        """
        if self.bar is not None:
            raise self._barred()
        try:
            file = self._files.last_file(create=True)
        except StoreUnavailable as error:
            self._health.require_writable()
            raise refusal(PutStatus.CREATE_MAPEDFILE_FAILED, str(error)) from error
        if file is None:
            raise refusal(
                PutStatus.CREATE_MAPEDFILE_FAILED, "the log's next file was not made in time"
            )
        return file

    def _barred(self) -> Exception:
        reason = f"the store takes no messages: {self.bar}"
        return refusal(PutStatus.SERVICE_NOT_AVAILABLE, reason)

    def _append_to(self, file: MappedFile, encoded: Encoded, now: int, began: float) -> PutResult:
        """Append to one file, or end it with a blank; inside the lock (``doAppend``)."""
        key = encoded.key
        # Also a message that takes no place makes its queue known.
        queue_offset = self.queue_offsets.setdefault(key, 0)
        copied: list[int] = []
        if encoded.copies is not None:
            copied = [self.queue_offsets.setdefault(copy, 0) for copy in encoded.copies.keys]
            encoded.data = encoded.copies.frame(copied)
            require_fit(encoded, self._files.file_size)
        if not encoded.advances:
            queue_offset = self._rules.own_offset(encoded)
        physical_offset, size = file.base + file.wrote, len(encoded.data)
        status, count, starts = AppendStatus.PUT_OK, len(encoded.starts), encoded.starts
        if size + _BLANK > file.room and count:
            status, count, starts = AppendStatus.END_OF_FILE, 0, ()
            size = self._rules.end_file(file)
        else:
            encoded.place(queue_offset, physical_offset, now)
            try:
                file.append(encoded.data)
                self._rules.appended(encoded)
                if encoded.advances:
                    self._advance(encoded, queue_offset + count, copied)
            except BaseException:
                # Ctrl-C comes anywhere. A message in the log has its queue offset.
                if file.base + file.wrote > physical_offset:
                    self._rules.appended(encoded)
                    if encoded.advances:
                        self._advance(encoded, queue_offset + count, copied)
                raise
        file.store_timestamp = now
        return PutResult(
            PutStatus.PUT_OK,
            status,
            encoded.store_host,
            physical_offset,
            queue_offset,
            size,
            count,
            now,
            (time.monotonic() - began) * _MS,
            starts,
        )

    def _advance(self, encoded: Encoded, next_offset: int, copied: list[int]) -> None:
        """Say which queue offsets come next; once more changes nothing."""
        self.queue_offsets[encoded.key] = next_offset
        if encoded.copies is not None:
            for copy, offset in zip(encoded.copies.keys, copied, strict=True):
                self.queue_offsets[copy] = offset + 1


def require_fit(encoded: Encoded, file_size: int) -> None:
    """Refuse a frame that no file of a log could hold.

    Raises:
        MessageRejected: if it is one.
    """
    # QUIRK: RocketMQ says PUT_OK, writes nothing and blanks two files
    # (test_append_vectors: vectors 36 and 38).
    size = len(encoded.data)
    if size > file_size - _BLANK:
        raise refusal(
            PutStatus.MESSAGE_ILLEGAL,
            f"{size} bytes do not fit into a file of {file_size}, of which "
            f"{_BLANK} are kept for its end",
            reason="larger_than_file",
        )


def end_file(file: MappedFile) -> int:
    """Fill a file with a blank, of which eight bytes are written; how many bytes it takes."""
    left = file.room
    # Fewer are left only where another program wrote: a reader takes them for the file's end.
    if left >= _BLANK:
        file.buffer[file.wrote : file.wrote + _BLANK] = frame.encode_blank(left)
    file.advance(left)
    return left
