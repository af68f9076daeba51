"""``logquarry verify`` and ``diff``: check one store, or compare two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options, outcome
from logquarry.cli import spark as with_spark
from logquarry.cli.outcome import ExitCode
from logquarry.cli.output import MOST_LISTED, Output

if TYPE_CHECKING:
    from logquarry.repair.findings import VerifyReport
    from logquarry.repair.store_diff import Place, StoreDiff


@click.command()
@options.stores
@options.spark_master
@options.as_json
@options.config
@options.quiet
def verify(
    stores: tuple[str, ...],
    spark_master: str | None,
    as_json: bool,
    config: str | None,
    out: Output,
) -> None:
    """Check all files of a store, and list what is wrong.

    verify checks every frame, blank, queue entry and index chain, and the checkpoint. Each finding
    is either damage or a note. A note reports a harmless fact. STORE is a folder, a URL, or a glob
    of several stores. A broker may have the store open.

    The exit code is 1 if any finding is damage, else 0.

    Example: logquarry verify /data/store
    """
    settings = options.store_config(config)
    if spark_master is None:
        from logquarry.log.location import find_stores
        from logquarry.repair.verification import verify as verify_path

        reports = []
        for location in find_stores(stores):
            with out.progress("checking", in_bytes=True) as progress:
                reports.append(verify_path(location, config=settings, progress=progress))
    else:
        from logquarry.spark.repair import verify_stores

        with (
            with_spark.session(spark_master) as session,
            out.progress("checking", in_bytes=True) as progress,
        ):
            reports = verify_stores(session, stores, config=settings, progress=progress)
    if as_json:
        documents = [report.to_json() for report in reports]
        out.json(documents[0] if len(documents) == 1 else {"stores": documents})
    else:
        for number, report in enumerate(reports):
            if len(reports) > 1:
                name = out.style(text.printable(report.store), "bold")
                out.lines(["", name] if number else [name])
            _show_findings(out, report)
            typed = stores[0] if len(stores) == len(reports) == 1 else report.store
            step = outcome.after_verify(report, typed, config)
            if step is not None:
                out.line(step)
    if any(report.has_damage for report in reports):
        click.get_current_context().exit(ExitCode.FINDINGS)


def _show_findings(out: Output, report: VerifyReport) -> None:
    if report.findings:
        rows = [
            (f.severity, f.kind, f.file, f.offset, text.count_text(f.length or None), f.reason)
            for f in report.findings
        ]
        header = ["severity", "kind", "file", "offset", "bytes", "reason"]
        out.table(header, rows, right="offset bytes")
        out.line()
    damage = report.damage_count
    notes = len(report.findings) - damage
    verdict = text.plural(damage, "damage finding") if damage else "no damage"
    counts = report.counts
    checked = (
        f"{text.plural(counts.get('messages', 0), 'message')}, "
        f"{text.plural(counts.get('queue_entries', 0), 'queue entry', 'queue entries')}, "
        f"{text.plural(counts.get('index_entries', 0), 'index entry', 'index entries')}"
    )
    verdict = out.style(verdict, "red" if damage else "green")
    if counts.get("lost_messages"):
        verdict += (
            f" ({text.plural(counts['lost_messages'], 'message')} lost, "
            f"{text.plural(counts['lost_bytes'], 'byte')})"
        )
    out.line(f"{verdict}, {text.plural(notes, 'note')}; checked {checked}")


# --------------------------------------------------------------------------------------------- diff
@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options.as_json
@options.config
@options.quiet
def diff(a: str, b: str, as_json: bool, config: str | None, out: Output) -> None:
    """Compare two stores, and show where they diverge.

    A and B are for example the stores of a master and a slave. diff first compares the logs byte by
    byte, in the range of physical offsets that both logs contain. Then it compares the queues. The
    stores have not diverged if the only difference is that one log begins later or ends earlier
    than the other. Brokers may have both stores open.

    Exit code 1 if the stores have diverged, if their logs have no range in common, if a store lacks
    its last log files, or if queues in RocksDB cannot be read. Exit code 0 if the stores are equal,
    or if one log continues the other.

    Example: logquarry diff /data/master /data/slave
    """
    settings = options.store_config(config)
    from logquarry.repair.store_diff import diff as diff_paths

    with out.progress("comparing", in_bytes=True) as progress:
        found = diff_paths(a, b, config=settings, progress=progress)
    if as_json:
        out.json(found.to_json())
    else:
        _show_diff(out, found, a, b, config)
    if found.has_diverged or found.lost or found.unread:
        click.get_current_context().exit(ExitCode.FINDINGS)


def _show_diff(out: Output, found: StoreDiff, a: str, b: str, config: str | None) -> None:
    out.line(_verdict(out, found))
    out.line()
    out.line(f"  a  {text.printable(a)}: {found.log_a.min_offset} to {found.log_a.max_offset}")
    out.line(f"  b  {text.printable(b)}: {found.log_b.min_offset} to {found.log_b.max_offset}")
    for note in found.notes:
        out.line(f"  {text.printable(note)}")
    _show_divergence(out, found)
    _show_parts(out, found)
    _show_queues(out, found)
    different = [name for name, state in found.config.items() if state != "equal"]
    if different:
        out.line()
        out.line(f"  ignored: differences in config/: {text.printable(', '.join(different))}")
    _show_next(out, found, a, b, config)


def _verdict(out: Output, found: StoreDiff) -> str:
    compared = text.size_text(max(0, found.end - found.start))
    if found.verdict == "equal":
        return f"{out.style('equal', 'green')}: {compared} of log, {_queue_count(found)}"
    if found.verdict == "prefix":
        words = out.style("equal in the range that both have", "green")
        return f"{words}: {compared} of log, {_queue_count(found)}"
    if found.verdict == "incomplete":
        words = out.style("not all queues were compared", "red")
        return f"{words}: equal are {compared} of log, {_queue_count(found)}"
    if found.verdict == "disjoint":
        words = out.style("no range in common", "red")
        return f"{words}: one log ends before the other begins; the stores cannot be compared"
    if found.divergence is not None:
        words = out.style(f"diverged at physical offset {found.divergence.offset}", "red")
        before = text.size_text(found.divergence.offset - found.start)
        return f"{words}: the {before} of log before it are equal"
    count = sum(queue.state == "differs" for queue in found.queues)
    words = out.style(text.plural(count, "queue differs", "queues differ"), "red")
    return f"{words}: the logs are equal in the range that both have, {compared}"


def _queue_count(found: StoreDiff) -> str:
    return text.plural(len(found.queues), "queue")


def _show_divergence(out: Output, found: StoreDiff) -> None:
    if found.divergence is None:
        return
    out.line()
    out.line(out.style(f"at physical offset {found.divergence.offset}", "bold"))
    for name, place in (("a", found.divergence.a), ("b", found.divergence.b)):
        out.line(f"  {name}  {_place(place)}")
        out.line(f"     in {text.printable(place.file)}")


def _place(place: Place) -> str:
    words = f"{place.what} at {place.offset}"
    if place.size:
        words += f", {text.plural(place.size, 'byte')}"
    if place.topic is not None:
        words += (
            f": {text.shown(place.topic)}, queue {place.queue_id} offset {place.queue_offset}, "
            f"stored {text.time_text(place.store_timestamp)}"
        )
    if place.reason is not None:
        words += f": {text.printable(place.reason)}"
    return words


def _show_parts(out: Output, found: StoreDiff) -> None:
    differing = [part for part in found.parts if part.first_difference is not None]
    if not differing:
        return
    out.line()
    rows = [
        [
            part.file,
            part.offset,
            f"{part.length:,}",
            f"not in {part.missing_in}" if part.missing_in else f"{part.different_bytes:,}",
            part.first_difference,
        ]
        for part in differing[:MOST_LISTED]
    ]
    header = ["log file", "from", "compared", "different", "first"]
    out.table(header, rows, right="from compared different first")
    same = len(found.parts) - len(differing)
    out.more(len(differing) - len(rows), "more that differ")
    if same:
        out.line(f"{text.plural(same, 'other file is', 'other files are')} equal")


def _show_queues(out: Output, found: StoreDiff) -> None:
    differing = [queue for queue in found.queues if queue.state == "differs"]
    if not differing:
        return
    out.line()
    rows = []
    for queue in differing[:MOST_LISTED]:
        ends = ["-" if side is None else side.max_offset for side in (queue.a, queue.b)]
        rows.append([text.shown(queue.topic), queue.queue_id, *ends, queue.reason])
    out.table(["topic", "queue", "end in a", "end in b", "difference"], rows, right="queue")
    out.more(len(differing) - len(rows))


def _show_next(out: Output, found: StoreDiff, a: str, b: str, config: str | None) -> None:
    faulty = found.lost or found.unread
    lost = [store for name, store in (("a", a), ("b", b)) if name in faulty]
    if not lost and (not found.has_diverged or found.verdict == "disjoint"):
        return
    divergence = found.divergence
    suspects = lost or [a, b]
    if divergence is not None:
        harmed = [
            store
            for store, place in ((a, divergence.a), (b, divergence.b))
            if place.what in ("damage", "nothing")
        ]
        suspects = harmed or suspects
    out.line()
    for store in suspects:
        out.line(f"next: {options.command_line('verify', store, config=config)}")
