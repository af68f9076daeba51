"""Work that goes on beside its use: kernels let go of the interpreter, two cores do both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar, cast, get_args

import pyarrow as pa

from logquarry.errors import CorruptFrame, UsageError
from logquarry.log import columns
from logquarry.log.codec import Rows, Window
from logquarry.log.columns import Decoding
from logquarry.log.filters import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan, Event, Run
from logquarry.message import StoredMessage

T = TypeVar("T")

_END: Final = object()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items in their order; each is made while the one before it is looked at.

    What making one raises comes here. Whoever stops early waits for the one that is being made.
    """
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, source, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, source, _END)
            yield cast(T, item)


# --------------------------------------------------------------------------------------------------
# From events of the walk to record batches: what to do about damage, filters, columns.

OnDamage = Literal["default", "stop", "skip", "fail"]
"""What to do where bytes are no frames.

``default``: a torn tail is the log's end, any other damage an error. ``stop``: the first damage
of any kind is the end. ``skip``: go on at the next sound frame, and count. ``fail``: an error,
also for a torn tail.
"""

BAD_COMPRESSION = "bad_compression"
"""Kind of a body that does not decompress although its flag says so."""

MOST_CONTENT = 64 << 20
"""Bytes of decompressed bodies in one batch, unless a single one is larger."""


@dataclass(slots=True)
class DamageLog:
    """What was passed over, in the order it was met."""

    spans: list[DamagedSpan] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Bytes in all."""
        return sum(span.length for span in self.spans)


def check_policy(text: str, choices: tuple[str, ...] = get_args(OnDamage)) -> OnDamage:
    """``text`` as a policy.

    Raises:
        UsageError: if it is none.
    """
    if text not in choices or text not in get_args(OnDamage):
        raise UsageError(f"on damage {text!r}: takes {', '.join(choices)}")
    return text  # type: ignore[return-value]


def as_error(span: DamagedSpan) -> CorruptFrame:
    """A damaged span as the exception that names it."""
    reason = f"{span.kind}: {span.reason} ({span.length} bytes up to the next sound frame)"
    if span.is_tail:
        reason = f"{span.kind}: {span.reason} (the last {span.length} bytes of the log)"
    return CorruptFrame(span.path, span.offset, reason, kind=span.kind)


def sound_runs(
    events: Iterable[Event], on_damage: OnDamage, damage: DamageLog | None = None
) -> Iterator[Run]:
    """The runs of frames among some events.

    Args:
        events: from :class:`~logquarry.log.walk.LogReader`.
        on_damage: what to do about damage.
        damage: gets every span met.

    Raises:
        CorruptFrame: on damage, as ``on_damage`` says.
    """
    for event in events:
        if isinstance(event, Run):
            yield event
        elif isinstance(event, DamagedSpan):
            if damage is not None:
                damage.spans.append(event)
            if on_damage == "fail" or (on_damage == "default" and not event.is_tail):
                raise as_error(event)
            if on_damage != "skip":
                return


def record_batches(
    runs: Iterable[Run], decoding: Decoding, wanted: MessageFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """The messages of some runs that pass a filter; batches without any are left out.

    A run is one batch, or several where its bodies decompress to more than MOST_CONTENT.
    """
    for run in runs:
        rows = run.rows
        if wanted is not None:
            rows = wanted.select(run.window, rows, decoding)
        if len(rows):
            yield from _bounded(run.window, rows, decoding)


def _bounded(window: Window, rows: Rows, decoding: Decoding) -> Iterator[pa.RecordBatch]:
    for part, bodies in columns.pieces(window, rows, decoding, MOST_CONTENT):
        yield columns.record_batch(window, part, decoding, bodies=bodies)


def messages(
    runs: Iterable[Run], decoding: Decoding, wanted: MessageFilter | None = None
) -> Iterator[StoredMessage]:
    """The same as message objects."""
    for run in runs:
        rows = run.rows
        if wanted is not None:
            rows = wanted.select(run.window, rows, decoding)
        yield from columns.messages(run.window, rows, decoding)


@dataclass(frozen=True, slots=True)
class BadBodies:
    """What is done about a body that does not decompress: it is damage like any other.

    Where damage is skipped the message is there, and its body as it is stored: the span has no
    length, as nothing is passed over.

    Attributes:
        layout: the store's files.
        on_damage: what to do about damage.
        damage: gets a span for each.
    """

    layout: StoreLayout
    on_damage: OnDamage
    damage: DamageLog | None = None

    def __call__(self, offset: int, reason: str) -> None:
        """For :attr:`Decoding.on_bad_body`.

        Raises:
            CorruptFrame: unless damage is skipped.
        """
        path = self.layout.log_path(offset)
        if self.on_damage != "skip":
            raise CorruptFrame(path, offset, f"{BAD_COMPRESSION}: {reason}", kind=BAD_COMPRESSION)
        if self.damage is not None:
            self.damage.spans.append(DamagedSpan(offset, 0, BAD_COMPRESSION, reason, path))
