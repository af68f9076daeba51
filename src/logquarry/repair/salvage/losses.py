"""The losses of a damaged log: the damaged spans, and those of their messages that are known.

A lost message is known from its entry in a consume queue, or from its frame if only its body is
damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from logquarry.log.layout import StoreLayout
from logquarry.log.walk import MISSING_FILE, DamagedSpan
from logquarry.read.batch_queue import all_queues
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import has_message
from logquarry.repair.audit.differences import Int64, consecutive, span_numbers
from logquarry.repair.audit.queue_offsets import Range

LostOffsets = dict[QueueKey, list[Range]]


@dataclass(slots=True)
class LostSpan:
    """A part of the log that is not saved.

    Attributes:
        kind: kind of the damage, as in verify.
        file: path below the store's folder.
        offset: physical offset of its first byte.
        length: number of bytes.
        reason: the damage in words.
        messages: the known queue offsets of its messages.
    """

    kind: str
    file: str
    offset: int
    length: int
    reason: str
    messages: LostOffsets = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Physical offset after the span."""
        return self.offset + self.length

    def to_json(self) -> dict[str, Any]:
        """As an object of docs/json.md."""
        return {
            "kind": self.kind,
            "file": self.file,
            "offset": self.offset,
            "length": self.length,
            "reason": self.reason,
            "messages": [
                {
                    "topic": topic,
                    "queue_id": queue_id,
                    "queue_offset": start,
                    "count": stop - start,
                }
                for (topic, queue_id), ranges in sorted(self.messages.items())
                for start, stop in ranges
            ],
        }


def lost_spans(
    layout: StoreLayout, damage: Sequence[DamagedSpan], end: int, known_end: int
) -> list[LostSpan]:
    """The damaged spans, and the bytes that the log had after its end.

    Args:
        layout: the store's files.
        damage: the damage of the log, in order.
        end: physical offset of the log's end.
        known_end: physical offset that the log once reached.
    """
    found: list[LostSpan] = []
    for span in damage:
        path = layout.log_file(span.offset)
        last = found[-1] if found else None
        joins = last is not None and last.end == span.offset and last.kind == span.kind
        # A gap of several files is one loss.
        if last is not None and joins and span.kind == MISSING_FILE:
            last.length += span.length
            continue
        found.append(LostSpan(span.kind, path, span.offset, span.length, span.reason))
    if known_end > end:
        reason = f"the log reached {known_end} once and ends at {end} now"
        path = layout.log_file(end)
        found.append(LostSpan(MISSING_FILE, path, end, known_end - end, reason))
    return found


def fill_messages(
    layout: StoreLayout, spans: Sequence[LostSpan], framed: Mapping[QueueKey, Pairs]
) -> None:
    """Fill in the messages of lost spans.

    Args:
        layout: the store's files.
        spans: the spans in order.
        framed: physical offsets and queue offsets of messages with damage only in the body.
    """
    if not spans:
        return
    known: dict[QueueKey, list[tuple[Int64, Int64]]] = {
        key: [(np.array(places, np.int64), np.array(offsets, np.int64))]
        for key, (places, offsets) in framed.items()
    }
    for queue in all_queues(layout):
        for start, units in queue.runs(0, queue.max_offset):
            places = units["physical_offset"].astype(np.int64)
            inside = (span_numbers(places, spans) >= 0) & has_message(units)
            which = np.flatnonzero(inside)
            if len(which):
                key = queue.topic, queue.queue_id
                known.setdefault(key, []).append((places[which], start + which))
    for key, pairs in known.items():
        places, offsets = (np.concatenate(part) for part in zip(*pairs, strict=True))
        at = span_numbers(places, spans)
        for number in np.unique(at[at >= 0]).tolist():
            spans[number].messages[key] = ranges_of(offsets[at == number])


Pairs = tuple[list[int], list[int]]


def lost_by_queue(
    spans: Iterable[LostSpan], gaps: Mapping[QueueKey, Sequence[Range]]
) -> LostOffsets:
    """Queue offsets of all lost messages that are known, by queue.

    Args:
        spans: the lost spans.
        gaps: gaps in the queue offsets of the saved messages.
    """
    found: dict[QueueKey, list[Range]] = {key: list(ranges) for key, ranges in gaps.items()}
    for span in spans:
        for key, ranges in span.messages.items():
            found.setdefault(key, []).extend(ranges)
    return {key: merged(ranges) for key, ranges in found.items() if ranges}


def merged(ranges: list[Range]) -> list[Range]:
    """Ranges in order; ranges that touch are joined."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def ranges_of(offsets: Int64) -> list[Range]:
    """Offsets in any order as ranges."""
    if not len(offsets):
        return []
    ordered = np.unique(offsets)
    return [(int(ordered[a]), int(ordered[b - 1]) + 1) for a, b in consecutive(ordered)]
