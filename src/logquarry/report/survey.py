"""Counts of what is in a log, from one walk over it, in memory that does not grow with the log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from logquarry.format import delay
from logquarry.format import rows as r
from logquarry.log import columns
from logquarry.log.columns import Decoding
from logquarry.log.walk import BlankSpan, DamagedSpan, Event, ExpiredSpan, LogEnd, LogReader, Run
from logquarry.store.message_store import MessageStore
from logquarry.units import Progress

Int64 = npt.NDArray[np.int64]

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
"""Latencies below it are counted one by one, those above in steps of about one percent."""
_STEPS: Final = 64
_LATENCY_BINS: Final = _EXACT_MS + 40 * _STEPS
_MOST_TAGS: Final = 10_000
_SIZE_BINS: Final = 34


@dataclass(slots=True)
class FileUse:
    """What the room of one log file is used for, in bytes."""

    path: str
    base: int
    room: int
    messages: int = 0
    blank: int = 0
    damaged: int = 0

    @property
    def unused(self) -> int:
        """Bytes that hold nothing yet."""
        return max(0, self.room - self.messages - self.blank - self.damaged)


@dataclass(slots=True)
class Survey:
    """What :func:`survey` counted.

    Attributes:
        messages: of each topic.
        bytes: of each topic, as frames.
        bin_ms: width of a time bin.
        first_bin: when the first one starts, in milliseconds since 1970.
        over_time: messages by topic and bin.
        body_sizes: messages by bit length of the body's size.
        tags: messages by tag; None for those without.
        tags_cut: whether there were too many tags to count each.
        delay_levels: messages in the schedule topic by level.
        files: the log's files.
        damage: damaged spans.
        ahead: messages whose producer's clock was ahead of the broker's.
        end: physical offset of the log's end.
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
    end: int = 0
    first_time: int | None = None
    last_time: int | None = None
    _latencies: Int64 = field(default_factory=lambda: np.zeros(_LATENCY_BINS, np.int64))
    _slowest: int = 0

    @property
    def total(self) -> int:
        """Messages in all."""
        return sum(self.messages.values())

    def latency_ms(self, percentile: float) -> int:
        """Store time minus born time that ``percentile`` percent of messages do not exceed."""
        counted = int(self._latencies.sum())
        if percentile >= 100 or counted == 0:
            return self._slowest
        wanted = math.ceil(counted * percentile / 100)
        at = int(np.searchsorted(np.cumsum(self._latencies), wanted))
        return min(_latency_of(at), self._slowest)

    @property
    def has_latencies(self) -> bool:
        """Whether there was any message whose clocks agree on the order of things."""
        return bool(self._latencies.any())


def survey(
    store: MessageStore,
    span: tuple[int | None, int | None],
    progress: Progress | None = None,
) -> Survey:
    """Count what is in the log of a store. Damage is passed over.

    Args:
        store: the store.
        span: store times of its first and last message, by which time is cut into bins.
        progress: called now and then with bytes done and bytes in all.
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
            _add_run(found, event, bins)
        elif isinstance(event, LogEnd):
            found.end = event.offset
        elif isinstance(event, DamagedSpan):
            found.damage.append(event)
        _use(found, event)
        if progress is not None and isinstance(event, Run):
            progress(min(event.end - log.start, length), length)
    return found


def bin_size(span_ms: int) -> int:
    """The finest sensible width of bins of which MOST_BINS cover a span."""
    # A damaged or hostile store time makes a span of any length: the last resort follows it.
    least = -(-span_ms // MOST_BINS)
    return next((size for size in _BIN_SIZES_MS if size >= least), least)


def _add_run(found: Survey, run: Run, bins: int) -> None:
    rows = run.rows
    ids, names = columns.topic_ids(run.window, rows)
    values = columns.fixed_fields(
        run.window, rows, ["store_timestamp", "born_timestamp", "queue_id"]
    )
    stored, born = values["store_timestamp"], values["born_timestamp"]
    counts = np.bincount(ids, minlength=len(names)).tolist()
    sizes = np.bincount(ids, rows[:, r.SIZE], minlength=len(names)).astype(np.int64).tolist()
    # Divided before the difference, which has more than 64 bits for times that are far apart.
    slots = np.clip(stored // found.bin_ms - found.first_bin // found.bin_ms, 0, bins - 1)
    for number, name in enumerate(names):
        found.messages[name] += counts[number]
        found.bytes[name] += sizes[number]
        own = ids == number
        line = found.over_time.setdefault(name, np.zeros(bins, np.int64))
        line += np.bincount(slots[own], minlength=bins)
        if name == delay.SCHEDULE_TOPIC:
            levels = Counter((values["queue_id"][own] + 1).tolist())
            found.delay_levels.update(levels)
    lengths = rows[:, r.BODY_LENGTH].astype(np.int64)
    bits = np.frexp(lengths.astype(np.float64))[1]
    found.body_sizes += np.bincount(bits, minlength=_SIZE_BINS)[:_SIZE_BINS]
    low, high = int(stored.min()), int(stored.max())
    found.first_time = low if found.first_time is None else min(found.first_time, low)
    found.last_time = high if found.last_time is None else max(found.last_time, high)
    _add_latencies(found, stored - born)
    _add_tags(found, run)


def _add_latencies(found: Survey, waited: Int64) -> None:
    found.ahead += int((waited < 0).sum())
    waited = waited[waited >= 0]
    if not len(waited):
        return
    found._slowest = max(found._slowest, int(waited.max()))
    large = np.maximum(waited, _EXACT_MS).astype(np.float64) / _EXACT_MS
    steps = _EXACT_MS + (np.log2(large) * _STEPS).astype(np.int64)
    slots = np.where(waited < _EXACT_MS, waited, steps)
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
    """Book the bytes of an event on the files in which they lie."""
    if isinstance(event, LogEnd | ExpiredSpan):
        return
    start, end = (
        (event.start, event.end)
        if isinstance(event, Run)
        else (
            event.offset,
            event.offset + event.length,
        )
    )
    for use in _files_between(found.files, start, end):
        part = min(end, use.base + use.room) - max(start, use.base)
        if isinstance(event, Run):
            use.messages += part
        elif isinstance(event, BlankSpan):
            use.blank += part
        else:
            use.damaged += part


def _files_between(files: Sequence[FileUse], start: int, end: int) -> list[FileUse]:
    low = max(0, int(np.searchsorted([file.base for file in files], start, "right")) - 1)
    return [f for f in files[low:] if f.base < end and f.base + f.room > start]
