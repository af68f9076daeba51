"""Which index files of a store can stay, and from where on the index has to be built.

An index file is derived from the log, and costs little to make. So one that may be torn is not
repaired: after a crash only files that the checkpoint says are on the disk stay, as in RocketMQ,
which destroys all others (and then indexes again only a part of what they held, #8007).
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.recovery import TransactionCheck, keeps_transactions
from logquarry.dialect31.unit_files import TransactionFrame, transaction_frames
from logquarry.format import index
from logquarry.format.delay import SCHEDULE_TOPIC
from logquarry.format.frame import Frame
from logquarry.format.index import ENTRY, HEADER, IndexHeader, IndexShape
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower, follow_run
from logquarry.log.layout import INDEX, StoreLayout
from logquarry.log.splits import stretches_ahead
from logquarry.log.walk import Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import Queue
from logquarry.read.log_queues import QueueKey
from logquarry.repair.recover.queue_check import QueueCheck
from logquarry.write.dispatcher import queue_name_fault
from logquarry.write.queue_writer import QueuePart, parts_with_copies

_ENTRY_DTYPE = ENTRY.dtype()


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What is to be done to the index.

    Attributes:
        set_aside: names of the files that go, with the reason for each.
        built_from: messages from this physical offset on have to be put in,
        keys_there: but for so many first keys of the message there.
        kept_timestamp: store time of the last key that stays, 0 if none does.
    """

    set_aside: tuple[tuple[str, str], ...]
    built_from: int
    keys_there: int = 0
    kept_timestamp: int = 0


def plan_index(
    layout: StoreLayout,
    shape: IndexShape,
    *,
    log_start: int,
    log_end: int,
    is_closed: bool,
    synced_timestamp: int,
) -> IndexPlan:
    """What is to be done to the index of a store.

    Args:
        layout: the store's files.
        shape: slots and entries of each file.
        log_start: physical offset of the log's first byte.
        log_end: where the log ends.
        is_closed: whether the store was closed in order.
        synced_timestamp: the checkpoint's time of the index.
    """
    aside: list[tuple[str, str]] = []
    last: IndexHeader | None = None
    keys_there = 0
    log = CommitLog(layout)
    for entry in layout.index_files:
        data = layout.open_file(f"{INDEX}/{entry.name}").window(0, entry.size)
        fault = "a file before it goes" if aside else _fault(data, entry.size, shape, log_end)
        if fault is None:
            header = index.decode_header(data)
            if not is_closed and (
                header.entry_count < shape.entries or header.end_timestamp > synced_timestamp
            ):
                fault = "the checkpoint does not say that all of it was on the disk"
            else:
                fault = _misfit(log, log_start, header, last)
            if fault is None:
                last = header
                keys_there = _keys_of_last(data, shape, header)
        if fault is not None:
            aside.append((entry.name, fault))
    if last is not None and last.entry_count > 1:
        return IndexPlan(tuple(aside), last.end_offset, keys_there, last.end_timestamp)
    return IndexPlan(tuple(aside), log_start)


def index_fault(layout: StoreLayout, shape: IndexShape, *, log_end: int) -> str | None:
    """What is wrong with an index, as the headers of its files tell; None if nothing is.

    Args:
        layout: the store's files.
        shape: slots and entries of each.
        log_end: where the log ends.
    """
    log = CommitLog(layout)
    last: IndexHeader | None = None
    for entry in layout.index_files:
        path = f"{INDEX}/{entry.name}"
        data = layout.open_file(path).window(0, min(entry.size, HEADER.size))
        fault = _header_fault(data, entry.size, shape, log_end)
        if fault is None:
            header = index.decode_header(data)
            fault = _misfit(log, layout.commit_log.start, header, last)
            last = header
        if fault is not None:
            return f"{layout.filesystem.full_path(path)}: {fault}"
    return None


def _misfit(
    log: CommitLog, log_start: int, header: IndexHeader, before: IndexHeader | None
) -> str | None:
    """Why a file is none of this log, or does not follow the one before it; None if it does."""
    if header.entry_count > 1 and not _is_of(log, log_start, header):
        return f"its last key is of no message that stands at {header.end_offset}"
    if before is not None and header.end_offset < before.end_offset:
        return "it ends before the one before it"
    return None


def _keys_of_last(data: memoryview, shape: IndexShape, header: IndexHeader) -> int:
    """How many entries at a file's end are of its last message: others may be in the next."""
    number = header.entry_count
    while number > 1:
        entry = index.decode_entry(data, shape.entry_position(number - 1))
        if entry.physical_offset != header.end_offset:
            break
        number -= 1
    return header.entry_count - number


def _is_of(log: CommitLog, log_start: int, header: IndexHeader) -> bool:
    """Whether the log has the message of a file's last key, as far as it goes back.

    An index of another store points into the midst of messages, where none can be read from.
    """
    if header.end_offset < log_start:
        return True
    outcome = log.outcome_at(header.end_offset, check_crc=False)
    return isinstance(outcome, Frame) and outcome.store_timestamp == header.end_timestamp


def _header_fault(data: memoryview, size: int, shape: IndexShape, log_end: int) -> str | None:
    """What is wrong with a file, as its size and its header tell."""
    if size != shape.file_size:
        return f"it has {size} bytes, and {shape.file_size} belong there"
    header = index.decode_header(data)
    if not 1 <= header.entry_count <= shape.entries:
        return f"its header counts {header.entry_count} entries of at most {shape.entries}"
    if header.entry_count > 1 and not 0 <= header.end_offset < log_end:
        return f"its last key is of a message at {header.end_offset}, and the log ends at {log_end}"
    return None


def _fault(data: memoryview, size: int, shape: IndexShape, log_end: int) -> str | None:
    """What is wrong with a file, None if it can stay."""
    fault = _header_fault(data, size, shape, log_end)
    if fault is not None:
        return fault
    header = index.decode_header(data)
    if header.entry_count == 1:
        return None
    count = header.entry_count - 1
    entries = np.frombuffer(data, _ENTRY_DTYPE, count, shape.entry_position(1))
    offsets = entries["physical_offset"].astype(np.int64)
    if (np.diff(offsets) < 0).any():
        return "its entries are not in the log's order"
    if int(offsets[0]) != header.begin_offset or int(offsets[-1]) != header.end_offset:
        return "its entries are not those that its header tells of"
    if (entries["previous"] >= np.arange(1, count + 1)).any() or (entries["previous"] < 0).any():
        return "a chain of it goes on to a later entry"
    return None


# --------------------------------------------------------------------------------------------------
# All queues of a store, compared with its log as that goes by, some of it found by threads.

_CLOCK_MS: Final = 1_000
"""How far the times of 3.x may be apart that it took for the same message."""


class QueueParts:
    """Gathers what frames bring to their queues. For one run.

    Args:
        config: the store's settings.
        with_transactions: whether to gather those frames.

    Attributes:
        parts: what some frames bring to each queue, in the log's order.
        transactions: those of them that concern transactions of 3.x, where that is asked for.
        has_keys: whether any of them has keys for the index.
        first_time: store time of the first, in milliseconds,
        last_time: and of the last.
    """

    def __init__(self, config: StoreConfig, *, with_transactions: bool = False) -> None:
        self.transactions: list[TransactionFrame] = []
        self._with_transactions = with_transactions
        self.parts: list[dict[QueueKey, QueuePart]] = []
        self.has_keys = False
        self.first_time = self.last_time = 0
        self._config = config

    def __call__(self, window: Window, found: Followed) -> None:
        """Some more frames."""
        times = found.requests.store_timestamp
        if not self.parts:
            self.first_time = int(times[0])
        self.last_time = int(times[-1])
        self.has_keys = self.has_keys or len(found.key_numbers) > 0
        self.parts.append(parts_with_copies(window, found, self._config))
        if self._with_transactions:
            self.transactions += transaction_frames(window, found.rows)


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """Sound frames one after the other, and what they bring to their queues.

    Attributes:
        start: physical offset of the first,
        end: and behind the last.
        count: how many.
        parts: what they bring.
    """

    start: int
    end: int
    count: int
    parts: QueueParts

    @property
    def first_time(self) -> int:
        """Store time of the first, in milliseconds."""
        return self.parts.first_time

    @property
    def last_time(self) -> int:
        """Store time of the last, in milliseconds."""
        return self.parts.last_time


def queued_ahead(
    layout: StoreLayout, config: StoreConfig, stretch_bytes: int
) -> Generator[QueuedRun]:
    """The sound stretches of a log as threads find them."""
    kept = keeps_transactions(layout, config)
    ahead = stretches_ahead(
        layout, stretch_bytes, lambda: QueueParts(config, with_transactions=kept)
    )
    try:
        for found, parts in ahead:
            yield QueuedRun(found.start, found.end, found.count, parts)
    finally:
        ahead.close()


class QueueChecks:
    """All queues of a store, compared with its log as that goes by.

    Args:
        queues: those that there are; None for one whose files are of no use.
        config: the store's settings.
        damage: the damage of the log up to where it was read.
        transactions: state table and redo log, where the store has them.

    Attributes:
        has_keys: whether any message so far has keys for the index.
        transactions: as above.
    """

    def __init__(
        self,
        queues: Mapping[QueueKey, Queue | None],
        config: StoreConfig,
        damage: Container[int],
        transactions: TransactionCheck | None = None,
    ) -> None:
        self.has_keys = False
        self.transactions = transactions
        self._config = config
        self._damage = damage
        self._follower = Follower(config.delay_levels_ms, keys=config.index_keys)
        self._checks = {key: self._check(key, disk) for key, disk in queues.items()}

    def __iter__(self) -> Iterator[QueueCheck]:
        return (check for _, check in sorted(self._checks.items()))

    def _check(self, key: QueueKey, disk: Queue | None) -> QueueCheck:
        is_3 = self.transactions is not None or self._config.is_3_1
        slack = _CLOCK_MS if is_3 and key[0] == SCHEDULE_TOPIC else 0
        return QueueCheck(key, disk, self._damage, tags_slack=slack)

    def take(self, run: Run | QueuedRun) -> None:
        """Some more frames of the log."""
        gathered = run.parts if isinstance(run, QueuedRun) else self._gathered(run)
        self.has_keys = self.has_keys or gathered.has_keys
        if self.transactions is not None:
            self.transactions.take(gathered.transactions)
        for parts in gathered.parts:
            for key, piece in parts.items():
                check = self._checks.get(key)
                if check is None:
                    if queue_name_fault(key[0]) is not None:
                        # It gets no queue.
                        continue
                    check = self._checks[key] = self._check(key, None)
                check.take(piece.offsets, piece.units)

    def _gathered(self, run: Run) -> QueueParts:
        wanted = self.transactions is not None
        gathered = QueueParts(self._config, with_transactions=wanted)
        for window, found in follow_run(self._follower, run):
            gathered(window, found)
        return gathered
