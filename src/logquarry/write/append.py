"""The writer of the commit log: puts messages and batches.

Follows ``CommitLog.asyncPutMessage(s)`` of 4.9.3. :meth:`PutPath.put_common
<logquarry.write.put_path.PutPath.put_common>` puts a common message. Batches, dialect 3.1, and
messages with properties that the store acts on (a delay, WAIT, further queues) take the longer path
through :mod:`logquarry.write.encode` and :meth:`LogAppender.append`.

Guarantees: if a put raises, its message is not in the log.
"""

from __future__ import annotations

from collections.abc import Sequence

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Health, RunningFlags
from logquarry.errors import WrongType
from logquarry.message import Message, require_message, require_messages
from logquarry.read.log_queues import QueueKey
from logquarry.units import Clock
from logquarry.write.encode import MessageEncoder
from logquarry.write.encode_batch import encode_batch, encode_messages
from logquarry.write.frame_append import Settle
from logquarry.write.log_appender import (
    AppendRules,
    LogAppender,
)
from logquarry.write.put_path import settle_nothing
from logquarry.write.put_result import PutResult, PutStatus, refusal


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

    def append_reference(self, message: Message) -> tuple[PutResult, bool]:
        """See :meth:`PutPath.append_reference`."""
        encoded = self.encoder.encode(message)
        return self.append(encoded), encoded.wait

    def append_batch_reference(
        self,
        messages: Sequence[Message] | None,
        wire: bytes | None,
        message: Message | None,
    ) -> tuple[PutResult, bool]:
        """See :meth:`PutBatchPath.append_batch_reference`."""
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
