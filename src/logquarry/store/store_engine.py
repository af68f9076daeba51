"""The parts of a store that is written, put together: how they start, and how they end.

::

    put -> CommitLogWriter -> MappedFileQueue -> flush services -> checkpoint
                                   |
                               dispatcher -> queues, index -> listeners
                                   |
                                 readers

Opening: lock, look, ``abort``, then everything else (reliability.md, rule 1). Closing goes the
other way round, and takes ``abort`` away only if nothing is left to be recovered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.state_table import StateTableKeeper, open_state_table, scratch_of
from logquarry.disk.allocate import AllocateMappedFileService
from logquarry.disk.disk import Disk
from logquarry.disk.locks import AbortFile, StoreLock
from logquarry.disk.mapped_file import TransientStorePool
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.disk.queue_folders import NameGuard
from logquarry.disk.service import Refusal, RunningFlags, Service
from logquarry.errors import StoreError, StoreUnavailable, UsageError
from logquarry.format import delay
from logquarry.log import codec
from logquarry.log.follow import DispatchRequests
from logquarry.log.layout import (
    CHECKPOINT,
    COMMIT_LOG,
    CONSUME_QUEUE,
    DURABLE,
    INDEX,
    StoreLayout,
    quarantine,
)
from logquarry.read.log_queues import is_lmq
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.recover.apply import apply_safe
from logquarry.repair.recover.entries import check_entries
from logquarry.repair.recover.found import (
    NeedsRecovery,
    StoreFound,
    check_folder,
    find_store,
    recovered_store,
)
from logquarry.repair.recover.safe import plan_safe
from logquarry.store.housekeeping import Housekeeping
from logquarry.store.load.loading import Loads, pending_load
from logquarry.store.log_growth import LogFeed, LogGrowth
from logquarry.store.retention.live import LiveRetention, RetentionService
from logquarry.store.stats import StatsRecorder
from logquarry.units import Clock
from logquarry.write.append import CommitLogWriter
from logquarry.write.append31 import AppendRules31
from logquarry.write.dispatcher import ArrivalListeners, Dispatcher, DispatchService, Groups
from logquarry.write.flush import Flushable, FlushServices
from logquarry.write.flush_wait import FlushWait, ReplicaWait
from logquarry.write.index_writer import IndexKeeper
from logquarry.write.put_result import PutStatus, refusal
from logquarry.write.queue_table import QueueTable

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 600.0
"""How long closing waits for one service: a slow disk may have gigabytes to take."""
_ADOPT_SECONDS: Final = 1.0


class StoreEngine:
    """A store's writing parts (``DefaultMessageStore.load``, ``start`` and ``shutdown``).

    Args:
        root: the store's folder; made if it is not there.
        config: its settings.
        clock: gives store times, in milliseconds.
        disk: what it is on.

    Attributes:
        config: the settings, with all sizes.
        disk: what it is on.
        health: whether the store may be written and read.
        flags: what keeps it from taking messages.
        log: the log's files.
        writer: appends to it.
        queues: the consume queues.
        index: the index, None where the store keeps none.
        checkpoint: the checkpoint.
        growth: tells who lives off the log, and settles puts.
        listeners: told of what was dispatched.
        loads: appends staged segments.
        retention: deletes what expires.
        recorder: counts.
        keeps_tails: whether bytes of an earlier log stand behind the log's end.

    Raises:
        StoreNotFound: if the folder holds other things.
        StoreUnavailable: if somebody else has the store, or it has to be recovered.
        CorruptStore: if a file is not what the format says.
    """

    def __init__(self, root: Path, config: StoreConfig, *, clock: Clock, disk: Disk) -> None:
        self.root = root
        self.health = disk.health
        self.flags = RunningFlags()
        self.listeners = ArrivalListeners()
        self.recorder = StatsRecorder()
        self.disk = self._disk = disk
        self._clock = clock
        self._closing = threading.Lock()
        self._adopting = threading.Lock()
        self._is_closed = False
        self._dispatched_timestamp = 0
        check_folder(root)
        disk.make_folders(root)
        self._lock = StoreLock(disk, root)
        self._abort = AbortFile(disk, root)
        try:
            pending = pending_load(root, config, disk, clock)
            found = self._find(root, config)
            self.config = found.config
            self.keeps_tails = found.keeps_tails
            self._recovered = found.recovered
            if not (root / COMMIT_LOG).is_dir():
                disk.sync_parent(root)
        except BaseException:
            self._lock.release()
            raise
        self._services: list[Service] = []
        # Who dispatches needs them at once. Its own thread would be seconds about it while another
        # puts without a pause: for each file that an import opens it waits for the interpreter.
        codec.kernels()
        try:
            self._load(found)
            self._start()
        except BaseException:
            self._give_up()
            raise
        parts = (self.log, self.writer, self.flush, self.recorder.loaded)
        self.loads = Loads(disk, root, *parts)
        if pending is not None:
            try:
                self.loads.finish(pending)
            except BaseException:
                self.close()
                raise

    # ------------------------------------------------------------------------------------ start
    def _find(self, root: Path, config: StoreConfig) -> StoreFound:
        """Look at what there is, and recover it where it needs that; ``abort`` is there then."""
        if config.recovery == "rocketmq":
            return recovered_store(root, config, self._disk, self._clock, self._abort)
        try:
            found = find_store(root, config)
        except NeedsRecovery as error:
            # Its text: whoever keeps the error keeps all the files open that were looked at.
            logger.warning("%s: it has to be recovered: %s", root, str(error))
            check_entries(root)
            if self._abort.exists:
                # What a crash left with its second name only is to be looked at, and what is set
                # aside must not come back by that name.
                NameGuard(self._disk).restore([root / COMMIT_LOG, root / INDEX])
            plan = plan_safe(root, with_sizes(config, StoreLayout.open(root, config)))
            for line in plan.summary():
                logger.warning("%s: %s", root, line)
            apply_safe(plan, self._disk, self._clock)
            return find_store(root, config, is_recovered=True)
        self._abort.make()
        return found

    def _load(self, found: StoreFound) -> None:
        """Open the files, and dispatch what is in the log and in no queue."""
        config, disk, root = self.config, self._disk, self.root
        for name in (COMMIT_LOG, CONSUME_QUEUE, INDEX):
            disk.make_folders(root / name)
        log_size, queue_size = config.mapped_file_size_commit_log, config.queue_file_size
        shape = config.index_shape
        assert log_size is not None and queue_size is not None and shape is not None
        pool = None
        if config.uses_transient_pool:
            pool = TransientStorePool(config.transient_store_pool_size, log_size)
        self._pool = pool
        self._allocator = AllocateMappedFileService(
            disk,
            pool=pool,
            warm=config.warm_mapped_file_enable,
            fast_fail=config.fast_fail_if_no_buffer_in_store_pool,
        )
        self.log = MappedFileQueue(
            disk,
            root / COMMIT_LOG,
            log_size,
            allocator=self._allocator,
            guard_names=True,
            gaps=found.keeps_tails,
        )
        self.checkpoint = CheckpointFile(disk, root / CHECKPOINT)
        self.queues = QueueTable(
            disk,
            root,
            queue_size,
            found.queue_ends,
            self.log,
            keeps_tails=found.keeps_tails,
        )
        self.index: IndexKeeper | None = None
        self.log.load()
        if self.log.bases:
            if found.keeps_tails:
                self.log.end_at(found.log_end)
            else:
                self.log.truncate_to(found.log_end, aside=quarantine(root, COMMIT_LOG))
        self._mark_durable(found.log_end)
        if config.message_index_enable:
            self.index = IndexKeeper(
                *(disk, root, shape, self.checkpoint, self._clock),
                sync_log=lambda: self.log.flush(0),
                counts_keys=config.is_3_1,
            )
        self.transactions: StateTableKeeper | None = None
        if config.is_3_1:
            self.transactions = open_state_table(
                disk, root, config, found.transactions, found.log_end
            )
        self.dispatcher = Dispatcher(
            self.log,
            self.queues.writers,
            None if self.index is None else self.index.writer,
            config,
            start=found.log_end,
            arrived=self._arrived,
            grown=self._grown,
            follow=None if self.transactions is None else self.transactions.follow,
        )
        for start, stop in found.pieces:
            self.dispatcher.dispatch_piece(start, stop)
        self.dispatcher.offset = max(self.dispatcher.offset, found.log_end)
        if self.dispatcher.offset < self.log.wrote_offset:
            raise StoreUnavailable(
                f"{root}: the log cannot be read from {self.dispatcher.offset} on"
            )
        # Opening makes the schedule topic's queues (in memory); what is there counts.
        levels = range(len(config.delay_levels_ms))
        offsets = {(delay.SCHEDULE_TOPIC, level): 0 for level in levels}
        offsets |= self.queues.next_offsets()
        if found.recovered is not None:
            self._dispatched_timestamp = found.recovered.dispatched_timestamp
            # QUIRK: as in Java those of multi-dispatch begin anew.
            offsets = {key: offsets[key] for key in offsets if not is_lmq(key[0], config)}
        if config.broker_role == "SLAVE":
            self.flags.set(Refusal.SLAVE)
        self._dispatching = DispatchService(self.dispatcher, self.flags, self.health)
        self._make_flushing()
        self.writer = CommitLogWriter(
            self.log,
            config,
            clock=self._clock,
            queue_offsets=offsets,
            flags=self.flags,
            health=self.health,
            settle=self.growth.settle if self._waits else self.growth.settle_now,
            rules=self._rules(),
        )
        self.log.on_flushed = self._flushed
        self.retention = LiveRetention(
            *(disk, root, lambda: StoreLayout.open(root, config)),
            log=self.log,
            queues=self.queues,
            index=self.index,
            transactions=self.transactions,
            dispatched=lambda: self.dispatcher.offset,
            clock=self._clock,
        )
        if config.clean_expired_files:
            self._services.append(
                RetentionService(self.retention, config, root, self.health, clock=self._clock)
            )

    def _rules(self) -> AppendRules31 | None:
        """What appends do otherwise in dialect 3.1."""
        table = self.transactions
        if table is None:
            return None
        scratch = scratch_of(self.root, self.config, self.log.wrote_offset)
        return AppendRules31(scratch, lambda: table.next_number)

    def _mark_durable(self, log_end: int) -> None:
        """Say from here on how far the log is on the disk; what was found there is."""
        self.durable = DurableFile(self._disk, self.root / DURABLE, log_end, self.checkpoint.times)
        self.checkpoint.before_write = self.durable.expect

    def _flushed(self, offset: int) -> None:
        # Bytes of another store's log may end within a frame; what is dispatched never does, nor
        # what somebody vouched for.
        if self.writer.has_foreign:
            vouched = self.dispatcher.limit
            offset = min(offset, self.dispatcher.offset if vouched is None else vouched)
        self.durable.move(offset)

    def _make_flushing(self) -> None:
        """The services that bring things to the disk, in the order in which they end."""
        config, health = self.config, self.health
        flushing = self._flushing = FlushServices(
            self.log,
            config,
            health,
            checkpoint=self.checkpoint,
            has_pool=self._pool is not None,
            committed=self._committed,
            flushables=self._flushables,
            dispatched_timestamp=lambda: self._dispatched_timestamp,
        )
        after_put, self._flush_queues = flushing.after_put, flushing.queues
        self._housekeeping = Housekeeping(self._abort, self.index, self.recorder, health)
        self.replicas = ReplicaWait(
            health,
            timeout_ms=config.slave_timeout,
            fall_behind_max=config.ha_slave_fallbehind_max,
        )
        is_replicated = config.broker_role == "SYNC_MASTER"
        wait = FlushWait(
            flushing.group, after_put.wakeup, replicas=self.replicas if is_replicated else None
        )
        self.growth = LogGrowth(self._dispatching, after_put, wait)
        commits = [] if flushing.commit is None else [flushing.commit]
        # What is committed can be dispatched, and what is dispatched can be flushed.
        self._services = [*commits, self._dispatching, flushing.log, flushing.queues]
        self._services += [self._housekeeping, self._allocator]
        if is_replicated:
            self._services.append(self.replicas.watch)

    def _start(self) -> None:
        for service in self._services:
            service.start()

    # --------------------------------------------------------------------------------- at work
    def _committed(self) -> None:
        # What is not committed cannot be dispatched: the put's own wake-up came too early.
        self._flushing.log.wakeup()
        self.growth.tell()

    @property
    def _waits(self) -> bool:
        """Whether puts wait for anything: the disk, or a replica."""
        return self._flushing.group is not None or self.config.broker_role == "SYNC_MASTER"

    def _flushables(self) -> Iterator[Flushable]:
        if self._recovered is not None:
            yield self._recovered.written
        yield from self.queues
        if self.transactions is not None:
            yield self.transactions
        if self.index is not None:
            yield self.index

    def _arrived(self, requests: DispatchRequests) -> None:
        self._dispatched_timestamp = int(np.max(requests.store_timestamp))
        if self.index is not None:
            self.index.guard()

    def _grown(self, requests: DispatchRequests, groups: Groups) -> None:
        self.listeners.tell(requests, groups)

    def wait_dispatched(self, offset: int | None, timeout: float | None) -> bool:
        """See :meth:`logquarry.store.write_api.WriteApi.wait_dispatched`."""
        if offset is None:
            offset = self.log.wrote_offset
        return self._dispatching.wait_dispatched(offset, timeout)

    def flush(self) -> int:
        """See :meth:`logquarry.store.write_api.WriteApi.flush`."""
        self._require_open()
        self.log.commit(0)
        self._flush_queues.flush(0)
        return self.log.flushed_offset

    def _require_open(self) -> None:
        if self._is_closed:
            raise refusal(PutStatus.SERVICE_NOT_AVAILABLE, f"{self.root}: it is closed")

    # ------------------------------------------------------------------------- bytes of a master
    def append_data(self, offset: int, data: bytes | memoryview) -> bool:
        """See :meth:`logquarry.store.write_api.WriteApi.append_data`."""
        taken = self._append_foreign(offset, data)
        if taken:
            self.growth.tell_all()
        return taken

    def _append_foreign(self, offset: int, data: bytes | memoryview) -> bool:
        self._require_open()
        self.health.require_writable()
        return self.writer.append_data(offset, data)

    def feed(self) -> LogFeed:
        """The log as bytes, for those who send it on, or bring it."""
        return LogFeed(
            self.log,
            self.replicas,
            dispatched=lambda: self.dispatcher.offset,
            vouched=lambda: self.dispatcher.limit,
            keep=self._keep,
            append=self._append_foreign,
            vouch=self._vouch,
            follow=self.growth.follow,
            unfollow=self.growth.unfollow,
        )

    def _vouch(self, offset: int) -> None:
        self.dispatcher.limit = offset
        self.growth.tell()

    def _keep(self, durably: bool) -> None:
        # A mark moves with a sync of the log, and that may have come before the vouching.
        self._flushed(self.log.flushed_offset)
        if durably:
            self.durable.sync()

    def adopt(self) -> None:
        """Learn from what :meth:`append_data` brought which queue offsets come next.

        Raises:
            StoreUnavailable: if it ends within a frame: nothing of ours may follow that.
        """
        with self._adopting:
            if not self.writer.has_foreign:
                return
            end = self.log.wrote_offset
            # A listener cannot wait for that.
            waits = not self._dispatching.is_current
            if not (waits and self._dispatching.wait_dispatched(end, _ADOPT_SECONDS)):
                raise refusal(
                    PutStatus.SERVICE_NOT_AVAILABLE,
                    f"{self.root}: the log ends within a message of another store: its rest has "
                    "to come first",
                )
            # If more has come since, the put is refused.
            self.writer.adopt(end, self.queues.next_offsets)

    # -------------------------------------------------------------------------------------- end
    @property
    def is_current(self) -> bool:
        """Whether the caller is a thread of the store: a listener, or a callback of a put."""
        return any(service.is_current for service in self._services)

    def close(self) -> None:
        """Close the store: in order, if that can be done; once more does nothing.

        Raises:
            UsageError: if a listener or a callback of a put asks for it, whose thread would have
                to wait for itself.
        """
        if self.health.is_forked:
            return
        if self.is_current:
            raise UsageError("a listener or callback cannot close the store that calls it")
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self.flags.set(Refusal.CLOSED)
            # A put that passed the flags a moment ago is refused when it comes to the log. It is
            # not left to wait: it may be a listener's or a callback's, whose thread has to end.
            self.writer.end()
            try:
                if not self._close_in_order():
                    logger.error("%s: it has to be recovered when it is opened next", self.root)
            finally:
                self._let_go()

    def _close_in_order(self) -> bool:
        """Bring everything to the disk, and take ``abort`` away; whether that was done."""
        # Nobody is to wait for a slave that will not hear of it.
        self.replicas.end()
        self.retention.end()
        ended = [service.stop(_PATIENCE_SECONDS) for service in self._services]
        failure = self._dispatching.failure
        if failure is not None:
            logger.error("%s: not all of the log is dispatched: %s", self.root, failure)
        try:
            self._cut_unjudged()
            self._flush_queues.flush(0)
            is_whole = self.queues.restore_lost()
            self.health.end_reads()
            self._close_files()
            if not (all(ended) and is_whole and failure is None):
                return False
            self._abort.remove()
        except StoreError as error:
            logger.error("%s: not closed in order: %s", self.root, error)
            return False
        return True

    def _cut_unjudged(self) -> None:
        """Take away what came of another store's log, and nobody vouched for.

        It mostly ends within a message, which the zeros behind it may seem to make whole.
        """
        vouched = self.dispatcher.limit
        if vouched is None or vouched >= self.log.wrote_offset or not self.writer.has_foreign:
            return
        # Of a log that does not begin at 0 maybe nothing was vouched for.
        vouched = max(vouched, self.log.min_offset)
        file = self.log.last
        if file is not None and file.base <= vouched:
            file.clear_from(vouched - file.base)
        self.log.truncate_to(vouched, aside=quarantine(self.root, COMMIT_LOG))

    def _close_files(self) -> None:
        # Of a store that could not be opened some are not there.
        names = ["_flush_queues", "log", "queues", "transactions", "index"]
        names += ["checkpoint", "durable", "_pool"]
        for name in names:
            part = getattr(self, name, None)
            if part is not None:
                part.close()

    def _let_go(self) -> None:
        self.health.end_reads()
        self._close_files()
        self.health.end(f"{self.root}: the store was closed")
        self._lock.release()

    def _give_up(self) -> None:
        """Opening failed: nothing was put, and what was found stays to be opened again."""
        for service in self._services:
            service.stop(_PATIENCE_SECONDS)
        with contextlib.suppress(StoreError):
            # What opening dispatched: without `abort` it counts as on the disk.
            found = (getattr(self, name, None) for name in ("transactions", "index"))
            for part in (*getattr(self, "queues", ()), *found):
                if part is not None:
                    part.flush(0)
            self._close_files()
            self._abort.remove()
        self._let_go()
