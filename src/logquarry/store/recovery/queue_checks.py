"""All queues of a store, compared with its log as that goes by, some of it found by threads."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Mapping
from dataclasses import dataclass

from logquarry.config import StoreConfig
from logquarry.files.layout import StoreLayout
from logquarry.scan.codec import Window
from logquarry.scan.follow import Followed, Follower, follow_run
from logquarry.scan.stretches import stretches_ahead
from logquarry.scan.walk import Run
from logquarry.store.dispatch.dispatcher import queue_name_fault
from logquarry.store.dispatch.queue_units import QueuePart, parts_with_copies
from logquarry.store.queue.consume_queue import Queue
from logquarry.store.queue.log_queues import QueueKey
from logquarry.store.recovery.queue_check import QueueCheck


class QueueParts:
    """Gathers what frames bring to their queues. For one run.

    Args:
        config: the store's settings.

    Attributes:
        parts: what some frames bring to each queue, in the log's order.
        has_keys: whether any of them has keys for the index.
        first_time: store time of the first, in milliseconds,
        last_time: and of the last.
    """

    def __init__(self, config: StoreConfig) -> None:
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
    ahead = stretches_ahead(layout, stretch_bytes, lambda: QueueParts(config))
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

    Attributes:
        has_keys: whether any message so far has keys for the index.
    """

    def __init__(
        self,
        queues: Mapping[QueueKey, Queue | None],
        config: StoreConfig,
        damage: Container[int],
    ) -> None:
        self.has_keys = False
        self._config = config
        self._damage = damage
        self._follower = Follower(config.delay_levels_ms)
        self._checks = {key: QueueCheck(key, disk, damage) for key, disk in queues.items()}

    def __iter__(self) -> Iterator[QueueCheck]:
        return (check for _, check in sorted(self._checks.items()))

    def take(self, run: Run | QueuedRun) -> None:
        """Some more frames of the log."""
        gathered = run.parts if isinstance(run, QueuedRun) else self._gathered(run)
        self.has_keys = self.has_keys or gathered.has_keys
        for parts in gathered.parts:
            for key, piece in parts.items():
                check = self._checks.get(key)
                if check is None:
                    if queue_name_fault(key[0]) is not None:
                        # It gets no queue.
                        continue
                    check = self._checks[key] = QueueCheck(key, None, self._damage)
                check.take(piece.offsets, piece.units)

    def _gathered(self, run: Run) -> QueueParts:
        gathered = QueueParts(self._config)
        for window, found in follow_run(self._follower, run):
            gathered(window, found)
        return gathered
