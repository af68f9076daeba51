"""All queues of a store, compared with its log as that goes by, some of it found by threads."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from logquarry.config import StoreConfig
from logquarry.files.layout import StoreLayout
from logquarry.format.delay import SCHEDULE_TOPIC
from logquarry.scan.codec import Window
from logquarry.scan.follow import Followed, Follower, follow_run
from logquarry.scan.stretches import stretches_ahead
from logquarry.scan.walk import Run
from logquarry.store.dispatch.dispatcher import queue_name_fault
from logquarry.store.dispatch.queue_units import QueuePart, parts_with_copies
from logquarry.store.queue.consume_queue import Queue
from logquarry.store.queue.log_queues import QueueKey
from logquarry.store.recovery.queue_check import QueueCheck
from logquarry.store.state_table.frames import TransactionFrame, transaction_frames
from logquarry.store.state_table.recovery import TransactionCheck, keeps_transactions

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
        self._follower = Follower(config.delay_levels_ms, keys_of_3_1=config.is_3_1)
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
