"""``logquarry messages``: messages in physical order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import MessageNotFound, UsageError

if TYPE_CHECKING:
    from logquarry.cli.reading import Reader
    from logquarry.log.columns import Decoding
    from logquarry.message import StoredMessage
    from logquarry.store.message_store import MessageStore

_REDACTED = "(redacted)"


@click.command()
@options.store
@options.filters
@click.option("--offset", type=int, metavar="PHYS", help="The one at this physical offset.")
@click.option("--id", "message_id", metavar="MSGID", help="The one with this message id.")
@options.on_damage
@options.decompress
@options.redact
@click.option("--jsonl", is_flag=True, help="JSON, one message a line.")
@options.config
@options.quiet
def messages(
    store: str,
    filters: options.Filters,
    offset: int | None,
    message_id: str | None,
    on_damage: str | None,
    decompress: bool,
    redact: str | None,
    jsonl: bool,
    config: str | None,
    quiet: bool,
) -> None:
    """Print messages, in the order of the log.

    Exit code 0, or 1 where the log is damaged and --on-damage does not say what to do about it.
    """
    out = Output(quiet=quiet)
    from logquarry.log import json_lines
    from logquarry.store.message_store import MessageStore

    policy = options.damage_policy(on_damage)
    hidden = json_lines.redaction(redact)
    wanted = filters.message_filter()
    one = offset is not None or message_id is not None
    if one and (
        not wanted.is_empty or filters.limit is not None or None not in (offset, message_id)
    ):
        raise UsageError("--offset and --id each name one message: no filter goes with them")
    settings = options.store_config(config)
    write = out.jsonl if jsonl else out.lines

    with MessageStore.open(store, config=settings) as opened:
        from logquarry.cli import reading

        reader = reading.reader(
            opened.layout,
            wanted=wanted,
            on_damage=policy,
            broker=opened.broker,
            decompress=decompress,
        )
        if one:
            found = _single(opened, offset, message_id)
            write(_of_one(found, reader.decoding, hidden, jsonl=jsonl))
            return
        for lines in _lines(reader, out, filters.limit, hidden, jsonl=jsonl):
            write(lines)
        reading.tell_damage(out, reader.damage.spans, policy)


def _single(store: MessageStore, offset: int | None, message_id: str | None) -> StoredMessage:
    if offset is not None:
        return store.message_at(offset)
    assert message_id is not None
    try:
        return store.message_by_id(message_id)
    except MessageNotFound as error:
        # What clients call a message id is their own, and as long as a broker's.
        raise MessageNotFound(
            f"{error} (if the id came from a client, it is the message's UNIQ_KEY: --key takes it)"
        ) from error


def _of_one(
    message: StoredMessage, decoding: Decoding, hidden: frozenset[str], *, jsonl: bool
) -> Iterable[str]:
    from logquarry.log import columns, json_lines

    body = columns.body_of(message, decoding)
    if jsonl:
        return [json_lines.line(json_lines.redacted(message.to_json(body=body), hidden))]
    return _block(message, body, hidden)


def _lines(
    reader: Reader, out: Output, limit: int | None, hidden: frozenset[str], *, jsonl: bool
) -> Iterator[Iterable[str]]:
    """The lines of the messages that are wanted, some at a time."""
    from logquarry.cli import reading
    from logquarry.log import columns, json_lines

    # A bar and lines on one terminal would be in each other's way.
    with out.progress("reading", in_bytes=True, beside_data=True) as progress:
        for run in reading.cut(reader.runs(progress), limit):
            if jsonl:
                yield json_lines.lines(run.window, run.rows, reader.decoding, hidden)
                continue
            for message in columns.messages(run.window, run.rows, reader.decoding):
                yield _block(message, columns.body_of(message, reader.decoding), hidden)


def _block(message: StoredMessage, body: bytes, hidden: frozenset[str]) -> list[str]:
    """A message for people: what it is, and how its body begins."""
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
    from logquarry.format import compression

    if compression.is_compressed(message.sys_flag) and body is message.body:
        return f"({text.plural(len(body), 'compressed byte')}: --decompress shows the content)"
    return text.preview(body)
