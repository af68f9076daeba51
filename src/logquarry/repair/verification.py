"""Verify: reads the log once, checks the whole store, and changes nothing.

While verify reads the log, it compares each frame with the entries in queues and index
(:mod:`logquarry.repair.audit`). After that, verify reports each difference as a finding, and checks
all other files.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from logquarry import arguments
from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.log.earlier_writers import unproved_start
from logquarry.log.follow import Follower, dispatch_requests
from logquarry.log.frames import guided
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import UNREADABLE, rereads
from logquarry.log.splits import STRETCH_BYTES, stretches_ahead
from logquarry.log.store_files import ABORT, LOCK, OPEN, unread_lock
from logquarry.log.walk import (
    MISSING_FILE,
    BlankSpan,
    DamagedSpan,
    ExpiredSpan,
    LogEnd,
    LogReader,
    Run,
    Span,
)
from logquarry.read.batch_queue import all_queues
from logquarry.read.compaction import compaction_faults
from logquarry.read.log_end import LostMessages, known_damage, log_bound, lost_messages
from logquarry.read.store_sizes import require_own_settings, with_entry_rules
from logquarry.repair import verify_files
from logquarry.repair.audit.differences import FileFault, SpanSet, file_differences
from logquarry.repair.audit.index import IndexAudit
from logquarry.repair.audit.log import LogAudit, are_stale_bytes, find_bounds
from logquarry.repair.audit.other_queues import StoreQueuesAudit
from logquarry.repair.audit.runs import FrameFacts, SoundParts, audited
from logquarry.repair.audit.timer_files import timer_faults
from logquarry.repair.findings import VerifyReport
from logquarry.repair.recover.loss import LossSearch, replaced_files
from logquarry.repair.recover.wrong_names import what_helps, wrong_links
from logquarry.text import plural

_COMES_AND_GOES: Final = frozenset(
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
"""While a writer has the store open, findings of these kinds are only notes, because the writer
writes the queues after the log.
"""

_CUT_IN_MEMORY: Final = frozenset({"queue_ahead", "index_ahead", "checkpoint_ahead"})
"""Kinds of findings that are only notes after a recovery by RocketMQ, because RocketMQ cuts queues
and index only in memory.
"""
_OF_LOST: Final = frozenset({"queue_in_damage", "queue_ahead", "index_ahead", MISSING_FILE})
"""Kinds of findings that show that the log may lack messages to which queues or index point."""
_OF_REPLACED: Final = frozenset({"queue_entry_dangling", "queue_entry_wrong"})
"""Kinds of findings that a log file of another store causes."""
_FRAME_FAULTS: Final = {
    "oversized": "{size} bytes are more than maxMessageSize, {most}: RocketMQ 4.9.3 and earlier "
    "versions would reject it; RocketMQ 5 compares only the body with maxMessageSize",
    "suspect_text": "NUL bytes or invalid UTF-8 in topic or properties, which no CRC covers",
    "bad_property_crc": "the frame does not match its property CRC: topic, properties or head "
    "changed",
}


def verify(
    path: str | os.PathLike[str],
    *,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check all files of a store, and list their faults. Nothing is changed.

    Another process may write to the store during the check. ``to_json()`` of the report is the
    document that ``logquarry verify --json`` prints (docs/json.md).

    Args:
        path: the store's folder, or a URL.
        config: settings of the store; missing sizes are inferred from the files.
        storage_options: options of the file system, for a URL.
        progress: called with (bytes checked so far, bytes to check in total).

    Returns:
        The report: ``findings`` lists the faults, ``has_damage`` is true if one of them is damage.

    Raises:
        StoreNotFound: if there is no store.
        UsageError: if an argument is invalid.
    """
    arguments.optional(arguments.function, progress, "progress")
    return verify_store(StoreLayout.open(path, config, storage_options), progress=progress)


@rereads
def verify_store(
    layout: StoreLayout,
    *,
    progress: Progress | None = None,
    stretch_bytes: int = STRETCH_BYTES,
    sound: SoundParts | None = None,
) -> VerifyReport:
    """See :func:`verify`. ``sound`` contains the parts in which Spark tasks have found no fault."""
    layout = layout.by_content()
    require_own_settings(layout)
    return _Verification(layout, progress, stretch_bytes, sound).run()


class _Verification:
    def __init__(
        self,
        layout: StoreLayout,
        progress: Progress | None,
        stretch_bytes: int,
        sound: SoundParts | None,
    ) -> None:
        self.layout = layout = with_entry_rules(layout)
        self.progress = progress
        self.stretch_bytes = stretch_bytes
        self.sound = sound
        self.report = VerifyReport(layout.root)
        self.live = layout.is_live()
        self.queues = StoreQueuesAudit(layout)
        self.index = IndexAudit(layout, frozenset() if sound is None else sound.chains)
        self.follower = Follower(layout.delay_levels_ms, keys=layout.config.index_keys)
        self.damage: list[DamagedSpan] = []
        self.expired: list[ExpiredSpan] = []
        self.messages = self.bytes = self.blanks = self.blank_bytes = 0
        self.facts = partial(FrameFacts, layout.config)
        self.last_keyed: int | None = None
        self.last_time = 0
        self.last_sound = 0
        self.stale = False
        self.recovered: LogAudit | None = None
        self.replaced = LostMessages(0, 0)
        self.known = known_damage(layout)
        self.log_bytes = layout.commit_log.end - layout.commit_log.start
        self.queue_bytes = sum(file.size for queue in layout.queue_files() for file in queue.files)
        index_bytes = sum(file.size for file in layout.index_files)
        self.total_bytes = self.log_bytes + self.queue_bytes + index_bytes

    def run(self) -> VerifyReport:
        end = self._log()
        self._advance(self.log_bytes)
        lost = [*self.damage, *self.expired]
        self.report.findings += self.queues.finish(end, SpanSet(lost))
        self._replaced_files(end)
        self._advance(self.log_bytes + self.queue_bytes)
        damaged = [f.file for f in self.report.findings if f.severity == "damage"]
        for path, reason in verify_files.misnamed_queue_files(self.layout, damaged):
            self.report.add("misnamed_queue_file", path, 0, reason)
        # A key's hash contains the topic. So if damage changed the topic of a frame, the index
        # entry differs from the frame, but is right.
        harmed = [Span(place, 1) for place in self.queues.harmed_topics]
        self.report.findings += self.index.finish(end, SpanSet([*lost, *harmed]), self.last_keyed)
        if self.layout.has_state_table and not self.live:
            verify_files.check_transactions(self.layout, end, self.report, self.queues.harmed_types)
        verify_files.check_checkpoint(
            self.layout,
            self.report,
            messages=self.messages,
            last_time=self.last_time,
            is_live=self.live,
        )
        verify_files.check_names(self.layout, self.report)
        verify_files.check_config(self.layout, self.report)
        verify_files.check_epochs(self.layout, self.report)
        verify_files.check_databases(self.layout, self.report, is_live=self.live)
        if not self.live:
            self.report.findings += timer_faults(self.layout)
            for path, offset, size, reason in compaction_faults(self.layout):
                self.report.add("compaction_wrong", path, offset, reason, size)
        self._state()
        verify_files.check_sidecar(
            self.layout, self.report, is_live=self.live, last_sound=self.last_sound
        )
        verify_files.read_other_files(self.layout, self.report)
        self._unreadable()
        self._advance(self.total_bytes)
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
            **self._lost(end),
            "queues": self.queues.queues,
            "queue_entries": self.queues.entries,
            "index_files": len(self.layout.index_files),
            "index_entries": self.index.entries,
        }
        return self.report

    def _advance(self, done: int) -> None:
        if self.progress is not None:
            self.progress(min(done, self.total_bytes), self.total_bytes)

    def _replaced_files(self, end: int) -> None:
        """Report log files whose messages are not the messages to which the queues point."""
        if self.live or not self.report.by_kind.keys() & _OF_REPLACED:
            return
        frames = LossSearch(self.layout, end=end, damage=self.damage).replaced
        self.replaced = LostMessages(int(frames[:, 2].sum()), int(frames[:, 1].sum()))
        for path, places, reason in replaced_files(self.layout, frames):
            self.report.add(MISSING_FILE, path, int(places[0]), reason)

    def _lost(self, end: int) -> dict[str, int]:
        has_lost = self.damage or self.report.by_kind.keys() & _OF_LOST
        if self.live or not has_lost:
            lost = LostMessages(0, 0)
        elif self.recovered is None:
            lost = lost_messages(self.layout, self.damage, end)
        else:
            known = [span for span in self.damage if span.offset < self.recovered.start]
            spans = [*known, *self.recovered.damage]
            lost = lost_messages(self.layout, spans, self.recovered.end)
        return {
            "lost_messages": lost.messages + self.replaced.messages,
            "lost_bytes": lost.bytes + self.replaced.bytes,
        }

    # ---------------------------------------------------------------------------------------- log
    def _log(self) -> int:
        self._log_files()
        bound = log_bound(self.layout)
        log = self.layout.commit_log
        end = log.start
        reader = LogReader(self.layout, bound=bound, live=self.live)
        guesses = self._guesses()
        try:
            for event in guided(reader, guesses, self._accept):
                if isinstance(event, FrameFacts | Run):
                    self._run(event)
                    self.last_sound = end = event.end
                elif isinstance(event, BlankSpan):
                    self.last_sound = event.end
                    self.blanks += 1
                    self.blank_bytes += event.length
                elif isinstance(event, DamagedSpan):
                    self._damage(event)
                elif isinstance(event, ExpiredSpan):
                    self.expired.append(event)
                else:
                    end = event.offset
                if self.progress is not None and not isinstance(event, LogEnd):
                    self._advance(end - log.start)
        finally:
            guesses.close()
        if not self.live and not self.index.is_exact:
            self._count_keys(bound)
        if bound is not None and log.files:
            self._beyond(end)
            # An earlier recovery may have cut the log without cutting the queues and the index.
            self.stale = end < bound or self.layout.cut_end is not None
        return end

    def _guesses(self) -> Generator[FrameFacts]:
        if self.live:
            return
        if self.sound is not None:
            yield from self.sound.runs
        else:
            yield from stretches_ahead(self.layout, self.stretch_bytes, self.facts)

    def _accept(self, run: FrameFacts) -> bool:
        sound = run.sound
        return sound is None or (
            self.queues.is_next(sound.queues) and self.index.is_next(sound.index[0])
        )

    def _log_files(self) -> None:
        log, names = self.layout.commit_log, self.layout.log_names
        unproved = unproved_start(self.layout.filesystem, log.files)
        if unproved is not None:
            self.report.add("log_start", log.files[0].path, log.start, unproved)
        links = wrong_links(self.layout)
        helps = what_helps(self.layout, links)
        wrong = [(one.path, one.base, one.reason, "renames it") for one in names.renames]
        wrong += [(path, 0, why, "moves it to quarantine") for path, why, _ in names.strangers]
        for path, base, why, does in wrong:
            reason, done = (links[path], "removes this link") if path in links else (why, does)
            step = helps or f"`logquarry recover` {done}"
            self.report.add("misnamed_file", path, base, f"{reason}; {step}")
        for path, reason in names.doubts:
            self.report.add("misnamed_file", path, 0, reason)
        verify_files.check_entry_files(self.layout, self.report)
        lacks_first = self.layout.lost_head is not None
        for found in file_differences(log.files, log.file_size, lacks_first=lacks_first):
            if found.fault in (FileFault.SIZE, FileFault.EMPTY_LAST):
                self.report.findings += [found.size_difference(found.file.base)]

    def _run(self, run: Run | FrameFacts) -> None:
        if isinstance(run, Run):
            run = audited(self.follower, run, self.facts())
        self.messages += run.count
        self.bytes += run.end - run.start
        if run.sound is not None:
            self.queues.add_sound(run.sound.queues)
            self.index.add_sound(run.sound.index[1])
        for followed, parts in run.parts:
            self.queues.add(followed, parts)
            if not self.live:
                # Retention of a running broker can delete index files during the check.
                self.index.add(followed)
        if run.last_keyed is not None:
            self.last_keyed = run.last_keyed
        self.last_time = max(self.last_time, run.latest_time)
        most = self.layout.config.max_message_size
        for kind, found in run.faults.items():
            for offset, size in found:
                reason = _FRAME_FAULTS[kind].format(size=size, most=most)
                self.report.add(kind, self.layout.log_file(offset), offset, reason, size)

    def _count_keys(self, bound: int | None) -> None:
        levels = self.layout.delay_levels_ms
        for event in LogReader(self.layout, bound=bound).events():
            if isinstance(event, Run):
                requests = dispatch_requests(event.window, event.rows, levels)
                self.index.count(event, requests.has_key)

    def _damage(self, span: DamagedSpan) -> None:
        if span.is_tail and self._stale_bytes(span.offset, span.length, is_closed=False):
            return
        self.damage.append(span)
        noted = ""
        if span.offset in self.known:
            noted = "; a recovery has recorded it"
            self.report.recorded.add(span.offset)
        path = self.layout.log_file(span.offset)
        self.report.add(span.kind, path, span.offset, span.reason + noted, span.length)

    def _beyond(self, end: int) -> None:
        reader = LogReader(self.layout, check_crc=True)
        stale = stale_bytes = 0
        first: int | None = None
        for event in reader.events(end, resync=True):
            if isinstance(event, Run):
                first = event.start if first is None else first
                stale += len(event.rows)
                stale_bytes += event.end - event.start
        if first is not None:
            found = f"{plural(stale, 'sound frame')} after the log's end at {end}"
            recovered = _audit_around(self.layout, end)
            if recovered.end > first:
                self.recovered = recovered
                reason = (
                    f"{found}: readers do not return them; `logquarry recover` keeps those before "
                    f"physical offset {recovered.end}"
                )
            else:
                reason = f"{found}: they are not messages"
            self.report.add("stale_frames", self.layout.log_file(first), first, reason, stale_bytes)
            return
        last = reader.data_end(end)
        is_reported = any(span.offset == end for span in self.damage)
        is_closed = not self.layout.has_abort
        if (
            last > end
            and not is_reported
            and not self._stale_bytes(end, last - end, is_closed=is_closed)
        ):
            self.report.add(
                "torn_tail",
                self.layout.log_file(end),
                end,
                "bytes after the log's end that are not frames",
                last - end,
                is_explained=self.layout.cut_end is not None,
            )

    def _stale_bytes(self, end: int, length: int, *, is_closed: bool) -> bool:
        """Report bytes after the log's end that come from a broker's reused buffer. Return whether
        the log has such bytes.
        """
        if not are_stale_bytes(self.layout, end, is_closed=is_closed):
            return False
        reason = "bytes of earlier messages, as a broker with writeWithoutMmap leaves them"
        self.report.add("stale_bytes", self.layout.log_file(end), end, reason, length)
        return True

    # ----------------------------------------------------------------------------------- the rest
    def _state(self) -> None:
        if self.live:
            reason = unread_lock(Path(self.layout.root) / LOCK) or OPEN
            self.report.add("live", LOCK, 0, reason)
        elif self.layout.has_abort:
            self.report.add("abort_file", ABORT, 0, "the store was not shut down cleanly")
        for path in self.layout.ignored:
            self.report.add("unknown_file", path, 0, "ignored; RocketMQ may refuse to start")

    def _unreadable(self) -> None:
        """Report the unreadable bytes that are not yet reported as damage of the log."""
        lost = [span for span in self.damage if span.kind == UNREADABLE]
        bases = {file.path: file.base for file in self.layout.commit_log.files}
        for path, ranges in sorted(self.layout.filesystem.unreadable.items()):
            for one in ranges:
                offset = bases.get(path, 0) + one.offset
                is_reported = path in bases and any(
                    span.offset < offset + one.length and offset < span.end for span in lost
                )
                if not is_reported:
                    self.report.add(UNREADABLE, path, offset, one.brief, one.length)


def _audit_around(layout: StoreLayout, place: int) -> LogAudit:
    """Audit the log up to its end; start at the file that contains the byte before ``place``."""
    file = layout.commit_log.at(place - 1)
    bounds = find_bounds(layout, all_queues(layout))
    log = LogAudit(layout, bounds, start=None if file is None else file.base, stop=layout.cut_end)
    for _ in log.runs():
        pass
    return log
