"""``logquarry stats``: numbers for monitoring a store, also while a writer has it open."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.outcome import ExitCode
from logquarry.cli.output import Output
from logquarry.errors import UnreadableFile, UsageError

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.read.log_queues import QueueKey
    from logquarry.read.pops import Pops
    from logquarry.store.message_store import MessageStore
    from logquarry.store.state import StoreState

T = TypeVar("T")
STATES: Final = {
    "closed": "shut down cleanly",
    "live": "open: a process holds its lock",
    "crashed": "not shut down cleanly: an abort file exists, and no process holds the lock",
}


@click.command()
@options.store
@click.option("--prometheus", is_flag=True, help="Print metrics in the text format of Prometheus.")
@options.as_json
@options.config
@options.quiet
def stats(store: str, prometheus: bool, as_json: bool, config: str | None, out: Output) -> None:
    """Show a store's numbers for monitoring.

    The numbers are offsets, bytes per topic, consumer lag and disk use. A broker may have the store
    open. For counts and rates of puts and gets, call MessageStore.stats() in the writer's process.

    Example: logquarry stats /data/store --prometheus
    """
    if prometheus and as_json:
        raise UsageError("--json and --prometheus are two output formats; pass one of them")
    from logquarry.read.pops import Pops, unacknowledged_pops

    def read(opened: MessageStore) -> tuple[StoreState, str, str, str, Pops]:
        # Read the state first, because it raises an error for a store with an unsupported feature.
        # The metrics of such a store would only be empty.
        stats = opened.stats()
        state = stats.state
        if prometheus:
            from logquarry.metrics import prometheus_text

            return state, opened.broker, opened.root, prometheus_text(opened, stats=stats), Pops(())
        return state, opened.broker, opened.root, "", unacknowledged_pops(opened.layout)

    settings = options.store_config(config)
    with no_collections():
        (state, broker, root, metrics, pops), left_out = read_store(store, settings, read)
        if prometheus:
            out.jsonl(metrics.splitlines())
        elif as_json:
            # docs/json.md describes the document.
            document = {"store": root, "broker": broker} | state.to_json()
            more = {"unacknowledged_pops": pops.to_json(), "unreadable": queue_list(left_out)}
            out.json(document | more)
        else:
            _show_stats(out, root, state)
            _show_pops(out, pops)
    if pops.hint is not None:
        out.note(f"hint: {pops.hint}")
    end_incomplete(out, left_out)


@contextmanager
def no_collections() -> Iterator[None]:
    """Context manager: stop Python's garbage collector.

    A store can have a million of consumer groups. Without this, the collector takes half of the
    time of the command, and finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _show_stats(out: Output, root: str, state: StoreState) -> None:
    length = state.max_offset - state.min_offset
    oldest = "-"
    if state.reserve_time_ms is not None:
        stored = text.time_text(state.first_timestamp)
        oldest = f"{stored}, {text.duration_text(state.reserve_time_ms)} ago"
    ratio = state.commit_log_disk_ratio
    rows = [
        ("store", root),
        ("state", STATES[state.state]),
        ("log", f"{state.min_offset} to {state.max_offset}: {text.size_text(length)}"),
        ("oldest", oldest),
        ("files", sizes_text(state.file_bytes)),
        ("disk", "unknown" if ratio is None else f"{ratio:.1%} full"),
        ("behind", f"dispatch {_bytes(state.dispatch_behind)}, disk {_bytes(state.flush_behind)}"),
    ]
    out.facts(rows, 8)
    if state.retained:
        out.line()
        topics = sorted(state.retained.items(), key=lambda item: (-item[1].bytes, item[0]))
        table = [[name, f"{kept.messages:,}", text.size_text(kept.bytes)] for name, kept in topics]
        out.table(["topic", "messages", "bytes"], table, right="messages bytes")
    if state.consumer_lag:
        out.line()
        lags = ((lag.group, lag.topic, f"{lag.messages:,}") for lag in state.consumer_lag)
        out.table(["group", "topic", "behind"], lags, right="behind")
    if state.delay_levels:
        out.line()
        levels = [[one.level, one.delivered, one.max_offset] for one in state.delay_levels]
        out.table(["delay level", "delivered", "max"], levels, right="delivered max")


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else text.size_text(count)


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Format the bytes of each folder in one line."""
    return ", ".join(f"{name} {text.size_text(size)}" for name, size in sizes.items())


def _show_pops(out: Output, pops: Pops) -> None:
    if pops.queues:
        out.line()
        rows = [
            [q.group, q.topic, q.queue_id, f"{q.messages:,}", text.time_text(q.oldest)]
            for q in pops.queues
        ]
        header = ["popped by group", "topic", "queue", "unacknowledged", "oldest pop"]
        out.table(header, rows, right="queue unacknowledged")


# -------------------------------------------------- unreadable queues
def read_store(
    store: str, settings: StoreConfig | None, read: Callable[[MessageStore], T]
) -> tuple[T, Mapping[QueueKey, str]]:
    """Open a store and call ``read`` with it; leave out queues that the disk fails to read.

    Returns:
        The result of ``read``, and for each queue that was left out, the reason.
    """
    from logquarry.read.batch_queue import unreadable_queues
    from logquarry.store.message_store import MessageStore

    left_out: Mapping[QueueKey, str] = {}
    with MessageStore.open(store, config=settings) as opened:
        try:
            return read(opened), left_out
        except UnreadableFile:
            left_out = unreadable_queues(opened.layout)
            if not left_out:
                raise
    with MessageStore.open(store, config=settings) as opened:
        opened.layout.left_out = left_out
        return read(opened), left_out


def queue_list(queues: Mapping[QueueKey, str]) -> list[dict[str, Any]]:
    """Make the JSON list of the queues that were left out (docs/json.md)."""
    return [
        {"topic": topic, "queue_id": queue_id, "reason": reason}
        for (topic, queue_id), reason in sorted(queues.items())
    ]


def end_incomplete(out: Output, left_out: Mapping[QueueKey, str]) -> None:
    """Warn of each queue that was left out; if there is one, exit with the code for findings."""
    for (topic, queue_id), reason in sorted(left_out.items()):
        out.warn(f"left out: {topic} queue {queue_id}: {reason}")
    if left_out:
        click.get_current_context().exit(ExitCode.FINDINGS)
