"""Prints the timer messages that wait (``info --timers``) and unacknowledged pops (``stats``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logquarry import text
from logquarry.cli.output import Output

if TYPE_CHECKING:
    from logquarry.log.layout import StoreLayout
    from logquarry.read.pops import Pops


def timers_document(layout: StoreLayout) -> dict[str, Any]:
    """``timers`` of ``info --json``, described in docs/json.md."""
    from logquarry.read.timer_wheel import precision
    from logquarry.read.timers import check_or_none, timers_of

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
                "topic": one.topic,
                "queue_id": one.queue_id,
                "uniq_key": one.uniq_key,
                "keys": one.keys,
                "physical_offset": one.physical_offset,
                "timer_queue_offset": one.queue_offset,
                "is_in_wheel": one.queue_offset < check.enqueued,
                "rolled": one.rolled,
            }
            for one in due
        ],
    }


def show_timers(out: Output, document: dict[str, Any]) -> None:
    """Print the timer messages as a table."""
    out.line(out.style("timer messages", "bold"))
    out.line(
        f"  waiting {document['waiting']:,}, deleted before their time {document['deleted']:,}"
    )
    rows = [
        [
            text.time_text(one["due"]),
            text.printable(one["topic"]),
            str(one["queue_id"]),
            text.printable(one["keys"] or one["uniq_key"] or "-"),
            str(one["physical_offset"]),
        ]
        for one in document["messages"]
    ]
    if rows:
        out.line()
        out.table(["due", "topic", "queue", "key", "offset"], rows, right="queue offset")


def show_pops(out: Output, pops: Pops) -> None:
    """Print unacknowledged pops as a table, if there are any."""
    if pops.queues:
        out.line()
        rows = [
            [
                *(text.printable(one.group), text.printable(one.topic), str(one.queue_id)),
                *(f"{one.messages:,}", text.time_text(one.oldest)),
            ]
            for one in pops.queues
        ]
        header = ["popped by group", "topic", "queue", "unacknowledged", "oldest pop"]
        out.table(header, rows, right="queue unacknowledged")
