"""Dispatches messages as RocketMQ does (``doDispatch``), by rules that depend on its version.

The rules are for stores with queue files. They come from ``CommitLog.recoverNormally``,
``recoverAbnormally`` and ``DefaultMessageStore.load`` of 4.9.3, 5.1.4, 5.3.3, 5.4.0 and 5.5.0. No
file distinguishes 5.1 from 5.3, so 5.1 gets the rules of 5.3, which dispatches more: after a clean
shutdown, 5.1 dispatches no message of the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.format import index, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.java_frame import JavaRequest, check_message
from logquarry.format.properties import MULTI_SEPARATOR
from logquarry.format.rows import POSITION
from logquarry.log.codec import Window
from logquarry.log.follow import Followed
from logquarry.read.features import Writer
from logquarry.read.log_queues import QueueKey, copy_key
from logquarry.repair.recover.java_queues import JavaQueue, JavaRefusal, Target
from logquarry.write.index_writer import IndexWriter
from logquarry.write.message_rules import LONGEST_NAME, name_fault
from logquarry.write.queue_writer import parts_of, units_of

_MOST_FILES: Final = 10


@dataclass(frozen=True, slots=True)
class JavaRules:
    """The rules of one RocketMQ version.

    Attributes:
        is_5: read V2 frames, know the delay levels during the recovery, and dispatch afterwards
            from the log's end on, not from the end of the queues.
        most_files: maximum number of last files that the recovery reads; None for no limit.
        starts_by_frame: the first frame of the first recovered file must be sound. A normal
            recovery compares its PHYSICALOFFSET, not the file's name, with the end of the queues.
        starts_by_offset: after a crash, begin at the file with the checkpoint's physical offset for
            the queues. Without this offset, compare store times.
    """

    name: str
    is_5: bool
    most_files: int | None = None
    starts_by_frame: bool = False
    starts_by_offset: bool = False


V4_9: Final = JavaRules("4.9.3", False)
V5_3: Final = JavaRules("5.3.3", True)
V5_4: Final = JavaRules("5.4.0", True, _MOST_FILES, True)
V5_5: Final = JavaRules("5.5.0", True, _MOST_FILES, True, True)


def rules_for(writer: Writer) -> JavaRules:
    """Return the rules of the version that wrote a store, as far as the files show the version."""
    if not writer.is_5:
        return V4_9
    assert writer.at_least is not None
    return {"5.4.0": V5_4, "5.5.0": V5_5}.get(writer.at_least, V5_3)


logger = logging.getLogger(__name__)

_QUEUED: Final = (sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_COMMIT)
_LONGEST_NUMBER: Final = 40
_NEVER_COPIED: Final = ("%RETRY%", "rmq_sys_", props.SCHEDULE_TOPIC)
"""Topics whose messages 5.x dispatches only to their own queue."""


class JavaDispatch:
    """Dispatches messages in the order of the log.

    ``open_index`` is called for the first message. ``messages`` and ``keys`` count dispatched
    messages and keys. ``store_timestamp`` and ``physical_offset`` are those of the last message in
    a queue.
    """

    def __init__(
        self,
        queues: dict[QueueKey, JavaQueue],
        config: StoreConfig,
        target: Target,
        open_index: Callable[[], IndexWriter | None],
        rules: JavaRules = V4_9,
    ) -> None:
        self.queues = queues
        self.messages = self.keys = 0
        self.store_timestamp: int | None = None
        self.physical_offset: int | None = None
        self._rules = rules
        self._config = config
        self._target = target
        self._open_index = open_index
        self._unsafe: set[str] = set()

    @cached_property
    def _index(self) -> IndexWriter | None:
        return self._open_index()

    def run(self, window: Window, run: Followed, levels_ms: tuple[int, ...]) -> None:
        """Dispatch a run of frames."""
        requests = run.requests
        if self._config.enable_multi_dispatch:
            # A queue can get copies and other messages of the run: keep the order of the log.
            data = window.data.data
            for position in run.rows[:, POSITION].tolist():
                found = check_message(
                    data, position, levels_ms=levels_ms, check_crc=False, is_5=self._rules.is_5
                )
                assert found.request is not None
                self.one(found.request)
            return
        for key, part in parts_of(run).items():
            queue = self._queue(key)
            if queue is not None:
                queue.put(part.offsets, part.units)
        queued = np.flatnonzero(requests.is_dispatched)
        if len(queued):
            self.store_timestamp = int(requests.store_timestamp[queued[-1]])
            self.physical_offset = int(requests.physical_offset[queued[-1]])
        self.messages += len(requests.size)
        self.keys += len(run.key_hashes)
        if self._index is not None:
            self._index.put(
                requests.physical_offset,
                requests.store_timestamp,
                run.key_hashes,
                run.key_numbers,
            )

    def one(self, request: JavaRequest) -> None:
        """Dispatch one message; raise JavaRefusal if RocketMQ would fail."""
        self.messages += 1
        kind = request.sys_flag & sys_flag.TRANSACTION_MASK
        if kind in _QUEUED:
            self._put((request.topic, request.queue_id), request.queue_offset, request)
            self.store_timestamp = request.store_timestamp
            self.physical_offset = request.physical_offset
            for key, offset in self._copies(request):
                self._put(key, offset, request)
        keys = [] if kind == sys_flag.TRANSACTION_ROLLBACK else _keys(request)
        self.keys += len(keys)
        if self._index is not None:
            hashes = [index.key_hash(request.topic, key) for key in keys]
            tag = (request.properties or {}).get(props.TAGS)
            if self._config.index_tags and tag and kind != sys_flag.TRANSACTION_ROLLBACK:
                hashes.append(java.positive_hash_code(index.tag_text(request.topic, tag)))
            self._index.put(
                np.array([request.physical_offset], np.int64),
                np.array([request.store_timestamp], np.int64),
                np.array(hashes, np.int64),
                np.zeros(len(hashes), np.int64),
            )

    def _put(self, key: QueueKey, offset: int, request: JavaRequest) -> None:
        queue = self._queue(key)
        if queue is not None:
            size = np.array([request.size], np.int64)
            physical, code = np.array([[request.physical_offset], [request.tags_code]], np.int64)
            queue.put(np.array([offset], np.int64), units_of(physical, size, code))

    def _queue(self, key: QueueKey) -> JavaQueue | None:
        """Return a queue, created if missing; None if a folder cannot have the topic's name."""
        queue = self.queues.get(key)
        if queue is None:
            topic = key[0]
            fault = name_fault(topic, "store", longest=LONGEST_NAME)
            if fault is not None:
                if topic not in self._unsafe:
                    self._unsafe.add(topic)
                    logger.error("topic %r gets no consume queue: %s", topic, fault)
                return None
            size = self._config.queue_file_size
            assert size is not None
            queue = self.queues[key] = JavaQueue(key, [], size, self._target)
        return queue

    def _copies(self, request: JavaRequest) -> Iterator[tuple[QueueKey, int]]:
        """Yield further queues of a message (``multiDispatchLmqQueue``)."""
        if not self._config.enable_multi_dispatch:
            return
        if self._rules.is_5 and (not request.properties or request.topic.startswith(_NEVER_COPIED)):
            return
        if request.properties is None:
            # QUIRK: checkMultiDispatchQueue dereferences null properties.
            raise JavaRefusal(
                f"the message at {request.physical_offset} has no properties, and RocketMQ's "
                "multi-dispatch fails without them"
            )
        named = request.properties.get(props.INNER_MULTI_DISPATCH, "")
        numbers = request.properties.get(props.INNER_MULTI_QUEUE_OFFSET, "")
        if not named.strip() or not numbers.strip():
            return
        names, offsets = _split(named), _split(numbers)
        if len(names) != len(offsets):
            return
        for name, text in zip(names, offsets, strict=True):
            yield copy_key(name, request.queue_id, self._config), _parse_long(text, request)


def _split(text: str) -> list[str]:
    """Split like Java's ``String.split``, which omits empty words at the end."""
    words = text.split(MULTI_SEPARATOR)
    while len(words) > 1 and not words[-1]:
        words.pop()
    return words if words[-1] or len(words) > 1 else []


def _parse_long(text: str, request: JavaRequest) -> int:
    digits = text[1:] if text[:1] in ("+", "-") else text
    value = int(text) if digits.isdecimal() and len(text) <= _LONGEST_NUMBER else None
    if value is None or not java.LONG_MIN <= value <= java.LONG_MAX:
        raise JavaRefusal(
            f"the message at {request.physical_offset} gives {text[:_LONGEST_NUMBER]!r} as its "
            "queue offset in another queue, but that is not a number"
        )
    return value


def _keys(request: JavaRequest) -> list[str]:
    if request.properties is None:
        return []
    unique = request.properties.get(props.UNIQ_KEY)
    rest = props.split_keys(request.properties.get(props.KEYS, ""))
    return rest if unique is None else [unique, *rest]
