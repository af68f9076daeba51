"""What can go wrong, as one tree of exceptions.

::

    LogquarryError
    ├── UsageError            an option or argument that makes no sense (CLI exit code 2)
    │   └── BadFilter         ... an SQL92 filter: column and reason
    ├── SourceNotReadable     what is to be imported cannot be read, or is no export (exit code 3)
    ├── BadRow                ... or one of its rows is no message: path, number, reason (code 1)
    ├── JavaNotFound          no Java that Spark can run on (in spark/java.py)
    ├── ReplicationError      a master and a slave cannot go on (exit code 4)
    │   ├── ProtocolViolation   the other side sends what the protocol has not got
    │   └── LogsDiverged        a slave's log is no beginning of its master's
    └── StoreError            something about a store
        ├── StoreNotFound     there is no store at that path, or it cannot be read (exit code 3)
        ├── StoreUnavailable  closed, read-only, busy, poisoned or refused (exit code 4)
        │   └── UnsupportedStore  the store has a feature that the call cannot handle
        ├── MessageRejected   the message was not stored: illegal or too large
        ├── MessageNotFound   no message stands where one was asked for
        ├── DecompressionError   a body does not decompress, or to too much
        └── CorruptStore      bytes that are not what the format says (exit code 1)
            ├── CorruptFrame  ... in the commit log: path, offset, kind and reason
            └── CorruptFile   ... in any other file of the store

Exceptions say that a thing was not done. Outcomes that are part of normal work (an offset past the
end of a queue, a torn tail) are values, never exceptions.
"""

from __future__ import annotations

from typing import Any


class LogquarryError(Exception):
    """Base of everything this package raises on purpose."""


class UsageError(LogquarryError, ValueError):
    """An argument, option or configuration value that cannot be meant."""


class BadFilter(UsageError):
    """An SQL92 filter that cannot be understood.

    Attributes:
        expression: the filter.
        column: where it ends to make sense, from 1.
        reason: what is wrong there, in words.
    """

    def __init__(self, expression: str, column: int, reason: str) -> None:
        super().__init__(f"column {column} of the filter {expression[:200]!r}: {reason}")
        self.expression = expression
        self.column = column
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return BadFilter, (self.expression, self.column, self.reason)


class SourceNotReadable(LogquarryError):
    """What is to be imported is not there, cannot be read, or is not what an export writes."""


class BadRow(LogquarryError):
    """A row that is to be imported is no message, or none that the store takes.

    Attributes:
        path: the file.
        unit: what ``number`` counts there: line or row.
        number: of the row, from 1.
        reason: what is wrong, in words.
    """

    def __init__(self, path: str, unit: str, number: int, reason: str) -> None:
        super().__init__(f"{path}: {unit} {number}: {reason}")
        self.path = path
        self.unit = unit
        self.number = number
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRow, (self.path, self.unit, self.number, self.reason)


class ReplicationError(LogquarryError):
    """A master and a slave cannot go on with each other."""


class ProtocolViolation(ReplicationError):
    """The other side of a connection sends what no master or slave would.

    Attributes:
        events: what came before it with the same bytes, and counts.
    """

    def __init__(self, message: str, *, events: Any = ()) -> None:
        super().__init__(message)
        self.events = list(events)


class LogsDiverged(ReplicationError):
    """A slave's log is no beginning of its master's: it is ahead of it, or has other bytes.

    Attributes:
        offset: from where on, as far as that is known.
    """

    def __init__(self, message: str, *, offset: int) -> None:
        super().__init__(message)
        self.offset = offset

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_diverged, (str(self), self.offset)


class StoreError(LogquarryError):
    """Something about a store or its files."""


class StoreNotFound(StoreError):
    """No store at the path, or its files cannot be read.

    Not an ``OSError``, so that "there is no store" is never taken for a failing disk.
    """


class StoreUnavailable(StoreError):
    """The store is closed, read-only, busy or locked by another process.

    Attributes:
        status: RocketMQ's put status: SERVICE_NOT_AVAILABLE, OS_PAGECACHE_BUSY or
            CREATE_MAPEDFILE_FAILED.
        appended: of a ``put_many`` that came to an end in the middle: the result for the messages
            that are in the log, else None. They are the first ones of the call.
    """

    def __init__(self, message: str, *, status: str = "SERVICE_NOT_AVAILABLE") -> None:
        super().__init__(message)
        self.status = status
        self.appended: Any = None


class UnsupportedStore(StoreUnavailable):
    """The store has a feature of RocketMQ that the call cannot handle. Nothing was changed.

    Attributes:
        feature: the feature's name, as ``store.features`` and ``info --json`` spell it.
        evidence: the files, folders or settings that show the feature.
    """

    def __init__(self, message: str, *, feature: str, evidence: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.feature = feature
        self.evidence = evidence

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_unsupported, (str(self), self.feature, self.evidence)


class MessageRejected(StoreError):
    """The message was not stored.

    Attributes:
        status: RocketMQ's put status: MESSAGE_ILLEGAL or PROPERTIES_SIZE_EXCEEDED; UNKNOWN_ERROR
            where multi-dispatch makes the message too large.
        reason: our word: too_large, properties, truncated, larger_than_file, topic, hosts or
            delay.
        index: of a message of ``put_many``: its number, else None.
        appended: as :class:`StoreUnavailable` has it; only where multi-dispatch makes a message
            too large. Every other refusal comes before the first message is appended.
    """

    def __init__(self, message: str, *, status: str, reason: str, index: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.index = index
        self.appended: Any = None

    def of_message(self, index: int) -> MessageRejected:
        """The same, said of a message of many."""
        text = f"message {index}: {self}"
        return MessageRejected(text, status=self.status, reason=self.reason, index=index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_rejected, (str(self), self.status, self.reason, self.index)


class MessageNotFound(StoreError, LookupError):
    """No message stands where one was asked for: outside the log, or not at a frame's start."""


class DecompressionError(StoreError, ValueError):
    """The body is not what its flag says, or is larger than the limit."""


class CorruptStore(StoreError):
    """Bytes that are not what the format says, with the place where they stand.

    Attributes:
        path: the file, as a string.
        offset: for commit log files the physical offset, for others the position in the file.
        kind: a short stable word (the ``kind`` of a verify finding).
        reason: what is wrong, in words.
    """

    def __init__(self, path: str, offset: int, reason: str, *, kind: str = "corrupt") -> None:
        super().__init__(f"{path}: at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not survive pickling by default, and these cross
        # from Spark's workers to the driver.
        return _rebuild_corrupt, (type(self), self.path, self.offset, self.reason, self.kind)


class CorruptFrame(CorruptStore):
    """Damage in the commit log."""


class CorruptFile(CorruptStore):
    """Damage in a queue file, an index file, the checkpoint or a configuration file."""


def _rebuild_unsupported(message: str, feature: str, evidence: tuple[str, ...]) -> UnsupportedStore:
    return UnsupportedStore(message, feature=feature, evidence=evidence)


def _rebuild_diverged(message: str, offset: int) -> LogsDiverged:
    return LogsDiverged(message, offset=offset)


def _rebuild_corrupt(
    cls: type[CorruptStore], path: str, offset: int, reason: str, kind: str
) -> CorruptStore:
    return cls(path, offset, reason, kind=kind)


def _rebuild_rejected(message: str, status: str, reason: str, index: int | None) -> MessageRejected:
    return MessageRejected(message, status=status, reason=reason, index=index)
