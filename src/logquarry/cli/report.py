"""``logquarry report`` and ``demo``: write an HTML page about a store.

The store of ``demo`` is from a real RocketMQ broker. The command also exports and checks the store.
"""

from __future__ import annotations

import tarfile
import tempfile
import time
from importlib.resources import as_file
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options, outcome, output, spark
from logquarry.cli.output import Output
from logquarry.errors import LogquarryError

if TYPE_CHECKING:
    from logquarry.repair.findings import VerifyReport
    from logquarry.spark.parquet import Summary
    from logquarry.store.message_store import MessageStore

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
    start = time.monotonic()
    parquet, page = target / "parquet", target / "report.html"
    with tempfile.TemporaryDirectory(prefix="logquarry-demo-") as folder:
        store = _unpack(Path(folder))
        out.note("Unpacked the store of a RocketMQ 4.9.3 broker.")
        with spark.session_if_installed(None) as session:
            through = "" if session is None else " through Spark"
            out.note(f"Exporting the store{through} to Parquet ...")
            done = spark.export(out, session, [str(store)], str(parquet))
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
    with (
        as_file(resources("logquarry") / "data" / f"{_STORE}.tar.xz") as archive,
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
        with output.staged(page) as file:
            file.write(html.encode())
    except LogquarryError as error:
        page.unlink(missing_ok=True)
        out.warn(f"no report was written: {error}")
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
