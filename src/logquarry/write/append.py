"""The writer of the commit log: puts messages and batches.

Follows ``CommitLog.asyncPutMessage(s)`` of 4.9.3. :meth:`CommitLogWriter._put_common` holds the
whole of a common put, from the message to its bytes in the log. Messages with properties that the
store acts on (a delay, WAIT, further queues), batches and dialect 3.1 take the longer path through
:mod:`logquarry.write.encode` and :meth:`LogAppender.append`.

Guarantees: a put that raises has not put its message into the log.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Sequence
from typing import Final

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Health, RunningFlags
from logquarry.errors import WrongType
from logquarry.format import frame, java
from logquarry.format import properties as props
from logquarry.format.java import crc32
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.units import Clock
from logquarry.write.encode import MessageEncoder
from logquarry.write.encode_batch import encode_batch, encode_messages
from logquarry.write.host_fields import host_fields
from logquarry.write.log_appender import (
    SLOW_PUT,
    AppendRules,
    LogAppender,
    Settle,
    log_held,
    settle_nothing,
)
from logquarry.write.message_rules import LONGEST_PROPERTIES, topic_bytes
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus, refusal

logger = logging.getLogger(__name__)

_KEYS: Final = f"{props.KEYS}{props.NAME_VALUE_SEPARATOR}"
_TAGS: Final = f"{props.TAGS}{props.NAME_VALUE_SEPARATOR}"
_PROPERTY_END: Final = props.PROPERTY_SEPARATOR
_DELAY, _WAIT, _COPIES = props.DELAY, props.WAIT, props.INNER_MULTI_DISPATCH
_DELIVER = props.TIMER_DELIVER_MS
_MAGIC: Final = frame.MAGIC_V1
_CRC_MASK: Final = java.INT_MAX
_LENGTH: Final = frame.PROPERTIES_LENGTH.struct.pack
_ONE_FRAME: Final = (0,)
_BLANK: Final = frame.BLANK.size
_MS: Final = 1_000
_PUT_OK, _APPENDED = PutStatus.PUT_OK, AppendStatus.PUT_OK
_new = tuple.__new__
_monotonic = time.monotonic


class CommitLogWriter(LogAppender):
    """Puts messages into the log (the writing half of ``CommitLog``). Any thread may put.

    Args:
        files, config, clock, queue_offsets, flags, health, settle, rules: as
            :class:`~logquarry.write.log_appender.LogAppender` takes them.

    Attributes:
        encoder: makes the frames.
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
    ) -> None:
        super().__init__(
            files,
            config,
            clock=clock,
            queue_offsets=queue_offsets,
            flags=flags,
            health=health,
            settle=settle,
            rules=rules,
        )
        self.encoder = MessageEncoder(
            config, clock, has_property_crc=rules is not None and rules.has_property_crc
        )
        self._topic_check = config.topic_check
        self._store_host = config.store_host
        self._largest = min(config.max_message_size, files.file_size - _BLANK)

    def put(self, message: Message) -> PutResult:
        """Put one message.

        Raises:
            StoreUnavailable: if the store takes no messages now.
            MessageRejected: if the store does not accept this message.
            UsageError: if a number does not fit its field.
        """
        # Usually none of the three conditions holds, and the call is skipped.
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        result, wait = self._put_common(message), True
        if result is None:
            encoded = self.encoder.encode(message)
            result, wait = self.append(encoded), encoded.wait
        return self.settle(result, wait)

    def append_message(self, message: Message) -> tuple[PutResult, bool]:
        """Put one message; the caller waits for flush and replica.

        Returns:
            The result, and whether the put waits.

        Raises:
            StoreUnavailable, MessageRejected, UsageError: as :meth:`put`.
        """
        began = _monotonic()
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        result, wait = self._put_common(message), True
        if result is None:
            encoded = self.encoder.encode(message)
            result, wait = self.append(encoded), encoded.wait
        if _monotonic() - began > SLOW_PUT:
            log_slow(_monotonic() - began, len(message.body), result)
        return result, wait

    def _put_common(self, message: Message) -> PutResult | None:
        """Put a message without properties that the store acts on: the whole put in one function.

        It takes 35 % less time than :meth:`MessageEncoder.encode` and :meth:`append`, which take
        every message and write the same bytes (test_put_many_twins.py).

        Returns:
            None, and nothing is changed, for any other message, or if the last file has no room.
        """
        (
            topic,
            body,
            queue_id,
            tags,
            keys,
            properties,
            text,
            delay_level,
            wait,
            flag,
            sys_flag,
            _,
            born,
            born_host,
            store_host,
            reconsume_times,
            prepared_offset,
        ) = message
        if (
            properties is not None
            or delay_level
            or not wait
            or type(body) is not bytes
            or not self.takes_kernels
        ):
            return None

        # The property string.
        if text is None:
            text = "" if keys is None else _KEYS + keys
            if tags is not None:
                text = f"{text}{_PROPERTY_END}{_TAGS}{tags}" if text else _TAGS + tags
        elif (
            type(text) is not str
            or keys is not None
            or tags is not None
            or _DELAY in text
            or _WAIT in text
            or _COPIES in text
            or _DELIVER in text
        ):
            return None
        data = text.encode("utf-8", "replace")

        # The parts of the frame that are known before the lock is taken.
        topic_data = topic_bytes(topic, self._topic_check)
        length, body_length = len(data), len(body)
        if length > LONGEST_PROPERTIES:
            return None
        hosts = host_fields(
            born_host, self._store_host if store_host is None else store_host, sys_flag
        )
        size = hosts.fixed_size + body_length + len(topic_data) + length
        if size > self._largest:
            return None
        if born is None:
            born = self.clock()
        rest = topic_data + _LENGTH(length) + data
        crc = crc32(body) & _CRC_MASK
        key = topic, queue_id

        # Under the lock: place, queue offset and store time; then the bytes.
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
                queue_offset = self.queue_offsets.get(key, 0) if hosts.advances else 0
                physical_offset = file.base + at
                head = hosts.pack(
                    size,
                    _MAGIC,
                    crc,
                    queue_id,
                    flag,
                    queue_offset,
                    physical_offset,
                    hosts.flags,
                    born,
                    hosts.born_host,
                    now,
                    hosts.store_host,
                    reconsume_times,
                    prepared_offset,
                    body_length,
                )
                try:
                    copying = _monotonic()
                    # As MappedFile.append does it, without the call.
                    file.buffer[at:end] = b"".join((head, body, rest))
                    file.wrote = end
                    if hosts.advances:
                        self.queue_offsets[key] = queue_offset + 1
                    else:
                        # Messages without a queue offset register their queue too.
                        self.queue_offsets.setdefault(key, 0)
                except BaseException:
                    # Ctrl-C may arrive at any line. If the message is in the log, its queue offset
                    # is taken.
                    if hosts.advances and file.wrote > at:
                        self.queue_offsets[key] = queue_offset + 1
                    raise
                file.store_timestamp = now
            except struct.error:
                # A number does not fit its field: the encoder's error names it.
                return None
            finally:
                self._held_since = 0.0
        ended = _monotonic()
        held = (ended - began) * _MS
        result = _new(
            PutResult,
            (
                _PUT_OK,
                _APPENDED,
                hosts.store_host,
                physical_offset,
                queue_offset,
                size,
                1,
                now,
                held,
                _ONE_FRAME,
                (ended - copying) * _MS,
            ),
        )
        if held > SLOW_PUT * _MS:
            log_held(body_length, result)
        return result

    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """Put messages of one topic and queue: all of them into one file, or none.

        Args:
            messages: the messages; None if ``wire`` and ``message`` are given.
            wire: the wire form of the messages.
            message: the fields that the messages of ``wire`` share.

        Raises:
            StoreUnavailable: if the store takes no messages now.
            MessageRejected: if the store does not accept these messages.
            UsageError: if the messages are not of one queue.
        """
        began = _monotonic()
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
            raise WrongType("put_batch takes messages, or wire= together with message=")
        result = self.settle(self.append(encoded), encoded.wait)
        if _monotonic() - began > SLOW_PUT:
            log_slow(_monotonic() - began, encoded.body_size, result)
        return result


def log_slow(seconds: float, body_size: int, result: PutResult) -> None:
    """Log a put that took long."""
    took = seconds * _MS
    logger.warning("a put took %d ms: %d bytes of body, %s", took, body_size, result)
