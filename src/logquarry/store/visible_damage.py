"""The damage of a store that shows without reading its log: for ``logquarry info``.

It costs the folders' listings, the last queue entries and ``.logquarry/damage.json``. Only if the
queues point beyond the log's end are all queue entries read.
"""

from __future__ import annotations

from collections.abc import Iterator

from logquarry.log.layout import CHECKPOINT, StoreLayout
from logquarry.read.log_end import consume_queues, known_damage, last_entries
from logquarry.read.lost_messages import lost_messages
from logquarry.repair.audit.differences import FileFault, file_differences
from logquarry.text import plural


def visible_damage(layout: StoreLayout, log_end: int) -> Iterator[str]:
    """Describe each sign of damage in words.

    Args:
        layout: the files of a store that no process has open.
        log_end: physical offset of the log's end.
    """
    log = layout.commit_log
    for one in file_differences(log.files, log.file_size):
        if one.fault is FileFault.GAP:
            yield f"{plural(len(one.missing), 'log file')} missing before {one.file.path}"
        else:
            yield one.reason()
    for topic, queue_id in layout.queue_names:
        files = layout.queue(topic, queue_id)
        for one in file_differences(files.files, files.file_size):
            yield one.reason()
    entries = last_entries(layout, consume_queues(layout))
    queued = entries[0].physical_offset + entries[0].size if entries else 0
    if queued > log_end:
        yield (
            f"the log ends at {log_end}, and the queues point to messages up to {queued}: "
            f"{lost_messages(layout, (), log_end)}"
        )
    recorded = len(known_damage(layout))
    if recorded:
        yield f"a recovery has recorded {plural(recorded, 'damaged place')} in the log"
    try:
        layout.read_checkpoint()
    except ValueError as error:
        yield f"{CHECKPOINT}: {error}"
