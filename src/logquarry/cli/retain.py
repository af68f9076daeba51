"""``logquarry retain``: show which files have expired, or delete them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.store.retention.plan import ExpiredFile, RetentionPlan
    from logquarry.store.retention.rules import RetentionRules

_MOST_LISTED = 20


@click.command()
@options.store
@click.option(
    "--older-than",
    metavar="AGE",
    help="Rule: the file's last message was stored at least AGE ago: 72h, 3d, 30m; a number "
    "without unit is hours.",
)
@click.option(
    "--max-disk-ratio",
    metavar="RATIO",
    help="Rule: the disk is fuller than RATIO: 0.75 or 75%.",
)
@click.option(
    "--keep-bytes",
    metavar="SIZE",
    help="Rule: the whole file is before the newest SIZE bytes of the log: 100g.",
)
@click.option(
    "--max-files",
    type=click.IntRange(min=1),
    metavar="N",
    help="Delete at most N log files in this run, the oldest first. N is not the number of files "
    "that stay.  [default: no limit]",
)
@click.option(
    "--apply", is_flag=True, help="Delete the files.  [default: list them, and change nothing]"
)
@options.as_json
@options.config
@options.quiet
def retain(
    store: str,
    older_than: str | None,
    max_disk_ratio: str | None,
    keep_bytes: str | None,
    max_files: int | None,
    apply: bool,
    as_json: bool,
    config: str | None,
    out: Output,
) -> None:
    """Show which files have expired; with --apply, delete them.

    A log file has expired if it matches all rules that you pass, for example --older-than. retain
    deletes the oldest log files first, and never the last log file. After that, retain deletes the
    files of queues and index whose entries all point to deleted messages. --apply needs a store
    that no process has open and that was shut down cleanly.

    Exit code 4 if --apply is not possible now, else 0.

    Example: logquarry retain /data/store --older-than 72h
    """
    rules = _rules(older_than, max_disk_ratio, keep_bytes, max_files)
    settings = options.store_config(config)
    from logquarry.store.retention.retain import retain as retain_store

    with out.progress("deleting") as progress:
        plan = retain_store(
            store, rules, apply=apply, config=settings, progress=progress if apply else None
        )
    if as_json:
        out.json(plan.to_json())
        return
    _show(out, plan, store, is_applied=apply)
    if plan.files and not apply and plan.refused is None:
        given = {
            "--older-than": older_than,
            "--max-disk-ratio": max_disk_ratio,
            "--keep-bytes": keep_bytes,
            "--max-files": None if max_files is None else str(max_files),
        }
        typed = [
            word for name, value in given.items() if value is not None for word in (name, value)
        ]
        out.line()
        out.line(f"next: {options.command_line('retain', store, *typed, '--apply', config=config)}")


def _rules(
    older_than: str | None, max_disk_ratio: str | None, keep_bytes: str | None, most: int | None
) -> RetentionRules:
    from logquarry.store.retention.rules import RetentionRules, disk_ratio, duration_ms

    given = (older_than, max_disk_ratio, keep_bytes)
    if given == (None, None, None):
        raise UsageError("pass a rule: --older-than, --max-disk-ratio or --keep-bytes")
    age = options.parsed("--older-than", older_than, duration_ms)
    ratio = options.parsed("--max-disk-ratio", max_disk_ratio, disk_ratio)
    keep = options.parsed("--keep-bytes", keep_bytes, text.byte_count)
    return RetentionRules(older_than_ms=age, max_disk_ratio=ratio, keep_bytes=keep, most_files=most)


def _show(out: Output, plan: RetentionPlan, store: str, *, is_applied: bool) -> None:
    count = text.plural(len(plan.log), "log file")
    others = len(plan.files) - len(plan.log)
    if others:
        count += f" and {text.plural(others, 'file')} of queues and index"
    if not plan.files:
        verdict, colour = "nothing has expired", "green"
    elif is_applied:
        verdict, colour = f"{count} deleted, {text.size_text(plan.bytes)}", "green"
    else:
        verdict = f"{count} would be deleted, {text.size_text(plan.bytes)}; nothing was changed"
        colour = "yellow"
    out.line(f"{text.printable(store)}: {out.style(verdict, colour)}")
    begins = "begins" if is_applied or not plan.log else "would begin"
    out.line()
    out.line(
        f"the log {begins} at {plan.new_min_offset} (before: {plan.min_offset}) and ends at "
        f"{plan.max_offset}"
    )
    first = "the first file that stays" if plan.log else "the first file stays"
    out.line(f"{first}: {text.printable(plan.stays_because)}")
    if plan.disk is not None:
        after = ""
        if plan.files:
            ratio = plan.disk.without(plan.bytes).ratio
            after = f"; after the deletion about {ratio:.1%}"
        out.line(f"the disk {'was' if is_applied else 'is'} {plan.disk.ratio:.1%} full{after}")
    out.section("log", _lines(plan.log), _MOST_LISTED)
    queues = [file for _, files in plan.queues for file in files]
    out.section("queues", _lines(queues), _MOST_LISTED)
    out.section("index", _lines(plan.index), _MOST_LISTED)
    out.section("transactions", _lines(plan.transactions), _MOST_LISTED)
    if plan.messages:
        out.title("deleted messages" if is_applied else "messages to delete")
        rows = [[topic, f"{count:,}"] for topic, count in sorted(plan.messages.items())]
        out.table(["topic", "messages"], rows, right="messages")
    if plan.unread:
        out.title("not read yet by these consumer groups")
        unread = [
            [one.group, one.topic, one.queue_id, one.offset, f"{one.messages:,}"]
            for one in plan.unread
        ]
        header = ["group", "topic", "queue", "next", "messages"]
        out.table(header, unread, right="queue next messages")
    if plan.refused is not None:
        out.warn(f"--apply is not possible now: {plan.refused}")


def _lines(files: Iterable[ExpiredFile]) -> list[str]:
    return [f"{file.path}  {text.size_text(file.size)}: {file.reason}" for file in files]
