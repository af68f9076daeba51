"""Names the queue files and queue folders whose entries belong to another queue or position.

The message of an entry has its topic, its queue id and its queue offset. If those of most entries
of a file agree on another place than its path, the file was renamed, or two files were swapped. The
other findings of such a queue list its wrong entries; these notes give the reason. Recovery,
rebuild and salvage make the queue again from the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from logquarry.format import properties, queue_entry
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.file_sequence import StoreFile
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CONSUME_QUEUE, NAME_DIGITS
from logquarry.read.commit_log import CommitLog

_MOST_ENTRIES: Final = 9
"""Number of entries of a file whose messages are read."""
_MARK: Final = properties.INNER_MULTI_DISPATCH.encode()


def misnamed_queue_files(layout: StoreLayout, files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The misnamed files in the queues of some files, each with the reason.

    Args:
        layout: the store's files.
        files: paths with findings; those of other parts of the store are skipped.
    """
    log = CommitLog(layout)
    keys = {tuple(path.split("/")[1:3]) for path in files if path.startswith(f"{CONSUME_QUEUE}/")}
    found: dict[str, str] = {}
    for topic, queue_id in layout.queue_names:
        if (topic, str(queue_id)) not in keys:
            continue
        for file in layout.queue(topic, queue_id).files:
            right = _right_path(layout, log, file)
            if right is not None and right != file.path:
                found[file.path] = right
    for path, right in sorted(found.items()):
        reason = f"its entries belong in {right}"
        if found.get(right) == path:
            reason += ": the names of the two files look swapped"
        yield path, f"{reason}; `logquarry recover` makes the queue again from the log"


def _right_path(layout: StoreLayout, log: CommitLog, file: StoreFile) -> str | None:
    """The path that the messages of most entries of a file show, None if they show none."""
    places = Counter(islice(_places(layout, log, file), _MOST_ENTRIES))
    if not places:
        return None
    (right, count), *_ = places.most_common(1)
    return right if 2 * count > places.total() else None


def _places(layout: StoreLayout, log: CommitLog, file: StoreFile) -> Iterator[str]:
    try:
        data = layout.open_file(file.path).window(0, file.size)[: file.size]
    except FileNotFoundError:
        return
    for position in range(0, len(data) - UNIT_SIZE + 1, UNIT_SIZE):
        entry = queue_entry.decode_at(data, position)
        if not entry.is_written:
            return
        if entry.is_filler:
            continue
        found = log.outcome_at(entry.physical_offset, check_crc=False)
        # The queue offsets of a copy by multi-dispatch are in its properties.
        if not isinstance(found, Frame) or _MARK in found.properties:
            continue
        base = found.queue_offset * UNIT_SIZE - position
        if base >= 0:
            topic = found.topic.decode("utf-8", "replace")
            yield f"{CONSUME_QUEUE}/{topic}/{found.queue_id}/{base:0{NAME_DIGITS}d}"
