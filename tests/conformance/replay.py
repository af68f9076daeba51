"""Repeats recorded puts of RocketMQ in this library's store."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import RunningFlags
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.testing.clock import FakeClock
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.dispatcher import Dispatcher
from logquarry.write.frame_append import Settle
from logquarry.write.index_writer import IndexWriter
from logquarry.write.put_result import PutResult
from logquarry.write.queue_table import QueueTable

Input = Mapping[str, Any]


def message_of(put: Input) -> Message:
    """The message of a recorded input; of a batch, what its messages share."""
    return Message(
        put["topic"],
        b"" if put["kind"] == "batch" else base64.b64decode(put["body"] or ""),
        queue_id=put["queueId"],
        # The golden inputs give the properties as a map; Java's HashMap gave the string its order.
        properties=dict(put["properties"]),
        properties_string=put["propertiesString"],
        flag=put["flag"],
        sys_flag=put["sysFlag"],
        born_timestamp=put["bornTimestamp"],
        born_host=put["bornHost"],
        store_host=put["storeHost"],
        reconsume_times=put["reconsumeTimes"],
        prepared_transaction_offset=put["preparedTransactionOffset"],
    )


def wire_of(put: Input) -> bytes:
    """The wire form of a recorded batch."""
    return base64.b64decode(put["body"])


class OurLog:
    """Only this library's log: no flush, no queues."""

    def __init__(self, root: Path, params: Mapping[str, Any], settle: Settle | None = None) -> None:
        self.root = root
        self.config = StoreConfig.from_mapping(params)
        self.clock = FakeClock()
        self.flags = RunningFlags()
        assert self.config.mapped_file_size_commit_log is not None
        self.disk = Disk()
        self.files = MappedFileQueue(
            self.disk, root / "commitlog", self.config.mapped_file_size_commit_log
        )
        # Opening a store makes the schedule topic's queues.
        levels = range(len(self.config.delay_levels_ms))
        self.offsets: dict[QueueKey, int] = {(props.SCHEDULE_TOPIC, i): 0 for i in levels}
        make = partial(
            CommitLogWriter,
            self.files,
            self.config,
            clock=self.clock,
            queue_offsets=self.offsets,
            flags=self.flags,
            health=self.disk.health,
        )
        self.writer = make() if settle is None else make(settle=settle)

    def put(self, put: Input, store_timestamp: int | None = None) -> PutResult:
        if store_timestamp is not None:
            self.clock.now = store_timestamp
        message = message_of(put)
        if put["kind"] == "batch":
            return self.writer.put_batch(wire=wire_of(put), message=message)
        return self.writer.put(message)

    @property
    def topic_queue_table(self) -> dict[str, int]:
        return {f"{topic}-{queue_id}": next_ for (topic, queue_id), next_ in self.offsets.items()}

    def dispatch(self) -> None:
        """Fill queues and index with all that is in the log."""
        shape = self.config.index_shape
        assert shape is not None
        dispatcher = Dispatcher(
            self.files,
            QueueTable(self.disk, self.root, self.config, {}, self.files).writer,
            IndexWriter(self.disk, self.root / "index", shape, clock=self.clock).put,
            self.config,
            start=0,
        )
        dispatcher.dispatch_until()
        assert dispatcher.offset == self.files.max_offset

    def close(self) -> None:
        self.files.close()


def append_facts(result: PutResult) -> dict[str, Any]:
    """A result as the oracle writes its ``AppendMessageResult``."""
    return {
        "status": result.append_status.value,
        "wroteOffset": result.physical_offset,
        "wroteBytes": result.size,
        "msgId": result.message_id,
        "storeTimestamp": result.store_timestamp,
        "logicsOffset": result.queue_offset,
        "msgNum": result.message_count,
    }
