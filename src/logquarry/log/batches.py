"""Makes Arrow batches or messages from a walk's events, and applies damage policy and filters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar, cast, get_args

import pyarrow as pa

from logquarry.arguments import choice
from logquarry.errors import CorruptFrame
from logquarry.format.sys_flag import DEFAULT_LIMIT
from logquarry.log import columns
from logquarry.log.codec import Rows
from logquarry.log.filters import MessageFilter
from logquarry.log.frames import decoded, unwrapped
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan, Event, Run
from logquarry.stored_message import StoredMessage

T = TypeVar("T")

_END: Final = object()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items in order; while the caller works, a thread makes the next item."""
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
"""Maximum bytes of decompressed bodies in one batch. A larger body gets a batch for itself."""


@dataclass(slots=True)
class DamageLog:
    """The damage that a read skipped, in the order of the log."""

    spans: list[DamagedSpan] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of skipped bytes."""
        return sum(span.length for span in self.spans)


def check_policy(text: str) -> OnDamage:
    """Check the name of a damage policy. Raises UsageError if no policy has this name."""
    return choice(text, "on_damage", get_args(OnDamage))  # type: ignore[return-value]


def as_error(span: DamagedSpan) -> CorruptFrame:
    """Make the exception for a damaged span."""
    reason = f"{span.kind}: {span.reason} ({span.length} bytes up to the next sound frame)"
    if span.is_tail:
        reason = f"{span.kind}: {span.reason} (the last {span.length} bytes of the log)"
    return CorruptFrame(span.path, span.offset, reason, kind=span.kind)


def sound_runs(
    events: Iterable[Event], on_damage: OnDamage, damage: DamageLog | None = None
) -> Iterator[Run]:
    """Yield the runs of frames, and apply the damage policy, which may raise CorruptFrame."""

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
    """Split inner batches of at most ``limit`` bytes in the runs of :func:`sound_runs`."""
    return unwrapped(sound_runs(events, on_damage, damage), limit=limit)


def record_batches(
    runs: Iterable[Run], decoding: columns.Decoding, wanted: MessageFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """Decode the messages that pass a filter. A batch has at most MOST_CONTENT bytes of bodies."""

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

    If the read skips damage, the message keeps its stored body. The recorded span has length 0.
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
