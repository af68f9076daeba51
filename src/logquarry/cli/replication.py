"""``logquarry serve-master`` and ``replicate``: send a log to slaves, or copy a master's log."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from logquarry import text
from logquarry.cli import options, outcome
from logquarry.cli.output import Output
from logquarry.errors import ReplicationError, StoreUnavailable, UsageError
from logquarry.format import java
from logquarry.systems import Held

if TYPE_CHECKING:
    from pathlib import Path

    from logquarry.config import StoreConfig
    from logquarry.protocol.ha_messages import HaTimes
    from logquarry.replication import ConfigSync, ConfigSynced, HaSlave, MasterStatus, SlaveOptions

_STATUS_SECONDS: Final = 0.2
_TRIES: Final = 5
"""With ``--once``, the command gives up after this many attempts (about 3 s) without an answer."""


# ------------------------------------------------------------------------- addresses, TLS, status
def host_port(text: str, *, option: str) -> tuple[str, int]:
    """Split ``127.0.0.1:10912`` or ``[::1]:10912`` into host and port."""
    host, colon, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    port = java.digits(digits)
    if not (colon and _is_host(host) and 0 <= port <= 0xFFFF):
        raise UsageError(f"{option} takes HOST:PORT, not {text!r}")
    return host, port


def _is_host(name: str) -> bool:
    try:
        # TLS and the lookup of a host both encode the name with IDNA. The encoder raises
        # UnicodeError for a name that no host can have.
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def ha_times(settings: StoreConfig) -> HaTimes:
    """Return the heartbeat and housekeeping intervals of a configuration."""
    from logquarry.protocol.ha_messages import HaTimes

    return HaTimes(
        heartbeat_ms=settings.ha_send_heartbeat_interval,
        housekeeping_ms=settings.ha_housekeeping_interval,
    )


class ServerTls(NamedTuple):
    """The paths of a server's TLS files, as the user passed them."""

    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS settings; None if the user passed no certificate."""
        if self.tls_cert is None:
            if self.tls_key is not None or self.tls_ca is not None:
                raise UsageError("--tls-key and --tls-ca need --tls-cert")
            return None
        context = _tls(ssl.Purpose.CLIENT_AUTH, *self)
        if self.tls_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def server_tls_options(clients: str) -> Callable[[Any], Any]:
    """Add the TLS options to a command that serves clients, as its argument ``tls``."""
    return options.bundle(
        "tls",
        ServerTls,
        (
            click.option(
                "--tls-cert",
                metavar="FILE",
                help="Serve TLS with this certificate (PEM).  [default: no TLS]",
            ),
            click.option(
                "--tls-key",
                metavar="FILE",
                help="The certificate's key (PEM).  [default: in --tls-cert]",
            ),
            click.option(
                "--tls-ca",
                metavar="FILE",
                help=f"Accept only {clients} with a certificate of this authority (PEM).  "
                "[default: all]",
            ),
        ),
    )


def client_tls(
    tls: bool,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_name: str | None = None,
) -> ssl.SSLContext | None:
    """Return the TLS settings of a slave; None without ``--tls``."""
    if not tls:
        if any(given is not None for given in (tls_ca, tls_cert, tls_key, tls_name)):
            raise UsageError("--tls-ca, --tls-cert, --tls-key and --tls-name need --tls")
        return None
    if tls_key is not None and tls_cert is None:
        raise UsageError("--tls-key needs --tls-cert")
    if tls_name and not _is_host(tls_name):
        raise UsageError(f"--tls-name takes the name of a host, not {tls_name!r}")
    return _tls(ssl.Purpose.SERVER_AUTH, tls_cert, tls_key, tls_ca)


def _tls(
    purpose: ssl.Purpose, certificate: str | None, key: str | None, authority: str | None
) -> ssl.SSLContext:
    files = {"--tls-cert": certificate, "--tls-key": key, "--tls-ca": authority}
    with options.reading_tls(files):
        context = ssl.create_default_context(purpose, cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    return context


def show_status(out: Output, waiting: Held, lines: Iterable[str]) -> None:
    """Show each of the lines for a moment as the status line, until an interrupt arrives."""
    with out.status_line() as show:
        for words in lines:
            show(words)
            time.sleep(_STATUS_SECONDS)
            waiting.check()


# --------------------------------------------------------------------------------------- replicate
@click.command()
@click.argument("master", metavar="HOST:PORT")
@click.option(
    "--into",
    "folder",
    metavar="STORE",
    required=True,
    help="The slave's store; replicate creates a missing store.",
)
@click.option(
    "--from",
    "start",
    type=click.IntRange(0, (1 << 63) - 1),
    metavar="OFFSET",
    help="Physical offset at which a new store begins: 0 (the whole log), or the start of one of "
    "the master's files.  [default: the master chooses; RocketMQ: its last file]",
)
@click.option(
    "--sync-config",
    metavar="HOST:PORT",
    help="Also copy the master's config/ (topics, groups, consumer offsets, delay progress) from "
    "the broker at this address: at the start, every 10 s, and with --once at the end.",
)
@click.option("--once", is_flag=True, help="End when the store has all of the master's log.")
@click.option(
    "--acknowledge",
    type=click.Choice(["flushed", "received"]),
    default="flushed",
    help="Acknowledge bytes when they are on the disk (flushed), or in memory, as RocketMQ does "
    "(received).",
)
@click.option("--no-crc", is_flag=True, help="Accept messages with a wrong body CRC.")
@click.option(
    "--tls", is_flag=True, help="Connect with TLS, which only a master of logquarry supports."
)
@click.option(
    "--tls-ca",
    metavar="FILE",
    help="Certificate authority of the master (PEM).  [default: the system's authorities]",
)
@click.option("--tls-cert", metavar="FILE", help="This slave's certificate (PEM).")
@click.option(
    "--tls-key", metavar="FILE", help="The certificate's key (PEM).  [default: in --tls-cert]"
)
@click.option(
    "--tls-name",
    metavar="NAME",
    help="The name in the master's certificate.  [default: HOST]",
)
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
    out: Output,
) -> None:
    """Keep copying a master's log into a store, until Ctrl-C.

    The master is a RocketMQ 4.9 broker or logquarry serve-master. The log files of master and STORE
    must have the same size: if the size is not 1 GiB, pass mappedFileSizeCommitLog with --config.
    After Ctrl-C, a broker or logquarry can open STORE for writing. Until the master has answered,
    replicate changes nothing in STORE.

    The exit code is 4 if the log in STORE is longer than the master's log or has other bytes, or if
    another process has STORE open for writing.

    Example: logquarry replicate 10.0.0.7:10912 --into /data/slave
    """
    host, port = host_port(master, option="MASTER")
    broker = None if sync_config is None else host_port(sync_config, option="--sync-config")
    context = client_tls(tls, tls_ca, tls_cert, tls_key, tls_name)
    from logquarry.config import StoreConfig
    from logquarry.disk.folders import held_by
    from logquarry.format.broker_json import TOPICS_FILE
    from logquarry.log.location import local_folder
    from logquarry.log.store_files import CONFIG, LOCK, is_in_use
    from logquarry.replication import ConfigSync, ConfigSyncOptions, HaSlave, SlaveOptions
    from logquarry.store.store_engine import check_openable

    settings = replace(options.store_config(config) or StoreConfig(), broker_role="SLAVE")
    follows = SlaveOptions(
        start=start,
        acknowledge=acknowledge,
        check_crc=not no_crc,
        times=ha_times(settings),
        tls=context,
        server_name=tls_name,
    )
    # Opening a store for writing changes files, for example by a recovery. So open the store only
    # after the master has answered, but report problems of the store at once.
    root = local_folder(folder, "only a local store can be written")
    check_openable(root, settings)
    if is_in_use(root / LOCK):
        raise StoreUnavailable(f"{root}: {held_by(root)}")
    _await_master(out, host, port, follows, ends=once)
    fetches = ConfigSyncOptions(tls=context, server_name=tls_name)
    if broker is not None:
        # An opening reads from topics.json which topics have batch queues. A slave that gets the
        # log without topics.json would write simple queues for these topics.
        with outcome.writing(folder, settings) as (waiting, opened):
            first = ConfigSync(opened, *broker, options=fetches)
            waiting.when_noted = first.close  # So Ctrl-C does not wait for the broker's answers.
            _fetch_first(out, waiting, first, root / CONFIG / TOPICS_FILE)
    with (
        outcome.writing(folder, settings) as (waiting, opened),
        HaSlave(opened, host, port, options=follows) as slave,
        ExitStack() as besides,
    ):
        sync = None
        if broker is not None:
            sync = besides.enter_context(ConfigSync(opened, *broker, options=fetches))
        show_status(out, waiting, _lines(out, slave, sync, ends=once))
        for part in (slave, sync):
            if part is not None and part.error is not None:
                raise part.error
        if once and not slave.status().has_all:
            trouble = slave.status().trouble or "the connection ended"
            raise ReplicationError(
                f"{folder} does not have all of the master's log: {trouble}. Start the command "
                "again when the master answers: it continues after the log that the store has"
            )
        if sync is not None:
            for name in _fetched(sync).missing:
                out.note(f"{sync.master}: the master has no {name}")
        opened.wait_dispatched()
        # close() flushes too, but an error of flush() names the cause.
        opened.flush()
        end = opened.max_offset
    out.note(f"{folder} has the master's log up to {end}")


def _await_master(out: Output, host: str, port: int, follows: SlaveOptions, *, ends: bool) -> None:
    from logquarry.replication.slave import failed_attempts

    noted = ""
    with out.status_line() as show:
        show(f"{host}:{port}: not connected")
        for count, trouble in enumerate(failed_attempts(host, port, follows), 1):
            if trouble != noted:
                noted = trouble
                out.note(trouble)
            if ends and count == _TRIES:
                raise ReplicationError(
                    f"no answer from a master in {text.plural(_TRIES, 'attempt')}: {trouble}. Give "
                    "the master's haListenPort (RocketMQ: listenPort plus 1)"
                )


def _fetched(sync: ConfigSync) -> ConfigSynced:
    """Copy config/ once. Raises ReplicationError if one of the master's files was not copied."""
    try:
        synced = sync.sync()
    except (OSError, ReplicationError) as error:
        raise ReplicationError(f"{sync.master}: config/ was not copied: {error}") from error
    if not synced.problems:
        return synced
    raise ReplicationError(f"{sync.master}: {'; '.join(synced.problems)}")


def _fetch_first(out: Output, waiting: Held, sync: ConfigSync, topics: Path) -> None:
    """Copy config/ before the log. A failure is an error only if the store lacks topics.json."""
    try:
        _fetched(sync)
    except ReplicationError as error:
        waiting.check()
        if not topics.exists():
            raise ReplicationError(
                f"{error}. Only {topics.name} shows which topics have batch queues, and the store "
                "has no such file: start the command again when the master's broker sends it"
            ) from error
        if error.__cause__ is not None:  # config_sync has already logged errors of single files.
            out.note(str(error))


def _lines(out: Output, slave: HaSlave, sync: ConfigSync | None, *, ends: bool) -> Iterator[str]:
    log_note = config_note = ""
    before, had = time.monotonic(), 0
    while True:
        status = slave.status()
        if status.has_ended or (ends and (status.has_all or status.failures >= _TRIES)):
            return
        news = f"{status.master}: connected" if status.is_connected else status.trouble
        if news and news != log_note:
            log_note = news
            out.note(news)
        if sync is not None:
            fetched = sync.status()
            if fetched.has_ended:
                return
            news = fetched.trouble or ("config/ is copied" if fetched.times else "")
            if news and news != config_note:
                config_note = news
                out.note(f"{fetched.master}: {news}")
        now = time.monotonic()
        speed = (status.received_bytes - had) / max(now - before, 1e-3)
        before, had = now, status.received_bytes
        state = "complete" if status.has_all else f"{text.size_text(int(speed))}/s"
        if not status.is_connected:
            state = "not connected"
        known = "nothing" if status.acknowledged is None else str(status.acknowledged)
        yield f"{status.master}: log to {status.max_offset}, acknowledged {known}, {state}"


# ------------------------------------------------------------------------------------ serve-master
@click.command()
@options.store
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:10912",
    help="Address for slaves. Port 0: the system chooses a free port.",
)
@click.option(
    "--listen-config",
    metavar="HOST:PORT",
    help="Address from which slaves copy config/ (topics, offsets): 127.0.0.1:10911. The command "
    "also listens at the port minus 2, where a RocketMQ slave requests topics.  [default: "
    "none]",
)
@click.option(
    "--full-history",
    is_flag=True,
    help="Send the whole log to an empty slave.  [default: from the last file on, as RocketMQ]",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="NETWORK",
    help="Accept only these addresses: 10.0.0.7 or 10.0.0.0/8.  [default: all]",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=16,
    help="Maximum number of slaves at the same time.",
)
@click.option(
    "--rate", metavar="SIZE", help="Maximum bytes a second to each slave: 50m.  [default: no limit]"
)
@click.option(
    "--transfer-size",
    metavar="SIZE",
    help="Maximum bytes in one transfer.  [default: haTransferBatchSize of --config, else 32k]",
)
@server_tls_options("slaves")
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
    tls: ServerTls,
    config: str | None,
    out: Output,
) -> None:
    """Send a store's log to slaves, until Ctrl-C.

    A slave is a RocketMQ 4.9 broker or logquarry replicate. The command opens STORE for writing, so
    no other process may have STORE open for writing. Readers may have STORE open. The command
    prints one line for each address that it serves.

    Example: logquarry serve-master /data/store --listen 10.0.0.7:10912
    """
    host, port = host_port(listen, option="--listen")
    asked_at = None
    if listen_config is not None:
        asked_at = host_port(listen_config, option="--listen-config")
    from logquarry.config import StoreConfig
    from logquarry.log.layout import StoreLayout
    from logquarry.protocol.ha_messages import TransferLimits
    from logquarry.replication import ConfigServer, ConfigServerOptions, HaMaster, MasterOptions
    from logquarry.replication.wire import Surroundings

    settings = options.store_config(config) or StoreConfig()
    if settings.broker_role == "SLAVE":
        settings = replace(settings, broker_role="ASYNC_MASTER")
    size = options.parsed("--transfer-size", transfer_size, text.byte_count)
    serves = MasterOptions(
        limits=TransferLimits(
            transfer_size=settings.ha_transfer_batch_size if size is None else size,
            bytes_per_second=options.parsed("--rate", rate, text.byte_count),
        ),
        times=ha_times(settings),
        full_history=full_history,
        max_connections=max_connections,
        allow=allow or None,
        tls=tls.context(),
    )
    # Do not make STORE if it does not exist: an empty new store would only hide a mistyped path.
    StoreLayout.open(store)
    # Opening STORE for writing changes files, so first check that the addresses are free.
    for address in filter(None, ((host, port), asked_at)):
        Surroundings().listen(*address).close()
    with (
        outcome.writing(store, settings) as (waiting, opened),
        HaMaster(opened, host, port, options=serves) as master,
        ExitStack() as besides,
    ):
        out.line(f"serving {text.printable(store)} at {master.address}")
        server = None
        if asked_at is not None:
            answers = ConfigServerOptions(
                max_connections=max_connections, allow=allow or None, tls=tls.context()
            )
            server = besides.enter_context(ConfigServer(opened.root, *asked_at, options=answers))
            out.line(f"serving its config/ at {server.address}")
        # Flush stdout now, because a script may wait for these lines.
        sys.stdout.flush()
        parts = [part for part in (master, server) if part is not None]

        def lines() -> Iterator[str]:
            while all(part.error is None for part in parts):
                yield _line(master.status())

        show_status(out, waiting, lines())
        for part in parts:
            if part.error is not None:
                raise part.error


def _line(status: MasterStatus) -> str:
    parts = [f"log to {status.max_offset}"]
    for slave in status.slaves:
        if slave.acknowledged is None:
            parts.append(f"{slave.peer} has not reported yet")
        else:
            behind = max(0, status.max_offset - slave.acknowledged)
            parts.append(f"{slave.peer} {text.size_text(behind)} behind")
    if not status.slaves:
        parts.append("no slave")
    if status.refused:
        parts.append(f"{status.refused} refused")
    return ", ".join(parts)
