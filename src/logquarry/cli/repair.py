"""``logquarry recover``, ``rebuild`` and ``retain``: repair a store, or delete expired files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from logquarry import text
from logquarry.cli import options, outcome
from logquarry.cli import spark as with_spark
from logquarry.cli.outcome import ExitCode
from logquarry.cli.output import MOST_LISTED, Output
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.log.walk import DamagedSpan
    from logquarry.repair.rebuild.build import QueueReport, RebuildReport
    from logquarry.repair.recover.plan import RecoveryMode, RecoveryPlan
    from logquarry.store.retention.plan import ExpiredFile, RetentionPlan
    from logquarry.store.retention.rules import RetentionRules


_NAMES: Final = {
    "consumequeue": "consume queues",
    "batchconsumequeue": "batch queues",
    "consumequeue_rocksdb": "queues in RocksDB",
    "index": "index",
}


@click.command()
@options.store
@click.option(
    "--mode",
    type=click.Choice(["safe", "rocketmq"]),
    default="safe",
    help="safe: keep every sound message. rocketmq: recover as RocketMQ does, which ends the log "
    "at the first bad message.",
)
@click.option(
    "--apply",
    is_flag=True,
    help="Make the repairs.  [default: print the steps, and change nothing]",
)
@click.option(
    "--accept-loss",
    metavar="BYTES",
    type=click.IntRange(min=0),
    help="Recover the store even if messages of up to BYTES bytes are lost.  [default: refuse a "
    "recovery that would lose more than a small share of the messages]",
)
@options.as_json
@options.config
@options.quiet
def recover(
    store: str,
    mode: RecoveryMode,
    apply: bool,
    accept_loss: int | None,
    as_json: bool,
    config: str | None,
    out: Output,
) -> None:
    """Show or make the repairs that a store needs after a crash.

    Without --apply, recover prints the steps and changes nothing. recover deletes abort, files
    that contain only zeros, and hard links to log files at wrong names; it moves bad files to
    STORE/.logquarry/quarantine/. Stop the broker first: no process may have the store open.

    Exit code 0 if there is nothing to do, or all steps are done; 1 if there are steps to do and
    --apply is missing; 4 if a process has the store open, if the recovery is impossible, or if the
    recovery would lose many messages and --accept-loss is missing.

    Example: logquarry recover /data/store --apply
    """
    settings = options.store_config(config)
    from logquarry.repair.recover.recover import recover as recover_store

    with out.progress("recovering" if apply else "reading", in_bytes=True) as progress:
        plan = recover_store(
            store,
            mode=mode,
            apply=apply,
            accept_loss=accept_loss,
            config=settings,
            progress=progress,
        )
    is_due = plan.is_needed and not apply
    if as_json:
        out.json(plan.to_json())
    else:
        _show_recovery(out, plan, store, is_applied=apply)
        words = ["recover", store, "--mode", mode] if mode != "safe" else ["recover", store]
        step = None
        if plan.refused is not None and plan.loss is not None and plan.is_needed:
            words += ["--accept-loss", str(plan.loss.bytes), "--apply"]
            before = "look for the lost files first. To accept the loss"
            step = outcome.line(*words, before=before, config=config)
        elif plan.refused is not None:
            step = outcome.after_refusal("recover", store, mode, config)
        elif is_due:
            if accept_loss is not None:
                words += ["--accept-loss", str(accept_loss)]
            step = outcome.line(*words, "--apply", config=config)
        elif plan.is_needed:
            step = outcome.line("verify", store, config=config)
        if step is not None:
            out.lines(["", step])
    if plan.refused is not None or is_due:
        click.get_current_context().exit(
            ExitCode.FINDINGS if plan.refused is None else ExitCode.REFUSED
        )


def _show_recovery(out: Output, plan: RecoveryPlan, store: str, *, is_applied: bool) -> None:
    count = text.plural(len(plan.steps), "step")
    if plan.refused is not None:
        verdict, colour = f"refused: {plan.refused}", "red"
    elif not plan.is_needed:
        verdict, colour = "nothing to do", "green"
    elif is_applied:
        verdict, colour = f"recovered in {count}: the store is shut down cleanly now", "green"
    else:
        verdict, colour = f"needs recovery, {count}; nothing was changed", "yellow"
    out.line(f"{text.printable(store)}: {out.style(text.printable(verdict), colour)}")
    if plan.loss is not None and plan.refused is None:
        loss = plan.loss.words(is_applied=is_applied)
        out.line(out.style(text.printable(loss), "red"))
    length = text.size_text(plan.log_end - plan.log_start)
    ends = "ends" if is_applied or not plan.is_needed else "will end"
    log = f"the log begins at {plan.log_start} and {ends} at {plan.log_end}, {length}"
    out.section("found", [*plan.looked_at, log])
    out.section("damage, which stays in the log; readers skip it", _damage_lines(plan.damage))
    steps = [f"{number}. {step}" for number, step in enumerate(plan.steps, 1)]
    title = "done" if is_applied else "to do" if plan.refused is None else "not done"
    out.section(title, steps)


def _damage_lines(damage: Sequence[DamagedSpan]) -> list[str]:
    return [
        f"{span.path} at {span.offset}, {text.plural(span.length, 'byte')}: {span.reason}"
        for span in damage
    ]


# ------------------------------------------------------------------------------------------ rebuild
@click.command()
@options.stores
@options.into(
    "Write the new files to DIR, and do not change STORE. With several stores, each gets its own "
    "folder in DIR."
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Replace the files of STORE. The old files move to STORE/.logquarry/quarantine/.",
)
@click.option(
    "--apply",
    is_flag=True,
    help="With --in-place: replace the files.  [default: print the plan, and change nothing]",
)
@click.option("--queues", is_flag=True, help="Only the consume queues.  [default: both]")
@click.option("--index", is_flag=True, help="Only the index.  [default: both]")
@click.option(
    "--resume",
    is_flag=True,
    help="With --into and --spark-master: skip stores that are complete in DIR.",
)
@options.spark_master
@options.as_json
@options.config
@options.quiet
def rebuild(
    stores: tuple[str, ...],
    into: Path | None,
    in_place: bool,
    apply: bool,
    queues: bool,
    index: bool,
    resume: bool,
    spark_master: str | None,
    as_json: bool,
    config: str | None,
    out: Output,
) -> None:
    """Rebuild consume queues and index from the log.

    Without --into and --apply, rebuild only prints its plan. With --into, a broker may have the
    store open; rebuild ignores messages that arrive after its start. With --in-place, no process
    may have the store open. To rebuild several stores, pass --spark-master.

    Example: logquarry rebuild /data/store --in-place --apply
    """
    if into is not None and (in_place or apply):
        raise UsageError("pass --into DIR, or --in-place with --apply, not both")
    if apply and not in_place:
        raise UsageError("--apply needs --in-place; to keep the old files, pass only --into DIR")
    from logquarry.log.location import has_wildcard

    settings = options.store_config(config)
    both = queues == index
    wanted: dict[str, Any] = {
        "into": into,
        "apply": apply,
        "queues": queues or both,
        "index": index or both,
        "config": settings,
    }
    if resume and spark_master is None:
        raise UsageError("--resume needs --spark-master")
    on_spark = spark_master is not None and (into is not None or apply)
    several = spark_master is not None and (len(stores) > 1 or has_wildcard(stores[0]))
    if len(stores) > 1 and not on_spark:
        raise UsageError(
            "several stores need --spark-master, and either --into or --in-place --apply"
        )
    if spark_master is None or not on_spark:
        from logquarry.repair.rebuild.rebuild import rebuild as rebuild_store

        with out.progress("reading the log", in_bytes=True) as progress:
            reports = [rebuild_store(stores[0], **wanted, progress=progress)]
    else:
        from logquarry.spark.rebuilding import rebuild_on_spark, rebuild_stores

        with (
            with_spark.session(spark_master) as session,
            out.progress("rebuilding", in_bytes=True) as progress,
        ):
            if several or resume:
                more = {**wanted, "resume": resume, "progress": progress}
                reports = rebuild_stores(session, stores, **more)
            else:
                reports = [rebuild_on_spark(session, stores[0], **wanted, progress=progress)]
    if as_json:
        documents = [report.to_json() for report in reports]
        out.json({"stores": documents} if several or resume else documents[0])
        return
    for number, report in enumerate(reports):
        if number:
            out.line()
        _show_rebuild(out, report, stores[0] if not several else report.store, config)
    if not reports:
        out.note("nothing to do: all stores are complete already")


def _show_rebuild(out: Output, report: RebuildReport, store: str, config: str | None) -> None:
    what = " and ".join(_NAMES[name] for name in report.old)
    name = text.printable(store)
    parts = {"--index" if folder == "index" else "--queues" for folder in report.old}
    only = parts if len(parts) == 1 else ()
    if not report.is_applied:
        verdict = f"would rebuild {what} from the log; nothing was changed"
        out.line(f"{name}: {out.style(verdict, 'yellow')}")
        out.line()
        for folder, found in report.old.items():
            size = f"{text.plural(found.files, 'file')}, {text.size_text(found.bytes)}"
            out.line(f"  {folder + '/':<14} {size} now; would move to quarantine")
        if report.is_live:
            out.line("  a process has the store open: only --into DIR is possible now")
        if report.has_abort:
            out.line("  the store was not shut down cleanly; recover also adds missing entries")
        out.line()
        elsewhere = ("rebuild", store, "--into", "DIR", *only)
        if report.is_live:
            out.line(outcome.line(*elsewhere, config=config))
            return
        check = "recover" if report.has_abort else "verify"
        _show_next(out, "check", check, store, config=config)
        _show_next(out, "elsewhere", *elsewhere, config=config)
        out.line(outcome.line("rebuild", store, "--in-place", "--apply", *only, config=config))
        return
    where = "in place" if report.into is None else f"into {text.printable(report.into)}"
    out.line(f"{name}: {out.style(f'{what} rebuilt {where}', 'green')}")
    out.line()
    out.line(
        f"  log            {report.log_start} to {report.log_end}: "
        f"{text.plural(report.messages or 0, 'message')}"
    )
    if report.queues is not None:
        _show_queues(out, report)
    if report.index is not None:
        keys, files = report.keys or 0, report.index.files
        out.line(f"  index          {text.plural(keys, 'key')} in {text.plural(files, 'file')}")
    if report.quarantine is not None:
        out.line(f"  old files      {text.printable(report.quarantine)}")
    _show_unsure_ends(out, report.queues or ())
    _show_left_damage(out, report)
    if report.is_live:
        out.line()
        out.line("  a process has the store open: messages stored since the start are not included")
    out.line()
    if report.into is None and report.has_abort:
        out.line("  the store was not shut down cleanly; rebuild does not change that")
        out.line(outcome.after_rebuild(store, config))
    elif report.into is None:
        out.line(outcome.line("verify", store, config=config))


def _show_queues(out: Output, report: RebuildReport) -> None:
    assert report.queues is not None
    topics = {queue.topic for queue in report.queues}
    taken = sum(queue.is_taken_over for queue in report.queues)
    words = f"{text.plural(len(report.queues), 'queue')} of {text.plural(len(topics), 'topic')}"
    if taken:
        words += f"; {taken} without a message in the log"
    out.line(f"  consume queues {words}")
    for queue in report.queues[: MOST_LISTED if report.damage else 0]:
        if queue.fillers:
            lost = text.plural(queue.fillers, "message")
            out.line(
                f"    {_name(queue)}: the log has lost {lost}; filler entries take their place"
            )
    for queue in [queue for queue in report.queues if queue.harmed][:MOST_LISTED]:
        frames = text.plural(queue.harmed, "frame")
        out.line(
            f"    {_name(queue)}: {frames} with a damaged queue offset; their entries are right"
        )


def _show_unsure_ends(out: Output, queues: Sequence[QueueReport]) -> None:
    from logquarry.repair.audit.expired_queues import end_words

    lines = [
        f"{one.topic}/{one.queue_id}: the old files are unusable, and {end_words(one.max_offset)}"
        for one in queues
        if not one.is_end_sure
    ]
    out.section("queues whose end is uncertain", lines)


def _name(queue: QueueReport) -> str:
    return f"{text.printable(queue.topic)}/{queue.queue_id}"


def _show_left_damage(out: Output, report: RebuildReport) -> None:
    lines = _damage_lines(report.damage)
    lines += [
        f"the message at physical offset {m.physical_offset} is in no queue: {m.topic}, queue "
        f"{m.queue_id} offset {m.queue_offset}: {m.reason}"
        for m in report.left_out
    ]
    out.section("damage in the log, which stays unchanged", lines)


def _show_next(out: Output, what: str, *words: str, config: str | None) -> None:
    out.line(f"{what + ':':<11}{options.command_line(*words, config=config)}")


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
    _show_expired(out, plan, store, is_applied=apply)
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


def _show_expired(out: Output, plan: RetentionPlan, store: str, *, is_applied: bool) -> None:
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
    out.section("log", _expired_lines(plan.log), _MOST_LISTED)
    queues = [file for _, files in plan.queues for file in files]
    out.section("queues", _expired_lines(queues), _MOST_LISTED)
    out.section("index", _expired_lines(plan.index), _MOST_LISTED)
    out.section("transactions", _expired_lines(plan.transactions), _MOST_LISTED)
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


def _expired_lines(files: Iterable[ExpiredFile]) -> list[str]:
    return [f"{file.path}  {text.size_text(file.size)}: {file.reason}" for file in files]
