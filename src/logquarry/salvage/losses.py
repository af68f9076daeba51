"""What a damaged log has lost: the spans, and the messages in them as far as anything tells.

A message that is lost is known from the unit that a consume queue has for it, or from its own
frame, where only the body is not what its CRC says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from logquarry.files.layout import StoreLayout
from logquarry.salvage.queues import Range, merged, ranges_of
from logquarry.scan.walk import MISSING_FILE, DamagedSpan
from logquarry.store.queue.consume_queue import has_message
from logquarry.store.queue.log_queues import QueueKey
from logquarry.store.read.log_bound import consume_queues

Int64 = npt.NDArray[np.int64]
LostOffsets = dict[QueueKey, list[Range]]


@dataclass(slots=True)
class LostSpan:
    """A part of the log of which nothing can be saved.

    Attributes:
        kind: as verify spells it.
        file: path below the store's folder.
        offset: physical offset of its first byte.
        length: its bytes.
        reason: in words.
        messages: queue offsets of the messages that stood in it, as far as anything tells.
    """

    kind: str
    file: str
    offset: int
    length: int
    reason: str
    messages: LostOffsets = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Physical offset behind it."""
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
    """The spans that a walk has found, and what the log is known to have had behind its end.

    Args:
        layout: the store's files.
        damage: from the walk, in order.
        end: where the log ends.
        known_end: where it is known to have ended.
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
        reason = f"the log is known to have reached up to {known_end}, and ends at {end}"
        path = layout.log_file(end)
        found.append(LostSpan(MISSING_FILE, path, end, known_end - end, reason))
    return found


def tell_messages(
    layout: StoreLayout, spans: Sequence[LostSpan], framed: Mapping[QueueKey, Pairs]
) -> None:
    """Fill in the messages of lost spans.

    Args:
        layout: the store's files.
        spans: in order.
        framed: physical offset and queue offset of each message that its frame tells.
    """
    if not spans:
        return
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.end for span in spans], np.int64)
    told: dict[QueueKey, list[tuple[Int64, Int64]]] = {
        key: [(np.array(places, np.int64), np.array(offsets, np.int64))]
        for key, (places, offsets) in framed.items()
    }
    for queue in consume_queues(layout):
        for start, units in queue.runs(0, queue.max_offset):
            places = units["physical_offset"].astype(np.int64)
            at = np.searchsorted(starts, places, "right") - 1
            inside = (at >= 0) & (places < ends[np.maximum(at, 0)])
            inside &= has_message(units)
            which = np.flatnonzero(inside)
            if len(which):
                key = queue.topic, queue.queue_id
                told.setdefault(key, []).append((places[which], start + which))
    for key, pairs in told.items():
        places, offsets = (np.concatenate(part) for part in zip(*pairs, strict=True))
        at = np.searchsorted(starts, places, "right") - 1
        for number in np.unique(at).tolist():
            spans[number].messages[key] = ranges_of(offsets[at == number])


Pairs = tuple[list[int], list[int]]


def lost_by_queue(
    spans: Iterable[LostSpan], gaps: Mapping[QueueKey, Sequence[Range]]
) -> LostOffsets:
    """The queue offsets of all messages that are known to be lost, queue by queue.

    Args:
        spans: what was lost.
        gaps: offsets that no message has between others that messages have.
    """
    found: dict[QueueKey, list[Range]] = {key: list(ranges) for key, ranges in gaps.items()}
    for span in spans:
        for key, ranges in span.messages.items():
            found.setdefault(key, []).extend(ranges)
    return {key: merged(ranges) for key, ranges in found.items() if ranges}
