"""``logquarry import``: put exported messages into a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from logquarry import text
from logquarry.cli import options, outcome, output
from logquarry.cli.output import Output

if TYPE_CHECKING:
    from logquarry.ingest.importing import Imported
    from logquarry.ingest.rows import Source
    from logquarry.store.message_store import StoreWriter
    from logquarry.systems import Held


@click.command(name="import")
@click.argument("source", metavar="SRC")
@click.argument("store", metavar="STORE")
@click.option(
    "--keep-times",
    is_flag=True,
    help="Keep the store times, but raise each time to at least the time of the previous message.  "
    "[default: the time of the import]",
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Skip the first N messages, which an interrupted import has already put.",
)
@options.as_json
@options.config
@options.quiet
@click.pass_context
def import_(
    ctx: click.Context,
    source: str,
    store: str,
    keep_times: bool,
    skip: int,
    as_json: bool,
    config: str | None,
    out: Output,
) -> None:
    """Put exported Parquet or JSON lines into a store.

    SRC is a file, a folder or a glob. If STORE does not exist, the command creates STORE. The
    command checks all rows before it puts the first message, and puts the messages in the order of
    SRC. If STORE already has a queue, the imported messages follow the queue's last message. If an
    import ends early, the command prints how many messages it has imported, and which --skip to
    pass to the next import.

    Exit code 1 if a row is not a valid message; then import puts nothing.

    Example: logquarry import parquet-folder /data/new-store
    """
    settings = options.store_config(config)
    from logquarry.ingest.importing import Imported, only_with_messages, read_source
    from logquarry.ingest.rows import open_source

    began = time.monotonic()
    found = open_source(source)
    # Read SRC before STORE is made: if SRC is no export, the command must leave no new store.
    next(read_source(found), None)
    if found.damage:
        out.warn(f"the export had skipped {text.plural(found.damage, 'damaged place')}")
    imported = Imported()
    try:
        with only_with_messages(store):
            _run(out, found, store, imported, settings, keep_times=keep_times, skip=skip)
    except BaseException:
        if imported.messages:
            # --quiet does not suppress this line: the user must know the number of stored messages.
            words, again = _report(imported, found.location, store, skip, outcome.words(ctx))
            if config is not None and "--config" not in again:
                again += ["--config", config]
            outcome.remember_words(ctx, again)
            output.error(words)
        raise
    seconds = time.monotonic() - began
    _warn_of_service_topics(out, imported)
    if as_json:
        out.json(_document(found, store, imported, seconds, keep_times=keep_times))
        return
    out.note(
        f"put {text.plural(imported.messages, 'message')}, {text.size_text(imported.bytes)}, into "
        f"{store} in {seconds:.1f} s"
    )
    if imported.raised_times:
        out.note(
            f"{text.plural(imported.raised_times, 'store time')} raised to the store time of the "
            "message before"
        )


def _run(
    out: Output,
    source: Source,
    store: str,
    imported: Imported,
    settings: Any,
    *,
    keep_times: bool,
    skip: int,
) -> None:
    from logquarry.ingest.importing import check_source, import_source

    with _opened(store, settings, imported) as (waiting, opened):
        opened.free_room_at_close()
        with out.progress("checking", in_bytes=True) as progress:
            checked = check_source(opened, source, progress=progress, pause=waiting.check)
        with out.progress("importing", in_bytes=True) as progress:
            import_source(
                opened,
                source,
                imported,
                checked=checked,
                keep_times=keep_times,
                skip=skip,
                progress=progress,
                pause=waiting.check,
            )
        opened.wait_dispatched()
        # Flush here, although close() flushes too, because a failed flush is an error that names
        # the cause.
        opened.flush()


@contextmanager
def _opened(store: str, settings: Any, imported: Imported) -> Iterator[tuple[Held, StoreWriter]]:
    """Context manager: open a store, close it, and note whether all messages are synced."""
    opened: StoreWriter | None = None
    try:
        # Delay Ctrl-C until the store has all messages of the current part of SRC: otherwise the
        # number of imported messages would be wrong.
        with outcome.writing(store, settings) as (waiting, opened):
            yield waiting, opened
    finally:
        if opened is not None:
            imported.is_synced = opened.stats().flush_behind == 0


def _report(
    imported: Imported, source: str, store: str, skip: int, words: Sequence[str]
) -> tuple[str, list[str]]:
    """After a failed import, return a text about the messages that it has put, and the words of
    the next command.
    """
    done = skip + imported.messages
    if not imported.is_synced:
        # After a failed sync, it is unknown which bytes are on the disk. Only a recovery finds out
        # which messages the log has.
        which = f"{skip + 1} to {done}" if done > skip + 1 else str(done)
        note = (
            f"not all of the log is synced, so it is not certain which of the messages {which} of "
            f"{source} are in {store}. After the recovery, count the messages at the physical "
            f"offset {imported.first_offset} and above (COUNT). Import the others with --skip "
            + (f"{skip} + COUNT" if skip else "COUNT")
        )
        return note, ["recover", store, "--apply"]
    count = text.plural(done, "message")
    if imported.is_complete:
        return f"all {count} of {source} are in {store}", ["verify", store]
    return (
        f"the first {count} of {source} are in {store}, the others are not: put the others with "
        f"--skip {done}",
        _with_skip(words, done),
    )


def _warn_of_service_topics(out: Output, imported: Imported) -> None:
    """Warn of messages that a broker would process a second time.

    The old broker's progress is stored in config/, as queue offsets. An import keeps neither the
    progress nor the queue offsets.
    """
    from logquarry.format import properties, timer
    from logquarry.store.transaction.transaction import HALF_TOPIC

    again = (
        "a RocketMQ broker delivers all of them, also those that the old broker has already "
        "delivered"
    )
    reasons = {
        properties.SCHEDULE_TOPIC: again,
        timer.TOPIC: again,
        HALF_TOPIC: "if their queue offsets changed, a broker can end the wrong transactions",
    }
    found = [topic for topic in reasons if topic in imported.topics]
    for topic in found:
        count = text.plural(imported.topics[topic][0], "message")
        out.warn(f"put {count} of {topic}: {reasons[topic]}")
    if found:
        out.note(
            "to leave these messages out, export only your own topics (--topic), and import them "
            "into a new store"
        )


def _with_skip(words: Sequence[str], count: int) -> list[str]:
    left: list[str] = []
    for word in words:
        if left[-1:] == ["--skip"]:
            left.pop()
        elif not word.startswith("--skip="):
            left.append(word)
    return [*left, "--skip", str(count)]


def _document(
    source: Source, store: str, imported: Imported, seconds: float, *, keep_times: bool
) -> dict[str, Any]:
    return {
        "source": source.location,
        "store": store,
        "files": [file.path for file in source.files],
        "messages": imported.messages,
        "bytes": imported.bytes,
        "topics": [
            {"topic": topic, "messages": count, "bytes": size}
            for topic, (count, size) in sorted(imported.topics.items())
        ],
        "first_offset": imported.first_offset,
        "end_offset": imported.end_offset,
        "raised_times": imported.raised_times if keep_times else None,
        "seconds": round(seconds, 3),
    }
