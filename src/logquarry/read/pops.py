"""Finds the messages that consumers of RocketMQ 5 have received with a pop request, but not
acknowledged.

Each delivery for a pop request is called a pop. The broker records pops in these places, and a
store may have records in all of them::

    rmq_sys_REVIVE_LOG_*   check points (tag ck) and acknowledgements (ack, bAck). They wait in
                           rmq_sys_wheel_timer until the messages become visible again.
    kvStore/               RocksDB, column family popState: a record for each message
    config/consumerOrderInfo.json    the last pop of each queue of ordered groups
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from logquarry.errors import CorruptFile, UnreadableFile, UsageError
from logquarry.format import broker_json
from logquarry.format import properties as props
from logquarry.format.broker_json import whole
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
_MOST_OF_A_POP: Final = 127
"""Maximum number of messages in a check point, because its field ``num`` is a byte."""


class Unacknowledged(NamedTuple):
    """Messages of one queue that a group has popped and not acknowledged.

    ``topic`` is the retry topic if the group popped the messages from the retry topic, as a
    repeated delivery. ``oldest`` is the time of the oldest pop, in ms since 1970.
    """

    group: str
    topic: str
    queue_id: int
    messages: int
    oldest: int


class Pops(NamedTuple):
    """The unacknowledged messages of each queue and group, sorted. If some could not be read,
    ``hint`` is the reason; else None.
    """

    queues: tuple[Unacknowledged, ...]
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object for ``stats --json``."""
        return {"queues": [one._asdict() for one in self.queues], "hint": self.hint}


class _Pop(NamedTuple):
    """One pop; ``time`` is in ms."""

    group: str
    topic: str
    queue_id: int
    time: int


_Popped = dict[tuple[str, str, int], dict[int, int]]
"""(group, topic, queue id) -> queue offset -> time of the pop."""


def unacknowledged_pops(layout: StoreLayout) -> Pops:
    """Find the messages that were popped and not acknowledged. Very recent pops are missing,
    because they are not in the store's files yet.
    """
    popped: _Popped = defaultdict(dict)
    _add_check_points(popped, _revive_messages(layout))
    with contextlib.suppress(FileNotFoundError, UnreadableFile, ValueError, TypeError, LookupError):
        _add_orders(popped, broker_json.decode(layout.filesystem.read(_ORDERS))["table"])
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
    path = f"{CONFIG}/{broker_json.CONSUMER_OFFSET_FILE}"
    try:
        offsets = broker_json.decode_consumer_offsets(layout.filesystem.read(path))
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
    """Add the messages that are in a check point (``PopCheckPoint``) and not acknowledged.

    Like the broker, the function ignores invalid messages.
    """
    acknowledged: set[tuple[_Pop, int]] = set()
    points: list[tuple[_Pop, int]] = []
    for frame in frames:
        tag = props.decode_bytes(frame.properties).get(props.TAGS)
        with contextlib.suppress(ValueError, TypeError, LookupError):
            body = broker_json.decode(frame.body)
            pop = _Pop(_text(body, "c"), _text(body, "t"), _whole(body, "q"), _whole(body, "pt"))
            if tag == _CHECK_POINT:
                points += [(pop, offset) for offset in _offsets_left(body)]
            else:
                offsets = body["aol"] if "aol" in body else [body["ao"]]
                acknowledged.update([(pop, whole(offset, "ao")) for offset in offsets])
    for pop, offset in points:
        if (pop, offset) not in acknowledged:
            popped[pop[:3]][offset] = pop.time


def _offsets_left(body: dict[str, Any]) -> list[int]:
    """The queue offsets in a check point that are not acknowledged: their bits in the field ``bm``
    are not set.
    """
    start, bits, steps = _whole(body, "so"), _whole(body, "bm"), body.get("d")
    if not steps:
        count = _whole(body, "n")
        if not 0 <= count <= _MOST_OF_A_POP:
            raise ValueError(f"'n' is {count}, more than a byte holds")
        steps = range(count)
    offsets = [start + whole(step, "d") for step in steps]
    return [offset for number, offset in enumerate(offsets) if not bits >> number & 1]


def _add_orders(popped: _Popped, table: Any) -> None:
    """Add the last pops of ordered groups (``ConsumerOrderInfoManager``).

    Invalid entries are ignored. Raises TypeError if ``table`` is not a JSON object.
    """
    for key, queues in _members(table):
        topic, _, group = key.rpartition("@")
        with contextlib.suppress(TypeError):
            for queue_id, order in _members(queues):
                with contextlib.suppress(ValueError, TypeError, LookupError):
                    offsets, time = _offsets_of_order(order), _whole(order, "popTime")
                    of_queue = popped[group, topic, whole(queue_id, key)]
                    of_queue.update(dict.fromkeys(offsets, time))


def _offsets_of_order(order: dict[str, Any]) -> list[int]:
    first, *steps = (whole(step, "o") for step in order["o"])
    bits = whole(order.get("cm", 0), "cm")
    offsets = [first, *(first + step for step in steps)]
    return [offset for number, offset in enumerate(offsets) if not bits >> number & 1]


def _add_records(popped: _Popped, layout: StoreLayout) -> str | None:
    """Add the records in ``kvStore/`` (``PopConsumerRecord``). If they cannot be read, return the
    reason.
    """
    try:
        for _, value in RocksDb(layout.filesystem, KV_STORE).items(_COLUMN_FAMILY):
            record = broker_json.decode(value)
            key = _text(record, "groupId"), _text(record, "topicId"), _whole(record, "queueId")
            popped[key][_whole(record, "offset")] = _whole(record, "popTime")
    except UsageError:
        return "pops in kvStore/ are not included: install the extra logquarry[rocksdb]"
    except (CorruptFile, ValueError, TypeError, LookupError) as error:
        return f"kvStore/ cannot be read, and not all of its pops are included: {error}"
    return None


def _members(table: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(table, dict):
        raise TypeError(f"{table!r} is not an object")
    return table.items()


def _whole(table: dict[str, Any], name: str) -> int:
    return whole(table[name], name)


def _text(table: dict[str, Any], name: str) -> str:
    value = table[name]
    if not isinstance(value, str):
        raise TypeError(f"{name!r} holds {value!r} instead of text")
    return value
