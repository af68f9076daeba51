"""Builds the two kinds of queues that only RocketMQ 5 has: batch queues, and queues in RocksDB.

To find a queue offset in a batch queue, the broker assumes that the entries have no gaps. So if
messages are lost, the rebuild extends the range of the next entry to their queue offsets
(:func:`logquarry.write.queue_writer.without_gaps`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable, UnsupportedStore
from logquarry.format import queue_entry as table
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import needs_package
from logquarry.read.batch_queue import BatchEntries
from logquarry.read.features import ROCKSDB_QUEUES
from logquarry.read.log_queues import QueueKey
from logquarry.read.rocksdb_queue import ENTRY_DTYPE, open_queues
from logquarry.repair.audit.differences import AuditedQueue, queue_name
from logquarry.repair.audit.right_offsets import NO_PLACE, RightBases
from logquarry.repair.rebuild.queue_files import (
    INVALID,
    BuiltQueue,
    EntryFiles,
    LeftOut,
    OldQueues,
    QueueFiles,
    topic_fault,
)
from logquarry.write.queue_writer import QueuePart, without_gaps

_MOST_HELD: Final = 64 << 20


@dataclass(slots=True)
class BuiltBatchQueue:
    """One batch queue during the build. Offsets are queue offsets.

    Attributes:
        written: number of bytes of the entries that are written to the files.
        restarts: number of times that the topic was deleted and created again.
        fillers: number of lost messages in the middle of the queue.
        harmed: physical offsets of the frames with a harmed queue offset; set when the build ends.
    """

    first: int
    stop: int
    written: int = 0
    restarts: int = 0
    fillers: int = 0
    parts: list[bytes] = field(default_factory=list)
    harmed: list[int] = field(default_factory=list)


class BatchFiles(EntryFiles):
    """Builds the batch queues of one store."""

    def __init__(self, disk: Disk, folder: Path, file_size: int) -> None:
        super().__init__(disk, folder, file_size)
        self.queues: dict[QueueKey, BuiltBatchQueue] = {}
        self._right: dict[QueueKey, RightBases] = {}

    def add(self, key: QueueKey, entries: BatchEntries) -> None:
        """Add the next frames of one queue, in the log's order."""
        reason = topic_fault(key)
        if reason is not None:
            for base, place in zip(entries["base"], entries["physical_offset"], strict=True):
                self.left_out.append(LeftOut(*key, int(base), int(place), reason))
            return
        self._add(key, self._right.setdefault(key, RightBases()).take(entries))

    def _add(self, key: QueueKey, entries: BatchEntries) -> None:
        if not len(entries):
            return
        at, starts = 0, entries["base"].astype(np.int64)
        stops = starts + entries["count"]
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        for end in [*breaks.tolist(), len(entries)]:
            self._add_run(key, int(starts[at]), int(stops[end - 1]), entries[at:end])
            at = end
        if self._held > _MOST_HELD:
            for name, queue in self.queues.items():
                self._write(name, queue)
            self._held = 0

    def _add_run(self, key: QueueKey, first: int, stop: int, entries: BatchEntries) -> None:
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = BuiltBatchQueue(first, stop)
        elif first < queue.stop:
            # The topic was deleted and created again: remove the earlier entries.
            for path in self._paths(key, queue):
                self._disk.remove(path)
            self.queues[key] = queue = BuiltBatchQueue(first, stop, restarts=queue.restarts + 1)
        elif first != queue.stop:
            queue.fillers += first - queue.stop
            entries = without_gaps(entries, queue.stop)
        queue.parts.append(entries.tobytes())
        queue.stop = stop
        self._held += len(queue.parts[-1])

    def finish(self) -> None:
        """Write all entries, and sync the files."""
        self._disk.make_folders(self._folder)
        for key, right in self._right.items():
            self._add(key, right.settle())
            for place, base in right.moved.items():
                if base == NO_PLACE:
                    own = right.homeless[place]
                    self.left_out.append(LeftOut(*key, own, place, INVALID))
                else:
                    self.queues[key].harmed.append(place)
        for key, queue in self.queues.items():
            self._write(key, queue)
            self._sync(self._paths(key, queue))
        self._held = 0

    def _write(self, key: QueueKey, queue: BuiltBatchQueue) -> None:
        data = b"".join(queue.parts)
        queue.parts.clear()
        self._write_bytes(key, queue.written, data)
        queue.written += len(data)

    def _paths(self, key: QueueKey, queue: BuiltBatchQueue) -> list[Path]:
        return [self._path(key, base) for base in range(0, queue.written, self._file_size)]


_FORMAT: Final = 5
"""Version of RocksDB's table format. The RocksDB library of brokers 5.3.3 to 5.5.0 can read it."""
_BUFFER: Final = 128 << 20
_NOT_OF_ROCKSDB: Final = ("rocksdict-config.json", "LOG", "LOG.old.*")


class RocksFiles(QueueFiles):
    """Builds the queues of one store in RocksDB, with the records that a broker would write.
    RocksDB writes and syncs its files without :mod:`logquarry.disk.disk`. Raises MissingExtra
    if the package ``rocksdict`` is missing.
    """

    def __init__(self, disk: Disk, folder: Path, file_size: int, old: OldQueues) -> None:
        super().__init__(disk, folder, file_size, old)
        try:
            import rocksdict
        except ImportError as error:
            raise needs_package("the queues of the store are") from error
        disk.make_folders(folder)
        self._batch: Any = rocksdict.WriteBatch
        families = {table.OFFSETS: _options(rocksdict)}
        self._db = rocksdict.Rdict(str(folder), _options(rocksdict), families)
        self._offsets = self._db.get_column_family(table.OFFSETS)
        self._firsts: dict[QueueKey, int] = {}
        self._lasts: dict[QueueKey, int] = {}
        self._end = 0

    def add_run(self, followed: Followed, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Add the entries of the next frames, in the log's order.

        Raises UnsupportedStore if a queue has lost messages in the middle. If a consumer asked for
        a lost message, a broker would send the consumer to offset 0
        (``RocksDBConsumeQueue.rollNextFile``).
        """
        timed = {}
        for key, part in parts.items():
            entries = np.empty(len(part.units), ENTRY_DTYPE)
            for name in part.units.dtype.names or ():
                entries[name] = part.units[name]
            entries["store_timestamp"] = followed.requests.store_timestamp[part.rows]
            timed[key] = replace(part, units=entries)
            ends = entries["physical_offset"].astype(np.int64) + entries["size"]
            self._end = max(self._end, int(ends.max(initial=0)))
        self.add(timed)
        self._require_no_gaps(parts)

    def _require_no_gaps(self, keys: Iterable[QueueKey]) -> None:
        for key in keys:
            queue = self.queues.get(key)
            if queue is not None and queue.gaps:
                start, stop = queue.gaps[0]
                raise UnsupportedStore(
                    f"{queue_name(key)}: the log has lost its messages from queue offset {start} "
                    f"to {stop - 1}. A consumer that asks a broker with RocksDB for one of them "
                    "begins again at offset 0. Nothing was changed; `logquarry salvage --into` "
                    "makes a plain store",
                    feature=ROCKSDB_QUEUES,
                    evidence=(str(self._folder.name),),
                )

    def _write(self, key: QueueKey, queue: BuiltQueue) -> None:
        batch = self._batch(raw_mode=True)
        for offset, entries in queue.parts:
            data = entries.tobytes()
            for at in range(len(entries)):
                value = data[at * table.ENTRY.size : (at + 1) * table.ENTRY.size]
                batch[table.entry_key(*key, offset + at)] = value
            if offset == queue.first:
                self._firsts[key] = int(entries["physical_offset"][0])
            self._lasts[key] = int(entries["physical_offset"][-1])
            queue.written = offset + len(entries)
        queue.parts.clear()
        try:
            self._db.write(batch)
        # rocksdict has no more specific exception class than Exception.
        except Exception as error:
            raise StoreUnavailable(f"{self._folder}: RocksDB cannot write: {error}") from error

    def _cut_files(self, key: QueueKey, queue: BuiltQueue, offset: int) -> None:
        for at in range(max(offset, queue.first), queue.written):
            del self._db[table.entry_key(*key, at)]

    def take_over(self, layout: StoreLayout) -> dict[QueueKey, int]:
        """Copy the ends of expired queues, close RocksDB, and return these ends."""
        old, taken = open_queues(layout), {}
        for key, (_, (last, place)) in (old.bounds if old is not None else {}).items():
            if key not in self.queues and place < layout.commit_log.start:
                self._set_bound(key, table.MAX, place, last)
                taken[key] = last + 1
        self._close()
        return taken

    def _set_bound(self, key: QueueKey, which: bytes, place: int, offset: int) -> None:
        self._offsets[table.bound_key(key[0], which, key[1])] = table.BOUND.struct.pack(
            place, offset
        )

    def finish(self) -> None:
        """Write all entries and the bounds of each queue. Raises what :meth:`add_run` raises."""
        self._settle()
        self._require_no_gaps(self.queues)
        self._write_all()
        for key, queue in self.queues.items():
            self._set_bound(key, table.MIN, self._firsts[key], queue.first)
            self._set_bound(key, table.MAX, self._lasts[key], queue.stop - 1)
        if self._end:
            self._offsets[table.DISPATCHED] = table.DISPATCHED_END.struct.pack(self._end)

    def _close(self) -> None:
        try:
            self._offsets.flush()
            self._db.flush()
            self._offsets.close()
            self._db.close()
        except Exception as error:
            raise StoreUnavailable(f"{self._folder}: RocksDB cannot write: {error}") from error
        for pattern in _NOT_OF_ROCKSDB:
            for path in self._folder.glob(pattern):
                path.unlink()


def require_dispatched(layout: StoreLayout, log_end: int) -> None:
    """Raise StoreUnavailable if RocksDB shows that messages after the log's end are lost.

    Only RocksDB shows this loss, so a rebuild of RocksDB would hide it.
    """
    old = open_queues(layout)
    if old is not None and old.dispatched_end > log_end:
        raise StoreUnavailable(
            f"{layout.root}: RocksDB has the messages up to {old.dispatched_end}, but the log ends "
            f"at {log_end}. New queues would not show the loss. Nothing was changed; "
            "`logquarry salvage --into` makes a plain store, or start the broker on the store"
        )


def why_not_built(queues: Iterable[AuditedQueue]) -> str | None:
    """Return why a broker could not serve all consumers from new queues in RocksDB, or None."""
    for queue in queues:
        if queue.largest_gap or queue.moved:
            return (
                f"{queue_name(queue.key)}: the log has lost messages between others. A consumer "
                "that asks a broker with RocksDB for one of them begins again at offset 0. "
                "`logquarry salvage --into` makes a plain store"
            )
    return None


def not_in_tasks(
    store: str, what: str, feature: str, evidence: tuple[str, ...]
) -> UnsupportedStore:
    """Return the error for a store that Spark cannot rebuild, because it has batch queues or queues
    in RocksDB.
    """
    return UnsupportedStore(
        f"{store}: {what}, which Spark does not build. Nothing was changed. "
        "Type `logquarry rebuild` without Spark",
        feature=feature,
        evidence=evidence,
    )


def _options(rocksdict: Any) -> Any:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_format_version(_FORMAT)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    # Do not compact the tables here: the broker does so later, with its own settings.
    options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
    options.set_disable_auto_compactions(True)
    options.set_write_buffer_size(_BUFFER)
    return options
