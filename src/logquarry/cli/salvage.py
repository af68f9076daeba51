"""``logquarry salvage``: copy the sound messages of a damaged store into a new store.
``logquarry convert``: make a plain store from a DLedger log, or from a log in several folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from logquarry import text
from logquarry.cli import options, outcome
from logquarry.cli import spark as with_spark
from logquarry.cli.outcome import ExitCode
from logquarry.cli.output import MOST_LISTED, Output, writing_to
from logquarry.errors import LogquarryError, UsageError

if TYPE_CHECKING:
    from logquarry.repair.salvage.plan import SalvagePlan
    from logquarry.repair.salvage.salvage import Salvaged

_LONGEST_V1_TOPIC: Final = 127
"""Bytes of a topic name in a V1 frame. RocketMQ 5 writes longer names into V2 frames."""


@click.command()
@options.stores
@options.into(
    "Make the new store in DIR, which must be empty or missing. With several stores, each gets its "
    "own folder in DIR.  [default: write nothing, only report]"
)
@click.option(
    "--include-stale",
    is_flag=True,
    help="Also save stale frames: sound messages that an earlier recovery left after the log's "
    "end.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="With --spark-master: skip stores that are saved completely, and start the others again.",
)
@options.spark_master
@options.as_json
@options.config
@options.quiet
def salvage(
    stores: tuple[str, ...],
    into: Path | None,
    include_stale: bool,
    resume: bool,
    spark_master: str | None,
    as_json: bool,
    config: str | None,
    out: Output,
) -> None:
    """Copy the sound messages of a damaged store.

    The output lists the lost messages. salvage only reads STORE, but no process may have STORE
    open. With --spark-master, salvage saves several stores in parallel, with one task for each
    store.

    The exit code is 1 if anything is lost, 4 if a process has the store open, and else 0.

    Example: logquarry salvage /data/store --into /data/saved
    """
    settings = options.store_config(config)
    if spark_master is not None:
        from logquarry.spark.repair import salvage_stores

        with (
            with_spark.session(spark_master) as session,
            out.progress("saving", in_bytes=True) as progress,
        ):
            found = salvage_stores(
                session,
                stores,
                into,
                include_stale=include_stale,
                config=settings,
                resume=resume,
                progress=progress,
            )
    elif resume:
        raise UsageError("--resume needs --spark-master")
    elif len(stores) > 1:
        raise UsageError("several stores need --spark-master")
    else:
        from logquarry.repair.salvage.salvage import salvage as salvage_path

        bars = partial(out.progress, in_bytes=True)
        with _telling_what_is_left(into):
            found = [
                salvage_path(
                    stores[0], into, include_stale=include_stale, config=settings, bars=bars
                )
            ]
    if as_json:
        documents = [one.to_json() for one in found]
        out.json(documents[0] if spark_master is None else {"stores": documents})
    else:
        for number, one in enumerate(found):
            if spark_master is not None:
                name = out.style(text.printable(one.plan.store), "bold")
                out.lines(["", name] if number else [name])
            _show_salvage(out, one)
            at = stores[0] if len(stores) == len(found) == 1 else one.plan.store
            saved = one.into if spark_master is not None or into is None else str(into)
            more = ["--include-stale"] if include_stale else []
            _show_next(out, saved, "salvage", at, *more, config=config)
    if not all(one.is_whole for one in found):
        click.get_current_context().exit(ExitCode.FINDINGS)


@contextmanager
def _telling_what_is_left(into: Path | None) -> Iterator[None]:
    """If the command fails or is interrupted, add a note to the error: what the command left in its
    target, and what to do. The error's text is printed first.
    """
    from logquarry.repair.salvage.target import why_not_empty

    if into is None:
        yield
        return
    with writing_to(into):
        was_empty = not (into.is_dir() and any(into.iterdir()))
        try:
            yield
        except BaseException as error:
            with suppress(LogquarryError):
                reason = why_not_empty(into) if was_empty else None
                if reason is not None and reason != str(error):
                    error.add_note(reason)
            raise


def _show_salvage(out: Output, found: Salvaged) -> None:
    plan = found.plan
    if plan.lost:
        rows: list[list[object]] = [
            [span.file, span.offset, f"{span.length:,}", span.kind, span.reason]
            for span in plan.lost[:MOST_LISTED]
        ]
        out.table(["file", "offset", "bytes", "kind", "reason"], rows, right="offset bytes")
        out.more(len(plan.lost) - MOST_LISTED)
        out.line()
    lost = [
        (topic, queue_id, start, stop)
        for span in plan.lost
        for (topic, queue_id), ranges in sorted(span.messages.items())
        for start, stop in ranges
    ]
    if lost:
        rows = [
            [topic, queue_id, start, f"{stop - start:,}"]
            for topic, queue_id, start, stop in lost[:MOST_LISTED]
        ]
        out.table(["lost in", "queue", "from offset", "messages"], rows, right="queue messages")
        out.more(len(lost) - MOST_LISTED)
        out.line()
    if plan.topics:
        rows = [
            [name, f"{one.messages:,}", text.size_text(one.bytes), f"{one.lost:,}"]
            for name, one in sorted(plan.topics.items())
        ]
        out.table(["topic", "saved", "bytes", "lost"], rows, right="saved bytes lost")
        out.line()
    for line in _notes(found):
        out.line(line)
    count = text.plural(plan.messages, "message")
    size = text.size_text(plan.bytes)
    if found.into is None:
        verdict = f"{count}, {size}, can be saved"
    else:
        verdict = f"{count}, {size}, saved into {text.printable(found.into)}"
    loss = "nothing is lost"
    if plan.unproved_start is not None:
        # The log starts above 0. It is unknown whether the earlier messages have expired or are
        # lost.
        loss = "nothing in the existing files is lost"
    if found.left_behind:
        loss = f"{text.plural(len(found.left_behind), 'part')} of the store left behind"
    if plan.lost:
        loss = _loss(plan, sum(stop - start for *_, start, stop in lost))
    out.line(f"{verdict}; {out.style(loss, 'green' if found.is_whole else 'red')}")


def _loss(plan: SalvagePlan, listed: int) -> str:
    """Describe the messages that a salvage does not save. ``listed`` is the sum of the counts
    that the table of queues shows.
    """
    from logquarry.repair.salvage.losses import HARMED_QUEUE_ID

    homeless = [span for span in plan.lost if span.kind == HARMED_QUEUE_ID]
    places = text.plural(len(plan.lost) - len(homeless), "place")
    length = sum(span.length for span in plan.lost)
    messages = max(listed, plan.lost_messages)
    words = []
    if messages:
        count = text.plural(messages, "message")
        if plan.lost_messages > listed:
            # If only the index shows a lost message, the queue of the message is unknown, because
            # the index does not record it. So the list by queue omits this message.
            count += f" ({plan.lost_messages - listed:,} of them only in the index)"
        # Print bytes as well as messages, because not all lost bytes are messages: some can be
        # filler at the end of a file.
        words.append(f"lost: {count}; {text.plural(length, 'byte')} of the log in {places}")
    elif length:
        size = text.plural(length, "byte")
        words.append(f"lost: {size} of the log in {places}; no queue and no index points there")
    elif len(homeless) < len(plan.lost):
        words.append("lost: an unknown number of messages")
    if homeless:
        words.append(f"{text.plural(len(homeless), 'frame')} saved, but in no queue")
    return "; ".join(words)


def _show_next(out: Output, saved: str | None, *words: str, config: str | None) -> None:
    again = outcome.line(*words, "--into", "DIR", config=config)
    out.line(again if saved is None else outcome.line("verify", saved))


def _notes(found: Salvaged) -> list[str]:
    plan, stale, plural = found.plan, found.plan.stale, text.plural
    lines = [] if plan.unproved_start is None else [plan.unproved_start]
    if plan.lowered_times:
        count = plural(len(plan.lowered_times), "store time")
        lines.append(f"{count} lowered to the store time of the next message")
    if plan.raised_times:
        count = plural(plan.raised_times, "store time")
        lines.append(f"{count} raised to the store time of the message before")
    if plan.rotten_offsets:
        count = plural(plan.rotten_offsets, "impossible queue offset")
        lines.append(f"{count} corrected from the neighbours in the queue")
    if plan.right_queues:
        count = plural(len(plan.right_queues), "wrong topic or queue id")
        lines.append(f"{count} corrected: the entries of the old queues show the right queue")
    if plan.right_types:
        count = plural(len(plan.right_types), "wrong transaction type")
        lines.append(f"{count} corrected: the entries of the old queues show the messages")
    if plan.displaced:
        count = plural(len(plan.displaced), "message")
        lines.append(
            f"{count} saved from a wrong place in the log: the queues show the right place"
        )
    if plan.ends:
        count = plural(plan.ends, "transaction end")
        lines.append(f"{count} whose half message is lost")
    if plan.wrong_crcs:
        count = plural(len(plan.wrong_crcs), "message")
        lines.append(
            f"{count} saved with a wrong property CRC, the first at {plan.wrong_crcs[0]}: topic, "
            "properties or head may be wrong; verify of the new store lists them"
        )
    if plan.contradicted:
        count = plural(len(plan.contradicted), "message")
        lines.append(
            f"{count} saved, but with tags or keys that do not match the old queues or index, the "
            f"first at {plan.contradicted[0]}: damage has changed the properties or the entries; "
            "verify of the new store cannot detect it"
        )
    if stale.messages:
        count = plural(stale.messages, "stale frame")
        what = "saved after all others" if stale.included else "not saved; pass --include-stale"
        lines.append(f"{count} after the log's end, from an earlier recovery: {what}")
    lines.extend(
        f"consumer group {text.printable(one.group)}, {text.printable(one.topic)} queue "
        f"{one.queue_id}: consumer offset {one.was} was beyond the queue's end; now {one.now}"
        for one in found.progress
    )
    if found.timers:
        count = plural(found.timers, "timer message")
        lines.append(f"{count} wait for their time; the new store has a timer wheel for them")
    lines.extend(_only_for_rocketmq5(found))
    if found.carried:
        lines.append(f"copied unchanged: {text.printable(', '.join(found.carried))}")
    lines.extend(
        f"left behind: {one.feature} ({text.printable(', '.join(one.paths))}): "
        f"{text.printable(one.reason)}"
        for one in found.left_behind
    )
    return lines


def _only_for_rocketmq5(found: Salvaged) -> list[str]:
    """Warn if a broker of RocketMQ 4.9 would lose or ignore messages of the new store."""
    plan = found.plan
    lines = []
    longest = _LONGEST_V1_TOPIC
    long = [one.messages for name, one in plan.topics.items() if len(name.encode()) > longest]
    if any(long):
        count = text.plural(sum(long), "message")
        lines.append(
            f"{count} in topics whose names are longer than {longest} bytes: only RocketMQ 5 can "
            "read them. RocketMQ 4.9 can end the log at the first of them"
        )
    batch = [one.messages for name, one in plan.topics.items() if name in plan.config.batch_topics]
    if any(batch):
        count = text.plural(sum(batch), "message")
        lines.append(f"{count} in batch queues: only RocketMQ 5 serves them")
    return lines


# ------------------------------------------------------------------------------------------ convert
@click.command()
@options.store
@options.into(
    "Make the plain store in DIR, which must be empty or missing.  [default: write nothing, only "
    "report]"
)
@options.as_json
@options.config
@options.quiet
def convert(store: str, into: Path | None, as_json: bool, config: str | None, out: Output) -> None:
    """Make a plain store from a DLedger log, or from a log in several folders.

    The new store contains its log in commitlog/, and also queues, index, topics and consumer
    offsets. To serve the new store with a broker of RocketMQ 4.9 or 5, remove enableDLegerCommitLog
    and storePathCommitLog from broker.conf. Messages of a DLedger log get new physical offsets;
    queue offsets stay. convert only reads STORE, but no process may have STORE open. convert omits
    damaged messages, and lists them.

    The exit code is 1 if a message is lost or a part of STORE is not copied, 2 if the log is
    already in commitlog/, 4 if a process has the store open, and else 0.

    Example: logquarry convert /data/dledger-store --into /data/store
    """
    settings = options.store_config(config)
    from logquarry.log.layout import StoreLayout
    from logquarry.repair.salvage.salvage import convert as convert_store

    layout = StoreLayout.open(store, settings)
    with _telling_what_is_left(into):
        found = convert_store(layout, into, bars=partial(out.progress, in_bytes=True))
    if as_json:
        out.json(found.to_json())
    else:
        if found.uncommitted:
            out.line(
                f"included: {text.plural(found.uncommitted, 'message')} after the last message "
                "that the DLedger group had committed"
            )
        _show_salvage(out, found)
        _show_next(out, None if into is None else str(into), "convert", store, config=config)
    if not found.is_whole:
        click.get_current_context().exit(ExitCode.FINDINGS)
