"""``logquarry replicate``: a store that follows a master."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options, serving
from logquarry.cli.output import Output
from logquarry.errors import ReplicationError

if TYPE_CHECKING:
    from logquarry.replication import ConfigSync, HaSlave


@click.command()
@click.argument("master", metavar="HOST:PORT")
@click.option("--into", "folder", metavar="STORE", required=True, help="The slave's store.")
@click.option(
    "--from",
    "start",
    type=click.IntRange(0, (1 << 63) - 1),
    metavar="OFFSET",
    help="Where a new store begins: 0 for all of the master's log, or the start of one of its "
    "files. By default where the master says, which with RocketMQ is its last file.",
)
@click.option(
    "--sync-config",
    metavar="HOST:PORT",
    help="The master's broker: its topics, groups, consumer offsets and delay progress are fetched "
    "into config/, at once, every 10 s, and with --once at the end.",
)
@click.option("--once", is_flag=True, help="End when all that the master has is here.")
@click.option(
    "--acknowledge",
    type=click.Choice(["flushed", "received"]),
    default="flushed",
    show_default=True,
    help="What the master is told: what is on the disk, or, as RocketMQ does, in memory.",
)
@click.option("--no-crc", is_flag=True, help="Take bodies that do not match their CRC.")
@click.option("--tls", is_flag=True, help="Connect by TLS, which no RocketMQ master speaks.")
@click.option("--tls-ca", metavar="FILE", help="The authority of the master's certificate.")
@click.option("--tls-cert", metavar="FILE", help="Our own certificate (PEM).")
@click.option("--tls-key", metavar="FILE", help="Its key, if it is not in the same file.")
@click.option("--tls-name", metavar="NAME", help="The name in the master's certificate.")
@options.config
@options.quiet
def replicate(
    master: str,
    folder: str,
    start: int | None,
    sync_config: str | None,
    once: bool,
    acknowledge: str,
    no_crc: bool,
    tls: bool,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_name: str | None,
    config: str | None,
    quiet: bool,
) -> None:
    """Follow a master, RocketMQ's or ours, until Ctrl-C.

    STORE is made if it is not there; its log's files must be as large as the master's
    (mappedFileSizeCommitLog in --config, where that is not 1 GiB). A store that is ahead of its
    master, or has other bytes, is refused. Opened again, as any store is, it takes messages.
    """
    out = Output(quiet=quiet)
    host, port = serving.host_port(master, option="MASTER")
    broker = None
    if sync_config is not None:
        broker = serving.host_port(sync_config, option="--sync-config")
    context = serving.client_tls(tls, tls_ca, tls_cert, tls_key)
    from logquarry.config import StoreConfig
    from logquarry.replication import ConfigSync, ConfigSyncOptions, HaSlave, SlaveOptions
    from logquarry.signals import held
    from logquarry.store.message_store import MessageStore

    settings = replace(options.store_config(config) or StoreConfig(), broker_role="SLAVE")
    follows = SlaveOptions(
        start=start,
        acknowledge=acknowledge,
        check_crc=not no_crc,
        times=serving.ha_times(settings),
        tls=context,
        server_name=tls_name,
    )
    with (
        held() as waiting,
        MessageStore.open(folder, config=settings, mode="rw") as opened,
        HaSlave(opened, host, port, options=follows) as slave,
        ExitStack() as besides,
    ):
        sync = None
        if broker is not None:
            fetches = ConfigSyncOptions(tls=context, server_name=tls_name)
            sync = besides.enter_context(ConfigSync(opened, *broker, options=fetches))
        line = _Line(out, slave, sync, ends=once)
        serving.go_on(out, waiting, line)
        for part in (slave, sync):
            if part is not None and part.error is not None:
                raise part.error
        if sync is not None:
            _fetch_last(out, sync)
        opened.wait_dispatched()
        # Closing does so too, but has nobody to tell that the disk refused.
        opened.flush()
        end = opened.max_offset
    out.note(f"{text.printable(folder)} is as its master up to {end}")


def _fetch_last(out: Output, sync: ConfigSync) -> None:
    """Fetch config/ as it is now that the log is here.

    Raises:
        ReplicationError: if not all of it could be had.
    """
    try:
        synced = sync.sync()
    except OSError as error:
        raise ReplicationError(f"{sync.master}: config/ was not fetched: {error}") from error
    for name in synced.missing:
        out.note(f"{sync.master}: the master has no {name}")
    if synced.problems:
        raise ReplicationError(f"{sync.master}: {'; '.join(synced.problems)}")


class _Line:
    """The status line, and notes of what changes for those who see none."""

    def __init__(self, out: Output, slave: HaSlave, sync: ConfigSync | None, *, ends: bool) -> None:
        self._out = out
        self._slave = slave
        self._sync = sync
        self._fetched = ""
        self._ends = ends
        self._said = ""
        self._at = time.monotonic(), 0

    def __call__(self) -> str | None:
        status = self._slave.status()
        if status.has_ended or (self._ends and status.has_all):
            return None
        news = f"{status.master}: connected" if status.is_connected else status.trouble
        if news and news != self._said:
            self._said = news
            self._out.note(text.printable(news))
        if self._sync is not None:
            fetched = self._sync.status()
            if fetched.has_ended:
                return None
            news = fetched.trouble or ("config/ is here" if fetched.times else "")
            if news and news != self._fetched:
                self._fetched = news
                self._out.note(f"{fetched.master}: {text.printable(news)}")
        before, had = self._at
        now = time.monotonic()
        speed = (status.received_bytes - had) / max(now - before, 1e-3)
        self._at = now, status.received_bytes
        state = "all there" if status.has_all else f"{text.size_text(int(speed))}/s"
        if not status.is_connected:
            state = "not connected"
        known = "nothing" if status.acknowledged is None else str(status.acknowledged)
        return f"{status.master}: log to {status.max_offset}, acknowledged {known}, {state}"
