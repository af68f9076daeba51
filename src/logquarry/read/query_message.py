"""Finds messages by key: with the index (``DefaultMessageStore.queryMessage``) or in the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from logquarry.format import properties as props
from logquarry.format import sys_flag
from logquarry.format.frame import Frame
from logquarry.format.rows import POSITION
from logquarry.log.readable import rereads
from logquarry.log.walk import Event, Run
from logquarry.read.index import Index
from logquarry.stored_message import StoredMessage

_ROUNDS: Final = 3
"""How often ``queryMessage`` reads the index, each time further back."""

Lookup = Callable[[int], Frame | None]
"""The sound frame at a physical offset, None if there is none."""


@rereads
def query_message(
    index: Index, lookup: Lookup, topic: str, key: str, max_count: int, begin: int, end: int
) -> list[Frame]:
    """Messages that the index has under a key, in the order of the log.

    As in Java, the answer includes messages of other keys with the same hash, and a message twice
    if the index has it twice. Messages that the log no longer holds are left out.
    """
    found: list[Frame] = []
    last_time = end
    for _ in range(_ROUNDS):
        offsets = index.query_offsets(topic, key, max_count, begin, last_time)
        if not offsets:
            break
        for number, offset in enumerate(sorted(offsets)):
            message = lookup(offset)
            if message is None:
                continue
            if number == 0:
                # QUIRK: if the oldest message was deleted, the next round reads the same again.
                last_time = message.store_timestamp
            found.append(message)
        if found or last_time < begin:
            break
    return found


def search_log(
    events: Iterable[Event], topic: str, key: str, max_count: int, begin: int, end: int
) -> list[Frame]:
    """The newest messages that an index would have under a key, in the order of the log.

    This reads the whole log, and decodes only frames that contain the bytes of the key. ``begin``
    and ``end`` are compared with the exact store time.
    """
    if not key or max_count <= 0:
        return []
    needle = key.encode("utf-8", "surrogatepass")
    newest: deque[Frame] = deque(maxlen=max_count)
    for event in events:
        if not isinstance(event, Run):
            continue
        starts = event.rows[:, POSITION]
        base = int(starts[0])
        data = event.window.data[base : event.end - event.window.base].tobytes()
        at = data.find(needle)
        while at >= 0:
            number = int(np.searchsorted(starts, base + at, "right")) - 1
            outcome = event.window.decode(int(starts[number]), check_crc=False)
            if (
                isinstance(outcome, Frame)
                and begin <= outcome.store_timestamp <= end
                and has_key(outcome, topic, key)
            ):
                newest.append(outcome)
            if number + 1 == len(starts):
                break
            at = data.find(needle, int(starts[number + 1]) - base)
    return list(newest)


def has_key(frame: Frame, topic: str, key: str) -> bool:
    """Whether RocketMQ indexes a message under a topic and a key (``IndexService.buildIndex``).

    Its keys are its UNIQ_KEY and each word of its KEYS. A message that was rolled back has no keys.
    """
    message = StoredMessage(frame)
    if sys_flag.transaction_type(frame.sys_flag) == sys_flag.TRANSACTION_ROLLBACK:
        return False
    if message.topic != topic:
        return False
    return key == message.uniq_key or key in props.split_keys(message.keys or "")


def of_key(message: StoredMessage, key: str) -> tuple[StoredMessage, ...]:
    """The messages of an inner batch that have a key, or all if none has it."""
    batch = message.unwrap()
    if len(batch) == 1:
        return batch
    found = tuple(
        one for one in batch if key == one.uniq_key or key in props.split_keys(one.keys or "")
    )
    return found or batch
