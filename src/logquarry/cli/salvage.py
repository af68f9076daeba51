"""``logquarry salvage``: every sound message of a damaged store into a new one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options, output
from logquarry.cli.output import Output
from logquarry.errors import UsageError
from logquarry.units import Progress

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.repair.salvage.salvage import Salvaged

_FINDINGS = 1
_MOST_TOLD = 40


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True)
@click.option(
    "--into",
    metavar="DIR",
    type=options.LocalFolder(),
    help="Make the new store here: a folder that is empty or not there. Without it nothing is "
    "written. Of several stores each gets a folder of its own in it.",
)
@click.option(
    "--include-stale",
    is_flag=True,
    help="Save sound messages behind the log's end too, which an earlier recovery cut off.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="With --spark-master: leave out stores that are saved already, and begin those anew that "
    "were not finished.",
)
@options.spark_master
@options.as_json
@options.config
@options.quiet
def salvage(
    stores: tuple[str, ...],
    into: Path | None,
    include_stale: bool,
    resume: bool,
    spark_master: str | None,
    as_json: bool,
    config: str | None,
    quiet: bool,
) -> None:
    """Save every sound message of a damaged store into a new one, and list what is lost.

    Nothing of STORE changes. Without --into it is only said what would be saved, and what is lost.
    With --spark-master many stores are saved at once, each by one task.

    Exit code 1 if anything is lost, 0 if nothing is; 4 if a process has the store open.
    """
    out = Output(quiet=quiet)
    settings = options.store_config(config)
    if spark_master is not None:
        from logquarry.cli import spark as with_spark
        from logquarry.spark.repair import salvage_stores

        with (
            with_spark.session(spark_master) as session,
            out.progress("saving", in_bytes=True) as progress,
        ):
            found = salvage_stores(
                session,
                stores,
                into,
                include_stale=include_stale,
                config=settings,
                resume=resume,
                progress=progress,
            )
    elif resume:
        raise UsageError("--resume is for many stores: with --spark-master")
    elif len(stores) > 1:
        raise UsageError("one store at a time, or --spark-master for several")
    else:
        found = [_alone(out, stores[0], into, settings, include_stale=include_stale)]
    if as_json:
        documents = [one.to_json() for one in found]
        out.json(documents[0] if spark_master is None else {"stores": documents})
    else:
        for number, one in enumerate(found):
            if spark_master is not None:
                out.line(f"{chr(10) if number else ''}{out.style(one.plan.store, 'bold')}")
            _show(out, one)
    if not all(one.plan.is_whole for one in found):
        click.get_current_context().exit(_FINDINGS)


def _alone(
    out: Output, store: str, into: Path | None, settings: StoreConfig | None, *, include_stale: bool
) -> Salvaged:
    from logquarry.log.layout import StoreLayout
    from logquarry.repair.salvage.salvage import salvage as salvage_store

    def bars(what: str) -> AbstractContextManager[Progress | None]:
        return out.progress(what, in_bytes=True)

    layout = StoreLayout.open(store, settings)
    try:
        return salvage_store(layout, into, include_stale=include_stale, bars=bars)
    except BaseException:
        if into is not None and (into / ".salvage").is_dir():
            output.error(f"{text.printable(str(into))} is not finished and opens as no store")
        raise


def _show(out: Output, found: Salvaged) -> None:
    plan = found.plan
    if plan.lost:
        rows = [
            [
                text.printable(span.file),
                str(span.offset),
                str(span.length),
                span.kind,
                text.printable(span.reason),
            ]
            for span in plan.lost[:_MOST_TOLD]
        ]
        out.table(["file", "offset", "length", "kind", "reason"], rows, right="offset length")
        _more(out, len(plan.lost))
        out.line()
    lost = [
        (topic, queue_id, start, stop)
        for span in plan.lost
        for (topic, queue_id), ranges in sorted(span.messages.items())
        for start, stop in ranges
    ]
    if lost:
        rows = [
            [text.printable(topic), str(queue_id), str(start), str(stop - start)]
            for topic, queue_id, start, stop in lost[:_MOST_TOLD]
        ]
        out.table(["lost of", "queue", "from offset", "messages"], rows, right="queue messages")
        _more(out, len(lost))
        out.line()
    if plan.topics:
        rows = [
            [text.printable(name), str(one.messages), text.size_text(one.bytes), str(one.lost)]
            for name, one in sorted(plan.topics.items())
        ]
        out.table(["topic", "saved", "bytes", "lost"], rows, right="saved bytes lost")
        out.line()
    for line in _notes(found):
        out.line(line)
    count = text.plural(plan.messages, "message")
    size = text.size_text(plan.bytes)
    if found.into is None:
        verdict = f"{count}, {size}, can be saved; nothing is written without --into"
    else:
        verdict = f"{count}, {size}, saved into {text.printable(found.into)}"
    loss = "nothing is lost"
    if plan.lost:
        lost_bytes = text.size_text(sum(span.length for span in plan.lost))
        loss = f"{lost_bytes} are lost in {text.plural(len(plan.lost), 'place')}"
    out.line(f"{verdict}; {out.style(loss, 'red' if plan.lost else 'green')}")


def _more(out: Output, count: int) -> None:
    if count > _MOST_TOLD:
        out.line(f"and {count - _MOST_TOLD} more; --json has all")


def _notes(found: Salvaged) -> list[str]:
    plan, stale, plural = found.plan, found.plan.stale, text.plural
    lines = []
    if plan.raised_times:
        count = plural(plan.raised_times, "store time")
        lines.append(f"{count} would fall behind and become that of the message before")
    if plan.rotten_offsets:
        count = plural(plan.rotten_offsets, "message")
        lines.append(f"{count} said a queue offset that cannot be, and have their own again")
    if plan.ends:
        count = plural(plan.ends, "transaction end")
        lines.append(f"{count} without the half message, which is lost")
    if stale.messages:
        count = plural(stale.messages, "sound message")
        what = "saved behind all others" if stale.included else "not saved (--include-stale)"
        lines.append(f"{count} behind the log's end, left over from a recovery: {what}")
    lines.extend(
        f"consumers {text.printable(one.group)} were at {one.was} of queue {one.queue_id} of "
        f"{text.printable(one.topic)}, and go on at its end, {one.now}"
        for one in found.progress
    )
    return lines
