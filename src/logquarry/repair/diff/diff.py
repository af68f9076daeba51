"""Compares two stores: logs, then queues, then the files of config/."""

from __future__ import annotations

from logquarry.disk.open_files import OpenFiles
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import rereads
from logquarry.log.store_files import CONFIG
from logquarry.log.walk import LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.log_end import last_entries, missing_end
from logquarry.read.lost_messages import lost_messages
from logquarry.read.store_sizes import require_log
from logquarry.repair.diff.log_diff import Common, LogDiff, compare_queue
from logquarry.repair.diff.store_diff import LogBounds, QueueDiff, Side, StoreDiff
from logquarry.units import Progress


class _Store:
    """One of the two stores, as it was when it was opened: a writer may append to it later."""

    def __init__(self, layout: StoreLayout) -> None:
        require_log(layout)
        self.layout = layout
        self.is_live = layout.is_live()
        files = OpenFiles(layout)
        found = ConsumeQueue.all_of(layout, files)
        self.queues: dict[tuple[str, int], ConsumeQueue] = {
            (queue.topic, queue.queue_id): queue for queue in found
        }
        log = CommitLog(layout, files=files, last_entries=lambda: last_entries(layout))
        self.log = LogBounds(log.min_offset, log.max_offset)
        # A writer may have begun a file after the listing.
        ends = [] if self.is_live else last_entries(layout)
        self.missing = None if self.is_live else missing_end(layout, ends)
        self.reach = self.log.max_offset if self.is_live else self._reach()

    def _reach(self) -> int:
        """Physical offset up to which to compare: the log's end, or the end of messages after it.

        Such messages are stale, or the last file is damaged before them. Then the log's end is in
        doubt, and the other store decides.
        """
        end = self.log.max_offset
        reader = LogReader(self.layout)
        last = reader.data_end(end)
        has_messages = last > end and any(isinstance(e, Run) for e in reader.events(end))
        return last if has_messages else end

    def config(self) -> dict[str, bytes]:
        files = self.layout.filesystem
        names = [entry.name for entry in files.list(CONFIG) if not entry.is_dir]
        return {name: files.read(f"{CONFIG}/{name}") for name in names if name.endswith(".json")}


@rereads
def compare_stores(
    a: StoreLayout, b: StoreLayout, *, progress: Progress | None = None
) -> StoreDiff:
    """Compare two stores.

    The common part of the logs is compared byte by byte. A later begin or an earlier end is not a
    divergence. A writer may have either store open: it is compared up to its present end.

    Args:
        a: files of the first store.
        b: files of the second store.
        progress: gets the bytes of the log that are compared, and their total.

    Raises:
        UnsupportedStore: if the log of a store is not found.
    """
    left, right = _Store(a), _Store(b)
    start = max(left.log.min_offset, right.log.min_offset)
    end = min(left.reach, right.reach)
    log = LogDiff(a, b, start, end).run(progress)
    # After the divergence of the logs the queues differ too.
    diverged_at = end if log.divergence is None else log.divergence.offset
    common = Common(start, diverged_at, left.is_live or right.is_live)
    sides: tuple[tuple[Side, _Store], ...] = (("a", left), ("b", right))
    keys = sorted(left.queues.keys() | right.queues.keys())
    queues = tuple(
        compare_queue(key, left.queues.get(key), right.queues.get(key), common) for key in keys
    )
    return StoreDiff(
        a=a.root,
        b=b.root,
        log_a=left.log,
        log_b=right.log,
        start=start,
        end=end,
        parts=tuple(log.parts),
        divergence=log.divergence,
        queues=queues,
        config=_compare_config(left.config(), right.config()),
        notes=(*_notes(left, right, queues), *log.notes),
        lost=tuple(name for name, store in sides if store.missing is not None),
    )


def _notes(left: _Store, right: _Store, queues: tuple[QueueDiff, ...]) -> list[str]:
    found = []
    stores = (("a", left, "b", right), ("b", right, "a", left))
    for name, store, other_name, other in stores:
        if store.is_live:
            found.append(
                f"{name} is open in another program: compared up to {store.log.max_offset}"
            )
        if store.log.min_offset > other.log.min_offset:
            missing = store.log.min_offset - other.log.min_offset
            found.append(
                f"{name} begins at {store.log.min_offset}, {missing} bytes after {other_name}"
            )
        if store.reach > store.log.max_offset:
            found.append(
                f"{name} has messages after its end at {store.log.max_offset}: its last file is "
                "damaged there, or a recovery left them"
            )
        if store.missing is not None:
            found.append(
                f"{name} lacks its last log files: it ends at {store.log.max_offset}, and its log "
                f"reached {store.missing}: {lost_messages(store.layout, (), store.log.max_offset)}"
            )
        if store.log.max_offset < other.log.max_offset:
            missing = other.log.max_offset - store.log.max_offset
            found.append(
                f"{name} ends at {store.log.max_offset}, {missing} bytes behind {other_name}"
            )
    behind = sum(queue.state == "behind" for queue in queues)
    if behind:
        words = "1 queue has" if behind == 1 else f"{behind} queues have"
        found.append(f"{words} different ends, like the logs")
    return found


def _compare_config(a: dict[str, bytes], b: dict[str, bytes]) -> dict[str, str]:
    found = {}
    for name in sorted(a.keys() | b.keys()):
        if name not in b:
            found[name] = "only_a"
        elif name not in a:
            found[name] = "only_b"
        else:
            found[name] = "equal" if a[name] == b[name] else "different"
    return found
