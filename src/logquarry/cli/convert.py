"""``logquarry convert``: makes a plain store from a DLedger log or a log in several folders."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import click

from logquarry import text
from logquarry.cli import next_step, options
from logquarry.cli.output import Output
from logquarry.cli.repair import show_salvage
from logquarry.units import Progress

_LOSSES = 1


@click.command()
@options.store
@click.option(
    "--into",
    metavar="DIR",
    type=options.LocalFolder(),
    help="Make the plain store in DIR, which must be empty or missing.  [default: write nothing, "
    "only report]",
)
@options.as_json
@options.config
@options.quiet
def convert(store: str, into: Path | None, as_json: bool, config: str | None, quiet: bool) -> None:
    """Make a plain store from a DLedger log, or from a log in several folders.

    The new store has its log in commitlog/, and queues, index, topics and consumer offsets. To
    serve it with a broker of RocketMQ 4.9 or 5, remove enableDLegerCommitLog and
    storePathCommitLog from broker.conf. Messages of a DLedger log get new physical offsets; queue
    offsets stay. convert only reads STORE, but no process may have it open. It leaves damaged
    messages out and lists them.

    Exit code 1 if a message is lost or a part of STORE is left behind, else 0; 2 if the log is
    already in commitlog/; 4 if a process has the store open.

    Example: logquarry convert /data/dledger-store --into /data/store
    """
    out = Output(quiet=quiet)
    settings = options.store_config(config)
    from logquarry.log.layout import StoreLayout
    from logquarry.repair.convert import convert as convert_store

    def bars(what: str) -> AbstractContextManager[Progress | None]:
        return out.progress(what, in_bytes=True)

    layout = StoreLayout.open(store, settings)
    found = convert_store(layout, into, bars=bars)
    if as_json:
        out.json(found.to_json())
    else:
        if found.uncommitted:
            out.line(
                f"{text.plural(found.uncommitted, 'message')} after the last one that the DLedger "
                "group had committed: included"
            )
        show_salvage(out, found.salvaged)
        if into is not None:
            out.line(next_step.line("verify", str(into)))
        else:
            out.line(next_step.line("convert", store, "--into", "DIR", config=config))
    if not found.salvaged.is_whole:
        click.get_current_context().exit(_LOSSES)
