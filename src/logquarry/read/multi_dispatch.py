"""Finds out whether a store's broker adds messages to further queues (multi-dispatch, LMQ).

With ``enableMultiDispatch`` a broker writes into the frame of such a message the queues
(INNER_MULTI_DISPATCH) and the queue offset in each (INNER_MULTI_QUEUE_OFFSET). If an entry of a
queue points to a frame of another topic, and this frame names the queue, the setting was on. With
``enableLmq`` all queues named ``%LMQ%...`` have queue id 0, whichever queue the message is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from logquarry.disk.open_files import OpenFiles
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CONSUME_QUEUE
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.log_queues import LMQ_PREFIX, MULTI_SEPARATOR

_MOST_QUEUES: Final = 256
"""Maximum number of queues to read. Stores with LMQ have many, and any of them shows it."""


@dataclass(frozen=True, slots=True)
class MultiDispatchFound:
    """Multi-dispatch and LMQ, as the queues of a store show them.

    Attributes:
        path: folder of a queue that multi-dispatch fills.
        has_lmq: whether queues named ``%LMQ%...`` all have queue id 0; None if no queue shows it.
    """

    path: str
    has_lmq: bool | None


def find_multi_dispatch(layout: StoreLayout) -> MultiDispatchFound | None:
    """Find a queue that multi-dispatch fills; None if no queue shows that it is on.

    Reads the last entry of up to 256 queues, and the frame that it points to.
    """
    if layout.other_log is not None or not layout.commit_log.files:
        return None
    files = OpenFiles(layout)
    log = CommitLog(layout, files=files)
    topics = layout.read_topics()
    # Queues of multi-dispatch usually have no entry in topics.json: read these first.
    names = sorted(
        layout.queue_names,
        key=lambda key: (not key[0].startswith(LMQ_PREFIX), key[0] in topics),
    )
    path: str | None = None
    has_lmq: bool | None = None
    for topic, queue_id in names[:_MOST_QUEUES]:
        is_lmq = topic.startswith(LMQ_PREFIX)
        if path is not None and not is_lmq:
            break
        queue = ConsumeQueue(layout, topic, queue_id, files=files)
        entry = queue.last_entry
        if entry is None or entry.is_filler:
            continue
        frame = log.outcome_at(entry.physical_offset, check_crc=False)
        if not isinstance(frame, Frame) or not names_queue_of(frame, topic):
            continue
        path = path or f"{CONSUME_QUEUE}/{topic}/{queue_id}"
        if is_lmq and (queue_id or frame.queue_id):
            has_lmq = not queue_id
            break
    return None if path is None else MultiDispatchFound(path, has_lmq)


def names_queue_of(frame: Frame, topic: str) -> bool:
    """Whether multi-dispatch puts a frame of another topic into a queue of a topic."""
    if frame.topic.decode("utf-8", java.UTF8_ERRORS) == topic:
        return False
    found = props.decode_bytes(frame.properties)
    named = found.get(props.INNER_MULTI_DISPATCH, "").split(MULTI_SEPARATOR)
    return topic in named and props.INNER_MULTI_QUEUE_OFFSET in found
