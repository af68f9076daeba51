"""``logquarry broker``: serve a store to RocketMQ's clients."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from logquarry import text
from logquarry.cli import options, outcome
from logquarry.cli.output import Output
from logquarry.cli.replication import ServerTls, host_port, server_tls_options
from logquarry.errors import UsageError
from logquarry.systems import Held, held

if TYPE_CHECKING:
    from rich.table import Table

    from logquarry.broker import Broker

_STATUS_SECONDS: Final = 0.5
_OTHER_LINES: Final = 7
"""Number of lines on the terminal that are not a row of a group: title, column heads, borders, the
line that counts the omitted groups, and the cursor's line.
"""
_GARBAGE: Final = 100_000
"""Number of new objects after which Python's garbage collector runs."""


@click.command()
@click.argument("store", metavar="[STORE]", required=False)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:10911",
    help="Address of the broker. Port 0: the system chooses a free port.",
)
@click.option(
    "--name-port",
    type=click.IntRange(0, 65_535),
    default=9_876,
    help="Port of the name server, on the same host. Port 0: the system chooses a free port.",
)
@click.option(
    "--advertise",
    metavar="HOST",
    help="Host at which clients reach the broker.  [default: the host of --listen; if this is "
    "0.0.0.0, the address that this machine uses to reach other networks]",
)
@click.option(
    "--read-only",
    is_flag=True,
    help="Do not change the store. The broker refuses sends, and keeps the offsets of groups "
    "outside of the store. Use this for an archived store, or for the store of a live broker.",
)
@click.option(
    "--offsets",
    type=options.LocalPath(),
    metavar="FOLDER",
    help="With --read-only, keep the offsets of groups in this folder.  [default: in memory]",
)
@click.option("--no-create-topics", is_flag=True, help="Refuse sends to topics that do not exist.")
@click.option("--no-create-groups", is_flag=True, help="Refuse consumer groups that do not exist.")
@click.option(
    "--queues",
    type=click.IntRange(1, 1_024),
    default=8,
    help="Maximum number of queues of a topic that a send creates.",
)
@click.option(
    "--broker-name",
    "name",
    metavar="NAME",
    default="broker-a",
    help="Name of the broker.",
)
@click.option(
    "--cluster",
    metavar="NAME",
    default="DefaultCluster",
    help="Name of the cluster.",
)
@click.option(
    "--accounts",
    type=options.LocalPath(),
    metavar="FILE",
    help="Accept only clients with an account of this TOML file (docs/broker.md).  [default: all]",
)
@server_tls_options("clients")
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow other machines to connect without TLS and accounts.",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve Prometheus metrics at this address: 127.0.0.1:5557.  [default: none]",
)
@options.config
@options.quiet
def broker(
    store: str | None,
    listen: str,
    no_create_topics: bool,
    no_create_groups: bool,
    accounts: Path | None,
    tls: ServerTls,
    metrics: str | None,
    config: str | None,
    out: Output,
    **given: Any,
) -> None:
    """Run a broker and its name server for STORE, until Ctrl-C.

    Clients of RocketMQ 4.x in Java, Go, C++, Python, Rust and Node.js can send and consume
    messages. If the folder STORE is missing, the broker makes a new store. Without the argument
    STORE, the broker serves a temporary store, and deletes it when the broker stops. The broker is
    one node: no slaves, no cluster, no gRPC (docs/broker.md).

    \b
    Pass the name server's address to the client:
      Java    producer.setNamesrvAddr("127.0.0.1:9876")
      Go      producer.WithNameServer([]string{"127.0.0.1:9876"})
      Python  producer.set_namesrv_addr("127.0.0.1:9876")
      Node    new Producer({nameSrv: "127.0.0.1:9876", producerGroup: "orders"})
      admin   mqadmin topicList -n 127.0.0.1:9876

    Example: logquarry broker /data/store
    """
    host, port = host_port(listen, option="--listen")
    metrics_at = None if metrics is None else host_port(metrics, option="--metrics")
    if given["read_only"] and store is None:
        raise UsageError("--read-only needs STORE")
    if given["offsets"] is not None and not given["read_only"]:
        raise UsageError("--offsets needs --read-only: other brokers save offsets in the store")
    from logquarry.broker import Broker, BrokerOptions
    from logquarry.broker.acl import AccessControl
    from logquarry.broker.broker import new_event_loop

    serves = BrokerOptions(
        host=host,
        port=port,
        create_topics=not no_create_topics,
        create_groups=not no_create_groups,
        tls=tls.context(),
        acl=None if accounts is None else AccessControl.from_file(accounts),
        **given,
    )
    served = Broker(store, options=serves, config=options.store_config(config))
    with (
        outcome.clean_end(store or "", lambda: served.close_problem),
        held() as waiting,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(_serve(out, waiting, store, served, metrics_at))


async def _serve(
    out: Output,
    waiting: Held,
    store: str | None,
    served: Broker,
    metrics_at: tuple[str, int] | None,
) -> None:
    async with served as running:
        server = None
        if metrics_at is not None:
            from logquarry.broker.options import listen_error
            from logquarry.metrics import serve_metrics

            try:
                server = serve_metrics(running, *metrics_at)
            except OSError as error:
                raise listen_error(error, *metrics_at, "--metrics") from error
        # Make Python's garbage collector run rarely: requests leave no reference cycles, and
        # frequent collections take a third of the time of a send. Collect once now, because clients
        # start to send when they see the first line of output.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GARBAGE)
        what = "a temporary store" if store is None else text.printable(store)
        out.line(f"serving {what} at {running.address}, name server {running.name_server}")
        if running.is_address_chosen:
            out.note(
                f"clients get the address {running.address}; --advertise HOST gives them another"
            )
        if server is not None:
            out.line(f"metrics at http://{server.address}/metrics")
        # Flush stdout now, because a script may wait for these lines.
        sys.stdout.flush()
        try:
            await _show(out, waiting, running)
        finally:
            if server is not None:
                await asyncio.to_thread(server.close)


async def _show(out: Output, waiting: Held, running: Broker) -> None:
    is_shown = not out.quiet and sys.stderr.isatty()
    if not is_shown:
        # Wait for an interrupt without a timer, so that an idle broker uses no processor time.
        noted, loop = asyncio.Event(), asyncio.get_running_loop()
        waiting.when_noted = partial(loop.call_soon_threadsafe, noted.set)
        try:
            while True:
                waiting.check()
                await noted.wait()
                noted.clear()
        finally:
            waiting.when_noted = None
    from rich.console import Console
    from rich.live import Live

    view, console = _View(running), Console(stderr=True)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            table = view.table(max(1, console.height - _OTHER_LINES))
            # Write in a thread, because a write blocks while the user has stopped the terminal with
            # Ctrl-S.
            await asyncio.to_thread(live.update, table, refresh=True)
            await asyncio.sleep(_STATUS_SECONDS)
            waiting.check()


class _View:
    def __init__(self, running: Broker) -> None:
        self._running = running
        self._before = time.monotonic(), 0, 0

    def table(self, most: int) -> Table:
        """Make a table of connections, rates, and at most ``most`` groups.

        The table lists the consumer groups, the largest lag at the top, and then the producer
        groups.
        """
        from rich.table import Table

        core = self._running.core
        now = time.monotonic()
        put, got = sum(core.counts.put.values()), sum(core.counts.got.values())
        before, had_put, had_got = self._before
        seconds = max(1e-3, now - before)
        self._before = now, put, got
        title = (
            f"{text.counted(len(self._running.connections), 'connection')}, "
            f"in {(put - had_put) / seconds:,.0f}/s, out {(got - had_got) / seconds:,.0f}/s"
        )
        table = Table(title=title, title_justify="left", expand=False)
        table.add_column("group")
        table.add_column("kind")
        table.add_column("clients", justify="right")
        table.add_column("topics", no_wrap=True)
        table.add_column("lag", justify="right")
        lags, producers = self._running.lags(), core.clients.producers
        for name in sorted(lags, key=lambda name: (-lags[name], name))[:most]:
            group = core.clients.consumers[name]
            topics = ", ".join(sorted(t for t in group.filters if not t.startswith("%RETRY%")))
            words = text.printable(name), "consumer", str(len(group.clients))
            table.add_row(*words, text.printable(topics), f"{lags[name]:,}")
        for name in sorted(producers)[: most - table.row_count]:
            table.add_row(text.printable(name), "producer", str(len(producers[name])), "", "")
        left_out = len(lags) + len(producers) - table.row_count
        if left_out:
            table.caption = text.counted(left_out, "more group")
        return table
