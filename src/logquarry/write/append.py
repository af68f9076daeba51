"""The writer of the commit log: puts messages and batches (``CommitLog.asyncPutMessage(s)``).

If a put raises an error, its message is not in the log. The rules of dialect 3.1 follow
``doAppend`` of RocketMQ 3.1.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Health, RunningFlags
from logquarry.format import frame, sys_flag
from logquarry.format.arrays import (
    BODY_AT,
    BODY_LENGTH,
    POSITION,
    PROPS_AT,
    PROPS_LENGTH,
    TOPIC_AT,
    TOPIC_LENGTH,
)
from logquarry.log.walk import Run
from logquarry.read.log_queues import QueueKey
from logquarry.units import Clock
from logquarry.write.encode import Encoded
from logquarry.write.frame_append import Settle
from logquarry.write.log_appender import AppendRules, end_file
from logquarry.write.put_batch_path import PutBatchPath
from logquarry.write.put_path import settle_nothing


class CommitLogWriter(PutBatchPath):
    """Puts messages into the log, like the put methods of ``CommitLog``. Any thread may put."""

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
            clock,
            {} if queue_offsets is None else queue_offsets,
            flags or RunningFlags(),
            health or Health(),
            settle,
            rules,
        )


_SYS_FLAG: Final = frame.HEAD.offsets["sys_flag"]
_QUEUE_OFFSET: Final = frame.HEAD.offsets["queue_offset"]
_PARTS: Final = ((BODY_AT, BODY_LENGTH), (TOPIC_AT, TOPIC_LENGTH), (PROPS_AT, PROPS_LENGTH))
_BLANK: Final = frame.BLANK.size


class ScratchBuffer:
    """The buffer for frames and blanks (``msgStoreItemMemory``).

    As in RocketMQ, a blank contains bytes of earlier frames.
    """

    def __init__(self, max_message_size: int) -> None:
        self._data = bytearray(max_message_size + _BLANK)

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes to the start of the buffer; the rest of the buffer does not change."""
        size = min(len(data), len(self._data))
        self._data[:size] = data[:size]

    def take_run(self, run: Run) -> None:
        """Copy the parts of each frame that a recovery reads: body, topic and properties.

        QUIRK: RocketMQ's recovery reads these parts into this buffer (test_dialect31.py:
        v3-blank/reopened).
        """
        rows = run.rows
        lengths = np.stack([rows[:, length] for _, length in _PARTS], axis=1).reshape(-1)
        starts = np.stack([rows[:, POSITION] + rows[:, at] for at, _ in _PARTS], axis=1).reshape(-1)
        # Each part is copied to the start of the buffer, so a later, longer part overwrites the
        # part. Copy only parts that are longer than all later parts.
        longest = np.maximum.accumulate(lengths[::-1])[::-1]
        behind = np.append(longest[1:], 0)
        for part in np.flatnonzero(lengths > behind).tolist():
            start = int(starts[part])
            self.take(run.window.data[start : start + int(lengths[part])].tobytes())

    def blank(self, size: int) -> bytes:
        """Return the bytes of a blank; fewer than ``size`` if the buffer is smaller."""
        self.take(frame.encode_blank(size))
        return bytes(self._data[:size])


class AppendRules31(AppendRules):
    """The rules of dialect 3.1. The appender calls the rules under the log's lock.

    A PREPARED message gets the next number of the state table as QUEUEOFFSET; a ROLLBACK keeps the
    number of its transaction. ``next_in_table`` is called only if the table has all messages of the
    log.
    """

    def __init__(self, scratch: ScratchBuffer, next_in_table: Callable[[], int]) -> None:
        self.next_number = next_in_table()
        self._next_in_table = next_in_table
        self._scratch = scratch

    def own_offset(self, encoded: Encoded) -> int:
        """See :meth:`AppendRules.own_offset`."""
        return self.next_number if _is_prepared(encoded.data) else encoded.own_offset

    def end_file(self, file: MappedFile) -> int:
        """See :meth:`AppendRules.end_file`."""
        left = file.room
        if left < _BLANK:
            return end_file(file)
        file.buffer[file.wrote : file.wrote + left] = self._scratch.blank(left).ljust(left, b"\0")
        file.advance(left)
        return left

    def appended(self, encoded: Encoded) -> None:
        """See :meth:`AppendRules.appended`."""
        data = encoded.data
        self._scratch.take(data)
        if _is_prepared(data):
            self.next_number = int.from_bytes(data[_QUEUE_OFFSET : _QUEUE_OFFSET + 8]) + 1

    def adopted(self) -> None:
        """See :meth:`AppendRules.adopted`."""
        self.next_number = self._next_in_table()


def _is_prepared(data: bytearray) -> bool:
    flags = int.from_bytes(data[_SYS_FLAG : _SYS_FLAG + 4])
    return sys_flag.transaction_type(flags) == sys_flag.TRANSACTION_PREPARED
