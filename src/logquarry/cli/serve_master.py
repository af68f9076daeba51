"""``logquarry serve-master``: a store's log for slaves."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from logquarry import text, values
from logquarry.cli import options, serving
from logquarry.cli.output import Output

if TYPE_CHECKING:
    from logquarry.replication import MasterStatus


@click.command()
@options.store
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:10912",
    show_default=True,
    help="Where slaves connect. Port 0: one that the system chooses.",
)
@click.option(
    "--full-history",
    is_flag=True,
    help="A slave that has nothing gets the whole log. By default, and from RocketMQ, it gets the "
    "last file.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="NETWORK",
    help="Who may connect: 10.0.0.7 or 10.0.0.0/8. By default whoever reaches the port.",
)
@click.option("--max-connections", type=click.IntRange(1), default=16, show_default=True)
@click.option("--rate", metavar="SIZE", help="Most bytes a second to each slave: 50m.")
@click.option("--transfer-size", metavar="SIZE", help="Most bytes in one transfer (32k).")
@click.option("--tls-cert", metavar="FILE", help="Serve TLS with this certificate (PEM).")
@click.option("--tls-key", metavar="FILE", help="Its key, if it is not in the same file.")
@click.option("--tls-ca", metavar="FILE", help="Slaves must show a certificate of this authority.")
@options.config
@options.quiet
def serve_master(
    store: str,
    listen: str,
    full_history: bool,
    allow: tuple[str, ...],
    max_connections: int,
    rate: str | None,
    transfer_size: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    config: str | None,
    quiet: bool,
) -> None:
    """Serve the log of STORE to slaves, RocketMQ's or ours, until Ctrl-C.

    The store is open to be written meanwhile, and nobody else may open it so.
    """
    out = Output(quiet=quiet)
    host, port = serving.host_port(listen, option="--listen")
    tls = serving.server_tls(tls_cert, tls_key, tls_ca)
    from logquarry.config import StoreConfig
    from logquarry.files.layout import StoreLayout
    from logquarry.protocol.ha import TransferLimits
    from logquarry.replication import HaMaster, MasterOptions
    from logquarry.signals import held
    from logquarry.store.message_store import MessageStore

    settings = options.store_config(config) or StoreConfig()
    if settings.broker_role == "SLAVE":
        settings = replace(settings, broker_role="ASYNC_MASTER")
    size = settings.ha_transfer_batch_size
    serves = MasterOptions(
        limits=TransferLimits(
            transfer_size=size if transfer_size is None else values.byte_count(transfer_size),
            bytes_per_second=None if rate is None else values.byte_count(rate),
        ),
        times=serving.ha_times(settings),
        full_history=full_history,
        max_connections=max_connections,
        allow=allow or None,
        tls=tls,
    )
    # Nobody can put into a store that is served from here: a new one is a path mistyped.
    StoreLayout.open(store)
    with (
        held() as waiting,
        MessageStore.open(store, config=settings, mode="rw") as opened,
        HaMaster(opened, host, port, options=serves) as master,
    ):
        out.line(f"serving {text.printable(store)} at {master.address}")
        # Whoever started this may wait for it.
        sys.stdout.flush()
        serving.go_on(out, waiting, lambda: _line(master.status()))
        if master.error is not None:
            raise master.error


def _line(status: MasterStatus) -> str | None:
    if status.has_ended:
        return None
    said = [f"log to {status.max_offset}"]
    for slave in status.slaves:
        if slave.acknowledged is None:
            said.append(f"{slave.peer} has said nothing yet")
        else:
            behind = max(0, status.max_offset - slave.acknowledged)
            said.append(f"{slave.peer} {text.size_text(behind)} behind")
    if not status.slaves:
        said.append("no slave")
    if status.refused:
        said.append(f"{status.refused} refused")
    return ", ".join(said)
