"""``logquarry stats``: numbers for monitoring, which work beside a running writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.incomplete import end_incomplete, queue_list, read_store
from logquarry.cli.info import STATES, show_pops, sizes_text
from logquarry.cli.output import Output
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.read.pops import Pops
    from logquarry.store.message_store import MessageStore
    from logquarry.store.state import StoreState


@click.command()
@options.store
@click.option("--prometheus", is_flag=True, help="Print metrics in the text format of Prometheus.")
@options.as_json
@options.config
@options.quiet
def stats(store: str, prometheus: bool, as_json: bool, config: str | None, quiet: bool) -> None:
    """Show a store's numbers for monitoring.

    These are offsets, bytes per topic, consumer lag and disk use. A broker may have the store open.
    Counts and rates of puts and gets exist only in the writer's process: call MessageStore.stats()
    there.

    Example: logquarry stats /data/store --prometheus
    """
    if prometheus and as_json:
        raise UsageError("--json and --prometheus are two output formats; pass one of them")
    out = Output(quiet=quiet)

    from logquarry.read.pops import Pops, unacknowledged_pops

    def read(opened: MessageStore) -> tuple[StoreState, str, str, str, Pops]:
        # Read the state first, because this raises if the store cannot be read. The metrics would
        # just be empty.
        state = opened.stats().state
        if prometheus:
            from logquarry.metrics.collector import prometheus_text

            return state, opened.broker, opened.root, prometheus_text(opened), Pops(())
        return state, opened.broker, opened.root, "", unacknowledged_pops(opened.layout)

    settings = options.store_config(config)
    (state, broker, root, metrics, pops), left_out = read_store(store, settings, read)
    if prometheus:
        out.jsonl(metrics.splitlines())
    elif as_json:
        document = _stats_document(root, broker, state, pops)
        out.json(document | {"unreadable": queue_list(left_out)})
    else:
        _show_stats(out, root, state)
        show_pops(out, pops)
    if pops.hint is not None:
        out.note(f"hint: {text.printable(pops.hint)}")
    end_incomplete(out, left_out)


def _stats_document(root: str, broker: str, state: StoreState, pops: Pops) -> dict[str, Any]:
    """The document of ``stats --json``, described in docs/json.md."""
    document = {"store": root, "broker": broker} | state.to_json()
    return document | {"unacknowledged_pops": pops.to_json()}


def _show_stats(out: Output, root: str, state: StoreState) -> None:
    length = state.max_offset - state.min_offset
    oldest = "-"
    if state.reserve_time_ms is not None:
        stored = text.time_text(state.first_timestamp)
        oldest = f"{stored}, {text.duration_text(state.reserve_time_ms)} ago"
    rows = [
        ("store", text.printable(root)),
        ("state", STATES[state.state]),
        ("log", f"{state.min_offset} to {state.max_offset}: {text.size_text(length)}"),
        ("oldest", oldest),
        ("files", sizes_text(state.file_bytes)),
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
            [str(one.level), str(one.delivered), str(one.max_offset)] for one in state.delay_levels
        ]
        out.table(["delay level", "delivered", "max"], levels, right="delivered max")


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%} full"


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else text.size_text(count)
