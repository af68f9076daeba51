"""Reading the messages that a command wants, and telling of what was passed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logquarry import text
from logquarry.cli.output import Output, Progress

if TYPE_CHECKING:
    from logquarry.files.layout import StoreLayout
    from logquarry.scan.batches import DamageLog, OnDamage
    from logquarry.scan.columns import Decoding
    from logquarry.scan.filters import MessageFilter
    from logquarry.scan.walk import Run

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
        from logquarry.scan.batches import sound_runs
        from logquarry.scan.walk import Run
        from logquarry.store.selection import Selection, plan_read, read_in_order

        plan = plan_read(self.layout, Selection(wanted=self.wanted))
        start, stop = plan.extent.start, plan.extent.stop
        everything = self.wanted.is_empty
        events = read_in_order(self.layout, plan)
        for run in sound_runs(events, self.on_damage, self.damage):
            rows = run.rows
            if not everything:
                rows = self.wanted.select(run.window, rows, self.decoding)
            if len(rows):
                yield Run(run.window, rows, run.path)
            if progress is not None:
                progress(min(run.end, stop) - start, stop - start)


def reader(
    layout: StoreLayout,
    *,
    wanted: MessageFilter,
    on_damage: OnDamage,
    broker: str,
    decompress: bool,
) -> Reader:
    """A reader of a store, with what it holds to decode its messages by."""
    from logquarry.files.delay_levels import levels_of
    from logquarry.scan.batches import DamageLog, bad_body_policy
    from logquarry.scan.columns import Decoding

    decoding = Decoding(
        broker=broker,
        delay_levels_ms=levels_of(layout),
        decompress=decompress,
        decompress_limit=layout.config.decompress_limit,
        on_bad_body=bad_body_policy(on_damage, layout.root),
    )
    return Reader(
        layout=layout,
        wanted=wanted,
        on_damage=on_damage,
        decoding=decoding,
        damage=DamageLog(),
    )


def cut(runs: Iterator[Run], limit: int | None) -> Iterator[Run]:
    """The first ``limit`` messages of some runs."""
    from logquarry.scan.walk import Run

    left = limit
    for run in runs if left != 0 else ():
        if left is None or len(run.rows) < left:
            yield run
        else:
            yield Run(run.window, run.rows[:left], run.path)
            return
        if left is not None:
            left -= len(run.rows)


def tell_damage(out: Output, damage: DamageLog, on_damage: OnDamage) -> None:
    """On stderr: what was passed over."""
    if not damage.spans:
        return
    for span in damage.spans[:_MOST_TOLD]:
        out.note(
            f"  {text.printable(span.path)}: at offset {span.offset}: {span.kind}, "
            f"{text.plural(span.length, 'byte')}: {text.printable(span.reason)}"
        )
    if len(damage.spans) > _MOST_TOLD:
        out.note(f"  and {len(damage.spans) - _MOST_TOLD} more")
    spans = text.plural(len(damage.spans), "damaged place")
    if on_damage == "skip":
        out.warn(f"skipped {spans}, {text.plural(damage.length, 'byte')} in all")
    elif damage.spans[-1].is_tail:
        out.warn(f"the log ends in a torn tail of {text.plural(damage.length, 'byte')}")
    else:
        out.warn("stopped at the first damaged place; what comes after it was not read")
