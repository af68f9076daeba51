"""Reads the log of an open store by physical offset, and checks the arguments of a get."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from logquarry import arguments
from logquarry.config import DEFAULT_COMMIT_LOG_FILE
from logquarry.errors import MessageNotFound, StoreUnavailable, UsageError
from logquarry.format.frame import Damage, DamageKind, Frame, decode_id
from logquarry.log.layout import StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.stored_message import StoredMessage

if TYPE_CHECKING:
    from logquarry.log.walk import LogReader


class LogReads(ABC):
    """The methods of an open store that read its log by physical offset."""

    def __init__(self, layout: StoreLayout, log: CommitLog, *, broker: str) -> None:
        self.layout = layout
        self.broker = broker
        self._log = log
        self._is_open = True

    def _require_open(self) -> None:
        """Raise StoreUnavailable if the store was closed."""
        if not self._is_open:
            raise StoreUnavailable(f"{self.layout.root}: the store was closed")

    @abstractmethod
    def _look_again(self) -> None:
        """List the log's files again if another process may have added files."""

    @property
    def root(self) -> str:
        """Path or URL of the store."""
        return self.layout.root

    @property
    def min_offset(self) -> int:
        """Physical offset at which the log starts."""
        self._require_open()
        return self._log.min_offset

    @property
    @abstractmethod
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """Physical offset at which a read of the whole log must end; None if there is no bound."""

    def message_at(self, physical_offset: int) -> StoredMessage:
        """Return the message that starts at a physical offset, after a check of its CRC.

        An inner batch of RocketMQ 5 (several messages in one frame) is returned as one message;
        :meth:`StoredMessage.unwrap` returns the messages in it.

        Raises:
            MessageNotFound: if the offset is outside the log, or inside a message or a blank. The
                same error is raised for an offset after the log's end, even if the bytes there look
                like a message.
            CorruptFrame: if the bytes at that offset are damaged.
        """
        self._require_open()
        physical_offset = arguments.integer(physical_offset, "physical_offset")
        if physical_offset >= self.max_offset:
            self._look_again()
        return self._stored(self._log.message_at(physical_offset))

    def message_by_id(self, message_id: str) -> StoredMessage:
        """Return the message with an id that a broker gave it (``MessageDecoder.decodeMessageId``).

        Raises:
            UsageError: if the text is not a message id.
            MessageNotFound: if the store has no message with that id.
            CorruptFrame: if the message with that id is damaged.
        """
        _, physical_offset = decode_id(arguments.text(message_id, "message_id"))
        message = self.message_at(physical_offset)
        if message.message_id != message_id.upper():
            raise MessageNotFound(
                f"{self.root}: no message {message_id}: the one at {physical_offset} is "
                f"{message.message_id}"
            )
        return message

    def message_size_at(self, physical_offset: int) -> int:
        """Return the size in bytes of the message at a physical offset.

        The CRC of its body is not checked.

        The errors are those of :meth:`message_at`.
        """
        self._require_open()
        physical_offset = arguments.offset(physical_offset, "physical_offset")
        if physical_offset >= self.max_offset:
            self._look_again()
        if self.min_offset <= physical_offset < self.max_offset:
            found = self._log.sound_frame_at(physical_offset, check_crc=False)
            if found is not None:
                return found.size
        return self._log.message_at(physical_offset).size

    def get_data(self, physical_offset: int, size: int) -> bytes:
        """Return bytes of the log as they are on the disk, even if damaged
        (``getBulkCommitLogData``).

        The result has ``size`` bytes, and can span several log files. If fewer bytes follow in the
        log, the result is shorter; at the log's end, it is empty.

        Raises:
            MessageNotFound: if the offset is before the log's start or after its end.
            CorruptFrame: if a log file in the range is missing or too short.
        """
        self._require_open()
        at = arguments.offset(physical_offset, "physical_offset")
        size = arguments.count(size, "size", least=0)
        if at + size > self.max_offset:
            self._look_again()
        if not self.min_offset <= at <= self.max_offset:
            raise MessageNotFound(
                f"{self.root}: no data at {at}: the log reaches from {self.min_offset} to "
                f"{self.max_offset}"
            )
        stop = min(at + size, self.max_offset)
        parts = []
        while at < stop:
            start, end, data = self._log.window_at(at, 1)
            if not start <= at < end:
                reason = "the file is missing or too short"
                raise self._log.corrupt(at, Damage(DamageKind.TRUNCATED, reason))
            part = data[at - start : min(stop, end) - start]
            parts.append(bytes(part))
            at += len(part)
        return b"".join(parts)

    def roll_next_file(self, physical_offset: int) -> int:
        """Return where the next log file after a physical offset starts (``rollNextFile``).

        The next file may not exist yet.
        """
        self._require_open()
        at = arguments.offset(physical_offset, "physical_offset")
        files = self._log.files
        size = files.file_size
        if not files.files:
            # If the log has no file yet, use the file size with which a writer would create one.
            size = self.layout.config.mapped_file_size_commit_log or DEFAULT_COMMIT_LOG_FILE
        return at - at % size + size

    def _stored(self, frame: Frame) -> StoredMessage:
        return StoredMessage(frame, broker=self.broker, delay_levels_ms=self.layout.delay_levels_ms)

    def _frame_at(self, physical_offset: int) -> Frame | None:
        if not self.min_offset <= physical_offset < self.max_offset:
            return None
        found = self._log.sound_frame_at(physical_offset)
        missing = self._log.missing_file(physical_offset) if found is None else None
        if missing is not None:
            raise missing
        return found

    @abstractmethod
    def _log_reader(self) -> LogReader:
        """Return an object that reads the log frame by frame, up to the current end of the log."""


NOT_FOR_USERS: Final = frozenset(
    (
        "bound",
        "check_stored",
        "config_tables",
        "has_queue_files",
        "load_staged",
        "log_feed",
        "put_stored",
        "start",
    )
)
"""Public methods and attributes that only logquarry itself uses; ``dir()`` of a store omits them.
"""


def get_arguments(
    topic: str, queue_id: int, offset: int, max_count: int, tag: str | None
) -> tuple[str, int, int, int, str | None]:
    """Check and return the arguments of a ``get``.

    As in RocketMQ, a negative offset raises no error, but gives the status OFFSET_TOO_SMALL, and a
    count below 1 means one message.
    """
    return (
        *arguments.queue(topic, queue_id),
        arguments.integer(offset, "offset"),
        arguments.integer(max_count, "max_count", least=arguments.INT_MIN, most=arguments.INT_MAX),
        arguments.optional(arguments.text, tag, "tag"),
    )


def renamed_topic(
    topic: str | Iterable[str], topics: str | Iterable[str] | None
) -> str | Iterable[str]:
    """Return ``topic``, the previous name of ``topics``; warn that ``topic`` is deprecated."""
    if topics is not None:
        raise UsageError("give topics; topic is its previous name")
    warnings.warn("scan(topic=...) is now scan(topics=...)", DeprecationWarning, stacklevel=3)
    return topic
