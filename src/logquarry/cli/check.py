"""``logquarry verify``, ``diff``, ``report`` and ``demo``: check a store, compare two, or write an
HTML page about a store.

The store of ``demo`` is from a real RocketMQ broker. The command also exports and checks the store.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options, outcome, output
from logquarry.cli import spark as with_spark
from logquarry.cli.outcome import ExitCode
from logquarry.cli.output import MOST_LISTED, Output
from logquarry.errors import LogquarryError

if TYPE_CHECKING:
    from logquarry.repair.findings import VerifyReport
    from logquarry.repair.store_diff import Place, StoreDiff
    from logquarry.spark.parquet import Summary
    from logquarry.store.message_store import MessageStore


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
        return f"{words}; equal: {compared} of log, {_queue_count(found)}"
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


_STORE = "real-broker"


@click.command()
@options.store
@click.option(
    "--html",
    "target",
    metavar="FILE",
    required=True,
    help="The file to write.",
)
@options.config
@options.quiet
def report(store: str, target: str, config: str | None, out: Output) -> None:
    """Write one HTML page with charts, queues and findings.

    A browser can show the page without a network. The command
    needs the packages of logquarry[report].

    Example: logquarry report /data/store --html report.html
    """
    from logquarry.report.page import store_report

    found: list[VerifyReport] = []

    settings = options.store_config(config)

    def read(opened: MessageStore) -> tuple[Path, str]:
        path = output.check_target(target, [store], settings)
        found.clear()
        page = store_report(
            opened,
            watch=lambda what: out.progress(what, in_bytes=True),
            checked=found.append,
        )
        return path, page

    (path, page), left_out = outcome.read_store(store, settings, read)
    with output.staged(path) as file:
        file.write(page.encode())
    out.note(f"wrote {target}, {text.size_text(len(page.encode()))}")
    step = outcome.after_verify(found[0], store, config)
    if step is not None:
        out.note(step)
    outcome.end_incomplete(out, left_out)


# --------------------------------------------------------------------------------------------- demo
@click.command()
@click.option(
    "--to",
    "target",
    metavar="DIR",
    type=options.LocalFolder(),
    default=Path("demo-output"),
    help="Folder for the Parquet files and the report.",
)
@options.quiet
def demo(target: Path, out: Output) -> None:
    """Export a sample store to Parquet, and write a report.

    The store comes with the package; a RocketMQ 4.9.3 broker wrote it.

    Example: logquarry demo --to demo-output
    """
    import tempfile

    start = time.monotonic()
    parquet, page = target / "parquet", target / "report.html"
    with tempfile.TemporaryDirectory(prefix="logquarry-demo-") as folder:
        store = _unpack(Path(folder))
        out.note("Unpacked the store of a RocketMQ 4.9.3 broker.")
        with output.writing_to(parquet), with_spark.session_if_installed(None) as session:
            through = "" if session is None else " through Spark"
            out.note(f"Exporting the store{through} to Parquet ...")
            done = with_spark.export(out, session, [str(store)], str(parquet))
        checked = _report(out, store, page)
    _summary(out, done.summary, checked)
    out.line(f"Parquet   {text.printable(str(parquet))}")
    if page.exists():
        out.line(
            f"Report    {text.printable(str(page))} (open it in a browser; it needs no network)"
        )
    out.line(f"Took      {time.monotonic() - start:.1f} s")
    out.line()
    out.lines(_next_steps(parquet))


def _unpack(folder: Path) -> Path:
    import tarfile
    from importlib.resources import as_file, files

    with (
        as_file(files("logquarry") / "data" / f"{_STORE}.tar.xz") as archive,
        tarfile.open(archive, "r:xz") as tar,
    ):
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # tarfile has no filters before 3.11.4; our archive is safe
            tar.extractall(folder)
    # The export takes the broker's name from the name of this folder.
    return (folder / _STORE / "store").rename(folder / _STORE / "broker-a")


def _report(out: Output, store: Path, page: Path) -> VerifyReport:
    from logquarry.log.layout import StoreLayout
    from logquarry.repair.verification import verify_store
    from logquarry.report.page import store_report
    from logquarry.store.message_store import MessageStore

    out.note("Checking every frame, and writing the report ...")
    try:
        with MessageStore.open(store) as opened:
            html = store_report(
                opened,
                title="A store that real RocketMQ wrote",
                notes=[
                    "A RocketMQ 4.9.3 broker wrote it: plain, ordered and batch messages, delays, "
                    "retries, and transactions. The demo of logquarry exported the same messages "
                    "to Parquet."
                ],
            )
    except LogquarryError as error:
        page.unlink(missing_ok=True)
        out.warn(f"no report was written: {error}")
    else:
        with output.staged(page) as file:
            file.write(html.encode())
    return verify_store(StoreLayout.open(store))


def _summary(out: Output, summary: Summary, report: VerifyReport) -> None:
    total = summary.total
    rows = [
        [
            name,
            text.count_text(topic.messages),
            text.size_text(topic.bytes),
            text.time_text(topic.first_ms),
            text.time_text(topic.last_ms),
        ]
        for name, topic in [*summary.topics.items(), ("all topics", total)]
    ]
    out.line()
    header = ["topic", "messages", "bytes", "first stored", "last stored"]
    out.table(header, rows, right="messages bytes")
    out.line()
    damage = report.damage_count
    span = (total.last_ms or 0) - (total.first_ms or 0)
    out.line(f"Time span {text.duration_text(span)}")
    out.line(f"Damage    {text.plural(damage, 'finding') if damage else 'none'}")


def _next_steps(parquet: Path) -> list[str]:
    return [
        "Next, try your own store. These commands only read it; its broker may be running:",
        "  logquarry info STORE                           topics, queues, bytes per topic",
        "  logquarry messages STORE --topic T --limit 5   the first five messages of a topic",
        "  logquarry verify STORE                         check every frame",
        "  logquarry export STORE --to DIR                export to Parquet, as here",
        f"  python -c \"import pyarrow.parquet as q; print(q.read_table('{parquet}'))\"",
    ]
