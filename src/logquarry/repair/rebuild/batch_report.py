"""The batch queues in the report of a rebuild."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from logquarry.errors import UnsupportedStore
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import BATCH_QUEUE
from logquarry.read.features import BATCH_QUEUES
from logquarry.repair.rebuild.batch_files import BatchFiles
from logquarry.repair.rebuild.build import QueueReport, RebuildReport


def with_batches(
    layout: StoreLayout,
    report: RebuildReport,
    batch: BatchFiles,
    copy: Callable[[StoreLayout, str], None],
) -> RebuildReport:
    """The report with the batch queues, after the queues without a message in the log are copied.

    A broker continues where such a queue ends: retention has deleted all its messages.

    Args:
        layout: the store's files.
        report: the report of the other queues.
        batch: the batch queues.
        copy: copies a file of the store to the new files.
    """
    queues = [
        QueueReport(*key, queue.first, queue.stop, queue.gaps, queue.restarts)
        for key, queue in batch.queues.items()
    ]
    for old in batch.expired(layout):
        for file in old.files:
            copy(layout, file.path)
        stop = old.max_offset
        queues.append(QueueReport(old.topic, old.queue_id, stop, stop, 0, 0, is_taken_over=True))
    every = sorted((*(report.queues or ()), *queues), key=lambda q: (q.topic, q.queue_id))
    left_out = (*report.left_out, *batch.left_out)
    return replace(report, queues=tuple(every), left_out=left_out)


def not_in_tasks(store: str, topics: Iterable[str]) -> UnsupportedStore:
    """The error of a rebuild by Spark: its tasks do not build batch queues."""
    names = ", ".join(sorted(topics))
    return UnsupportedStore(
        f"{store}: topics {names} have batch queues, which Spark does not build. "
        "Nothing was changed. Type `logquarry rebuild` without Spark",
        feature=BATCH_QUEUES,
        evidence=(f"{BATCH_QUEUE}/",),
    )
