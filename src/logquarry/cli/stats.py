"""``logquarry stats``: what can be known of a store now, at rest or beside its writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.store.state import StoreState

_STATES = {
    "closed": "closed in order",
    "live": "open: a process holds its lock",
    "crashed": "not closed in order",
}


@click.command()
@options.store
@click.option("--prometheus", is_flag=True, help="As Prometheus reads it.")
@options.as_json
@options.config
@options.quiet
def stats(store: str, prometheus: bool, as_json: bool, config: str | None, quiet: bool) -> None:
    """Show a store's numbers: offsets, bytes per topic, lag of consumers, how full the disk is.

    What a running store did (puts, gets, their rates) only its own process knows: there
    MessageStore.stats() tells.
    """
    if prometheus and as_json:
        raise UsageError("--json and --prometheus are two ways to say it: choose one")
    out = Output(quiet=quiet)
    from logquarry.store.message_store import MessageStore

    if prometheus:
        from logquarry.metrics.collector import prometheus_text

        with MessageStore.open(store, config=options.store_config(config)) as opened:
            out.jsonl(prometheus_text(opened).splitlines())
        return
    with MessageStore.open(store, config=options.store_config(config)) as opened:
        state, broker, root = opened.stats().state, opened.broker, opened.root
    if as_json:
        out.json(_document(root, broker, state))
    else:
        _show(out, root, state)


def _document(root: str, broker: str, state: StoreState) -> dict[str, Any]:
    """The document of ``stats --json`` (docs/json.md)."""
    return {"store": root, "broker": broker} | state.to_json()


def _show(out: Output, root: str, state: StoreState) -> None:
    length = state.max_offset - state.min_offset
    oldest = "-"
    if state.reserve_time_ms is not None:
        stored = text.time_text(state.first_timestamp)
        oldest = f"{stored}, {text.duration_text(state.reserve_time_ms)} ago"
    files = ", ".join(f"{name} {text.size_text(size)}" for name, size in state.file_bytes.items())
    rows = [
        ("store", text.printable(root)),
        ("state", _STATES[state.state]),
        ("log", f"{state.min_offset:,} to {state.max_offset:,}: {text.size_text(length)}"),
        ("oldest", oldest),
        ("files", files),
        ("disk", _ratio(state.commit_log_disk_ratio)),
        ("behind", f"dispatch {_bytes(state.dispatch_behind)}, disk {_bytes(state.flush_behind)}"),
    ]
    for name, value in rows:
        out.line(f"{out.style(f'{name:<8}', 'bold')}  {value}")
    if state.retained:
        out.line()
        topics = sorted(state.retained.items(), key=lambda item: (-item[1].bytes, item[0]))
        table = [
            [text.printable(name), f"{kept.messages:,}", text.size_text(kept.bytes)]
            for name, kept in topics
        ]
        out.table(["topic", "messages", "bytes"], table, right="messages bytes")
    if state.consumer_lag:
        out.line()
        lags = [
            [text.printable(lag.group), text.printable(lag.topic), f"{lag.messages:,}"]
            for lag in state.consumer_lag
        ]
        out.table(["group", "topic", "behind"], lags, right="behind")
    if state.delay_levels:
        out.line()
        levels = [
            [str(one.level), f"{one.delivered:,}", f"{one.max_offset:,}"]
            for one in state.delay_levels
        ]
        out.table(["delay level", "delivered", "max"], levels, right="delivered max")


def _ratio(value: float | None) -> str:
    return "cannot be told" if value is None else f"{value:.1%} full"


def _bytes(count: int | None) -> str:
    return "cannot be told" if count is None else text.size_text(count)
