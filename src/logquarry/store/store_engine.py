"""Creates, connects and closes the parts of a store that is open for writing.

::

    put -> CommitLogWriter -> MappedFileQueue -> flush services -> checkpoint
                                   |
                               dispatcher -> queues, index -> listeners
                                   |
                                 readers

When a store is opened, the engine takes the lock, reads the files, and creates the file ``abort``.
Only then does it change other files. Closing runs these steps in reverse order. Closing deletes
``abort`` only if the next opening needs no recovery.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.arguments import Clock
from logquarry.config import StoreConfig
from logquarry.dialect31.prepared import AppendRules31, scratch_of
from logquarry.disk.config_file import keep_settings
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile, StoreLock, is_lockable
from logquarry.disk.log_files import PagesAhead
from logquarry.disk.service import Refusal, RunningFlags, Service
from logquarry.errors import StoreError, StoreNotFound, StoreUnavailable, UsageError
from logquarry.format import properties as props
from logquarry.log.follow import DispatchRequests
from logquarry.log.layout import StoreLayout
from logquarry.log.log_place import is_on
from logquarry.log.store_files import ABORT, CHECKPOINT, COMMIT_LOG, CONSUME_QUEUE, LOCK, BrokenLink
from logquarry.paths import exists, is_folder
from logquarry.read.features import PROPERTY_CRC, find_features
from logquarry.read.fence import Action, refusal
from logquarry.read.log_queues import QueueKey, is_lmq
from logquarry.repair.recover import open_check
from logquarry.repair.recover.apply import apply_safe, note_end
from logquarry.repair.recover.loss import require_consent
from logquarry.repair.recover.safe import plan_safe
from logquarry.repair.recover.store_folders import (
    check_config_links,
    check_entries,
    check_places,
    discard_names,
)
from logquarry.store.load.loading import Loads, pending_load
from logquarry.store.load.segment import StagedWriter
from logquarry.store.retention.retain import LiveRetention, RetentionService
from logquarry.store.stats import StatsRecorder
from logquarry.store.writer_files import Housekeeping, LogFeed, StoreFiles
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.dispatcher import (
    ArrivalListeners,
    Dispatcher,
    DispatchService,
    Groups,
    load_kernels,
)
from logquarry.write.flush import FlushServices
from logquarry.write.index_writer import check_room
from logquarry.write.log_appender import AppendRules, PropertyCrcRules
from logquarry.write.put_result import ReplicaWait
from logquarry.write.settling import LogGrowth

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 600.0
"""Maximum time to wait until a service stops: it may have to sync gigabytes to a slow disk."""


class StoreEngine:
    """Holds the parts that write one store (``DefaultMessageStore.load``, ``start``, ``shutdown``).

    A recovery during the opening may lose at most ``accept_loss`` bytes of messages; None allows
    only a small share. The constructor raises the errors of
    :meth:`~logquarry.store.message_store.MessageStore.open`. The constructor also raises
    CorruptStore if a file violates the format.
    """

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        clock: Clock,
        disk: Disk,
        accept_loss: int | None = None,
    ) -> None:
        self.root = root
        self.clock = clock
        self.disk = disk
        self.health = disk.health
        self.flags = RunningFlags()
        self.listeners = ArrivalListeners()
        self.recorder = StatsRecorder()
        self._closing = threading.Lock()
        self._are_stopped = False
        self.close_problem: str | None = None
        self._has_property_crc = check_openable(root, config, accept_loss)
        disk.make_folders(root)
        with contextlib.ExitStack() as undo:
            # The steps of `_end` run last, in reverse order, both after a close and after a failed
            # opening. A step can be repeated. After a failed opening, the user has no store object
            # on which to call close() again. So `undo` calls _finish several times: if Ctrl-C
            # interrupts a step, the next call repeats this step, and then runs the other steps.
            self._end: list[Callable[[], object]] = []
            for _ in range(3):
                undo.callback(self._finish)
            self._end.append(StoreLock(disk, root).release)
            self._abort = AbortFile(disk, root)
            pending = pending_load(root, config, disk, clock)
            was_unclean = self._abort.exists
            found = self._find(config, accept_loss)
            if not is_folder(root / COMMIT_LOG):
                disk.sync_parent(root)
            self._end.append(partial(self.health.end, f"{root}: the store was closed"))
            load_kernels()
            self.config = found.config
            keep_settings(disk, root, found.config)
            self.files = self._open_files(found, was_unclean)
            self._end.append(self.files.close)
            undo.callback(self._take_back)
            self.log, self.queues = self.files.log, self.files.queues
            self._dispatched_timestamp = 0
            self._pages_ahead: PagesAhead | None = None
            self.dispatcher = self._make_dispatcher(found.log_end)
            self._dispatch_rest(found)
            self._make_services()
            self._end.append(self._flushing.queues.close)
            self._end.append(self.health.end_reads)
            self.writer = self._make_writer(self._next_offsets(found))
            self.retention = self._make_retention()
            self.feed = LogFeed(
                self.files,
                self.writer,
                self.dispatcher,
                self._dispatching,
                self.growth,
                self.replicas,
                self.flags,
            )
            self.log.on_flushed = self.feed.note_flushed
            self._end.append(self._stop_services)
            for service in self._services:
                service.start()
                undo.callback(service.stop, _PATIENCE_SECONDS)
            undo.pop_all()
        if pending is not None:
            try:
                self.loads.finish(pending)
            except BaseException:
                self.close()
                raise

    # ------------------------------------------------------------------------------------ start
    def _find(self, config: StoreConfig, accept_loss: int | None) -> open_check.StoreFound:
        """Read the store's files, recover the store if necessary, and create ``abort``."""
        root = self.root
        if config.recovery == "rocketmq":
            return open_check.recovered_store(
                root, config, self.disk, self.clock, self._abort, accept_loss
            )
        try:
            found = open_check.find_store(root, config)
        except open_check.NeedsRecovery as error:
            # Log the text instead of the error object, because this object keeps all files open
            # that find_store has read.
            logger.warning("%s: the store needs a recovery: %s", root, str(error))
            check_entries(root, config, removes_links=True)
            layout = StoreLayout.open(root, config)
            with open_check.settled_names(layout, config, self.disk):
                plan = plan_safe(root, config)
                require_consent(plan.root, plan.loss, accept_loss)
            for line in plan.summary():
                logger.warning("%s: %s", root, line)
            apply_safe(plan, self.disk, self.clock)
            return open_check.find_store(root, plan.config, is_recovered=True)
        discard_names(root, found.log_folders, self.disk)
        self._abort.make()
        return found

    def _open_files(self, found: open_check.StoreFound, was_unclean: bool) -> StoreFiles:
        try:
            return StoreFiles(self.disk, self.root, found, self.clock, was_unclean=was_unclean)
        except BaseException:
            with contextlib.suppress(StoreError):
                self._abort.remove()
            raise

    def _take_back(self) -> None:
        """Undo a failed opening. No message was put, so the next opening needs no recovery."""
        with contextlib.suppress(StoreError):
            # The failed opening may have dispatched messages to the queues. The next opening trusts
            # queue entries if there is no `abort`, so sync the entries before `abort` is removed.
            for part in self.files.derived():
                part.flush(0)
            self.files.close()
            self._abort.remove()

    def _make_dispatcher(self, start: int) -> Dispatcher:
        files = self.files
        return Dispatcher(
            self.log,
            self.queues.writer,
            None if files.index is None else files.index.writer.put,
            self.config,
            start=start,
            dispatched=self._dispatched,
            follow=None if files.transactions is None else files.transactions.follow,
        )

    def _dispatched(self, requests: DispatchRequests, groups: Groups) -> None:
        self._dispatched_timestamp = int(np.max(requests.store_timestamp))
        if self.files.index is not None:
            self.files.index.guard()
        if self.files.topics is not None:
            self.files.topics.note(groups.keys())
        self.listeners.tell(requests, groups)
        if self._pages_ahead is not None:
            self._pages_ahead.grown()

    def _dispatch_rest(self, found: open_check.StoreFound) -> None:
        dispatcher = self.dispatcher
        for start, stop in found.pieces:
            dispatcher.dispatch_piece(start, stop)
        dispatcher.offset = max(dispatcher.offset, found.log_end)
        if dispatcher.offset < self.log.wrote_offset:
            raise StoreUnavailable(
                f"{self.root}: the log cannot be read from {dispatcher.offset} on"
            )
        if found.recovered is not None:
            self._dispatched_timestamp = found.recovered.dispatched_timestamp
            self.files.checkpoint.offsets = found.recovered.offsets

    def _next_offsets(self, found: open_check.StoreFound) -> dict[QueueKey, int]:
        """Return the next queue offset of each queue, from which the log's writer continues."""
        # As in a new store, the schedule topic's queues start at 0. If such a queue has files, the
        # next offset in these files replaces the 0.
        levels = range(len(self.config.delay_levels_ms))
        offsets = {(props.SCHEDULE_TOPIC, level): 0 for level in levels}
        offsets |= self.queues.next_offsets()
        if found.recovered is not None and not found.recovered.rules.is_5:
            # QUIRK: as in RocketMQ 4.9, after a recovery the queues of multi-dispatch start at 0.
            offsets = {key: offsets[key] for key in offsets if not is_lmq(key[0], self.config)}
        return offsets

    def _make_services(self) -> None:
        """Create the services, and the :class:`LogGrowth` object. A normal close stops the services
        in the order of the list ``_services``.
        """
        config, health, files = self.config, self.health, self.files
        if config.broker_role == "SLAVE":
            self.flags.set(Refusal.SLAVE)
        self._dispatching = DispatchService(self.dispatcher, self.flags, health)
        self._flushing = flushing = FlushServices(
            self.log,
            config,
            health,
            checkpoint=files.checkpoint,
            has_pool=files.pool is not None,
            committed=self._committed,
            flushables=files.derived,
            dispatched_timestamp=lambda: self._dispatched_timestamp,
        )
        self.replicas = ReplicaWait(
            health,
            timeout_ms=config.slave_timeout,
            fall_behind_max=config.ha_slave_fallbehind_max,
        )
        is_replicated = config.broker_role == "SYNC_MASTER"
        self._puts_wait = flushing.group is not None or is_replicated
        self.growth = LogGrowth(
            self._dispatching,
            flushing.after_put,
            flushing.group,
            self.replicas if is_replicated else None,
        )
        # Stop the services in this order, because each service produces work for the next. The
        # dispatch service dispatches committed messages, and the flush services sync the results.
        self._services: list[Service] = [] if flushing.commit is None else [flushing.commit]
        self._services += [self._dispatching, flushing.log, flushing.queues]
        housekeeping = Housekeeping(self._abort, files.index, self.recorder.sample, health)
        self._services += [housekeeping, files.allocator]
        if is_replicated:
            self._services.append(self.replicas.watch)
        if not self._puts_wait and files.pool is None and not config.warm_mapped_file_enable:
            self._pages_ahead = PagesAhead(self.log, health)
            self._services.append(self._pages_ahead)

    def _committed(self) -> None:
        # The put woke the dispatcher before the message was committed to the file, so the
        # dispatcher may have missed the message. Wake the dispatcher again.
        self._flushing.log.wakeup()
        self.growth.wake()

    def _make_writer(self, queue_offsets: dict[QueueKey, int]) -> CommitLogWriter:
        return CommitLogWriter(
            *(self.log, self.config),
            clock=self.clock,
            queue_offsets=queue_offsets,
            claim_topic=self.queues.claim_topic,
            flags=self.flags,
            health=self.health,
            settle=self.growth.settle if self._puts_wait else self.growth.settle_now,
            rules=self._append_rules(),
        )

    def _append_rules(self) -> AppendRules | None:
        """Return the append rules of 3.1 or of property CRCs; None if the rules of 4.9 apply."""
        table = self.files.transactions
        if table is None:
            return PropertyCrcRules() if self._has_property_crc else None
        scratch = scratch_of(self.root, self.config, self.log.wrote_offset)
        return AppendRules31(scratch, lambda: table.next_number)

    def _make_retention(self) -> LiveRetention:
        retention = LiveRetention(
            *(self.disk, self.root, self.config),
            log=self.log,
            queues=self.queues,
            index=self.files.index,
            transactions=self.files.transactions,
            begin_at=self.files.durable.begin_at,
            dispatched=lambda: self.dispatcher.offset,
            clock=self.clock,
        )
        if self.config.clean_expired_files:
            self._services.append(RetentionService(retention))
        return retention

    # ---------------------------------------------------------------------------------- at work
    @cached_property
    def loads(self) -> Loads:
        """The object that appends staged segments to the log."""
        staged = StagedWriter(self.writer, self.growth.wake_all, self.recorder.loaded)
        return Loads(self.disk, self.root, self.log, staged, self.flush)

    def wait_dispatched(self, offset: int | None, timeout: float | None) -> bool:
        """See :meth:`logquarry.store.writer.BaseWriter.wait_dispatched`."""
        if offset is None:
            offset = self.log.wrote_offset
        return self._dispatching.wait_dispatched(offset, timeout)

    def flush(self) -> int:
        """Sync all files; see :meth:`logquarry.store.writer.BaseWriter.flush`."""
        self.feed.require_open()
        self.log.commit(0)
        self._flushing.queues.flush(0)
        return self.log.flushed_offset

    def sync_log(self) -> None:
        """Sync the log."""
        self.log.commit(0)
        self.log.flush(0)

    # -------------------------------------------------------------------------------------- end
    @property
    def is_current(self) -> bool:
        """Whether the calling thread is one of the store's own threads, which run listeners."""
        return any(service.is_current for service in self._services)

    def close(self) -> None:
        """Close the store, cleanly if possible. A second call does nothing.

        If a listener or a callback of a put calls this method, raise UsageError. Otherwise the
        thread of this listener or callback would wait for its own end.
        """
        if self.health.is_forked:
            return
        if self.is_current:
            raise UsageError("a listener or callback cannot close the store that calls it")
        with self._closing:
            try:
                if Refusal.CLOSED not in self.flags.refusals:
                    self.flags.set(Refusal.CLOSED)
                    # A put may just have passed the check of the flags; the log refuses this put.
                    # Do not wait for the put: it may run in a listener or a callback, whose thread
                    # the close must stop.
                    self.writer.end()
                    self.close_problem = "the closing was interrupted"
                    self.close_problem = problem = self._close_in_order()
                    if problem is not None:
                        logger.error("%s: not shut down cleanly: %s", self.root, problem)
            finally:
                self._finish()

    def _finish(self) -> None:
        """Run the steps of ``_end``. If Ctrl-C interrupts this call, the next call continues it."""
        failure: Exception | None = None
        while self._end:
            try:
                self._end[-1]()
            except (StoreError, OSError) as error:
                self.close_problem = self.close_problem or str(error)
                logger.error("%s: not shut down cleanly: %s", self.root, error)
            except Exception as error:
                failure = error
            self._end.pop()
        if failure is not None:
            raise failure

    def _stop_services(self) -> None:
        """If an exception such as Ctrl-C has interrupted the closing, stop the services.

        A service that is still running could write files that are closed, or that the next writer
        has open.
        """
        if not self._are_stopped:
            for service in reversed(self._services):
                service.stop(_PATIENCE_SECONDS)
            self._are_stopped = True

    def _close_in_order(self) -> str | None:
        """Sync all files, and delete ``abort``. Return what failed; None if nothing failed."""
        # The replication server should be closed by now, so no slave will acknowledge the messages.
        self.replicas.end()
        self.retention.end()
        ended = [service.stop(_PATIENCE_SECONDS) for service in self._services]
        self._are_stopped = True
        failure = self._dispatching.failure
        try:
            self.feed.cut_unvouched()
            self._flushing.queues.flush(0)
            is_whole = self.queues.restore_lost()
            self.health.end_reads()
            self._flushing.queues.close()
            log_end = self.log.wrote_offset
            self.files.close()
            if self.files.keeps_tails:
                # A recovery may have kept stale frames after the log's end, and their entries in
                # queues. So record the log's end for later readers.
                note_end(self.disk, self.root, log_end)
            if failure is not None:
                return f"not all of the log is dispatched: {failure}"
            if not (all(ended) and is_whole):
                return "a thread did not end" if is_whole else "queue files are missing"
            self._abort.remove()
        except StoreError as error:
            return str(failure or error)
        return None


def check_openable(root: Path, config: StoreConfig, accept_loss: int | None = None) -> bool:
    """Check whether a store can be opened for writing; take no lock, and change nothing. Return
    whether its messages have property CRCs. Raises the errors of :class:`StoreEngine`.
    """
    if config.max_index_num is not None and config.index_shape is not None:
        check_room(config.index_shape)
    try:
        layout = StoreLayout.open(root, config).by_content()
    except BrokenLink:
        raise
    except StoreNotFound:
        # A new store has no unsupported features. If there are other files, check_folder raises.
        is_new, unsupported = True, None
        has_property_crc = is_on(config, "enabledAppendPropCRC")
    else:
        is_new = False
        features = find_features(layout, index=False)
        has_property_crc = features.get(PROPERTY_CRC) is not None
        unsupported = refusal(
            layout,
            Action.WRITE,
            mode=config.recovery,
            may_lack_log=accept_loss is not None,
            found=features,
        )
    if unsupported is not None:
        raise unsupported
    open_check.check_folder(root)
    check_places(root)
    check_config_links(root)
    if is_new:
        _require_outside_of_stores(root)
    if not is_lockable(root):
        # Check first: taking the lock creates a file, but a refused opening must change nothing.
        open_check.check_before_lock(root, config, accept_loss)
    return has_property_crc


def _require_outside_of_stores(root: Path) -> None:
    """Raise UsageError if a new store would lie in another store. RocketMQ can refuse to start if
    its store contains an unknown folder.
    """
    for folder in root.resolve().parents:
        # A folder that has only a log is no store, because storePathCommitLog can name any folder.
        parts = CONSUME_QUEUE, CHECKPOINT, ABORT, LOCK
        if is_folder(folder / COMMIT_LOG) and any(exists(folder / name) for name in parts):
            reason = f"a new store cannot lie in the store {folder}"
            raise UsageError(f"{root}: {reason}; choose a folder outside of it")
