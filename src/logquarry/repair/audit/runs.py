"""Runs (sound frames without a gap between them), with the facts that an audit needs.

A long log is cut into stretches that threads read ahead (:func:`runs_ahead`). The audit goes
through the log in order. If a thread's run begins where the audit is, the audit uses this run; it
reads all other parts itself (:func:`logquarry.log.places.guided`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import TransactionFrame, transaction_frames
from logquarry.format.rows import POSITION, SIZE
from logquarry.log import columns
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower, follow_run
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import stretches_ahead
from logquarry.log.walk import Run
from logquarry.read.log_queues import QueueKey
from logquarry.write.queue_writer import QueuePart, parts_with_copies

Parts = dict[QueueKey, QueuePart]
"""The entries of some frames by queue."""


class Facts(Protocol):
    """Collects facts about the frames of one run."""

    @property
    def first_time(self) -> int:
        """Store time of the first frame in milliseconds."""

    @property
    def last_time(self) -> int:
        """Store time of the last frame in milliseconds."""

    def __call__(self, window: Window, followed: Followed) -> None:
        """Take the next frames. The arrays are valid only during the call."""


F = TypeVar("F", bound=Facts)


@dataclass(frozen=True, slots=True)
class AuditedRun(Generic[F]):
    """Sound frames without a gap between them.

    Attributes:
        start: physical offset of the first frame.
        end: physical offset after the last frame.
        count: number of frames.
        facts: what a collector (:class:`FrameFacts`, for example) found in them.
    """

    start: int
    end: int
    count: int
    facts: F

    @property
    def first_time(self) -> int:
        """Store time of the first frame in milliseconds."""
        return self.facts.first_time

    @property
    def last_time(self) -> int:
        """Store time of the last frame in milliseconds."""
        return self.facts.last_time


def runs_ahead(
    layout: StoreLayout, stretch_bytes: int, make: Callable[[], F]
) -> Generator[AuditedRun[F]]:
    """The sound stretches of a log, read by threads; see :func:`stretches_ahead`.

    Args:
        layout: the store's files.
        stretch_bytes: bytes of the log that one thread reads at once.
        make: makes an empty collector of facts.
    """
    with closing(stretches_ahead(layout, stretch_bytes, make)) as ahead:
        for found, facts in ahead:
            yield AuditedRun(found.start, found.end, found.count, facts)


def audited(follower: Follower, run: Run, facts: F) -> AuditedRun[F]:
    """A run that the audit read itself, with its facts."""
    for window, followed in follow_run(follower, run):
        facts(window, followed)
    return AuditedRun(run.start, run.end, len(run.rows), facts)


class FrameFacts:
    """Collects the faults of frames for verify, and the facts to compare with queues and index.

    Args:
        config: settings of the store; frames above its maxMessageSize are reported.

    Attributes:
        parts: dispatch requests and keys, and the entries by queue, in the log's order.
        oversized: physical offset and size of each frame that is too large.
        suspects: physical offset and size of each frame whose topic or properties are not valid
            text.
        wrong_crcs: physical offset and size of each frame whose property CRC is wrong.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.parts: list[tuple[Followed, Parts]] = []
        self.oversized: list[tuple[int, int]] = []
        self.suspects: list[tuple[int, int]] = []
        self.wrong_crcs: list[tuple[int, int]] = []
        self._config = config

    @property
    def first_time(self) -> int:
        """Store time of the first frame in milliseconds."""
        return int(self.parts[0][0].requests.store_timestamp[0])

    @property
    def last_time(self) -> int:
        """Store time of the last frame in milliseconds."""
        return int(self.parts[-1][0].requests.store_timestamp[-1])

    def __call__(self, window: Window, followed: Followed) -> None:
        """Take the next frames."""
        rows = followed.rows
        large = np.flatnonzero(rows[:, SIZE] > self._config.max_message_size).tolist()
        for found, which in (
            (self.oversized, large),
            (self.suspects, columns.suspect_rows(window, rows)),
            (self.wrong_crcs, columns.wrong_property_crcs(window, rows)),
        ):
            found += [(window.base + int(rows[n, POSITION]), int(rows[n, SIZE])) for n in which]
        # Copy these arrays, because the follower reuses them.
        kept = replace(
            followed,
            rows=rows[:0],
            key_hashes=followed.key_hashes.copy(),
            key_numbers=followed.key_numbers.copy(),
        )
        self.parts.append((kept, parts_with_copies(window, followed, self._config)))


class EntryFacts:
    """Collects the queue entries of frames, with the copies by multi-dispatch.

    Args:
        config: settings of the store.
        with_transactions: whether to collect the frames of transactions of 3.x.

    Attributes:
        parts: entries by queue, in the log's order.
        transactions: frames of transactions, if they are collected.
        has_keys: whether any frame has keys for the index.
        first_time: store time of the first frame in milliseconds.
        last_time: store time of the last frame in milliseconds.
    """

    def __init__(self, config: StoreConfig, *, with_transactions: bool = False) -> None:
        self.parts: list[Parts] = []
        self.transactions: list[TransactionFrame] = []
        self.has_keys = False
        self.first_time = self.last_time = 0
        self._config = config
        self._with_transactions = with_transactions

    def __call__(self, window: Window, followed: Followed) -> None:
        """Take the next frames."""
        times = followed.requests.store_timestamp
        if not self.parts:
            self.first_time = int(times[0])
        self.last_time = int(times[-1])
        self.has_keys = self.has_keys or len(followed.key_numbers) > 0
        self.parts.append(parts_with_copies(window, followed, self._config))
        if self._with_transactions:
            self.transactions += transaction_frames(window, followed.rows)
