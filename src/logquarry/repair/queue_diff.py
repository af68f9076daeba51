"""Compares the queues of two stores: consume queues, batch queues and queues in RocksDB.

A queue can be in files in one store, and in RocksDB in the other, because the settings of the two
brokers differ. Then only the fields that both forms have are compared: physical offset, size and
tags code. If both queues have the same form, all stored fields are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from logquarry.errors import CorruptFile
from logquarry.format.arrays import Bools, Records
from logquarry.format.queue_entry import FILLER_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.rocksdb import is_installed
from logquarry.read.batch_queue import BatchQueue
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, Queue
from logquarry.read.rocksdb_queue import QueueDb, RocksQueue, rocksdb_folders
from logquarry.repair.audit.differences import TagsRule, same_entries
from logquarry.repair.audit.other_queues import wrong_end

_MORE_FIELDS: Final = {
    "store_timestamp": "store time",
    "base": "first queue offset",
    "count": "number of messages",
}
_ORDER: Final = ("equal", "behind", "differs")

_Run = tuple[int, Records]


@dataclass(frozen=True, slots=True)
class LogBounds:
    """The first offset of a log (physical offset) or of a queue (queue offset), and the offset
    after the last one.
    """

    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class UnitPair:
    """The first entries that differ: (physical offset, size, tags code), or None if missing."""

    queue_offset: int
    a: tuple[int, int, int] | None
    b: tuple[int, int, int] | None

    def to_json(self) -> dict[str, Any]:
        """Return the entries as a JSON object (docs/json.md)."""
        names = ("physical_offset", "size", "tags_code")
        a, b = (unit and dict(zip(names, unit, strict=True)) for unit in (self.a, self.b))
        return {"queue_offset": self.queue_offset, "a": a, "b": b}


@dataclass(frozen=True, slots=True)
class QueueDiff:
    """One queue in both stores; ``a`` and ``b`` are None if the store lacks the queue.

    Attributes:
        state: ``equal``, ``behind`` (one queue lacks only the last entries of the other) or
            ``differs``.
    """

    topic: str
    queue_id: int
    state: str
    a: LogBounds | None
    b: LogBounds | None
    difference: UnitPair | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Common:
    """The range of physical offsets that the logs of both stores have in common.

    If ``is_live``, a writer has a store open, and its queues may lack the newest messages.
    """

    start: int
    end: int
    is_live: bool

    def relevant(self, rows: Records) -> Bools:
        """Return a mask: whether each entry points to a message in the common part of the logs."""
        found: Bools = (
            (rows["size"] > 0)
            & (rows["size"] != FILLER_SIZE)
            & (rows["physical_offset"] >= self.start)
            & (rows["physical_offset"] < self.end)
        )
        return found


class StoreQueues:
    """The queues of one store.

    Attributes:
        forms: queue -> the queue in each form that the store has (files, RocksDB).
        unread: folder of a RocksDB that could not be read -> the reason.
    """

    def __init__(self, layout: StoreLayout, files: OpenFiles) -> None:
        self.unread: dict[str, str] = {}
        self.forms: dict[QueueKey, dict[type[Queue], Queue]] = {}
        self._layout = layout
        self._has_abort = layout.has_abort
        queues: list[Queue] = [*ConsumeQueue.all_of(layout, files)]
        queues += BatchQueue.all_of(layout, files)
        databases = []
        for folder in rocksdb_folders(layout):
            if not is_installed():
                self.unread[folder] = "install it with: pip install 'logquarry[rocksdb]'"
                continue
            try:
                databases.append(QueueDb(layout, folder))
            except CorruptFile as error:
                self.unread[folder] = error.reason
        # Compare the RocksDB from which readers of the store read.
        self._db = db = max(databases, key=lambda one: one.dispatched_end, default=None)
        if db is not None:
            queues += (RocksQueue(db, key, layout.commit_log.start, None) for key in db.bounds)
        for queue in queues:
            self.forms.setdefault(queue.key, {})[type(queue)] = queue

    def could_not_read(self, error: CorruptFile) -> bool:
        """Record ``error`` and return True if it is damage in the RocksDB of this store."""
        db = self._db
        if db is None or self._layout.filesystem.full_path(db.folder) != error.path:
            return False
        self.unread[db.folder] = error.reason
        return True

    def wrong_end(self, key: QueueKey) -> str | None:
        """Return why the end of a queue in RocksDB is wrong, or None."""
        return None if self._db is None else wrong_end(self._db, key, self._layout.commit_log.start)

    def lags_at(self, queue: Queue | None, place: int) -> bool:
        """Whether a crash explains that a queue lacks the entry of a message at ``place``."""
        is_in_files = queue is not None and not isinstance(queue, RocksQueue)
        if self._db is None or is_in_files:
            return False
        return self._has_abort and place >= self._db.dispatched_end


def compare_queues(a: StoreQueues, b: StoreQueues, common: Common) -> Iterator[QueueDiff]:
    """Compare all queues of two stores; yield the results sorted by topic and queue id. Leave out
    queues that cannot be read. If a store has unreadable queues, also leave out the queues that
    only the other store has.
    """
    for key in sorted(a.forms.keys() | b.forms.keys()):
        left, right = a.forms.get(key, {}), b.forms.get(key, {})
        if (a.unread and not left) or (b.unread and not right):
            continue
        pairs = dict.fromkeys(
            (left.get(form, _any(left)), right.get(form, _any(right))) for form in {**left, **right}
        )
        found = []
        for pair in pairs:
            try:
                found.append(_Pair(key, *pair, a, b, common).compared())
            except CorruptFile as error:
                if not any(one.could_not_read(error) for one in (a, b)):
                    raise
        if found:
            yield max(found, key=lambda one: _ORDER.index(one.state))


def _any(forms: Mapping[type[Queue], Queue]) -> Queue | None:
    return next(iter(forms.values()), None)


class _Pair:
    """Compares one queue of two stores, for the messages that both logs have."""

    def __init__(
        self,
        key: QueueKey,
        a: Queue | None,
        b: Queue | None,
        of_a: StoreQueues,
        of_b: StoreQueues,
        common: Common,
    ) -> None:
        self._key = key
        self._queues = a, b
        self._stores = of_a, of_b
        self._common = common
        self._bounds = _bounds(a), _bounds(b)
        self._ends = [0 if one is None else one.max_offset for one in self._bounds]
        self._is_same_form = type(a) is type(b)

    def compared(self) -> QueueDiff:
        """Return the result, with the first entries that differ."""
        for start, left, right in _aligned(*map(self._runs, self._queues)):
            found = self._first_difference(start, left, right)
            if found is not None:
                return found
        if self._ends[0] == self._ends[1]:
            return self._diff("equal")
        for name, store, queue in zip("ab", self._stores, self._queues, strict=True):
            wrong = store.wrong_end(self._key) if isinstance(queue, RocksQueue) else None
            if wrong is not None:
                return self._diff("differs", f"in {name}, {wrong}")
        name = "b" if self._ends[0] > self._ends[1] else "a"
        return self._diff("behind", f"{name} ends before the other queue")

    def _runs(self, queue: Queue | None) -> Iterator[_Run]:
        if queue is None:
            return iter(())
        read = queue.rows if self._is_same_form else queue.runs
        return read(0, queue.max_offset)

    def _first_difference(self, start: int, left: Records, right: Records) -> QueueDiff | None:
        if left.tobytes() == right.tobytes():
            return None
        differs = ~same_entries(left, right, TagsRule())
        more = [name for name in _MORE_FIELDS if name in (left.dtype.names or ())]
        for name in more:
            differs |= left[name] != right[name]
        differs &= self._common.relevant(left) | self._common.relevant(right)
        if not differs.any():
            return None
        at = int(differs.argmax())
        rows = left[at], right[at]
        names = [_MORE_FIELDS[name] for name in more if rows[0][name] != rows[1][name]]
        return self._described(start + at, rows, names)

    def _described(self, number: int, rows: tuple[np.void, np.void], more: list[str]) -> QueueDiff:
        units = [tuple(row.item()[:3]) if row["size"] > 0 else None for row in rows]
        for side, lacking, other in ((0, "b", 1), (1, "a", 0)):
            unit = units[side]
            if unit is None or units[other] is not None:
                continue
            text = f"{lacking} lacks entry {number}"
            is_last = number >= self._ends[other]
            if is_last and self._common.is_live:
                return self._diff("behind", f"{text} so far; a writer has a store open")
            if is_last and self._stores[other].lags_at(self._queues[other], unit[0]):
                return self._diff("behind", f"{text} so far; the broker had not written it")
            reason = f"{text}, but its log has the message at {unit[0]}"
            return self._diff("differs", reason, UnitPair(number, *units))
        is_more = units[0] == units[1] and more
        reason = f"entry {number} differs" + (f": {', '.join(more)}" if is_more else "")
        return self._diff("differs", reason, UnitPair(number, *units))

    def _diff(self, state: str, reason: str = "", pair: UnitPair | None = None) -> QueueDiff:
        if reason and any(isinstance(queue, RocksQueue) for queue in self._queues):
            reason = f"RocksDB: {reason}"
        return QueueDiff(*self._key, state, *self._bounds, pair, reason)


def _bounds(queue: Queue | None) -> LogBounds | None:
    return None if queue is None else LogBounds(queue.min_offset, queue.max_offset)


def _aligned(*queues: Iterator[_Run]) -> Iterator[tuple[int, Records, Records]]:
    """Cut the runs of two queues at the same queue offsets. Yield the queue offset of each piece,
    and its entries in each queue: zeros if only the other queue has entries there.
    """
    heads = [next(runs, None) for runs in queues]
    while known := [head for head in heads if head is not None]:
        start = min(offset for offset, _ in known)
        ends = {at for offset, rows in known for at in (offset, offset + len(rows))}
        count = min(ends - {start}) - start
        sides = [np.zeros(count, known[0][1].dtype)] * 2
        for at, head in enumerate(heads):
            if head is not None and head[0] == start:
                sides[at], left = head[1][:count], head[1][count:]
                heads[at] = (start + count, left) if len(left) else next(queues[at], None)
        yield start, sides[0], sides[1]
