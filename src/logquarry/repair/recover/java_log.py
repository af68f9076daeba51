"""Reads the log as RocketMQ does when it starts, including RocketMQ's faults.

For Java's recovery, the log ends at the first place at which no message begins. After the recovery,
``ReputMessageService`` dispatches the messages that are in no queue yet. ``ReputMessageService``
checks no CRC, and skips unreadable bytes. Java also accepts some frames that logquarry's compiled
code rejects (:mod:`logquarry.repair.recover.java_dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from logquarry.config import IndexKeys
from logquarry.format import frame, java
from logquarry.format.arrays import POSITION
from logquarry.format.checkpoint import Checkpoint, Offsets
from logquarry.log.batches import ahead
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower
from logquarry.repair.recover.java_dispatch import (
    V4_9,
    JavaDispatch,
    JavaMemoryError,
    JavaRequest,
    JavaRules,
    JavaVerdict,
    check_message,
)
from logquarry.repair.recover.java_queues import RECOVERED_FILES, JavaFile, JavaRefusal, mapped

_MOST_BYTES: Final = 8 << 20
_GRACE_MS: Final = 3_000

AfterRun = Callable[[], None]
_Step = tuple[int, int, Window, Followed | JavaVerdict]
"""A step through a file: its first position, the position of the next step, the window at the first
position, and a run of the log. If no run begins there, the result of Java's check replaces the run.
"""


@dataclass(eq=False)
class JavaLog:
    """The files of a log, as RocketMQ treats them. ``place`` returns the full path of a file.
    ``last_message`` is the physical offset of the last message that :meth:`find_end` found.
    ``stopped_by`` describes the bytes after this message, if they are not zeros.
    """

    place: Callable[[str], Path]
    files: list[JavaFile]
    file_size: int
    levels_ms: tuple[int, ...]
    after_run: AfterRun = lambda: None
    rules: JavaRules = V4_9
    keys: IndexKeys = "4.9"
    last_message: int | None = field(init=False, default=None)
    stopped_by: str | None = field(init=False, default=None)
    _open: tuple[str, memoryview] = field(init=False, default_factory=lambda: ("", memoryview(b"")))

    @property
    def min_offset(self) -> int:
        """Physical offset of the log's first byte, -1 without files."""
        return self.files[0].base if self.files else -1

    @property
    def max_offset(self) -> int:
        """Physical offset of the log's end, 0 without files."""
        return self.files[-1].base + self.files[-1].wrote if self.files else 0

    def _view(self, file: JavaFile) -> memoryview:
        if self._open[0] != file.path:
            # mapped() refuses unreadable blocks. If they were read as zeros, the log would seem to
            # end there.
            self._open = file.path, mapped(self.place(file.path), "keeps the messages after it")
        return self._open[1]

    def first_normally(self, known: int, *, index_limit: int | None, check_crc: bool) -> int:
        """Return the index in ``files`` of the file at which a recovery after a clean shutdown
        begins. The queues point to messages up to physical offset ``known``. If ``index_limit`` is
        given, the store time of the file's first frame must not be after it.
        """
        if not self.rules.is_5:
            return max(0, len(self.files) - RECOVERED_FILES)
        if not self.rules.starts_by_frame:
            return max((n for n, file in enumerate(self.files) if file.base <= known), default=0)
        return self._first_matched(
            lambda first: first.physical_offset <= known, index_limit, check_crc=check_crc, least=0
        )

    def recent(
        self, checkpoint: Checkpoint, offsets: Offsets, *, index_safe: bool, check_crc: bool
    ) -> int:
        """Return the index in ``files`` of the file at which a recovery after a crash begins."""
        limit = min(checkpoint.physic_timestamp, checkpoint.logics_timestamp)
        # QUIRK: if the time is near the lowest value of a long, Java's subtraction overflows, and
        # the result is a time in the far future.
        limit = max(0, java.to_long(limit - _GRACE_MS))
        index_limit = checkpoint.index_timestamp if index_safe else None
        if self.rules.starts_by_frame:
            by_offset = self.rules.starts_by_offset and offsets.logics_physical > 0
            if self.rules.starts_by_offset:
                limit = checkpoint.logics_timestamp
            return self._first_matched(
                lambda first: (
                    first.physical_offset <= offsets.logics_physical
                    if by_offset
                    else first.store_timestamp <= limit
                ),
                index_limit,
                check_crc=check_crc,
                least=-1,
            )
        if index_limit is not None:
            limit = min(limit, index_limit)
        for number in range(len(self.files) - 1, -1, -1):
            first = self._first_timestamp(self.files[number])
            if first and first <= limit:
                return number
        return 0

    def _first_matched(
        self,
        matches: Callable[[JavaRequest], bool],
        index_limit: int | None,
        *,
        check_crc: bool,
        least: int,
    ) -> int:
        """Return the index in ``files`` of the last file whose first frame matches. If none of the
        last ``most_files`` files matches, return the index of the first file among them.
        """
        left = self.rules.most_files or 1
        for number in range(len(self.files) - 1, least, -1):
            left -= 1
            file = self.files[number]
            first = self._ask(
                file, self._view(file), 0, self.levels_ms, check_crc=check_crc
            ).request
            is_known = first is not None and first.store_timestamp != 0 and matches(first)
            if is_known and first is not None and index_limit is not None:
                is_known = first.store_timestamp <= index_limit
            if is_known or left <= 0:
                return number
        return 0

    def _first_timestamp(self, file: JavaFile) -> int:
        data = self._view(file)
        least = frame.FIXED_SIZE_V1
        if len(data) < least:
            return 0
        head = frame.HEAD.struct.unpack_from(data, 0)
        if head[1] != frame.MAGIC_V1 and not (self.rules.is_5 and head[1] == frame.MAGIC_V2):
            return 0
        born, _ = frame.host_sizes(head[7])
        (timestamp,) = frame.STORE_TIME.struct.unpack_from(data, frame.HEAD.size + born)
        return int(timestamp)

    def find_end(
        self, start: int, dispatch: JavaDispatch | None, *, check_crc: bool, known: int = -1
    ) -> int:
        """Find the log's end, as ``recoverNormally`` and ``recoverAbnormally`` do. Pass each
        message after physical offset ``known`` to ``dispatch``. Raises JavaRefusal if RocketMQ
        would fail.
        """
        # QUIRK: 4.9 reads the delay levels only after its recovery. So for a delayed message, the
        # recovery writes the hash of the tags into the entry, and not the delivery time.
        levels = self.levels_ms if self.rules.is_5 else ()
        at = 0
        for file in self.files[start:]:
            data = self._view(file)
            for at, _, window, found in ahead(
                self._steps(file, data, 0, levels, check_crc=check_crc)
            ):
                if isinstance(found, JavaVerdict):
                    if found.request is not None:
                        self.last_message = file.base + at
                        if dispatch is not None and found.request.physical_offset > known:
                            dispatch.one(found.request)
                    elif not found.is_success:
                        self.stopped_by = _stop_reason(window, check_crc)
                        return file.base + at
                    continue
                self.last_message = window.base + int(found.rows[-1, POSITION])
                if dispatch is not None and known < window.base:
                    dispatch.run(window, found, levels)
                    self.after_run()
                elif dispatch is not None and known < self.last_message:
                    for position in found.rows[:, POSITION].tolist():
                        one = self._ask(file, data, at + position, levels, check_crc=False)
                        # QUIRK: RocketMQ skips a message that begins exactly at ``known``.
                        if one.request is not None and window.base + position > known:
                            dispatch.one(one.request)
        self.stopped_by = "a blank, and no file after it"
        return file.base + at

    def _steps(
        self,
        file: JavaFile,
        data: memoryview,
        at: int,
        levels_ms: tuple[int, ...],
        *,
        check_crc: bool,
        read_body: bool = True,
    ) -> Iterator[_Step]:
        """Yield the steps through a file, from position ``at`` on. A step is a run of messages or,
        if no run begins at a place, the result of Java's check there. The last step is the result
        of the check at the first place without a message. A step stays valid only until two more
        steps were yielded.
        """
        size = 1
        # A follower overwrites its previous result, so use two followers alternately.
        followers = [
            Follower(levels_ms, check_crc=check_crc, as_java=True, keys=self.keys) for _ in range(2)
        ]
        while size > 0:
            followers.reverse()
            window = Window.of(data[at:], file.base + at)
            run, count, _ = followers[0].follow(window, min(window.length, _MOST_BYTES))
            if run is not None:
                yield at, at + count, window, run
                at += count
                continue
            verdict = self._ask(file, data, at, levels_ms, check_crc=check_crc, read_body=read_body)
            yield at, verdict.end, window, verdict
            at, size = verdict.end, verdict.size

    def _ask(
        self,
        file: JavaFile,
        data: memoryview,
        at: int,
        levels_ms: tuple[int, ...],
        *,
        check_crc: bool,
        read_body: bool = True,
    ) -> JavaVerdict:
        try:
            return check_message(
                data,
                at,
                levels_ms=levels_ms,
                check_crc=check_crc,
                read_body=read_body,
                is_5=self.rules.is_5,
            )
        except JavaMemoryError as error:
            raise JavaRefusal(
                f"{file.path} at {at}: the bytes there make RocketMQ allocate {error}, and end"
            ) from error

    def cut(self, offset: int) -> list[JavaFile]:
        """Cut the log in memory. Return the files after the cut, which Java would delete."""
        kept, dropped = [], []
        for file in self.files:
            if file.base > offset:
                dropped.append(file)
                continue
            if file.base + self.file_size > offset:
                file.wrote = offset - file.base
            kept.append(file)
        self.files = kept
        return dropped

    def dispatch_rest(self, start: int, dispatch: JavaDispatch) -> None:
        """Dispatch the messages from ``start`` on, as ``ReputMessageService.doReput`` does. Raises
        JavaRefusal if RocketMQ would fail, or would wait forever.
        """
        offset = start
        while offset < self.max_offset:
            offset = self._dispatch_file(max(offset, self.min_offset), dispatch)

    def _dispatch_file(self, offset: int, dispatch: JavaDispatch) -> int:
        """Dispatch the messages of one file. Return the offset at which to continue.

        QUIRK: if the lengths of a frame's parts do not add up to TOTALSIZE, Java moves its buffer
        by their sum, but its offset by TOTALSIZE. If Java then skips the rest of the file, the
        offset is after the file's end.
        """
        file = next((f for f in self.files if f.base <= offset < f.base + self.file_size), None)
        if file is None or offset - file.base >= file.wrote:
            raise JavaRefusal(
                f"RocketMQ would wait without end for a message at {offset}: there is "
                "no file for it"
            )
        start = offset - file.base
        left = file.wrote - start
        data, levels = self._view(file)[: file.wrote], self.levels_ms
        steps = self._steps(file, data, start, levels, check_crc=False, read_body=False)
        for at, after, window, found in ahead(steps):
            if not isinstance(found, JavaVerdict):
                dispatch.run(window, found, levels)
                self.after_run()
                offset, left = offset + after - at, left - (after - at)
            elif found.request is not None:
                dispatch.one(found.request)
                offset, left = offset + found.size, left - found.size
            elif found.is_success:
                return offset + self.file_size - offset % self.file_size
            elif found.size > 0:
                offset += found.size
            else:
                return offset + left
            if left <= 0:
                break
        return offset


def _stop_reason(window: Window, check_crc: bool) -> str | None:
    outcome = window.decode(0, check_crc=check_crc)
    if isinstance(outcome, frame.Damage):
        return None if outcome.kind is frame.DamageKind.ZEROED else outcome.reason
    return "a frame that this version of RocketMQ does not accept"
