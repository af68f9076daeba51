"""Counts messages, sizes, times and tags of a log in one scan. The memory for a scan does not grow
with the log.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from logquarry.arguments import Progress
from logquarry.format import arrays as r
from logquarry.format import properties as props
from logquarry.format.arrays import Int64
from logquarry.log import columns
from logquarry.log.columns import Decoding
from logquarry.log.frames import unwrapped
from logquarry.log.walk import BlankSpan, DamagedSpan, Event, ExpiredSpan, LogEnd, LogReader, Run
from logquarry.store.message_store import MessageStore
from logquarry.text import printable, size_text

MOST_BINS: Final = 96
_BIN_SIZES_MS: Final = tuple(
    number * unit
    for unit, numbers in (
        (1, (10, 20, 50, 100, 200, 500)),
        (1_000, (1, 2, 5, 10, 15, 30)),
        (60_000, (1, 2, 5, 10, 15, 30)),
        (3_600_000, (1, 2, 3, 6, 12)),
        (86_400_000, (1, 2, 7, 14, 28, 84, 364)),
    )
    for number in numbers
)
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 100.0)

_EXACT_MS: Final = 1 << 10
"""Latencies below this number of milliseconds are exact; larger latencies are rounded to about 1%.
"""
_STEPS: Final = 64
_LATENCY_BINS: Final = _EXACT_MS + 40 * _STEPS
_MOST_TAGS: Final = 10_000
_SIZE_BINS: Final = 34


@dataclass(slots=True)
class FileUse:
    """The use of one log file, in bytes."""

    path: str
    base: int
    room: int
    messages: int = 0
    blank: int = 0
    damaged: int = 0

    @property
    def unused(self) -> int:
        """Number of bytes at the file's end that are not used yet."""
        return max(0, self.room - self.messages - self.blank - self.damaged)

    @property
    def label(self) -> str:
        """The file's name."""
        return printable(self.path.rpartition("/")[2])

    def spans(self) -> list[dict[str, Any]]:
        """Return one row of the file map for each kind of bytes in the file. Damaged bytes are
        counted in the row for messages.
        """
        rows: list[dict[str, Any]] = []
        at = 0
        for use, length in (
            ("messages", self.messages + self.damaged),
            ("unused", self.unused),
            ("blank", self.blank),
        ):
            if length:
                rows.append(self.span(use, at, length))
            at += length
        return rows

    def span(self, use: str, at: int, length: int) -> dict[str, Any]:
        """Return a row of the file map. Its ``from`` and ``to`` are shares of the file, 0 to 1."""
        room = max(1, self.room)
        return {
            "file": self.label,
            "use": use,
            "from": at / room,
            "to": min(1.0, (at + length) / room),
            "text": f"{size_text(length)} ({length / room:.2%})",
        }


@dataclass(slots=True)
class Survey:
    """The counts of :func:`survey`. Times are in milliseconds since 1970.

    Attributes:
        bin_ms: width of a time bin; ``first_bin`` is the start of the first bin.
        bytes: bytes of the frames of each topic.
        over_time: number of messages of each topic in each time bin.
        body_sizes: bit length of a body's size in bytes -> number of messages with such a body.
        tags: tag -> number of messages. The key None is for messages without a tag.
        tags_cut: whether the log has more different tags than the survey counts.
        ahead: number of messages whose born time is after their store time.
        first_time: lowest store time of a message; None if there are no messages.
    """

    bin_ms: int
    first_bin: int
    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    over_time: dict[str, Int64] = field(default_factory=dict)
    body_sizes: Int64 = field(default_factory=lambda: np.zeros(_SIZE_BINS, np.int64))
    tags: Counter[str | None] = field(default_factory=Counter)
    tags_cut: bool = False
    delay_levels: Counter[int] = field(default_factory=Counter)
    files: list[FileUse] = field(default_factory=list)
    damage: list[DamagedSpan] = field(default_factory=list)
    ahead: int = 0
    first_time: int | None = None
    last_time: int | None = None
    _latencies: Int64 = field(default_factory=lambda: np.zeros(_LATENCY_BINS, np.int64))
    _slowest: int = 0

    @property
    def total(self) -> int:
        """Number of messages of all topics."""
        return sum(self.messages.values())

    def latency_ms(self, percentile: float) -> int:
        """Return the latency (store time minus born time) at a percentile (0 to 100)."""
        counted = int(self._latencies.sum())
        if percentile >= 100 or counted == 0:
            return self._slowest
        wanted = math.ceil(counted * percentile / 100)
        at = int(np.searchsorted(np.cumsum(self._latencies), wanted))
        return min(_latency_of(at), self._slowest)

    @property
    def has_latencies(self) -> bool:
        """Whether at least one message has a store time at or after its born time."""
        return bool(self._latencies.any())


def survey(
    store: MessageStore,
    span: tuple[int | None, int | None],
    progress: Progress | None = None,
) -> Survey:
    """Scan a store's log, and count its messages. Damaged parts are skipped.

    ``span`` is (store time of the first message, store time of the last message). The time bins
    cover the time from the first to the last message.
    """
    first, last = span[0] or 0, max(span[0] or 0, span[1] or 0)
    width = bin_size(last - first)
    found = Survey(width, first // width * width)
    bins = (last - found.first_bin) // width + 1
    log = store.layout.commit_log
    found.files = [FileUse(file.path, file.base, log.file_size) for file in log.files]
    reader = LogReader(store.layout, bound=store.bound, live=store.is_live)
    length = store.max_offset - store.min_offset
    for event in reader.events():
        if isinstance(event, Run):
            _add_bytes(found, event)
            for run in unwrapped((event,)):
                _add_run(found, run, bins)
        elif isinstance(event, DamagedSpan):
            found.damage.append(event)
        _use(found, event)
        if progress is not None and isinstance(event, Run):
            progress(min(event.end - log.start, length), length)
    return found


def bin_size(span_ms: int) -> int:
    """Return the smallest usual bin width, in milliseconds, for which MOST_BINS bins cover the
    time.
    """
    # With a damaged or forged store time, the span can be too long for the usual widths.
    least = -(-span_ms // MOST_BINS)
    return next((size for size in _BIN_SIZES_MS if size >= least), least)


def _add_bytes(found: Survey, run: Run) -> None:
    ids, names = columns.topic_ids(run.window, run.rows)
    sizes = np.bincount(ids, run.rows[:, r.SIZE], minlength=len(names)).astype(np.int64).tolist()
    for name, size in zip(names, sizes, strict=True):
        found.bytes[name] += size


def _add_run(found: Survey, run: Run, bins: int) -> None:
    rows = run.rows
    ids, names = columns.topic_ids(run.window, rows)
    values = columns.fixed_fields(
        run.window, rows, ["store_timestamp", "born_timestamp", "queue_id"]
    )
    stored, born = values["store_timestamp"], values["born_timestamp"]
    counts = np.bincount(ids, minlength=len(names)).tolist()
    # Divide before the subtraction, because the difference of two damaged times can overflow.
    slots = np.clip(stored // found.bin_ms - found.first_bin // found.bin_ms, 0, bins - 1)
    for number, name in enumerate(names):
        found.messages[name] += counts[number]
        own = ids == number
        line = found.over_time.setdefault(name, np.zeros(bins, np.int64))
        line += np.bincount(slots[own], minlength=bins)
        if name == props.SCHEDULE_TOPIC:
            found.delay_levels.update(queue + 1 for queue in values["queue_id"][own].tolist())
    lengths = rows[:, r.BODY_LENGTH].astype(np.int64)
    bits = np.frexp(lengths.astype(np.float64))[1]
    found.body_sizes += np.bincount(bits, minlength=_SIZE_BINS)[:_SIZE_BINS]
    low, high = int(stored.min()), int(stored.max())
    found.first_time = low if found.first_time is None else min(found.first_time, low)
    found.last_time = high if found.last_time is None else max(found.last_time, high)
    _add_latencies(found, stored, born)
    _add_tags(found, run)


def _add_latencies(found: Survey, stored: Int64, born: Int64) -> None:
    is_ahead = born > stored
    found.ahead += int(is_ahead.sum())
    # The difference of two damaged times can be too large for a signed number of 64 bits.
    waited = (stored.astype(np.uint64) - born.astype(np.uint64))[~is_ahead]
    if not len(waited):
        return
    found._slowest = max(found._slowest, int(waited.max()))
    large = np.maximum(waited, _EXACT_MS).astype(np.float64) / _EXACT_MS
    steps = _EXACT_MS + (np.log2(large) * _STEPS).astype(np.int64)
    slots = np.where(waited < _EXACT_MS, waited.astype(np.int64), steps)
    slots = np.minimum(slots, _LATENCY_BINS - 1)
    found._latencies += np.bincount(slots, minlength=_LATENCY_BINS)


def _latency_of(slot: int) -> int:
    if slot < _EXACT_MS:
        return slot
    return round(_EXACT_MS * 2 ** ((slot - _EXACT_MS + 0.5) / _STEPS))


def _add_tags(found: Survey, run: Run) -> None:
    batch = columns.record_batch(run.window, run.rows, Decoding(columns=["tags"]))
    counted: list[dict[str, Any]] = batch.column("tags").value_counts().to_pylist()
    for entry in counted:
        tag = entry["values"]
        if tag in found.tags or len(found.tags) < _MOST_TAGS:
            found.tags[tag] += entry["counts"]
        else:
            found.tags_cut = True


def _use(found: Survey, event: Event) -> None:
    if isinstance(event, LogEnd | ExpiredSpan):
        return
    start, end = event.start if isinstance(event, Run) else event.offset, event.end
    low = max(0, int(np.searchsorted([file.base for file in found.files], start, "right")) - 1)
    for use in found.files[low:]:
        if use.base >= end or use.base + use.room <= start:
            continue
        part = min(end, use.base + use.room) - max(start, use.base)
        if isinstance(event, Run):
            use.messages += part
        elif isinstance(event, BlankSpan):
            use.blank += part
        else:
            use.damaged += part
