"""``logquarry messages``, and the class that reads messages for ``messages`` and ``export``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import click

from logquarry import text
from logquarry.arguments import Progress
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import MessageNotFound, UsageError

if TYPE_CHECKING:
    from logquarry.log.batches import MessageFilter, OnDamage
    from logquarry.log.codec import Rows
    from logquarry.log.columns import Decoding
    from logquarry.log.layout import StoreLayout
    from logquarry.log.walk import DamagedSpan, Run
    from logquarry.store.message_store import MessageStore
    from logquarry.stored_message import StoredMessage

_REDACTED: Final = "(redacted)"
_MOST_LISTED: Final = 20


@click.command()
@options.store
@options.filters
@click.option(
    "--offset", type=int, metavar="PHYS", help="Print the message at this physical offset."
)
@click.option(
    "--id",
    "message_id",
    metavar="MSGID",
    help="Print the message with this message id (store host and physical offset in hex).",
)
@options.on_damage
@options.decompress
@options.redact
@click.option("--jsonl", is_flag=True, help="Print JSON lines, one message a line.")
@options.config
@options.quiet
def messages(
    store: str,
    filters: options.Filters,
    offset: int | None,
    message_id: str | None,
    on_damage: OnDamage,
    decompress: bool,
    redact: str | None,
    jsonl: bool,
    config: str | None,
    out: Output,
) -> None:
    """Print messages in the order of the log.

    If you pass several filters, a message is printed only if it passes all of them. STORE is a
    folder or a URL. A broker may have the store open.

    The exit code is 1 if --offset or --id finds no message. The exit code is also 1 if the command
    fails at damage, which happens only with --on-damage fail, or without --on-damage. In all other
    cases, the exit code is 0.

    Example: logquarry messages /data/store --topic orders --limit 5
    """
    from logquarry.log import exported
    from logquarry.read.bulk import warn_of_unknown_topics
    from logquarry.store.message_store import MessageStore

    hidden = exported.redaction(redact)
    wanted = filters.message_filter()
    one = offset is not None or message_id is not None
    if one and (
        not wanted.is_empty or filters.limit is not None or None not in (offset, message_id)
    ):
        raise UsageError("--offset and --id select one message: pass one of them, and no filter")
    settings = options.store_config(config)
    write = out.jsonl if jsonl else out.lines

    with MessageStore.open(store, config=settings) as opened:
        reader = MessageReader(
            opened.layout,
            wanted=wanted,
            on_damage=on_damage,
            broker=opened.broker,
            decompress=decompress,
        )
        if one:
            found = _single(opened, offset, message_id)
            for message in found.unwrap():
                write(_of_one(message, reader.decoding, hidden, jsonl=jsonl))
            return
        warn_of_unknown_topics([opened.layout], wanted)
        for lines in _lines(reader, out, filters.limit, hidden, jsonl=jsonl):
            write(lines)
        report_damage(out, reader.damage.spans, on_damage, opened.layout)


def _single(store: MessageStore, offset: int | None, message_id: str | None) -> StoredMessage:
    if offset is not None:
        return store.message_at(offset)
    assert message_id is not None
    try:
        return store.message_by_id(message_id)
    except MessageNotFound as error:
        # RocketMQ's clients show the UNIQ_KEY as the message id, and both have the same length, so
        # the user may have passed a UNIQ_KEY.
        raise MessageNotFound(
            f"{error} (if the id is from a client, it is a UNIQ_KEY: search with --key)"
        ) from error


def _of_one(
    message: StoredMessage, decoding: Decoding, hidden: frozenset[str], *, jsonl: bool
) -> Iterable[str]:
    from logquarry.log import columns, exported

    body = columns.body_of(message, decoding)
    if jsonl:
        return [exported.line(exported.redacted(message.to_json(body=body), hidden))]
    return _block(message, body, hidden)


def _lines(
    reader: MessageReader, out: Output, limit: int | None, hidden: frozenset[str], *, jsonl: bool
) -> Iterator[Iterable[str]]:
    from logquarry.log import columns
    from logquarry.log.frames import decoded

    decoding = reader.decoding

    def decode(run: Run) -> Iterator[tuple[Rows, list[str]]]:
        if jsonl:
            yield from reader.lines(run, hidden)
            return
        for number, message in enumerate(columns.messages(run.window, run.rows, decoding)):
            lines = _block(message, columns.body_of(message, decoding), hidden)
            yield run.rows[number : number + 1], lines

    with out.progress("reading", in_bytes=True, beside_data=True) as progress:
        yield from decoded(limited(reader.runs(progress), limit), decode)


def _block(message: StoredMessage, body: bytes, hidden: frozenset[str]) -> list[str]:
    parts = [
        str(message.physical_offset),
        text.time_text(message.store_timestamp),
        f"{text.printable(message.topic)} queue {message.queue_id} offset {message.queue_offset}",
        text.size_text(message.size),
    ]
    for name, value in (
        ("tags", message.tags),
        ("keys", message.keys),
        ("id", message.uniq_key or message.message_id),
        ("from", message.born_host),
    ):
        hides = {"id": {"uniq_key", "message_id"}, "from": {"born_host"}}.get(name, {name})
        if value and not hidden & hides:
            parts.append(f"{name} {text.printable(value)}")
    if kind := _kind(message.sys_flag):
        parts.append(kind)
    shown = _REDACTED if "body" in hidden else _body_text(message, body)
    return ["  ".join(parts), f"    {shown}"]


def _kind(flag: int) -> str:
    from logquarry.format import sys_flag

    return {
        sys_flag.TRANSACTION_PREPARED: "prepared",
        sys_flag.TRANSACTION_COMMIT: "committed",
        sys_flag.TRANSACTION_ROLLBACK: "rolled back",
    }.get(sys_flag.transaction_type(flag), "")


def _body_text(message: StoredMessage, body: bytes) -> str:
    from logquarry.format import sys_flag

    if sys_flag.is_compressed(message.sys_flag) and body is message.body:
        return f"({text.plural(len(body), 'compressed byte')}: --decompress shows the content)"
    return text.preview(body)


# ------------------------------------------------------------------------------------------ reading
class MessageReader:
    """Reads selected messages of one store in physical order.

    The reader uses the store's delay levels, and its limit for decompressed bodies.

    Attributes:
        damage: the damage that the reader has found, and the messages whose bodies it could not
            decompress.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        wanted: MessageFilter,
        on_damage: OnDamage,
        broker: str,
        decompress: bool,
    ) -> None:
        from logquarry.log.batches import BadBodies, DamageLog
        from logquarry.log.columns import Decoding

        self.layout = layout
        self.damage = DamageLog()
        self.decoding = Decoding(
            broker=broker,
            delay_levels_ms=layout.delay_levels_ms,
            decompress=decompress,
            decompress_limit=layout.config.decompress_limit,
            on_bad_body=BadBodies(layout, on_damage, self.damage),
        )
        self._wanted = wanted
        self._on_damage = on_damage

    def runs(self, progress: Progress | None = None) -> Iterator[Run]:
        """Yield the frames that pass the filter, in runs (groups of consecutive frames)."""
        from logquarry.log.batches import selected
        from logquarry.read import bulk as store_reading
        from logquarry.read.log_end import last_entries

        start, stop = self.layout.commit_log.start, self.layout.commit_log.end
        # Estimate the log's end from the last queue entries, because the last log file can end with
        # much empty space.
        if entries := last_entries(self.layout):
            stop = entries[0].end
        wanted = None if self._wanted.is_empty else self._wanted
        found = store_reading.runs(self.layout, self._wanted, self._on_damage, self.damage)
        for run in found:
            yield from selected((run,), self.decoding, wanted)
            if progress is not None:
                progress(run.end - start, max(run.end, stop) - start)

    def lines(
        self, run: Run, hidden: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Rows, list[str]]]:
        """Yield (rows, JSON lines of these rows) for each part of a run."""
        from logquarry.log import exported

        return exported.line_parts(run.window, run.rows, self.decoding, hidden)


def limited(runs: Iterator[Run], limit: int | None) -> Iterator[Run]:
    """Yield the first ``limit`` messages of the runs; all messages if ``limit`` is None."""
    left = limit
    for run in runs if left != 0 else ():
        if left is None or len(run.rows) < left:
            yield run
        else:
            yield replace(run, rows=run.rows[:left])
            return
        if left is not None:
            left -= len(run.rows)


def report_damage(
    out: Output,
    spans: Sequence[DamagedSpan],
    on_damage: OnDamage,
    layout: StoreLayout | None = None,
) -> None:
    """Print the damage that the reader found, and whether the reader skipped it or stopped."""
    from logquarry.log.batches import BAD_COMPRESSION
    from logquarry.read.log_end import lost_messages

    bad_bodies = [span.offset for span in spans if span.kind == BAD_COMPRESSION]
    spans = [span for span in spans if span.kind != BAD_COMPRESSION]
    if bad_bodies:
        count = text.plural(len(bad_bodies), "body", "bodies")
        where = ", ".join(map(str, bad_bodies[:_MOST_LISTED]))
        out.warn(f"{count} could not be decompressed, and stayed as stored: at {where}")
    if not spans:
        return
    for span in spans[:_MOST_LISTED]:
        out.note(
            f"  {span.path}: at offset {span.offset}: {span.kind}, "
            f"{text.plural(span.length, 'byte')}: {span.reason}"
        )
    if len(spans) > _MOST_LISTED:
        out.note(f"  and {len(spans) - _MOST_LISTED} more")
    length = text.plural(sum(span.length for span in spans), "byte")
    known = ""
    if layout is not None:
        end = spans[-1].offset if spans[-1].is_tail else layout.commit_log.end
        lost = lost_messages(layout, spans, end)
        known = f": {lost}" if lost.messages else ""
    if on_damage == "skip":
        out.warn(f"skipped {text.plural(len(spans), 'damaged place')}, {length} in total{known}")
    elif spans[-1].is_tail:
        out.warn(f"the log ends in a torn tail of {length}{known}")
    else:
        out.warn(
            "stopped at the first damaged place and read nothing after it; to read on, pass "
            "--on-damage skip"
        )
