"""``logquarry report``: one offline page about a store."""

from __future__ import annotations

import click

from logquarry import text
from logquarry.cli import options, output
from logquarry.cli.output import Output


@click.command()
@options.store
@click.option(
    "--html",
    "target",
    metavar="FILE",
    required=True,
    help="Where the page goes.",
)
@options.config
@options.quiet
def report(store: str, target: str, config: str | None, quiet: bool) -> None:
    """Write one offline HTML page about a store: charts, queues, findings."""
    out = Output(quiet=quiet)
    from logquarry.report.page import store_report
    from logquarry.store.message_store import MessageStore

    with MessageStore.open(store, config=options.store_config(config)) as opened:
        path = output.check_target(target, [store])
        page = store_report(opened, watch=lambda what: out.progress(what, in_bytes=True))
    with output.staged(path) as file:
        file.write(page.encode())
    out.note(f"wrote {text.printable(target)}, {text.size_text(len(page.encode()))}")
