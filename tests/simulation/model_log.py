"""A model of a store's log: the bytes written, the bytes synced, and the bytes after a power cut.

It replaces :class:`~logquarry.store.writer_files.LogFeed` and the log's files. The disk may
fail a sync, after which the log takes no more writes, or an append. A power cut keeps the synced
bytes and any prefix of the others; the recovery then cuts at the end of a frame.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from logquarry.disk.service import Health
from logquarry.format.arrays import BLANK, REACHED_STOP, TABLE_FULL
from logquarry.log import codec
from logquarry.write.put_result import ReplicaWait
from logquarry.write.settling import Wakeable

_ROWS = codec.empty_rows(256)


class ModelLog:
    """A store's log.

    Args:
        root: its name.
        file_size: bytes of each of its files.
        replicas: hears of slaves.

    Attributes:
        wrote_offset: end of the written bytes.
        flushed_offset: end of the bytes on the disk.
        dispatched_offset: end of the vouched bytes; in a master, of all bytes.
        fails_sync: asked at each sync whether it fails.
        fails_append: asked at each append whether the disk takes only a part.
        during_sync: called during a sync, while other threads go on.
        vouched: called with the end of the vouched bytes.
    """

    def __init__(self, root: str, file_size: int, replicas: ReplicaWait | None = None) -> None:
        self.root = root
        self.file_size = file_size
        self.replicas = replicas
        self.health = Health()
        self.config = SimpleNamespace(broker_role="SLAVE")
        self.store_timestamp = 0
        self.wrote_offset = self.flushed_offset = self.dispatched_offset = 0
        self._files: dict[int, bytearray] = {}
        self._followers: list[Wakeable] = []
        self.fails_sync: Callable[[], bool] = lambda: False
        self.fails_append: Callable[[], bool] = lambda: False
        self.during_sync: Callable[[], None] = lambda: None
        self.vouched: Callable[[], None] = lambda: None

    def log_feed(self) -> Any:
        """See :class:`MessageStore`."""
        return self

    # -------------------------------------------------------------------------------- reading
    @property
    def min_offset(self) -> int:
        return min(self._files, default=0)

    @property
    def max_offset(self) -> int:
        return self.wrote_offset

    def select(self, offset: int, most: int | None = None) -> memoryview | None:
        self.health.require_readable()
        base = offset - offset % self.file_size
        file = self._files.get(base)
        if file is None or offset >= self.wrote_offset:
            return None
        found = memoryview(file)[offset - base : self.wrote_offset - base]
        return found if most is None else found[:most]

    def bytes_of(self, start: int, stop: int) -> bytes:
        """The bytes between two offsets, without those that the log does not have."""
        found = bytearray()
        stop = min(stop, self.wrote_offset)
        while start < stop:
            part = self.select(start)
            if part is None:
                break
            found += part[: stop - start]
            start += len(part)
        return bytes(found)

    # -------------------------------------------------------------------------------- writing
    def append_data(self, offset: int, data: bytes | memoryview) -> bool:
        self.health.require_writable()
        begins = not self._files and offset % self.file_size == 0
        if not begins and (not self._files or offset != self.wrote_offset):
            return False
        if begins:
            self.wrote_offset = self.flushed_offset = self.dispatched_offset = offset
        fails = self.fails_append()
        self._write(data[: len(data) // 2] if fails else data)
        if fails:
            raise self.health.poison("the disk is full")
        return True

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            at = self.wrote_offset % self.file_size
            file = self._files.setdefault(self.wrote_offset - at, bytearray(self.file_size))
            part = rest[: self.file_size - at]
            file[at : at + len(part)] = part
            self.wrote_offset += len(part)
            rest = rest[len(part) :]

    def put(self, data: bytes) -> None:
        """Append bytes of a master's own."""
        self.health.require_writable()
        self._write(data)
        self.dispatched_offset = self.wrote_offset
        for follower in self._followers:
            if follower.is_unset():
                follower.set()

    def vouch(self, offset: int) -> None:
        assert self.dispatched_offset <= offset <= self.wrote_offset
        self.dispatched_offset = offset
        self.vouched()

    def keep(self, durably: bool) -> None:
        pass

    def follow(self, flag: Wakeable) -> None:
        self._followers.append(flag)

    def unfollow(self, flag: Wakeable) -> None:
        self._followers = [other for other in self._followers if other is not flag]

    def sync(self) -> int:
        self.health.require_writable()
        mark = self.wrote_offset
        self.during_sync()
        # Another sync at the same time may have ended all writes.
        self.health.require_writable()
        if self.fails_sync():
            raise self.health.poison("a sync failed")
        self.flushed_offset = max(self.flushed_offset, mark)
        return self.flushed_offset

    def flush(self, least_pages: int) -> int:
        """See :class:`MappedFileQueue`."""
        assert least_pages == 0
        return self.sync()

    # ------------------------------------------------------------------------------ other days
    def expire_first(self) -> None:
        """Delete the first file, if it is not the last one."""
        if len(self._files) > 1:
            base = self.min_offset
            if base + self.file_size <= min(self.flushed_offset, self.dispatched_offset):
                del self._files[base]

    def copy(self) -> ModelLog:
        """The log as it is now."""
        copy = ModelLog(self.root, self.file_size)
        copy._files = {at: bytearray(file) for at, file in self._files.items()}
        copy.wrote_offset, copy.flushed_offset = self.wrote_offset, self.flushed_offset
        copy.dispatched_offset = self.dispatched_offset
        return copy

    def reopened(self, *, cut_at: int | None = None) -> ModelLog:
        """The log as the next process finds it, and recovers.

        Args:
            cut_at: the log loses the bytes from there on.
        """
        after = ModelLog(self.root, self.file_size)
        end = self.wrote_offset if cut_at is None else cut_at
        base = self.min_offset
        if not self._files or end <= base:
            return after
        after._files = self._cut(end)
        after.wrote_offset = end
        sound = after._sound_end()
        after._files = after._cut(sound)
        if not after._files:
            sound = 0
        # Recovery brings all found bytes to the disk.
        after.wrote_offset = after.flushed_offset = after.dispatched_offset = sound
        return after

    def _cut(self, end: int) -> dict[int, bytearray]:
        return {
            at: file[: end - at].ljust(self.file_size, b"\0")
            for at, file in self._files.items()
            if at < end
        }

    def after_power_cut(self, rng: random.Random) -> ModelLog:
        """The log after a power cut and a recovery."""
        kept = rng.choice((self.flushed_offset, self.flushed_offset, self.wrote_offset, None))
        if kept is None:
            kept = rng.randint(self.flushed_offset, self.wrote_offset)
        return self.reopened(cut_at=kept)

    def _sound_end(self) -> int:
        at = self.min_offset
        while (data := self.select(at)) is not None:
            room = self.file_size - at % self.file_size
            window = codec.Window.of(data, at, room)
            count, after, code = codec.walk(window, 0, window.length, _ROWS, check_crc=True)
            at += after if count else 0
            if code == BLANK and at - at % self.file_size + self.file_size <= self.wrote_offset:
                at += self.file_size - at % self.file_size
            elif code not in (REACHED_STOP, TABLE_FULL) or not count:
                return at
        return at
