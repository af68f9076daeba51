"""Finds the messages of RocketMQ 5 that consumers popped and have not acknowledged.

The broker keeps the pops in these places; a store may have all of them::

    rmq_sys_REVIVE_LOG_*   check points (tag ck) and acknowledgements (ack, bAck). They wait in
                           rmq_sys_wheel_timer until the messages become visible again.
    kvStore/               RocksDB, column family popState: a record for each message
    config/consumerOrderInfo.json    the last pop of each queue of ordered groups
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from logquarry.errors import CorruptFile, UnreadableFile, UsageError
from logquarry.format import broker_config, fastjson
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb, is_there
from logquarry.log.store_files import CONFIG
from logquarry.log.walk import LogReader
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, Queue
from logquarry.read.rocksdb_queue import derived_queues, rocksdb_folders
from logquarry.read.timers import timers_of

KV_STORE: Final = "kvStore"
REVIVE_TOPIC: Final = "rmq_sys_REVIVE_LOG_"
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"

_ORDERS: Final = f"{CONFIG}/consumerOrderInfo.json"
_COLUMN_FAMILY: Final = "popState"
_CHECK_POINT: Final = "ck"


class Unacknowledged(NamedTuple):
    """Messages of one queue that a group has popped and not acknowledged.

    If messages were popped again, ``topic`` is the retry topic. ``oldest`` is a time in ms.
    """

    group: str
    topic: str
    queue_id: int
    messages: int
    oldest: int


class Pops(NamedTuple):
    """The unacknowledged pops, sorted; ``hint`` is the reason why some pops are missing."""

    queues: tuple[Unacknowledged, ...]
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object for ``stats --json``."""
        return {"queues": [one._asdict() for one in self.queues], "hint": self.hint}


_Popped = dict[tuple[str, str, int], dict[int, int]]
"""(group, topic, queue id) -> queue offset -> time of the pop."""


def unacknowledged_pops(layout: StoreLayout) -> Pops:
    """Find the pops that consumers have not acknowledged; very recent pops are not in the files."""
    popped: _Popped = defaultdict(dict)
    _add_check_points(popped, _revive_messages(layout))
    with contextlib.suppress(FileNotFoundError, UnreadableFile, ValueError, TypeError, LookupError):
        _add_orders(popped, fastjson.decode(layout.filesystem.read(_ORDERS))["table"])
    hint = None
    if is_there(layout.filesystem, KV_STORE):
        hint = _add_records(popped, layout)
    found = [
        Unacknowledged(*key, len(offsets), min(offsets.values()))
        for key, offsets in sorted(popped.items())
        if offsets
    ]
    return Pops(tuple(found), hint)


def _revive_messages(layout: StoreLayout) -> Iterator[Frame]:
    log = CommitLog(layout)
    queues: dict[QueueKey, Queue] = {}
    if rocksdb_folders(layout):
        queues.update(derived_queues(layout, LogReader(layout, check_crc=False))[0])
    for key in layout.queue_names:
        queues[key] = ConsumeQueue(layout, *key, log_min_offset=log.min_offset)
    queues = {key: one for key, one in queues.items() if key[0].startswith(REVIVE_TOPIC)}
    if not queues:
        return
    path = f"{CONFIG}/{broker_config.CONSUMER_OFFSET_FILE}"
    try:
        offsets = broker_config.decode_consumer_offsets(layout.filesystem.read(path))
    except (FileNotFoundError, UnreadableFile, ValueError, TypeError):
        offsets = {}
    places: list[int] = []
    for (topic, queue_id), queue in sorted(queues.items()):
        # The stored offset is the queue offset of the last message that the broker has handled.
        last = offsets.get((topic, REVIVE_GROUP), {}).get(queue_id, -1)
        start = max(last + 1, queue.min_offset)
        places += [entry.physical_offset for _, entry in queue.entries(start)]
    waiting = timers_of(layout).waiting.values()
    places += [one.physical_offset for one in waiting if one.topic.startswith(REVIVE_TOPIC)]
    for place in sorted(places):
        frame = log.outcome_at(place)
        if isinstance(frame, Frame):
            yield frame


def _add_check_points(popped: _Popped, frames: Iterable[Frame]) -> None:
    """Add the messages of check points that are not acknowledged (``PopCheckPoint``)."""
    acknowledged: set[tuple[Any, ...]] = set()
    points: list[tuple[tuple[Any, ...], int]] = []
    for frame in frames:
        tag = props.decode_bytes(frame.properties).get(props.TAGS)
        with contextlib.suppress(ValueError, TypeError, LookupError):
            body = json.loads(frame.body)
            pop = body["c"], body["t"], int(body["q"]), int(body["pt"])
            if tag == _CHECK_POINT:
                start, bits = int(body["so"]), int(body["bm"])
                steps = body.get("d") or range(int(body["n"]))
                points += [
                    (pop, start + int(step))
                    for number, step in enumerate(steps)
                    if not bits >> number & 1
                ]
            else:
                offsets = body["aol"] if "aol" in body else [body["ao"]]
                acknowledged.update((*pop, int(offset)) for offset in offsets)
    for pop, offset in points:
        if (*pop, offset) not in acknowledged:
            popped[pop[:3]][offset] = pop[3]


def _add_orders(popped: _Popped, table: dict[str, Any]) -> None:
    """Add the last pops of ordered groups (``ConsumerOrderInfoManager``)."""
    for key, queues in table.items():
        topic, _, group = key.rpartition("@")
        for queue_id, order in queues.items():
            first, *steps = order["o"]
            bits = int(order.get("cm", 0))
            for number, offset in enumerate([first, *(first + step for step in steps)]):
                if not bits >> number & 1:
                    popped[group, topic, int(queue_id)][int(offset)] = int(order["popTime"])


def _add_records(popped: _Popped, layout: StoreLayout) -> str | None:
    """Add ``kvStore/``'s records (``PopConsumerRecord``); return the reason if that fails."""
    try:
        for _, value in RocksDb(layout.filesystem, KV_STORE).items(_COLUMN_FAMILY):
            record = json.loads(value)
            key = record["groupId"], record["topicId"], int(record["queueId"])
            popped[key][int(record["offset"])] = int(record["popTime"])
    except UsageError:
        return "pops in kvStore/ are not included: install the extra logquarry[rocksdb]"
    except (CorruptFile, ValueError, TypeError, LookupError) as error:
        return f"kvStore/ cannot be read, and not all of its pops are included: {error}"
    return None
