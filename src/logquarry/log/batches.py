"""Selects the messages of a walk, and decodes them to Arrow batches or to objects.

The damage policy of a read (:data:`OnDamage`) decides which damage raises an error, which damage
ends the read, and which damage the read skips. :class:`MessageFilter` selects frames before they
are decoded: by topic, queue, tag, key, time, offset and body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, TypeVar, cast, get_args

import numpy as np
import pyarrow as pa

from logquarry.arguments import choice
from logquarry.errors import CorruptFrame, UsageError
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.format.arrays import Bools
from logquarry.format.sys_flag import DEFAULT_LIMIT
from logquarry.log import columns
from logquarry.log.codec import Rows, Window
from logquarry.log.columns import Decoding
from logquarry.log.frames import decoded, unwrapped
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan, Event, Run
from logquarry.stored_message import StoredMessage
from logquarry.text import counted

TAG_SEPARATOR = props.TAG_SEPARATOR
"""The separator of tags. Code in spark/ imports the constant from here, because spark/ does not
import format/.
"""


@dataclass(frozen=True, kw_only=True)
class MessageFilter:
    """Conditions that a message must meet. An attribute with the value ``None`` sets no condition.

    Attributes:
        topic_pattern: regular expression that matches the whole topic name.
        tags: the message must have one of these tags. The filter compares the texts of the tags,
            not the hashes that a consume queue contains.
        keys: one of these words must be a word of the message's property KEYS, or equal its
            property UNIQ_KEY.
        until_ms: the store timestamp in milliseconds must be lower than this number.
        queue_offsets: the lowest queue offset that passes, and the end of the range (exclusive).
        queue_ranges: (topic, queue id) -> a range as in ``queue_offsets``, for this queue only. If
            the end is None, the range has no end.
        grep: regular expression that must match some part of the body. If the read decompresses
            bodies, it searches the decompressed body.
    """

    topics: frozenset[str] | None = None
    topic_pattern: str | None = None
    queue_ids: frozenset[int] | None = None
    queues: frozenset[tuple[str, int]] | None = None
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    queue_offsets: tuple[int, int] | None = None
    queue_ranges: Mapping[tuple[str, int], tuple[int, int | None]] | None = None
    grep: str | None = None

    def __post_init__(self) -> None:
        for name in ("_topic_pattern", "_grep"):
            try:
                getattr(self, name)
            except (re.error, ValueError, OverflowError, RecursionError) as error:
                label = name[1:].replace("_", " ")
                raise UsageError(f"{label}: not a regular expression: {error}") from error
        since, until = self.since_ms, self.until_ms
        if since is not None and until is not None and since > until:
            raise UsageError(f"since {since} is later than until {until}")

    @property
    def is_empty(self) -> bool:
        """Whether the filter has no condition, so that every message passes."""
        return self == MessageFilter()

    def takes_topic(self, topic: str) -> bool:
        """Whether messages of a topic can pass."""
        if self.topics is not None and topic not in self.topics:
            return False
        return self._topic_pattern is None or self._topic_pattern.fullmatch(topic) is not None

    def takes_queue(self, topic: str, queue_id: int) -> bool:
        """Whether messages of a queue can pass."""
        return (
            self.takes_topic(topic)
            and (self.queue_ids is None or queue_id in self.queue_ids)
            and (self.queues is None or (topic, queue_id) in self.queues)
        )

    @property
    def names_queues(self) -> bool:
        """Whether the filter names topics or queues, so that a read can use consume queues."""
        conditions = self.topics, self.topic_pattern, self.queue_ids, self.queues, self.queue_ranges
        return any(condition is not None for condition in conditions)

    def offsets_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the range of queue offsets that can pass in a queue: the first, and the end
        (exclusive).
        """
        least, beyond = self.queue_offsets or (0, java.LONG_MAX)
        first, stop = (self.queue_ranges or {}).get((topic, queue_id), (0, None))
        return max(least, first), beyond if stop is None else min(beyond, stop)

    @cached_property
    def _topic_pattern(self) -> re.Pattern[str] | None:
        return None if self.topic_pattern is None else re.compile(self.topic_pattern)

    @cached_property
    def _grep(self) -> re.Pattern[bytes] | None:
        if self.grep is None:
            return None
        # If a command line argument is not UTF-8, the text contains surrogates.
        return re.compile(self.grep.encode("utf-8", "surrogateescape"))

    def select(self, window: Window, rows: Rows, decoding: Decoding) -> Rows:
        """Return the rows of the frames that meet all conditions."""
        for condition in (
            self._by_topic,
            self._by_numbers,
            self._by_queues,
            self._by_queue_ranges,
            self._by_text,
            self._by_body,
        ):
            keep = condition(window, rows, decoding) if len(rows) else None
            if keep is not None and not keep.all():
                rows = rows[keep]
        return rows

    # Each of these methods returns a mask of the frames to keep. The method returns None if the
    # filter does not set the condition.
    def _by_topic(self, window: Window, rows: Rows, _: Decoding) -> Bools | None:
        if self.topics is None and self.topic_pattern is None:
            return None
        ids, names = columns.topic_ids(window, rows)
        return np.array([self.takes_topic(name) for name in names], np.bool_)[ids]

    def _by_numbers(self, window: Window, rows: Rows, _: Decoding) -> Bools | None:
        names = [
            name
            for name, condition in (
                ("queue_id", self.queue_ids),
                ("queue_offset", self.queue_offsets),
                ("store_timestamp", (self.since_ms, self.until_ms)),
            )
            if condition is not None and condition != (None, None)
        ]
        if not names:
            return None
        values = columns.fixed_fields(window, rows, names)
        keep = np.ones(len(rows), np.bool_)
        if self.queue_ids is not None:
            keep &= np.isin(values["queue_id"], list(self.queue_ids))
        if self.queue_offsets is not None:
            least, beyond = self.queue_offsets
            keep &= (values["queue_offset"] >= least) & (values["queue_offset"] < beyond)
        if self.since_ms is not None:
            keep &= values["store_timestamp"] >= self.since_ms
        if self.until_ms is not None:
            keep &= values["store_timestamp"] < self.until_ms
        return keep

    def _by_queues(self, window: Window, rows: Rows, _: Decoding) -> Bools | None:
        if self.queues is None:
            return None
        ids, topics = columns.topic_ids(window, rows)
        queue_ids = columns.fixed_fields(window, rows, ["queue_id"])["queue_id"]
        keep = np.zeros(len(rows), np.bool_)
        for number, topic in enumerate(topics):
            wanted = [queue_id for name, queue_id in self.queues if name == topic]
            keep |= (ids == number) & np.isin(queue_ids, wanted)
        return keep

    def _by_queue_ranges(self, window: Window, rows: Rows, _: Decoding) -> Bools | None:
        if self.queue_ranges is None:
            return None
        ids, topics = columns.topic_ids(window, rows)
        values = columns.fixed_fields(window, rows, ["queue_id", "queue_offset"])
        keep = np.ones(len(rows), np.bool_)
        for (topic, queue_id), (first, stop) in self.queue_ranges.items():
            if topic in topics:
                own = (ids == topics.index(topic)) & (values["queue_id"] == queue_id)
                offsets = values["queue_offset"]
                within = (offsets >= first) & (offsets < (java.LONG_MAX if stop is None else stop))
                keep &= ~own | within
        return keep

    def _by_text(self, window: Window, rows: Rows, _: Decoding) -> Bools | None:
        if self.tags is None and self.keys is None:
            return None
        wanted = ["tags"] * (self.tags is not None) + ["keys", "uniq_key"] * (self.keys is not None)
        batch = columns.record_batch(window, rows, Decoding(columns=wanted))
        keep = np.ones(len(rows), np.bool_)
        if self.tags is not None:
            keep &= np.array([tag in self.tags for tag in batch["tags"].to_pylist()], np.bool_)
        if self.keys is not None:
            pairs = zip(batch["keys"].to_pylist(), batch["uniq_key"].to_pylist(), strict=True)
            keep &= np.array([self._has_key(keys, uniq) for keys, uniq in pairs], np.bool_)
        return keep

    def _has_key(self, keys: str | None, uniq_key: str | None) -> bool:
        assert self.keys is not None
        if uniq_key in self.keys:
            return True
        return keys is not None and not self.keys.isdisjoint(props.split_keys(keys))

    def _by_body(self, window: Window, rows: Rows, decoding: Decoding) -> Bools | None:
        pattern = self._grep
        if pattern is None:
            return None
        body = Decoding(
            columns=["body"],
            decompress=decoding.decompress,
            decompress_limit=decoding.decompress_limit,
        )
        keep: list[bool] = []
        for part, made in columns.pieces(window, rows, body):
            bodies = columns.record_batch(window, part, body)["body"] if made is None else made
            keep += [pattern.search(text.as_buffer()) is not None for text in bodies]
        return np.array(keep, np.bool_)


def names(text: str | Iterable[str] | None, what: str) -> frozenset[str] | None:
    """Parse ``a,b``, or several such texts, to a set of names.

    If ``text`` is None, the result is None: every name is allowed. Raises UsageError for a text
    without a name, because an empty filter must not select everything.
    """
    if text is None:
        return None
    parts = text.split(",") if isinstance(text, str) else list(text)
    found = frozenset(part.strip() for part in parts if part.strip())
    if not found:
        raise UsageError(f"{what} names nothing: {','.join(parts)!r}")
    return found


def tag_expression(text: str | None, what: str = "tags") -> frozenset[str] | None:
    """Parse a tag expression ``paid || sent``. The result is None for any tag (``*`` or None)."""
    found = props.parse_tags(text)
    if found is None and text is not None and text != props.ANY_TAG:
        raise UsageError(f"{what} names nothing: {text!r}")
    return found


T = TypeVar("T")

_END: Final = object()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items in order. While the caller processes an item, a thread computes the next
    item.
    """
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, source, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, source, _END)
            yield cast(T, item)


# --------------------------------------------------------------------------------------------------
# Damage policy

OnDamage = Literal["default", "stop", "skip", "fail"]
"""Damage policy of a read.

- ``default``: a torn tail ends the read. All other damage raises an error.
- ``stop``: the first damage ends the read.
- ``skip``: the read counts the damage and continues at the next sound frame.
- ``fail``: all damage raises an error, even a torn tail.
"""

BAD_COMPRESSION = "bad_compression"
"""Kind of damage: the flags mark a body as compressed, but decompression fails."""

MOST_CONTENT = 64 << 20
"""Maximum bytes of decompressed bodies in one batch. A message with a larger body is the only
message of its batch.
"""


@dataclass(slots=True)
class DamageLog:
    """The damage that a read has found, in the order of the log."""

    spans: list[DamagedSpan] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of damaged bytes."""
        return sum(span.length for span in self.spans)


def check_policy(text: str) -> OnDamage:
    """Return ``text`` as a damage policy. Raises UsageError if no policy has this name."""
    return choice(text, "on_damage", get_args(OnDamage))  # type: ignore[return-value]


def as_error(span: DamagedSpan) -> CorruptFrame:
    """Make the exception for a damaged span."""
    length = counted(span.length, "byte")
    reason = f"{span.kind}: {span.reason} ({length} up to the next sound frame)"
    if span.is_tail:
        reason = f"{span.kind}: {span.reason} (the last {length} of the log)"
    return CorruptFrame(span.path, span.offset, reason, kind=span.kind)


def sound_runs(
    events: Iterable[Event], on_damage: OnDamage, damage: DamageLog | None = None
) -> Iterator[Run]:
    """Yield the runs of frames, and apply the damage policy to the damage between them. Raises
    CorruptFrame for damage that the policy does not allow.
    """

    def report(span: DamagedSpan) -> bool:
        if damage is not None:
            damage.spans.append(span)
        if on_damage == "fail" or (on_damage == "default" and not span.is_tail):
            raise as_error(span)
        return on_damage == "skip"

    for event in events:
        if isinstance(event, Run):
            yield replace(event, on_lost=report)
        elif isinstance(event, DamagedSpan) and not report(event):
            return


def message_runs(
    events: Iterable[Event],
    on_damage: OnDamage,
    damage: DamageLog | None = None,
    *,
    limit: int = DEFAULT_LIMIT,
) -> Iterator[Run]:
    """Yield the runs of :func:`sound_runs`. Each inner batch of at most ``limit`` bytes is replaced
    by its messages.
    """
    return unwrapped(sound_runs(events, on_damage, damage), limit=limit)


def record_batches(
    runs: Iterable[Run], decoding: columns.Decoding, wanted: MessageFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """Decode the messages that pass a filter. If the read decompresses bodies, MOST_CONTENT limits
    the bytes of bodies in a batch.
    """

    def decode(run: Run) -> Iterator[tuple[Rows, pa.RecordBatch]]:
        for part, bodies in columns.pieces(run.window, run.rows, decoding, MOST_CONTENT):
            yield part, columns.record_batch(run.window, part, decoding, bodies=bodies)

    return decoded(selected(runs, decoding, wanted), decode)


def messages(
    runs: Iterable[Run], decoding: columns.Decoding, wanted: MessageFilter | None = None
) -> Iterator[StoredMessage]:
    """Decode the messages that pass a filter to objects."""

    def decode(run: Run) -> Iterator[tuple[Rows, list[StoredMessage]]]:
        yield run.rows, columns.messages(run.window, run.rows, decoding)

    for found in decoded(selected(runs, decoding, wanted), decode):
        yield from found


def selected(
    runs: Iterable[Run], decoding: columns.Decoding, wanted: MessageFilter | None
) -> Iterator[Run]:
    """Reduce each run to the messages that pass a filter, and drop empty runs."""
    if wanted is None:
        yield from runs
        return

    def decode(run: Run) -> Iterator[tuple[Rows, Run]]:
        rows = wanted.select(run.window, run.rows, decoding)
        yield run.rows, replace(run, rows=rows)

    for run in decoded(runs, decode):
        if len(run.rows):
            yield run


@dataclass(frozen=True, slots=True)
class BadBodies:
    """The damage policy for bodies that do not decompress.

    If the policy is ``skip``, the read returns the body as it is stored in the log, and adds a span
    of length 0 to the :class:`DamageLog`.
    """

    layout: StoreLayout
    on_damage: OnDamage
    damage: DamageLog | None = None

    def __call__(self, offset: int, reason: str) -> None:
        """Apply the policy. Raises CorruptFrame, unless the policy is ``skip``."""
        path = self.layout.log_path(offset)
        if self.on_damage != "skip":
            raise CorruptFrame(path, offset, f"{BAD_COMPRESSION}: {reason}", kind=BAD_COMPRESSION)
        if self.damage is not None:
            self.damage.spans.append(DamagedSpan(offset, 0, BAD_COMPRESSION, reason, path))
