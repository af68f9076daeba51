"""The exceptions of this package, as one tree.

::

    LogquarryError
    ├── UsageError            invalid option or argument (CLI exit code 2)
    │   ├── WrongType         an argument of a wrong type; also a TypeError
    │   ├── BadFilter         invalid SQL92 filter: column and reason
    │   └── MissingExtra      a package that the call needs is not installed
    ├── SourceNotReadable     an import's source cannot be read, or is not an export (exit code 3)
    ├── BadRow                a row of an import is not a message: path, number, reason (code 1)
    ├── JavaNotFound          no Java that Spark can run on (in spark/session.py)
    ├── ReplicationError      a master and a slave cannot continue (exit code 4)
    │   ├── ProtocolViolation   the peer sent bytes that violate the protocol
    │   └── LogsDiverged        a slave's log is not the beginning of its master's log
    └── StoreError            a problem with a store
        ├── StoreNotFound     there is no store at that path, or it cannot be read (exit code 3)
        ├── StoreUnavailable  closed, read-only, busy, refused, or a sync failed (exit code 4)
        │   └── UnsupportedStore  the store has a feature that the call cannot handle
        ├── MessageRejected   the message was not stored: illegal or too large
        ├── MessageNotFound   there is no message at the given place
        ├── DecompressionError   a body does not decompress, or exceeds the limit
        └── CorruptStore      bytes that violate the format (exit code 1)
            ├── CorruptFrame  ... in the commit log: path, offset, kind and reason
            └── CorruptFile   ... in any other file of the store
                ├── MisnamedFile  a log file whose frames contradict its name
                └── UnreadableFile  a file with bytes that the disk does not deliver

A call that raises an exception has not completed its work. If a result can occur in normal work,
the call returns it instead of raising an exception. Examples are an offset after the end of a
queue, and a torn tail.
"""

from __future__ import annotations

import errno
import sys
from typing import Any, Final

LIMITS: Final = {
    errno.EMFILE: "raise the process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOMEM: "free memory",
}
"""What the user can do if ``open`` fails because of a limit of the process or of the system."""

_OF_READS: Final = LIMITS | {
    errno.ENODEV: "the file system cannot map files into memory: copy the store to another file "
    "system",
    errno.ESTALE: "mount the network file system again",
}
_OF_WRITES: Final = _OF_READS | {
    errno.ENOSPC: "free some space, or inodes if df -i shows that all are in use",
    errno.EDQUOT: "free some space, or raise the user's quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "mount the file system for writing. The system's log (dmesg) can show why it is "
    "read-only",
    errno.EIO: "check the disk. The system's log (dmesg) can show the fault",
    errno.EACCES: "use an account that may write there",
    errno.EPERM: "use an account that may write there",
}
_ATTRIBUTES: Final = ". If lsattr shows the attribute i or a, remove it with chattr"
"""What the user can also do on Linux after EPERM. Other systems lack these commands."""


def is_at_limit(error: BaseException) -> bool:
    """Return whether the cause of an error is that the process or the system has no free descriptor
    or no memory. Such an error shows nothing about the store.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in LIMITS


def write_reason(error: OSError) -> str:
    """Return why a write, a sync or another change failed, and, if known, what the user can do
    next.
    """
    step = _OF_WRITES.get(error.errno or 0)
    if step is not None and error.errno == errno.EPERM and sys.platform == "linux":
        step += _ATTRIBUTES
    reason = error.strerror or str(error)
    return reason if step is None else f"{reason}: {step}"


def reason_of(error: OSError) -> str:
    """Return why a system call failed. If the disk is not the cause, the text also says what the
    user can do next.
    """
    step = _OF_READS.get(error.errno or 0)
    reason = error.strerror or str(error)
    return reason if step is None else f"{reason}: {step}"


class LogquarryError(Exception):
    """Base of all exceptions that this package raises deliberately."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles exceptions of its workers. By default, Python passes only the text to the
        # constructor when it unpickles an exception. This fails if the constructor takes other
        # arguments.
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[LogquarryError], args: tuple[Any, ...]) -> LogquarryError:
    return kind.__new__(kind, *args)


class UsageError(LogquarryError, ValueError):
    """An invalid argument, option or configuration value."""


class WrongType(UsageError, TypeError):
    """An argument of a wrong type. The error text names the argument and the accepted types."""


class BadFilter(UsageError):
    """An invalid SQL92 filter. ``column`` is the error's position in the filter, counted from 1."""

    def __init__(self, expression: str, column: int, reason: str) -> None:
        super().__init__(f"column {column} of the filter {expression[:200]!r}: {reason}")
        self.expression = expression
        self.column = column
        self.reason = reason


class MissingExtra(UsageError):
    """A package that the call needs is not installed. The text names the extra to install."""


class SourceNotReadable(LogquarryError):
    """The source of an import is missing, unreadable, or not written by an export."""


class BadRow(LogquarryError):
    """A row of an import is not a message, or the store rejects the row.

    ``number`` is the number of the line or row (``unit``), counted from 1.
    """

    def __init__(self, path: str, unit: str, number: int, reason: str) -> None:
        super().__init__(f"{path}: {unit} {number}: {reason}")
        self.path = path
        self.unit = unit
        self.number = number
        self.reason = reason


class ReplicationError(LogquarryError):
    """A master and a slave cannot continue to replicate."""


class ProtocolViolation(ReplicationError):
    """The peer sent bytes that violate the protocol.

    ``events`` contains the events (decoded messages of the protocol) that came before the invalid
    bytes.
    """

    def __init__(self, message: str, *, events: Any = ()) -> None:
        super().__init__(message)
        self.events = list(events)


class LogsDiverged(ReplicationError):
    """A slave's log is longer than its master's log, or has other bytes.

    ``offset`` is the physical offset of the first difference.
    """

    def __init__(self, message: str, *, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class StoreError(LogquarryError):
    """A problem with a store or its files."""


class StoreNotFound(StoreError):
    """No store is at the path, or its files cannot be read.

    This class is not a subclass of ``OSError``, so that callers do not confuse a missing store with
    a failing disk.

    Attributes:
        suggestion: the given path, and the path of a nearby store that the user probably meant;
            None if there is no such store.
    """

    suggestion: tuple[str, str] | None = None


class StoreUnavailable(StoreError):
    """The store is closed, read-only, busy or locked by another process.

    Attributes:
        status: RocketMQ's put status: SERVICE_NOT_AVAILABLE, OS_PAGECACHE_BUSY or
            CREATE_MAPEDFILE_FAILED.
        appended: if a ``put_many`` fails after it has appended messages, the result for these
            messages; else None.
    """

    def __init__(self, message: str, *, status: str = "SERVICE_NOT_AVAILABLE") -> None:
        super().__init__(message)
        self.status = status
        self.appended: Any = None


class UnsupportedStore(StoreUnavailable):
    """The store has a feature of RocketMQ that the call cannot handle. The call has changed
    nothing.

    Attributes:
        feature: the feature's name, as in ``store.features`` and ``info --json``. If the recovery
            ``"rocketmq"`` does not support the store, the name is ``recovery_mode``.
        evidence: the files, folders or settings that show the feature.
    """

    def __init__(self, message: str, *, feature: str, evidence: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.feature = feature
        self.evidence = evidence


class MessageRejected(StoreError):
    """The message was not stored.

    Attributes:
        status: RocketMQ's put status: MESSAGE_ILLEGAL or PROPERTIES_SIZE_EXCEEDED; UNKNOWN_ERROR
            if multi-dispatch makes the message too large.
        reason: logquarry's code for the cause, such as too_large, properties, topic or delay.
        index: index of the message in a ``put_many``, from 0; None for a single put.
        appended: as in :class:`StoreUnavailable`. Usually ``put_many`` checks all messages first,
            so after a rejection none of them is in the log. One case is different: if
            multi-dispatch (delivery to further queues) makes a message too large, the log already
            has the messages before it.
    """

    def __init__(self, message: str, *, status: str, reason: str, index: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.index = index
        self.appended: Any = None

    def of_message(self, index: int) -> MessageRejected:
        """Return a copy of this exception for message ``index`` of a ``put_many``."""
        text = f"message {index}: {self}"
        return MessageRejected(text, status=self.status, reason=self.reason, index=index)


class MessageNotFound(StoreError, LookupError):
    """The given place is outside the log, or is not the start of a frame."""


class DecompressionError(StoreError, ValueError):
    """A body marked as compressed does not decompress, or exceeds the limit."""


class CorruptStore(StoreError):
    """Bytes that violate the format.

    Attributes:
        offset: physical offset if the bytes are in the commit log; else position in the file.
        kind: a short stable code (the ``kind`` of a verify finding).
    """

    def __init__(self, path: str, offset: int, reason: str, *, kind: str = "corrupt") -> None:
        super().__init__(f"{path}: at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason
        self.kind = kind


class CorruptFrame(CorruptStore):
    """Damage in the commit log."""


class CorruptFile(CorruptStore):
    """Damage in a file outside the commit log, or a file with a wrong name or size."""


class MisnamedFile(CorruptFile):
    """A log file has the name of another log file, or a name that is not a physical offset."""


class UnreadableFile(CorruptFile, ValueError):
    """The disk does not deliver bytes of a queue file, an index file or a small file.

    The class is a ``ValueError``, because callers of decoders expect a ValueError for invalid
    bytes.
    """
