"""Parts of a log that are followed apart from each other, by threads or on other machines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from logquarry.files.layout import StoreLayout
from logquarry.scan.codec import Window
from logquarry.scan.follow import Followed, Follower
from logquarry.scan.walk import LogReader

STRETCH_BYTES: Final = 8 << 20
_THREADS: Final = 2
_MOST_AHEAD: Final = 4
_FRAMES_AT_ONCE: Final = 1 << 15
"""All of a stretch of frames of 256 bytes: what is done once a queue is done less often."""

Each = Callable[[Window, Followed], None]
"""Gets some frames and what they mean, both good until it returns."""
E = TypeVar("E", bound=Each)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sound frames one after the other.

    Attributes:
        start: physical offset of the first,
        end: and behind the last.
        count: how many.
    """

    start: int
    end: int
    count: int


def tiles(layout: StoreLayout, size: int) -> Iterator[tuple[int, int]]:
    """Stretches that tile the log: (from, to). None goes on beyond the end of its file."""
    room = layout.commit_log.file_size
    for file in layout.commit_log.files:
        for start in range(file.base, file.base + room, size):
            yield start, min(start + size, file.base + room)


class StretchReader:
    """Follows stretches of a log. For one thread at a time.

    Args:
        layout: the store's files.
        check_crc: whether bodies are compared with their CRC.
        keys_of_3_1: give the keys that RocketMQ 3.1.3 put into its index.
    """

    def __init__(
        self, layout: StoreLayout, *, check_crc: bool = True, keys_of_3_1: bool = False
    ) -> None:
        self._log = layout.commit_log
        self._reader = LogReader(layout, check_crc=check_crc)
        self._follower = Follower(
            layout.delay_levels_ms,
            most_frames=_FRAMES_AT_ONCE,
            check_crc=check_crc,
            keys_of_3_1=keys_of_3_1,
        )
        # Room for the last frame of a stretch, which goes on beyond it.
        self._more = layout.config.max_message_size

    def read(self, start: int, stop: int, each: Each, *, resync: bool) -> Stretch | None:
        """The frames that start in a stretch, up to the first place where there is none.

        Args:
            start: where the stretch begins,
            stop: and ends, in the same file.
            each: gets the frames, some at a time.
            resync: whether ``start`` may lie within a frame, unless a file begins there.

        Returns:
            What was read, None where no frame is found.
        """
        file = self._log.at(start)
        if file is None or not file.size:
            return None
        at: int | None = start
        if resync and start != file.base:
            at = self._reader.find(start, stop)
        if at is None:
            return None
        first, count = at, 0
        window = self._reader.window(at, stop - at + self._more)
        while at < stop:
            done = at - window.base
            rest = Window(window.data[done:], at, window.end - done)
            followed, after, _ = self._follower.follow(rest, stop - at)
            if followed is None:
                break
            each(rest, followed)
            count += len(followed.rows)
            at += after
        return Stretch(first, at, count) if count else None

    def read_all(
        self, start: int, stop: int, size: int, make: Callable[[], E]
    ) -> Iterator[tuple[Stretch, E]]:
        """All the frames that start between two places of one file, a stretch at a time.

        Args:
            start: where the first stretch begins; it may lie within a frame.
            stop: where the last one ends.
            size: bytes of a stretch.
            make: makes what gets the frames of the next stretch.
        """
        at, resync = start, True
        while at < stop:
            upto = min(at + size, stop)
            each = make()
            found = self.read(at, upto, each, resync=resync)
            if found is not None:
                yield found, each
            resync = found is None or found.end < upto
            at = upto if found is None or resync else found.end


def stretches_ahead(
    layout: StoreLayout, size: int, make: Callable[[], E]
) -> Generator[tuple[Stretch, E]]:
    """The sound stretches of a log as threads find them, a few ahead of who asks.

    None of a log of one stretch, which is not worth a thread. Whoever stops early closes it.

    Args:
        layout: the store's files.
        size: bytes of a stretch.
        make: makes what gets the frames of the next stretch.
    """
    log = layout.commit_log
    if log.end - log.start <= size:
        return
    places = tiles(layout, size)
    coming: deque[tuple[int, E, Future[Stretch | None]]] = deque()
    # A thread needs a reader of its own, and any of them will do.
    idle: deque[StretchReader] = deque(StretchReader(layout) for _ in range(_THREADS))

    def read(start: int, stop: int, each: Each) -> Stretch | None:
        reader = idle.pop()
        try:
            return reader.read(start, stop, each, resync=True)
        finally:
            idle.append(reader)

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="stretches")
    rest = LogReader(layout)
    try:
        while True:
            for start, stop in islice(places, _MOST_AHEAD - len(coming)):
                each = make()
                coming.append((start, each, pool.submit(read, start, stop, each)))
            if not coming:
                return
            start, each, future = coming.popleft()
            found = future.result()
            if found is not None:
                yield found, each
            elif rest.data_end(start) <= start:
                # Nothing at all follows.
                return
    finally:
        pool.shutdown(cancel_futures=True)
