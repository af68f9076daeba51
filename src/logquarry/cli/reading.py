"""Reading the messages that a command wants, and telling of what was passed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logquarry import text
from logquarry.cli.output import Output
from logquarry.units import Progress

if TYPE_CHECKING:
    from logquarry.log.batches import DamageLog, OnDamage
    from logquarry.log.columns import Decoding
    from logquarry.log.filters import MessageFilter
    from logquarry.log.layout import StoreLayout
    from logquarry.log.walk import DamagedSpan, Run

_MOST_TOLD = 20


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads messages of one store in physical order.

    Attributes:
        layout: the store's files.
        wanted: which messages.
        on_damage: what to do where there are none.
        decoding: how they are decoded.
        damage: gets what was passed over.
    """

    layout: StoreLayout
    wanted: MessageFilter
    on_damage: OnDamage
    decoding: Decoding
    damage: DamageLog

    def runs(self, progress: Progress | None = None) -> Iterator[Run]:
        """The frames that pass the filter, run by run.

        Raises:
            CorruptFrame: on damage, as ``on_damage`` says.
        """
        from logquarry.log.walk import Run
        from logquarry.read import bulk as store_reading

        start, stop = self.layout.commit_log.start, self._likely_end()
        everything = self.wanted.is_empty
        found = store_reading.runs(self.layout, self.wanted, self.on_damage, self.damage)
        for run in found:
            rows = run.rows
            if not everything:
                rows = self.wanted.select(run.window, rows, self.decoding)
            if len(rows):
                yield Run(run.window, rows, run.path)
            if progress is not None:
                progress(run.end - start, max(run.end, stop) - start)

    def _likely_end(self) -> int:
        """Where the log ends by its queues: there may be much room behind it."""
        from logquarry.read.log_end import consume_queues, last_entries

        entries = last_entries(self.layout, consume_queues(self.layout))
        if not entries:
            return self.layout.commit_log.end
        return entries[0].physical_offset + entries[0].size


def reader(
    layout: StoreLayout,
    *,
    wanted: MessageFilter,
    on_damage: OnDamage,
    broker: str,
    decompress: bool,
) -> Reader:
    """A reader of a store, with what it holds to decode its messages by."""
    from logquarry.log.batches import BadBodies, DamageLog
    from logquarry.log.columns import Decoding

    damage = DamageLog()
    decoding = Decoding(
        broker=broker,
        delay_levels_ms=layout.delay_levels_ms,
        decompress=decompress,
        decompress_limit=layout.config.decompress_limit,
        on_bad_body=BadBodies(layout, on_damage, damage),
    )
    return Reader(
        layout=layout,
        wanted=wanted,
        on_damage=on_damage,
        decoding=decoding,
        damage=damage,
    )


def cut(runs: Iterator[Run], limit: int | None) -> Iterator[Run]:
    """The first ``limit`` messages of some runs."""
    from logquarry.log.walk import Run

    left = limit
    for run in runs if left != 0 else ():
        if left is None or len(run.rows) < left:
            yield run
        else:
            yield Run(run.window, run.rows[:left], run.path)
            return
        if left is not None:
            left -= len(run.rows)


def tell_damage(
    out: Output,
    spans: Sequence[DamagedSpan],
    on_damage: OnDamage,
) -> None:
    """On stderr: what was passed over.

    Args:
        out: where to.
        spans: damaged spans that were met.
        on_damage: what was done about them.
    """
    from logquarry.log.batches import BAD_COMPRESSION

    bad_bodies = [span.offset for span in spans if span.kind == BAD_COMPRESSION]
    spans = [span for span in spans if span.kind != BAD_COMPRESSION]
    if bad_bodies:
        count = text.plural(len(bad_bodies), "body", "bodies")
        where = ", ".join(map(str, bad_bodies[:_MOST_TOLD]))
        out.warn(f"{count} did not decompress and came as stored: at {where}")
    if not spans:
        return
    for span in spans[:_MOST_TOLD]:
        out.note(
            f"  {text.printable(span.path)}: at offset {span.offset}: {span.kind}, "
            f"{text.plural(span.length, 'byte')}: {text.printable(span.reason)}"
        )
    if len(spans) > _MOST_TOLD:
        out.note(f"  and {len(spans) - _MOST_TOLD} more")
    length = text.plural(sum(span.length for span in spans), "byte")
    if on_damage == "skip":
        out.warn(f"skipped {text.plural(len(spans), 'damaged place')}, {length} in all")
    elif spans[-1].is_tail:
        out.warn(f"the log ends in a torn tail of {length}")
    else:
        out.warn("stopped at the first damaged place; what comes after it was not read")
