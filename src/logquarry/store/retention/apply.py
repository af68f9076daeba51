"""Carries out the plan of a retention over a store that nobody has open.

The log goes first, file by file from its begin on, and each is off the disk before the next goes:
a crash leaves a log that begins later, and never one with a hole. Queues and index come after it.
What they name before the log's begin is passed over, by us and by RocketMQ, so that a crash before
their turn leaves nothing to mend; the next retention finishes it. The other way round a crash would
leave messages in the log that no queue names.

Nothing else is touched: the log's end does not move, and with it neither does the durable mark nor
the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from logquarry.store.disk.disk import Disk
from logquarry.store.retention.plan import RetentionPlan
from logquarry.units import Progress


def apply_retention(
    plan: RetentionPlan, disk: Disk, root: Path, progress: Progress | None = None
) -> None:
    """Delete what a plan says, durably; with the store's lock held.

    Args:
        plan: the plan, made since the lock was taken.
        disk: what the store is on.
        root: its folder.
        progress: told of the files that are gone.

    Raises:
        StoreUnavailable: if the disk fails. What is gone is gone, the rest stays, and all of it is
            a store.
    """
    for done, file in enumerate(plan.files, 1):
        disk.remove(root / file.path)
        if progress is not None:
            progress(done, len(plan.files))
