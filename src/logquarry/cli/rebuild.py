"""``logquarry rebuild``: consume queues and index made anew from the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import UsageError
from logquarry.log.store_names import has_wildcard

if TYPE_CHECKING:
    from logquarry.repair.rebuild.build import RebuildReport

_MOST_TOLD = 40
_NAMES = {"consumequeue": "consume queues", "index": "index"}


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True)
@click.option(
    "--into",
    metavar="DIR",
    type=options.LocalFolder(),
    help="Write them into DIR; STORE is only read. Of several stores each gets a folder in it.",
)
@click.option("--in-place", is_flag=True, help="Replace those of STORE; the old ones are kept.")
@click.option("--apply", is_flag=True, help="With --in-place: do it.")
@click.option("--queues", is_flag=True, help="Only the consume queues.")
@click.option("--index", is_flag=True, help="Only the index.")
@click.option(
    "--resume", is_flag=True, help="With --into and Spark: leave out stores that are there already."
)
@options.spark_master
@options.as_json
@options.config
@options.quiet
def rebuild(
    stores: tuple[str, ...],
    into: Path | None,
    in_place: bool,
    apply: bool,
    queues: bool,
    index: bool,
    resume: bool,
    spark_master: str | None,
    as_json: bool,
    config: str | None,
    quiet: bool,
) -> None:
    """Make consume queues and index anew from the log.

    In place the old ones are moved to STORE/.logquarry/quarantine/, and no process may have the
    store open. With --into it may: what is in its log at the start is taken. Without --into, and
    without --apply, it only says what it would do. With --spark-master many stores can be rebuilt
    at once.
    """
    if into is not None and (in_place or apply):
        raise UsageError("--into is one way, and --in-place --apply is the other")
    if apply and not in_place:
        raise UsageError("--apply replaces what the store has: say --in-place too, or --into DIR")
    out = Output(quiet=quiet)
    settings = options.store_config(config)
    both = queues == index
    wanted: dict[str, Any] = {
        "into": into,
        "apply": apply,
        "queues": queues or both,
        "index": index or both,
        "config": settings,
    }
    if resume and spark_master is None:
        raise UsageError("--resume is for many stores: with --spark-master")
    on_spark = spark_master is not None and (into is not None or apply)
    several = spark_master is not None and (len(stores) > 1 or has_wildcard(stores[0]))
    if len(stores) > 1 and not on_spark:
        raise UsageError("one store at a time; with --spark-master, and --into or --apply, many")
    if spark_master is None or not on_spark:
        from logquarry.repair.rebuild.rebuild import rebuild as rebuild_store

        with out.progress("reading the log", in_bytes=True) as progress:
            reports = [rebuild_store(stores[0], **wanted, progress=progress)]
    else:
        from logquarry.cli import spark as with_spark
        from logquarry.spark.rebuilding import rebuild_on_spark, rebuild_stores

        with (
            with_spark.session(spark_master) as session,
            out.progress("rebuilding", in_bytes=True) as progress,
        ):
            if several or resume:
                more = {**wanted, "resume": resume, "progress": progress}
                reports = rebuild_stores(session, stores, **more)
            else:
                reports = [rebuild_on_spark(session, stores[0], **wanted, progress=progress)]
    if as_json:
        documents = [report.to_json() for report in reports]
        out.json({"stores": documents} if several or resume else documents[0])
        return
    for number, report in enumerate(reports):
        if number:
            out.line()
        _show(out, report, stores[0] if not several else report.store, config)
    if not reports:
        out.note("all of them are there already")


def _show(out: Output, report: RebuildReport, store: str, config: str | None) -> None:
    what = " and ".join(_NAMES[name] for name in report.old)
    name = text.printable(store)
    only = [f"--{'queues' if word == 'consumequeue' else word}" for word in report.old]
    only = only if len(only) == 1 else []
    if not report.is_applied:
        verdict = f"would make {what} anew from the log; nothing was changed"
        out.line(f"{name}: {out.style(verdict, 'yellow')}")
        out.line()
        for folder, found in report.old.items():
            size = f"{text.plural(found.files, 'file')}, {text.size_text(found.bytes)}"
            out.line(f"  {folder + '/':<14} {size} now, which would be moved to quarantine")
        if report.is_live:
            out.line("  a process has the store open: only --into DIR can be done now")
        if report.has_abort:
            out.line("  the store was not closed in order: recover makes what is missing, too")
        out.line()
        look = "recover" if report.has_abort else "verify"
        _show_next(out, "look", look, store, config=config)
        if not report.is_live:
            _show_next(out, "do", "rebuild", store, "--in-place", "--apply", *only, config=config)
        _show_next(out, "or beside", "rebuild", store, "--into", "DIR", *only, config=config)
        return
    where = "in place" if report.into is None else f"into {text.printable(report.into)}"
    out.line(f"{name}: {out.style(f'{what} made anew, {where}', 'green')}")
    out.line()
    out.line(
        f"  log            {report.log_start} to {report.log_end}: "
        f"{text.plural(report.messages or 0, 'message')}"
    )
    if report.queues is not None:
        _show_queues(out, report)
    if report.index is not None:
        keys, files = report.keys or 0, report.index.files
        out.line(f"  index          {text.plural(keys, 'key')} in {text.plural(files, 'file')}")
    if report.quarantine is not None:
        out.line(f"  the old ones   {text.printable(report.quarantine)}")
    _show_damage(out, report)
    if report.is_live:
        out.line()
        out.line("  a process has the store open: what it has written since is not in them")
    out.line()
    if report.into is None and report.has_abort:
        out.line("  the store was not closed in order, which is as it was")
        _show_next(out, "next", "recover", store, config=config)
    elif report.into is None:
        _show_next(out, "next", "verify", store, config=config)


def _show_queues(out: Output, report: RebuildReport) -> None:
    assert report.queues is not None
    topics = {queue.topic for queue in report.queues}
    taken = sum(queue.is_taken_over for queue in report.queues)
    words = f"{text.plural(len(report.queues), 'queue')} of {text.plural(len(topics), 'topic')}"
    if taken:
        words += f"; {taken} without a message in the log any more, which go on where they ended"
    out.line(f"  consume queues {words}")
    for queue in report.queues[: _MOST_TOLD if report.damage else 0]:
        if queue.fillers:
            lost = text.plural(queue.fillers, "message")
            place = f"{text.printable(queue.topic)}/{queue.queue_id}"
            out.line(f"    {place}: {lost} of it the log has lost; fillers stand for them")


def _show_damage(out: Output, report: RebuildReport) -> None:
    lines = [f"{s.path} at {s.offset}, {s.length} bytes: {s.reason}" for s in report.damage]
    lines += [
        f"the message at {m.physical_offset} has no place in queue {m.queue_id} of {m.topic}: "
        f"queue offset {m.queue_offset}: {m.reason}"
        for m in report.left_out
    ]
    if not lines:
        return
    out.line()
    out.line(out.style("damage in the log, which stays as it is", "bold"))
    out.lines(f"  {text.printable(line)}" for line in lines[:_MOST_TOLD])
    if len(lines) > _MOST_TOLD:
        out.line(f"  and {len(lines) - _MOST_TOLD} more; --json has all")


def _show_next(out: Output, what: str, *words: str, config: str | None) -> None:
    out.line(f"{what + ':':<11}{options.command_line(*words, config=config)}")
