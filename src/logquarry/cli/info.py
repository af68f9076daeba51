"""``logquarry info`` and ``stats``: show a store's contents, and its numbers for monitoring."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.outcome import end_incomplete, queue_list, read_store
from logquarry.cli.output import Output
from logquarry.errors import CorruptStore, UnsupportedStore, UsageError

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.format.checkpoint import Checkpoint
    from logquarry.log.layout import StoreLayout
    from logquarry.read.pops import Pops
    from logquarry.store.message_store import MessageStore
    from logquarry.store.overview import Overview
    from logquarry.store.state import StoreState, Transactions

_QUEUE_MEMBERS: Final = ("queue_id", "min_offset", "max_offset", "messages", "bytes")
_STATES: Final = {
    "closed": "shut down cleanly",
    "live": "open: a process holds its lock",
    "crashed": "not shut down cleanly: an abort file exists, and no process holds the lock",
}


@click.command()
@options.store
@click.option(
    "--exact",
    is_flag=True,
    help="Count messages and bytes in the whole log.  [default: infer them from queues and index]",
)
@click.option(
    "--transactions",
    is_flag=True,
    help="Count the committed, rolled back and open half messages, and list the open ones.",
)
@click.option(
    "--timers",
    is_flag=True,
    help="List the timer messages that wait for their time (RocketMQ 5's timer wheel).",
)
@options.as_json
@options.config
@options.quiet
def info(
    store: str,
    exact: bool,
    transactions: bool,
    timers: bool,
    as_json: bool,
    config: str | None,
    out: Output,
) -> None:
    """Show log, topics, queues, index and state of a store.

    STORE is a folder or a URL. A broker may have the store open.

    Example: logquarry info /data/store
    """
    from logquarry.log.filesystem import LocalFileSystem
    from logquarry.store.overview import overview

    settings = options.store_config(config)

    def read(opened: MessageStore) -> tuple[Overview, dict[str, Any]]:
        if isinstance(opened.layout.filesystem, LocalFileSystem):
            # info opens only a few log files, so it would miss a log file with a wrong name. Check
            # the names of all files; for a local store this is cheap.
            opened.layout.require_right_names()
        if not exact and not opened.has_queue_files:
            out.note("the store has no queue files: reading the whole log")
        with out.progress("reading the log", in_bytes=True) as progress:
            found = overview(opened, exact=exact, progress=progress)
        halves = None
        if transactions:
            from logquarry.store.state import transactions as read_transactions

            halves = read_transactions(opened)
        document = _document(opened, found, halves)
        if timers:
            document["timers"] = _timers_document(opened.layout)
        return found, document

    try:
        (found, document), left_out = read_store(store, settings, read)
    except UnsupportedStore:
        _show_features(out, store, settings, as_json=as_json)
        raise
    document["unreadable"] = queue_list(left_out)
    if as_json:
        out.json(document)
    else:
        _show(out, document, found)
        out.line()
        check = options.command_line("verify", store, config=config)
        if found.signs or found.damage or found.hint is not None or left_out:
            out.line(f"next: {check}")
        else:
            out.line(f"quick look; `{check}` checks every frame")
    if found.hint is not None:
        out.note(f"hint: {found.hint}")
    for span in found.damage:
        out.warn(
            f"{span.path}: at offset {span.offset}: {span.kind}, {text.plural(span.length, 'byte')}"
        )
    end_incomplete(out, left_out)


def _show_features(out: Output, store: str, settings: StoreConfig | None, *, as_json: bool) -> None:
    from logquarry.log.layout import StoreLayout
    from logquarry.read.features import find_features

    layout = StoreLayout.open(store, settings)
    features = find_features(layout).to_json()
    if as_json:
        out.json({"store": layout.root, "features": features})
        return
    out.facts([["store", layout.root], *_feature_rows(features)], 10)


# ----------------------------------------------------------------------------------- info: JSON
def _document(store: MessageStore, found: Overview, halves: Transactions | None) -> dict[str, Any]:
    # docs/json.md describes the document.
    layout, log = store.layout, store.layout.commit_log
    from logquarry.store.state import file_bytes

    transactions = None
    if halves is not None:
        transactions = {
            **text.document(halves, ("committed", "rolled_back", "put_back", "unreadable")),
            "open": len(halves.open),
            "open_messages": text.json_value(halves.open),
        }
    return {
        "store": store.root,
        "broker": store.broker,
        "state": found.state,
        "commit_log": {
            "min_offset": found.min_offset,
            "max_offset": found.max_offset,
            "file_size": log.file_size,
            "first_store_timestamp": found.first_time,
            "last_store_timestamp": found.last_time,
            "files": [{"path": f.path, "offset": f.base, "size": f.size} for f in log.files],
        },
        "messages": _total(topic.messages for topic in found.topics),
        "bytes": _total(topic.bytes for topic in found.topics),
        "other_bytes": found.other_bytes,
        "hint": found.hint,
        "topics": [
            {
                **text.document(topic, ("topic", "messages", "bytes")),
                "queues": [text.document(queue, _QUEUE_MEMBERS) for queue in topic.queues],
            }
            for topic in found.topics
        ],
        "index": [
            {
                "path": file.path,
                "size": file.size,
                **file.header._asdict(),
                "max_hash_slot_num": file.shape.slots if file.shape else None,
                "max_index_num": file.shape.entries if file.shape else None,
            }
            for file in found.index
        ],
        "file_bytes": file_bytes(layout),
        "checkpoint": _checkpoint(store),
        "abort": store.has_abort,
        "lock": {"exists": layout.filesystem.exists("lock"), "held": found.state == "live"},
        "ignored": list(layout.ignored),
        "damage": [
            {"kind": s.kind, "file": s.path, "offset": s.offset, "length": s.length}
            for s in found.damage
        ],
        "signs": found.signs,
        "transactions": transactions,
        "timers": None,
        "features": store.features.to_json(),
    }


def _checkpoint(store: MessageStore) -> dict[str, int] | None:
    found: Checkpoint | None
    try:
        found = store.checkpoint
    except CorruptStore:
        # info shows no checkpoint if it is damaged; verify reports it as a finding.
        return None
    return None if found is None else found._asdict()


def _total(values: Any) -> int | None:
    numbers = list(values)
    return None if None in numbers else sum(numbers)


# ----------------------------------------------------------------------------------- info: text
def _show(out: Output, document: dict[str, Any], found: Overview) -> None:
    log, files = document["commit_log"], document["commit_log"]["files"]
    length = log["max_offset"] - log["min_offset"]
    rows = [
        ["store", document["store"]],
        ["state", _STATES[found.state]],
        [
            "log",
            f"{log['min_offset']} to {log['max_offset']}: {text.size_text(length)} in "
            f"{text.plural(len(files), 'file')} of {text.size_text(log['file_size'])}",
        ],
        ["messages", _messages(document)],
        [
            "stored",
            f"{text.time_text(found.first_time)} to {text.time_text(found.last_time)}"
            if found.first_time is not None
            else "-",
        ],
        ["index", _index(document["index"])],
        ["checkpoint", _checkpoint_text(document["checkpoint"])],
        ["file sizes", _sizes_text(document["file_bytes"])],
    ]
    rows += _feature_rows(document["features"])
    if document["ignored"]:
        rows.append(["ignored", ", ".join(document["ignored"])])
    rows += [["" if number else "damage", sign] for number, sign in enumerate(found.signs)]
    out.facts(rows, 10)
    if found.topics:
        out.line()
        _show_topics(out, found)
    if document["transactions"] is not None:
        out.line()
        _show_transactions(out, document["transactions"])
    if document["timers"] is not None:
        out.line()
        _show_timers(out, document["timers"])


def _feature_rows(features: dict[str, Any]) -> list[list[str]]:
    writer = features["writer"]
    rows = []
    if writer["evidence"]:
        known = [f"{writer['at_least']} or later"] if writer["at_least"] else []
        known += [f"before {writer['before']}"] if writer["before"] else []
        evidence = ", ".join(writer["evidence"])
        rows.append(["written by", f"RocketMQ {', '.join(known)} ({evidence})"])
    for number, feature in enumerate(features["found"]):
        evidence = ", ".join(feature["evidence"])
        shown = f"{feature['name']}: {feature['detail']} ({evidence})"
        rows.append(["" if number else "features", shown])
    return rows


def _messages(document: dict[str, Any]) -> str:
    queues = sum(len(topic["queues"]) for topic in document["topics"])
    where = f"{text.plural(queues, 'queue')} of {text.plural(len(document['topics']), 'topic')}"
    parts = [f"{text.count_text(document['messages'])} in {where}"]
    if document["other_bytes"]:
        parts.append(f"{text.size_text(document['other_bytes'])} of the log are in no queue")
    return "; ".join(parts)


def _index(files: list[dict[str, Any]]) -> str:
    if not files:
        return "none"
    keys = sum(file["entry_count"] - 1 for file in files)
    known = [file for file in files if file["entry_count"] > 1]
    span = ""
    if known:
        first, last = known[0]["begin_timestamp"], known[-1]["end_timestamp"]
        span = f", {text.time_text(first)} to {text.time_text(last)}"
    return f"{text.plural(keys, 'key')} in {text.plural(len(files), 'file')}{span}"


def _checkpoint_text(times: dict[str, int] | None) -> str:
    if times is None:
        return "missing or unreadable"
    names = {"physic_timestamp": "log", "logics_timestamp": "queues", "index_timestamp": "index"}
    return ", ".join(
        f"{ours} {text.time_text(times[name]) if times[name] else 'never'}"
        for name, ours in names.items()
    )


def _show_topics(out: Output, found: Overview) -> None:
    length = max(1, found.max_offset - found.min_offset)
    rows = []
    topics = sorted(found.topics, key=lambda t: (-(t.bytes or 0), t.topic))
    for topic in topics:
        share = "-" if topic.bytes is None else f"{topic.bytes / length:.1%}"
        own = [text.count_text(topic.messages), text.size_text(topic.bytes), share]
        if len(topic.queues) == 1:
            (queue,) = topic.queues
            rows.append([topic.topic, queue.queue_id, queue.min_offset, queue.max_offset, *own])
            continue
        rows.append([topic.topic, "all", "", "", *own])
        for queue in topic.queues:
            numbers = [text.count_text(queue.messages), text.size_text(queue.bytes)]
            rows.append(["", queue.queue_id, queue.min_offset, queue.max_offset, *numbers, ""])
    header = ["topic", "queue", "min", "max", "messages", "bytes", "share"]
    out.table(header, rows, right="queue min max messages bytes share")


def _show_transactions(out: Output, halves: dict[str, Any]) -> None:
    out.line(out.style("half messages", "bold"))
    for name in ("committed", "rolled_back", "put_back", "open", "unreadable"):
        if halves[name] or name != "unreadable":
            out.line(f"  {name.replace('_', ' '):<12}{halves[name]:>9,}")
    rows = [
        [
            half["physical_offset"],
            half["topic"],
            text.time_text(half["born_timestamp"]),
            half["check_times"],
        ]
        for half in halves["open_messages"]
    ]
    if rows:
        out.line()
        out.table(["offset", "topic", "born", "checks"], rows, right="offset checks")


def _timers_document(layout: StoreLayout) -> dict[str, Any]:
    """Make the member ``timers`` of ``info --json`` (docs/json.md)."""
    from logquarry.read.timers import check_or_none, precision, timers_of

    check = check_or_none(layout)
    found = timers_of(layout, check)
    due = found.due()
    step = precision(layout, check.read_time)
    return {
        "waiting": len(due),
        "deleted": len(found.deleted()),
        "messages": [
            {
                "due": one.slot_time + step,
                **text.document(one, ("topic", "queue_id", "uniq_key", "keys", "physical_offset")),
                "timer_queue_offset": one.queue_offset,
                "is_in_wheel": one.queue_offset < check.enqueued,
                "rolled": one.rolled,
            }
            for one in due
        ],
    }


def _show_timers(out: Output, document: dict[str, Any]) -> None:
    """Print the timer messages as a table."""
    out.line(out.style("timer messages", "bold"))
    out.line(
        f"  waiting {document['waiting']:,}, deleted before their time {document['deleted']:,}"
    )
    rows = [
        [
            text.time_text(one["due"]),
            one["topic"],
            one["queue_id"],
            one["keys"] or one["uniq_key"] or "-",
            one["physical_offset"],
        ]
        for one in document["messages"]
    ]
    if rows:
        out.line()
        out.table(["due", "topic", "queue", "key", "offset"], rows, right="queue offset")


# -------------------------------------------------------------------------------------------- stats
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
    with _no_collections():
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
def _no_collections() -> Iterator[None]:
    """Context manager: stop Python's garbage collector.

    A store can have a million consumer groups. The collector would then take half of the time of
    the command, and find nothing.
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
        ("state", _STATES[state.state]),
        ("log", f"{state.min_offset} to {state.max_offset}: {text.size_text(length)}"),
        ("oldest", oldest),
        ("files", _sizes_text(state.file_bytes)),
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


def _sizes_text(sizes: Mapping[str, int]) -> str:
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
