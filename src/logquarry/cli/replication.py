"""What ``serve-master`` and ``replicate`` share: addresses, TLS, and going on until told to end."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import ReplicationError, UsageError
from logquarry.signals import Held

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.protocol.ha import HaTimes
    from logquarry.replication import ConfigSync, HaSlave, MasterStatus


_LOOK_EVERY: Final = 0.2


def host_port(text: str, *, option: str) -> tuple[str, int]:
    """``127.0.0.1:10912`` or ``[::1]:10912`` in two.

    Raises:
        UsageError: if it is not.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and _is_host(host) and port.isascii() and port.isdigit()) or int(port) > 0xFFFF:
        raise UsageError(f"{option} takes HOST:PORT, not {text!r}")
    return host, int(port)


def _is_host(name: str) -> bool:
    try:
        # What the system is asked for. Of a name that has no such form it fails otherwise.
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def ha_times(settings: StoreConfig) -> HaTimes:
    """Heartbeats and housekeeping, as a configuration asks for them.

    Raises:
        UsageError: if it cannot be meant.
    """
    from logquarry.protocol.ha import HaTimes

    return HaTimes(
        heartbeat_ms=settings.ha_send_heartbeat_interval,
        housekeeping_ms=settings.ha_housekeeping_interval,
    )


def server_tls(
    certificate: str | None, key: str | None, authority: str | None
) -> ssl.SSLContext | None:
    """How a master serves TLS; None where no certificate is given.

    Raises:
        UsageError: if the files cannot be used.
    """
    if certificate is None:
        if key is not None or authority is not None:
            raise UsageError("--tls-key and --tls-ca say more of --tls-cert, which is not there")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise UsageError(f"TLS: {error}") from error
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(
    is_wanted: bool, authority: str | None, certificate: str | None, key: str | None
) -> ssl.SSLContext | None:
    """How a slave connects by TLS; None where it does not.

    Raises:
        UsageError: if the files cannot be used.
    """
    if not is_wanted:
        if authority or certificate or key:
            raise UsageError("--tls-ca, --tls-cert and --tls-key say more of --tls")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise UsageError(f"TLS: {error}") from error
    return context


def go_on(out: Output, waiting: Held, line: Callable[[], str | None]) -> None:
    """Show a status line until an interrupt comes.

    Args:
        out: where it is shown.
        waiting: what has interrupts wait.
        line: gives the line; None to end.
    """
    with out.status_line() as shown:
        while (words := line()) is not None:
            shown.show(words)
            time.sleep(_LOOK_EVERY)
            waiting.check()


# --------------------------------------------------------------------------------------------------
# ``logquarry replicate``: a store that follows a master.


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
    host, port = host_port(master, option="MASTER")
    broker = None
    if sync_config is not None:
        broker = host_port(sync_config, option="--sync-config")
    context = client_tls(tls, tls_ca, tls_cert, tls_key)
    from logquarry.config import StoreConfig
    from logquarry.replication import ConfigSync, ConfigSyncOptions, HaSlave, SlaveOptions
    from logquarry.signals import held
    from logquarry.store.message_store import MessageStore

    settings = replace(options.store_config(config) or StoreConfig(), broker_role="SLAVE")
    follows = SlaveOptions(
        start=start,
        acknowledge=acknowledge,
        check_crc=not no_crc,
        times=ha_times(settings),
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
        go_on(out, waiting, line)
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


# --------------------------------------------------------------------------------------------------
# ``logquarry serve-master``: a store's log for slaves.


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
    "--listen-config",
    metavar="HOST:PORT",
    help="Where slaves ask for config/ (topics, offsets): 127.0.0.1:10911. Also listens two ports "
    "below, where a RocketMQ slave asks for topics. By default nowhere.",
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
    listen_config: str | None,
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

    With --listen-config its topics, groups and offsets, too.

    The store is open to be written meanwhile, and nobody else may open it so.
    """
    out = Output(quiet=quiet)
    host, port = host_port(listen, option="--listen")
    asked_at = None
    if listen_config is not None:
        asked_at = host_port(listen_config, option="--listen-config")
    tls = server_tls(tls_cert, tls_key, tls_ca)
    from logquarry.config import StoreConfig
    from logquarry.log.layout import StoreLayout
    from logquarry.protocol.ha import TransferLimits
    from logquarry.replication import ConfigServer, ConfigServerOptions, HaMaster, MasterOptions
    from logquarry.signals import held
    from logquarry.store.message_store import MessageStore

    settings = options.store_config(config) or StoreConfig()
    if settings.broker_role == "SLAVE":
        settings = replace(settings, broker_role="ASYNC_MASTER")
    size = settings.ha_transfer_batch_size
    serves = MasterOptions(
        limits=TransferLimits(
            transfer_size=size if transfer_size is None else text.byte_count(transfer_size),
            bytes_per_second=None if rate is None else text.byte_count(rate),
        ),
        times=ha_times(settings),
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
        ExitStack() as besides,
    ):
        out.line(f"serving {text.printable(store)} at {master.address}")
        server = None
        if asked_at is not None:
            answers = ConfigServerOptions(
                max_connections=max_connections, allow=allow or None, tls=tls
            )
            server = besides.enter_context(ConfigServer(opened.root, *asked_at, options=answers))
            out.line(f"serving its config/ at {server.address}")
        # Whoever started this may wait for it.
        sys.stdout.flush()
        parts = [part for part in (master, server) if part is not None]

        def line() -> str | None:
            has_ended = any(part.error is not None for part in parts)
            return None if has_ended else _line(master.status())

        go_on(out, waiting, line)
        for part in parts:
            if part.error is not None:
                raise part.error


def _line(status: MasterStatus) -> str:
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
