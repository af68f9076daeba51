"""Checks the state table and the redo log of a store of 3.x against its log."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from logquarry.dialect31.recovery import TransactionCheck
from logquarry.dialect31.unit_files import transaction_frames
from logquarry.format import broker_config, durable_mark, fastjson
from logquarry.log.follow import Followed, dispatch_requests
from logquarry.log.layout import (
    ABORT,
    CHECKPOINT,
    CONFIG,
    DURABLE,
    INTENT,
    LOADS,
    LOCK,
    REDO_LOG,
    SIDECAR,
    STATE_TABLE,
    StoreLayout,
)
from logquarry.log.splits import STRETCH_BYTES
from logquarry.log.walk import BlankSpan, DamagedSpan, ExpiredSpan, LogEnd, LogReader, Run
from logquarry.read.index_tags import with_index_tags
from logquarry.read.log_end import known_damage, log_bound
from logquarry.repair.verify.findings import VerifyReport
from logquarry.repair.verify.index import IndexChecker
from logquarry.repair.verify.queues import QueueChecker
from logquarry.repair.verify.runs import (
    Checked,
    CheckedRun,
    CheckedRuns,
    SoundParts,
    SoundRun,
    followed_ahead,
)
from logquarry.units import Progress


def check_transactions(layout: StoreLayout, end: int, report: VerifyReport) -> None:
    """Find where table and redo log say something else than the log.

    After a crash they mostly do: that is a note then.

    Args:
        layout: the store's files.
        end: where its log ends.
        report: gets the findings.
    """
    check = TransactionCheck()
    # Frames whose body alone is bad count, as they do for queues.
    for event in LogReader(layout, bound=end, check_crc=False).events():
        if isinstance(event, Run):
            check.take(transaction_frames(event.window, event.rows))
    faults = list(check.table_faults(layout))
    for kind, is_stale in (("state_table_wrong", False), ("state_table_stale", True)):
        reasons = [reason for reason, stale in faults if stale is is_stale]
        if reasons:
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            crashed = layout.has_abort
            report.add(kind, STATE_TABLE, 0, reasons[0] + more, is_explained=crashed)
    fault = check.redo_fault(layout)
    if fault is not None:
        report.add("redo_log_wrong", REDO_LOG, 0, fault, is_explained=layout.has_abort)


# --------------------------------------------------------------------------------------------------
# The check of a whole store: one walk over the log, then queues, index and the rest.

_COMES_AND_GOES = frozenset(
    {
        "torn_tail",
        "wrong_file_size",
        "queue_behind",
        "queue_ahead",
        "queue_missing",
        "queue_head_missing",
        "index_ahead",
        "index_chain",
        "index_entry",
        "index_entry_wrong",
        "index_header",
    }
)
"""What is no damage beside a live writer, which appends to the log first."""

_CUT_IN_MEMORY = frozenset({"queue_ahead", "index_ahead"})
"""What RocketMQ's recovery leaves behind the end it gave the log: it cuts in memory only."""


_LEFTOVERS = (f"{SIDECAR}/rebuild",)


def verify_store(
    layout: StoreLayout,
    *,
    progress: Progress | None = None,
    stretch_bytes: int = STRETCH_BYTES,
    sound: SoundParts | None = None,
) -> VerifyReport:
    """Check a store, changing nothing.

    Args:
        layout: its files.
        progress: told how many bytes of the log were checked, and how many there are.
        stretch_bytes: bytes of the log that one thread follows in one go.
        sound: what others have found sound; by default threads of this process look.

    Returns:
        Findings of damage and notes. Nothing that the bytes say raises.
    """
    return _Verification(layout, progress, stretch_bytes, sound).run()


class _Verification:
    def __init__(
        self,
        layout: StoreLayout,
        progress: Progress | None,
        stretch_bytes: int,
        sound: SoundParts | None,
    ) -> None:
        self.layout = layout = with_index_tags(layout)
        self.progress = progress
        self.stretch_bytes = stretch_bytes
        self.sound = sound
        self.report = VerifyReport(layout.root)
        self.live = layout.is_live()
        self.queues = QueueChecker(layout, self.report)
        chains = frozenset[str]() if sound is None else sound.chains
        self.index = IndexChecker(layout, self.report, chains)
        self.damage: list[DamagedSpan] = []
        self.expired: list[ExpiredSpan] = []
        self.messages = self.bytes = self.blanks = self.blank_bytes = 0
        self.last_keyed: int | None = None
        self.last_time = 0
        self.last_sound = 0
        self.stale = False
        self.known = known_damage(layout)

    def run(self) -> VerifyReport:
        """Check everything."""
        end = self._log()
        excused: list[DamagedSpan | ExpiredSpan] = [*self.damage, *self.expired]
        self.queues.finish(end, excused)
        self.index.check(end, excused, self.last_keyed)
        if self.layout.has_state_table and not self.live:
            check_transactions(self.layout, end, self.report)
        self._checkpoint()
        self._config()
        self._state()
        self._sidecar()
        if self.live:
            self.report.downgrade(_COMES_AND_GOES)
        if self.stale:
            self.report.downgrade(_CUT_IN_MEMORY)
        files = self.layout.commit_log.files
        self.report.counts = {
            "messages": self.messages,
            "message_bytes": self.bytes,
            "blanks": self.blanks,
            "blank_bytes": self.blank_bytes,
            "log_files": len(files),
            "min_offset": self.layout.commit_log.start,
            "max_offset": end,
            "damaged_spans": len(self.damage),
            "damaged_bytes": sum(span.length for span in self.damage),
            "queues": len(self.layout.queue_names),
            "queue_entries": self.queues.entries,
            "index_files": len(self.layout.index_files),
            "index_entries": self.index.entries,
        }
        return self.report

    # ---------------------------------------------------------------------------------------- log
    def _log(self) -> int:
        self._log_files()
        bound = log_bound(self.layout)
        log = self.layout.commit_log
        end = log.start
        guesses = self._guesses()
        try:
            runs = CheckedRuns(
                self.layout, bound=bound, live=self.live, guesses=guesses, accept=self._accept
            )
            for event in runs.events():
                end = self._event(event, end)
                if self.progress is not None and not isinstance(event, LogEnd):
                    self.progress(end - log.start, log.end - log.start)
        finally:
            guesses.close()
        if not self.live and not self.index.is_exact:
            self._count_keys(bound)
        if bound is not None and log.files:
            self._beyond(end)
            if end < bound:
                # The queues and the index may be as stale as the frames are.
                self.stale = True
        return end

    def _guesses(self) -> Generator[CheckedRun | SoundRun]:
        if self.sound is not None:
            yield from self.sound.runs
        elif not self.live:
            yield from followed_ahead(self.layout, self.stretch_bytes)

    def _accept(self, run: CheckedRun | SoundRun) -> bool:
        if isinstance(run, CheckedRun):
            return True
        return self.queues.is_next(run.queues) and self.index.is_next(run.entries[0])

    def _event(self, event: CheckedRun | SoundRun | Checked, end: int) -> int:
        """Take what the walk tells next; where the log ends as far as is known then."""
        if isinstance(event, CheckedRun | SoundRun):
            self._run(event)
            self.last_sound = event.end
            return event.end
        if isinstance(event, BlankSpan):
            self.last_sound = event.end
            self.blanks += 1
            self.blank_bytes += event.length
        elif isinstance(event, DamagedSpan):
            self._damage(event)
        elif isinstance(event, ExpiredSpan):
            self.expired.append(event)
        elif isinstance(event, LogEnd):
            return event.offset
        return end

    def _log_files(self) -> None:
        files, room = self.layout.commit_log.files, self.layout.commit_log.file_size
        for index, file in enumerate(files):
            if file.size == room:
                continue
            last = index == len(files) - 1 and index > 0
            kind = "empty_file" if last and file.size == 0 else "wrong_file_size"
            self.report.add(
                kind, file.path, file.base, f"{file.size} bytes, and the log's files have {room}"
            )

    def _run(self, run: CheckedRun | SoundRun) -> None:
        self.messages += run.count
        self.bytes += run.end - run.start
        if isinstance(run, SoundRun):
            self.queues.add_sound(run.queues)
            self.index.add_sound(run.entries[1])
            if run.last_keyed is not None:
                self.last_keyed = run.last_keyed
            self.last_time = max(self.last_time, run.last_time)
        else:
            for followed in run.parts:
                self._follow(followed)
        most = self.layout.config.max_message_size
        for offset, size in run.oversized:
            reason = f"{size} bytes, and maxMessageSize is {most}"
            self.report.add("oversized", self.layout.log_file(offset), offset, reason, size)
        for offset, size in run.suspects:
            self.report.add(
                "suspect_text",
                self.layout.log_file(offset),
                offset,
                "NUL bytes or invalid UTF-8 in topic or properties, which no CRC covers",
                size,
            )

    def _follow(self, followed: Followed) -> None:
        requests = followed.requests
        self.queues.add(followed)
        if not self.live:
            # What retention deletes before the index is read would seem to be missing from it.
            self.index.add(followed)
        keyed = np.flatnonzero(requests.has_key)
        if len(keyed):
            self.last_keyed = int(requests.physical_offset[keyed[-1]])
        self.last_time = max(self.last_time, int(requests.store_timestamp.max()))

    def _count_keys(self, bound: int | None) -> None:
        """Count the keys of the log, for an index that has not just what it should have."""
        levels = self.layout.delay_levels_ms
        for event in LogReader(self.layout, bound=bound).events():
            if isinstance(event, Run):
                requests = dispatch_requests(event.window, event.rows, levels)
                self.index.count(event, requests.has_key)

    def _damage(self, span: DamagedSpan) -> None:
        self.damage.append(span)
        noted = "; a recovery has noted it" if span.offset in self.known else ""
        path = self.layout.log_file(span.offset)
        self.report.add(span.kind, path, span.offset, span.reason + noted, span.length)

    def _beyond(self, end: int) -> None:
        """What lies behind the end of a store that was closed in order."""
        reader = LogReader(self.layout, check_crc=True)
        stale = stale_bytes = 0
        first: int | None = None
        for event in reader.events(end, resync=True):
            if isinstance(event, Run):
                first = event.start if first is None else first
                stale += len(event.rows)
                stale_bytes += event.end - event.start
        if first is not None:
            reason = f"{stale} sound frames behind the log's end at {end}: they are no messages"
            self.report.add("stale_frames", self.layout.log_file(first), first, reason, stale_bytes)
            return
        last = reader.data_end(end)
        told = any(span.offset == end for span in self.damage)
        if last > end and not told:
            self.report.add(
                "torn_tail",
                self.layout.log_file(end),
                end,
                "bytes behind the log's end that are no frames",
                last - end,
            )

    # ----------------------------------------------------------------------------------- the rest
    def _checkpoint(self) -> None:
        try:
            found = self.layout.read_checkpoint()
        except ValueError as error:
            self.report.add("checkpoint_short", CHECKPOINT, 0, str(error))
            return
        if found is None:
            self.report.add("checkpoint_missing", CHECKPOINT, 0, "RocketMQ makes a new one")
        elif not any(found):
            if self.messages:
                self.report.add("checkpoint_zero", CHECKPOINT, 0, "nothing is known as flushed")
        elif self.messages and max(found) > self.last_time:
            self.report.add(
                "checkpoint_ahead",
                CHECKPOINT,
                0,
                f"it says {max(found)}, and the last message was stored at {self.last_time}",
            )

    def _config(self) -> None:
        decoders: dict[str, Callable[[bytes], object]] = {
            broker_config.CONSUMER_OFFSET_FILE: broker_config.decode_consumer_offsets,
            broker_config.DELAY_OFFSET_FILE: broker_config.decode_delay_offsets,
            broker_config.TOPICS_FILE: broker_config.decode_topics,
        }
        for entry in self.layout.filesystem.list(CONFIG):
            if entry.is_dir or not entry.name.endswith(".json"):
                continue
            path = f"{CONFIG}/{entry.name}"
            decode: Callable[[bytes], object] = decoders.get(entry.name, fastjson.decode)
            try:
                decode(self.layout.filesystem.read(path))
            except (ValueError, TypeError, RecursionError) as error:
                self.report.add("bad_config", path, 0, str(error))
            except FileNotFoundError:
                continue

    def _state(self) -> None:
        if self.live:
            self.report.add("live", LOCK, 0, "a process has the store open and may be writing")
        elif self.layout.has_abort:
            self.report.add("abort_file", ABORT, 0, "the store was not closed in order")
        for path in self.layout.ignored:
            self.report.add("unknown_file", path, 0, "ignored; RocketMQ may refuse to start")

    def _sidecar(self) -> None:
        """Our own files: the durable mark, and what interrupted work has left."""
        files = self.layout.filesystem
        for folder in _LEFTOVERS:
            for entry in files.list(folder):
                reason = "work that was interrupted has left it; it can be removed"
                self.report.add("leftover", f"{folder}/{entry.name}", 0, reason)
        if files.exists(f"{LOADS}/{INTENT}") and not self.live:
            reason = "a load was interrupted; whoever opens the store to write finishes it"
            self.report.add("unfinished_load", f"{LOADS}/{INTENT}", 0, reason)
        try:
            mark = durable_mark.decode(files.read(DURABLE))
        except FileNotFoundError:
            return
        except OSError as error:
            self.report.add("durable_mark_invalid", DURABLE, 0, str(error))
            return
        if mark is None:
            reason = "its magic or its CRC is wrong: it says nothing"
            self.report.add("durable_mark_invalid", DURABLE, 0, reason)
        elif self.layout.durable_end is None:
            reason = "the checkpoint is another one than it was made for: it says nothing"
            self.report.add("durable_mark_foreign", DURABLE, 0, reason)
        elif mark.offset > self.last_sound and not self.live:
            reason = f"it says {mark.offset}, and the last frame or blank ends at {self.last_sound}"
            self.report.add("durable_mark_ahead", DURABLE, 0, reason)
