"""Identifies the files of the commit log by their content.

A file's name is the physical offset of its first byte. Each frame contains its own physical offset
(PHYSICALOFFSET), so the right name of a file can be computed from its frames. Rules:

- If the first frame agrees with the name, the name is right.
- If the first frame does not agree, whole frames with correct CRCs are read at several positions.
  If at least two of them agree with the name, the name is right, and the first frames are
  displaced. If fewer agree, the file offset that most of these frames imply is right, so one
  damaged PHYSICALOFFSET does no harm. Stale frames (left by an earlier truncation) imply the same
  file offset as the other frames in the file.
- A file without a frame keeps its name, unless another file needs that name.
- If the frames of two files imply the same file offset, the copy is the file whose name differs
  from this offset.
- The offsets of all files leave the same remainder when divided by the file size. A file does not
  belong to the log if its remainder differs from the remainder of most files and it also overlaps
  one of them. If its frames agree with its name, it may be from another store. Then recover refuses
  the store.
- If the consume queues contain other physical offsets for all messages that were read from a file,
  this file is from another store. Then recover refuses the store, and renames no file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from logquarry.errors import LogquarryError, MisnamedFile
from logquarry.format import queue_entry
from logquarry.format.frame import Frame
from logquarry.log.codec import first_frames, head_offset
from logquarry.log.filesystem import Entry, FileSystem, FileView
from logquarry.log.store_files import (
    COMMIT_LOG,
    CONSUME_QUEUE,
    LARGEST_BASE,
    NAME_DIGITS,
    StoreFile,
    is_offset_name,
    size_of,
)

RENAMING: Final = ".renaming"
"""Suffix of a log file while a recovery renames it. The name before the suffix is the right
name.
"""
_LEAST_FRAMES: Final = 2
"""The name of a file may fit the names of the other files. Then it is treated as wrong only if this
number of frames contradict it, or if a queue has the physical offset of one such frame. The queues
contradict a file only if at least this number of entries differ from its frames.
"""
_PARTS: Final = 8
_PART_BYTES: Final = 8 << 20
"""If a file's first frame contradicts its name, frames are read at _PARTS positions of the file."""
_CHUNK: Final = 1 << 20
MOST_GAP: Final = 1 << 12
"""Maximum number of consecutive missing log files: 4 TiB with files of 1 GiB."""
_OURS: Final = re.compile(rf"([0-9]{{{NAME_DIGITS}}})\{RENAMING}(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Rename:
    """A log file with a wrong name. ``base`` is the file's offset according to its frames."""

    path: str
    base: int
    reason: str

    @property
    def target(self) -> str:
        """The path that the file should have."""
        return right_path(self.base)


@dataclass(frozen=True, slots=True)
class LogNames:
    """The files of a log with the offsets that their frames show.

    A stranger (path, reason, offset) has the name of a log file, possibly with the suffix RENAMING,
    but does not belong to the log. If its frames show that it is a copy of a log file, ``offset``
    is that file's offset, else None.
    A doubt (path, reason) is a file whose place in the log is unclear: the queues contradict its
    frames, another file's frames show the same offset, or it overlaps another file.
    """

    files: tuple[StoreFile, ...]
    renames: tuple[Rename, ...] = ()
    strangers: tuple[tuple[str, str, int | None], ...] = ()
    doubts: tuple[tuple[str, str], ...] = ()

    @property
    def are_right(self) -> bool:
        """Whether the log has neither renames nor doubts."""
        return not (self.renames or self.doubts)

    def error(self, filesystem: FileSystem, first: str | None = None) -> MisnamedFile:
        """Make the error for a reader that found the misnamed file ``first``."""
        found = [(one.path, one.base, one.reason) for one in self.renames]
        found += [(path, 0, reason) for path, reason in self.doubts]
        path, offset, reason = next((one for one in found if one[0] == first), found[0])
        more = f" (wrong names in total: {len(found)})" if len(found) > 1 else ""
        return MisnamedFile(
            filesystem.full_path(path),
            offset,
            f"{reason}{more}. Nothing was read or changed. `logquarry recover {filesystem.root}` "
            "shows how to rename the files; `logquarry salvage` reads them as they are",
            kind="misnamed_file",
        )


def right_path(base: int) -> str:
    """Return the path of the log file that begins at a physical offset."""
    return f"{COMMIT_LOG}/{base:0{NAME_DIGITS}d}"


def contradicts_name(view: FileView, base: int | None) -> bool:
    """Whether the physical offset in a file's first frame differs from the offset in the file's
    name.
    """
    try:
        told = head_offset(view)
    except (OSError, LogquarryError):
        # The reader of this file reports the error.
        return False
    return told is not None and told >= 0 and told != base


def has_doubtful_name(filesystem: FileSystem, files: Sequence[StoreFile], size: int) -> bool:
    """Whether a log may have wrong names.

    Checks only files that a walk over the log might never open: the first and the last file, files
    before or after a gap, and files whose names are not offsets. Every other file is checked when a
    reader opens it.
    """
    suspects: dict[str, int | None] = {file.path: file.base for file in (*files[:1], *files[-1:])}
    for before, after in pairwise(files):
        if after.base - before.base < size:
            return True
        if after.base - before.base != size:
            suspects |= {before.path: before.base, after.path: after.base}
    known = {file.path for file in files}
    entries = _entries(filesystem, filesystem.list(COMMIT_LOG))
    suspects |= {path: None for path, _ in entries if path not in known}
    for path, base in suspects.items():
        try:
            view = filesystem.open(path)
        except (OSError, LogquarryError):
            # The reader of this file reports the error.
            continue
        if contradicts_name(view, base):
            return True
    return False


def identify_files(
    filesystem: FileSystem, files: Sequence[StoreFile], entries: Sequence[Entry]
) -> LogNames:
    """Identify the files of a log. ``files`` are the files whose names are offsets, in order.
    ``entries`` is the list of ``commitlog/``.
    """
    return _Identification(filesystem, files, entries).run()


def _entries(filesystem: FileSystem, entries: Sequence[Entry]) -> Iterator[tuple[str, Entry]]:
    # Log files may also be in a subfolder, such as a backup or lost+found.
    for entry in entries:
        path = f"{COMMIT_LOG}/{entry.name}"
        if not entry.is_dir:
            yield path, entry
            continue
        try:
            inner = filesystem.list(path)
        except LogquarryError:
            continue
        yield from ((f"{path}/{one.name}", one) for one in inner if not one.is_dir)


@dataclass(slots=True)
class _Item:
    """One file.

    Attributes:
        named: the offset in the name, None if the name is not an offset.
        ours: the offset in a name with the suffix RENAMING, which a recovery left because it was
            interrupted during a rename; None for all other names.
        base: the offset that ``frames`` show, None if unknown.
    """

    path: str
    size: int
    named: int | None
    ours: int | None = None
    base: int | None = None
    frames: list[Frame] = field(default_factory=list)


class _Identification:
    def __init__(
        self, filesystem: FileSystem, files: Sequence[StoreFile], entries: Sequence[Entry]
    ) -> None:
        self._filesystem = filesystem
        self._items = [_Item(file.path, file.size, file.base) for file in files]
        known = {file.path for file in files}
        for path, entry in _entries(filesystem, entries):
            if path not in known:
                ours = _OURS.fullmatch(entry.name)
                target = int(ours[1]) if ours is not None and "/" not in entry.name else None
                self._items.append(_Item(path, entry.size, None, target))
        sizes = Counter(item.size for item in self._items if item.named is not None and item.size)
        sizes = sizes or Counter(item.size for item in self._items)
        # The file size is the most frequent size. The size cannot be computed from the names,
        # because names may be wrong.
        self._size = max(sizes, key=lambda size: (sizes[size], size), default=0)
        self._right: dict[int, _Item] = {}
        self._mute: list[_Item] = []
        self._wrong: list[_Item] = []
        self._placed: dict[int, _Item] = {}
        self._strangers: list[tuple[str, str, int | None]] = []
        self._doubts: list[tuple[str, str]] = []
        self._queues: dict[str, list[tuple[int, str]]] = {}

    def run(self) -> LogNames:
        for item in self._items:
            self._judge(item)
        self._drop_other_grids()
        self._place()
        self._place_mute()
        self._drop_overlapping()
        files = self._right | self._placed
        renames = [
            Rename(item.path, base, self._reason(item, base))
            for base, item in sorted(files.items())
            if item.path != right_path(base)
        ]
        return LogNames(
            tuple(StoreFile(base, item.size, item.path) for base, item in sorted(files.items())),
            tuple(renames),
            tuple(self._strangers),
            tuple(self._doubts),
        )

    # ---------------------------------------------------------------------------------- one file
    def _judge(self, item: _Item) -> None:
        try:
            view = self._filesystem.open(item.path)
            told = head_offset(view)
            if told is not None and told == item.named:
                item.base = told
            elif told is not None:
                self._vote(item, view)
        except (OSError, LogquarryError):
            # The file keeps its name. The reader of this file reports the error.
            item.base, item.frames = None, []
        if item.base is None and item.ours is not None:
            item.base = item.ours
        if item.base is None:
            if item.named is not None:
                self._mute.append(item)
        elif item.base == item.named:
            self._right[item.base] = item
        else:
            self._wrong.append(item)

    def _vote(self, item: _Item, view: FileView) -> None:
        votes: defaultdict[int, list[Frame]] = defaultdict(list)
        # The start of a file can contain a block of another file. So read frames at several
        # positions. If enough frames agree with the name, the name is right.
        read = dict(first_frames(view))
        for part in range(1, _PARTS):
            read.update(first_frames(view, part * view.size // _PARTS, _PART_BYTES))
        for position, found in sorted(read.items()):
            base = found.physical_offset - position
            if 0 <= base <= LARGEST_BASE:
                votes[base].append(found)
        if not votes:
            return
        base = max(votes, key=lambda one: (len(votes[one]), one == item.named))
        if item.named is not None and len(votes.get(item.named, ())) >= _LEAST_FRAMES:
            base = item.named
        item.base, item.frames = base, votes[base]
        doubtful = len(votes[base]) < _LEAST_FRAMES and self._may_be_right(item)
        if doubtful and self._agrees_with_queues(item) is not True:
            item.base = item.named if item.named in votes else None

    def _may_be_right(self, item: _Item) -> bool:
        # A name may be right if its distance to most other names is a multiple of the file size.
        if item.named is None or not self._size:
            return False
        rest = Counter(one.named % self._size for one in self._items if one.named is not None)
        return item.named % self._size == max(rest, key=lambda one: (rest[one], not one))

    # ------------------------------------------------------------------------------- all of them
    def _drop_other_grids(self) -> None:
        """Drop a file's offset if its distance to most other files' offsets is not a multiple of
        the file size.
        """
        if not self._size:
            return
        bases = [*self._right, *(item.base for item in self._wrong if item.base is not None)]
        rest = Counter(base % self._size for base in bases)
        start = max(rest, key=lambda one: (rest[one], not one), default=0)
        for item in list(self._wrong):
            assert item.base is not None
            if item.base % self._size != start:
                self._wrong.remove(item)
                if item.named is not None:
                    item.base = None
                    self._mute.append(item)

    def _place(self) -> None:
        claims: defaultdict[int, list[_Item]] = defaultdict(list)
        for item in self._wrong:
            assert item.base is not None
            if item.base in self._right:
                self._is_copy(item)
            elif self._agrees_with_queues(item) is False:
                reason = (
                    f"its frames start at physical offset {item.base}, but the queues have other "
                    "messages there: it may be of another store. Move the file out of the store; "
                    "if the queues are wrong, move consumequeue/ out"
                )
                self._doubts.append((item.path, reason))
            else:
                claims[item.base].append(item)
        mute = {item.named for item in self._mute}
        strays: dict[int, _Item] = {}
        for base, items in sorted(claims.items()):
            items.sort(key=lambda item: (item.named is None, item.ours is None, item.path))
            first, *others = items
            if first.named is None and first.ours is None:
                if base not in mute:
                    strays[base] = first
            else:
                self._placed[base] = first
            for other in others:
                self._second_claim(first, other)
        self._place_strays(strays)

    def _place_strays(self, strays: dict[int, _Item]) -> None:
        # Add a file to the log if its name is not an offset, but its frames show its offset. A
        # file before the log's start is added only if it ends where the log starts. Any other file
        # before the start is probably a copy of an expired file.
        bases = [*self._right, *self._placed]
        start = min(bases, default=None)
        last = max(bases, default=None)
        for base in sorted(strays, reverse=True):
            if start is None or last is None or base > start or base == start - self._size:
                if last is not None and base - last > MOST_GAP * self._size:
                    continue
                self._placed[base] = strays[base]
                start = base if start is None else min(start, base)

    def _second_claim(self, first: _Item, other: _Item) -> None:
        if other.size == first.size and self._same_bytes(first, other):
            self._is_copy(other)
            return
        reason = (
            f"its frames start at physical offset {other.base}, as those of {first.path} do, but "
            "the two files differ: move the older one out of the store"
        )
        self._doubts.append((other.path, reason))

    def _is_copy(self, item: _Item) -> None:
        # Readers ignore files with other names. A file with the suffix RENAMING would get its name
        # back after retention has deleted the log file.
        if item.named is not None or item.ours is not None:
            assert item.base is not None
            name = f"{item.base:0{NAME_DIGITS}d}"
            reason = f"it has the messages of {name}, which exists"
            self._strangers.append((item.path, reason, item.base))

    def _place_mute(self) -> None:
        """Choose offsets for the files whose offset cannot be determined from frames."""
        shifts = {
            item.named - base for base, item in self._placed.items() if item.named is not None
        }
        # The names of all files with frames may be wrong by the same number. Then correct the names
        # of the files without frames by this number too.
        shift = shifts.pop() if not self._right and len(shifts) == 1 else 0
        displaced: list[_Item] = []
        for item in self._mute:
            assert item.named is not None
            base = item.named - shift
            if base in self._placed or base in self._right or base < 0:
                displaced.append(item)
            else:
                self._right[base] = item
        free = self._free_names() if displaced else iter(())
        for item in displaced:
            place = next(free, None)
            if place is not None:
                self._placed[place] = item
            else:
                reason = "no message in it shows its place, and another file needs its name"
                self._strangers.append((item.path, reason, None))

    def _free_names(self) -> Iterator[int]:
        """Yield offsets that no file has: first the old names of renamed files, then offsets in
        gaps, and last the offset after the log's last file.
        """
        there = {*self._right, *self._placed}
        vacated = {item.named for item in self._placed.values()} - there
        yield from sorted(base for base in vacated if base is not None)
        if self._size:
            gaps = range(min(there), max(there) + self._size + 1, self._size)[:MOST_GAP]
            yield from (base for base in gaps if base not in there and base not in vacated)

    def _drop_overlapping(self) -> None:
        """Drop a file if it overlaps other files and its offset does not fit them. The offsets of
        most files leave the same remainder when divided by the file size. An offset does not fit if
        it leaves a different remainder.
        """
        files = self._right | self._placed
        size = size_of(tuple(StoreFile(base, files[base].size, "") for base in sorted(files)))
        rests = Counter(base % size for base in files if size)
        start = max(rests, key=lambda one: rests[one], default=0)
        if 2 * rests[start] <= len(files):
            return
        right = [base for base in files if base % size == start]
        for base, item in sorted(files.items()):
            over = [one for one in right if one - size < base < one + size]
            if base % size == start or not over:
                continue
            (self._right if base in self._right else self._placed).pop(base)
            name = files[over[0]].path
            if item.base is not None:
                reason = (
                    f"it overlaps {name}, and no log file of {size} bytes can have its name: it "
                    "may be of another store. Move the file out of the store"
                )
                self._doubts.append((item.path, reason))
            else:
                reason = f"it overlaps {name}, and no message in it shows that it is of this log"
                self._strangers.append((item.path, reason, None))

    # --------------------------------------------------------------------------------- evidence
    def _agrees_with_queues(self, item: _Item) -> bool | None:
        """True if a queue has the physical offset of one of the file's frames.

        False if at least _LEAST_FRAMES frames were compared, and the queues have a different offset
        for each of them. None in all other cases.
        """
        others = 0
        for one in item.frames:
            entry = self._entry_of(one)
            if entry is None:
                continue
            if entry == one.physical_offset:
                return True
            others += 1
        # One different offset does not prove that the file is from another store, because RocketMQ
        # 3 can use a queue offset for two messages after a restart.
        return False if others >= _LEAST_FRAMES else None

    def _entry_of(self, message: Frame) -> int | None:
        topic = message.topic.decode("utf-8", "replace")
        if topic in ("", ".", "..") or "/" in topic or "\0" in topic:
            return None
        folder = f"{CONSUME_QUEUE}/{topic}/{message.queue_id}"
        try:
            if folder not in self._queues:
                self._queues[folder] = [
                    (int(one.name), f"{folder}/{one.name}")
                    for one in self._filesystem.list(folder)
                    if not one.is_dir and is_offset_name(one.name)
                ]
            at = message.queue_offset * queue_entry.UNIT_SIZE
            base, path = max((one for one in self._queues[folder] if one[0] <= at), default=(0, ""))
            if not path:
                return None
            data = self._filesystem.open(path).window(at - base, queue_entry.UNIT_SIZE)
            entry = queue_entry.decode_at(data, 0) if len(data) >= queue_entry.UNIT_SIZE else None
        except (OSError, LogquarryError, ValueError):
            return None
        if entry is None or not entry.is_written or entry.is_filler:
            return None
        return entry.physical_offset

    def _same_bytes(self, one: _Item, other: _Item) -> bool:
        first, second = (self._filesystem.open(item.path) for item in (one, other))
        return all(
            first.window(at, _CHUNK)[:_CHUNK] == second.window(at, _CHUNK)[:_CHUNK]
            for at in range(0, one.size, _CHUNK)
        )

    def _reason(self, item: _Item, base: int) -> str:
        if item.base is None:
            return "it has no frame, and another file needs its name"
        told = f"its frames start at physical offset {base}"
        if item.named is None:
            return f"{told}, but its name is not an offset"
        told += f", but its name says {item.named}"
        other = self._placed.get(item.named)
        if other is not None and other.named == base:
            return f"{told}: the names of this file and of {other.path} look swapped"
        return told
