"""The report of one store: what to ask of it, and in which words to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Protocol

from logquarry.errors import LogquarryError
from logquarry.format import delay
from logquarry.report.page import Page, Table, Tile, render
from logquarry.report.survey import Survey, survey
from logquarry.store.message_store import MessageStore
from logquarry.store.overview import Overview, overview
from logquarry.store.read.saved_progress import delay_offsets
from logquarry.text import (
    count_text,
    duration_text,
    plural,
    printable,
    size_text,
    time_text,
)
from logquarry.units import Progress
from logquarry.verify import VerifyReport, verify_store

_STATES = {"closed": "closed in order", "live": "open", "crashed": "not closed in order"}


class MissingExtra(LogquarryError):
    """A package of an extra is not installed."""


class Watcher(Protocol):
    """Shows how far a step is."""

    def __call__(self, what: str, /) -> AbstractContextManager[Progress | None]:
        """A context in which the step runs; gives its progress callback."""


def store_report(
    store: MessageStore,
    *,
    watch: Watcher | None = None,
    notes: Sequence[str] = (),
    title: str | None = None,
) -> str:
    """The HTML page about a store.

    Args:
        store: the store.
        watch: shows how far each step is.
        notes: sentences for below the numbers at the top.
        title: what the page is called (default: the store's path).

    Raises:
        MissingExtra: if Altair or vl-convert are not installed.
    """
    try:
        import altair as _altair  # noqa: F401
        import vl_convert as _vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"a report needs {error.name}, which is not installed: pip install 'logquarry[report]'"
        ) from error
    from logquarry.report.charts import figures

    step = watch or (lambda what: nullcontext(None))
    glance = overview(store)
    with step("counting") as progress:
        found = survey(store, (glance.first_time, glance.last_time), progress)
    with step("checking") as progress:
        report = verify_store(store.layout, progress=progress)
    page = Page(
        title=f"Store {printable(store.root)}" if title is None else title,
        subtitle=_subtitle(store, glance),
        tiles=_tiles(found, glance, report),
        figures=figures(found, _pending(store)),
        tables=[_queue_table(glance), _finding_table(report)],
        notes=[*notes, *([] if glance.hint is None else [_hint(glance)])],
    )
    return render(page)


def _subtitle(store: MessageStore, glance: Overview) -> str:
    now = datetime.now(UTC)
    return (
        f"{printable(store.broker)}, {_STATES[glance.state]}; offsets "
        f"{count_text(glance.min_offset)} to {count_text(glance.max_offset)}; "
        f"logquarry, {now:%Y-%m-%d %H:%M} UTC"
    )


def _tiles(found: Survey, glance: Overview, report: VerifyReport) -> list[Tile]:
    span = (found.last_time or 0) - (found.first_time or 0)
    damage = sum(finding.severity == "damage" for finding in report.findings)
    notes = len(report.findings) - damage
    queues = sum(len(topic.queues) for topic in glance.topics)
    files = found.files
    return [
        Tile(
            "Messages",
            count_text(found.total),
            f"{plural(len(found.messages), 'topic')}, {plural(queues, 'queue')}",
        ),
        Tile(
            "In the log",
            size_text(sum(found.bytes.values())),
            f"{plural(len(files), 'file')} of {size_text(files[0].room) if files else '0 B'}",
        ),
        Tile(
            "Time span",
            duration_text(span) if found.total else "-",
            f"from {_when(found.first_time)} UTC" if found.total else "",
        ),
        Tile(
            "Born to stored",
            duration_text(found.latency_ms(99)) if found.has_latencies else "-",
            "for 99% of messages",
        ),
        Tile(
            "Damage",
            count_text(damage) if damage else "none",
            f"{plural(notes, 'note')}; {size_text(sum(file.blank for file in files))} of blanks",
            bad=damage > 0,
        ),
    ]


def _when(ms: int | None) -> str:
    return time_text(ms).replace("T", " ").partition(".")[0]


def _hint(glance: Overview) -> str:
    reason = (glance.hint or "").partition(";")[0]
    return f"The queues do not tell what they keep in the log: {printable(reason)}."


def _queue_table(glance: Overview) -> Table:
    rows = [
        [
            printable(queue.topic),
            str(queue.queue_id),
            count_text(queue.min_offset),
            count_text(queue.max_offset),
            count_text(queue.messages),
            size_text(queue.bytes),
        ]
        for topic in glance.topics
        for queue in topic.queues
    ]
    header = ["Topic", "Queue", "Min offset", "Max offset", "Messages in the log", "Bytes"]
    return Table("Queues", header, rows, frozenset(range(1, 6)), empty="There are none.")


def _finding_table(report: VerifyReport) -> Table:
    ranked = sorted(report.findings, key=lambda finding: finding.severity != "damage")
    rows = [
        [
            finding.severity,
            finding.kind,
            printable(finding.file),
            count_text(finding.offset),
            count_text(finding.length) if finding.length else "-",
            printable(finding.reason),
        ]
        for finding in ranked
    ]
    counts: Mapping[str, int] = report.counts
    looked = (
        f"Nothing was found: {plural(counts.get('messages', 0), 'message')}, "
        f"{plural(counts.get('queue_entries', 0), 'queue entry', 'queue entries')} and "
        f"{plural(counts.get('index_entries', 0), 'index entry', 'index entries')} are sound."
    )
    header = ["Severity", "Kind", "File", "Offset", "Bytes", "What is wrong"]
    return Table("Findings", header, rows, frozenset({3, 4}), frozenset({0, 1}), empty=looked)


def _pending(store: MessageStore) -> dict[int, int]:
    """Messages that wait for delivery, by delay level, as delayOffset.json has it."""
    delivered = delay_offsets(store.layout)
    if delivered is None:
        return {}
    waiting: dict[int, int] = {}
    for topic, queue_id in store.queues():
        if topic == delay.SCHEDULE_TOPIC:
            least, most = store.queue_offsets(topic, queue_id)
            level = queue_id + 1
            waiting[level] = most - min(most, max(least, delivered.get(level, 0)))
    return waiting
