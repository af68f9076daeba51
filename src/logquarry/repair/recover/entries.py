"""What stands in a store's folders where its files belong, and is none, or one twice.

A recovery that finds it out half way through leaves a store half done, and what it makes zeros by
one name is gone by the other. So this is looked at first, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

from logquarry.errors import StoreUnavailable
from logquarry.format import frame, java
from logquarry.format.rows import REACHED_STOP
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.layout import (
    ABORT,
    CHECKPOINT,
    COMMIT_LOG,
    CONSUME_QUEUE,
    DURABLE,
    INDEX,
    LARGEST_BASE,
    LOCK,
    NAME_DIGITS,
    REDO_LOG,
    SIDECAR,
    STATE_TABLE,
    TRANSACTION,
    FileSequence,
    StoreFile,
    StoreLayout,
    quarantine,
)
from logquarry.read.log_end import known_damage
from logquarry.repair.recover.saved_units import NAME as KEPT_UNITS

REPORT: Final = "recovery.json"
_FILES: Final = (ABORT, LOCK, CHECKPOINT, DURABLE)
_FOLDERS: Final = (COMMIT_LOG, CONSUME_QUEUE, INDEX, SIDECAR, TRANSACTION, STATE_TABLE, REDO_LOG)


def check_entries(root: Path) -> None:
    """See that what has the name of a file of a store is one, and each is there once.

    Raises:
        StoreUnavailable: if not.
    """
    aside = quarantine(root)
    for folder in (*(root / name for name in _FOLDERS), aside):
        _check(folder, is_folder=True)
    for path in (*(root / name for name in _FILES), aside / REPORT, aside / KEPT_UNITS):
        _check(path)
    places: dict[tuple[int, int], Path] = {}
    for path in _entries(root / COMMIT_LOG):
        _check_numbered(path, places)
    for name in (STATE_TABLE, REDO_LOG):
        for path in _entries(root / name):
            _check_numbered(path, places)
    for topic in _entries(root / CONSUME_QUEUE):
        _found(topic)
        for queue in _entries(topic):
            found = _found(queue)
            # A plain file is passed over, unless a message is to go there.
            if found is not None and stat.S_ISDIR(found.st_mode):
                _check_once(queue, found, places)
            for path in _entries(queue):
                _check_numbered(path, places)
    for path in _entries(root / INDEX):
        # A folder there is passed over, and in nobody's way.
        if path.name.isascii() and path.name.isdigit() and not _is_folder(path):
            _check_once(path, _check(path), places)


def _check_numbered(path: Path, places: dict[tuple[int, int], Path]) -> None:
    if len(path.name) == NAME_DIGITS and path.name.isascii() and path.name.isdigit():
        _check_once(path, _check(path), places)


def _check(path: Path, *, is_folder: bool = False) -> os.stat_result | None:
    """What is there, if anything is: a file, or a folder if that belongs there."""
    found = _found(path)
    if found is None:
        return None
    if is_folder:
        if not stat.S_ISDIR(found.st_mode):
            raise _refused(path, "is no folder")
    elif not stat.S_ISREG(found.st_mode):
        raise _refused(path, "is a folder" if stat.S_ISDIR(found.st_mode) else "is no plain file")
    return found


def _found(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError as error:
        if not path.is_symlink():
            return None
        raise _refused(path, "is a link, and nothing is where it leads") from error


def _refused(path: Path, what: str) -> StoreUnavailable:
    return StoreUnavailable(f"{path}: it {what}: take it out of the way. Nothing was changed")


def _check_once(
    path: Path, found: os.stat_result | None, places: dict[tuple[int, int], Path]
) -> None:
    if found is None:
        return
    other = places.setdefault((found.st_dev, found.st_ino), path)
    if other != path:
        raise StoreUnavailable(
            f"{path}: it is {other} by another name: take one of the two away, or make it a copy. "
            "Nothing was changed"
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _entries(folder: Path) -> Iterator[Path]:
    """What is in a folder, by name; nothing if it is none: who reads it next says what is wrong."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(folder))
    for name in names:
        yield folder / name


# --------------------------------------------------------------------------------------------------
# Files of the log whose names cannot be right.
#
# A name says where in the log a file begins, and so does each message in it. A file that was
# renamed is not touched: whoever gives it its name back loses nothing. One in which nothing tells
# where it belongs is none of the log, and goes to quarantine.

_MOST_BLANKS: Final = 1 << 12
"""Files of the log that may be missing in a row: four terabytes of RocketMQ's size."""
_LEAST_FRAMES: Final = 2
"""Messages that have to agree before a file whose name might be right counts as renamed."""


def misnamed_files(layout: StoreLayout) -> list[tuple[StoreFile, str]]:
    """The files of a log that are none of it, with the reason for each.

    Raises:
        StoreUnavailable: if a file was renamed, or is too far off to be of this log.
    """
    files = layout.commit_log
    _check_others(layout)
    size = files.file_size
    if not size:
        return []
    for file in files.files:
        _check_length(layout, file)
    names = Counter(file.base % size for file in files.files)
    # Java's are multiples of the size. Where no file's is, most of them tell.
    start = max(names, key=lambda rest: (names[rest], not rest), default=0)
    found: list[tuple[StoreFile, str]] = []
    # What an earlier recovery found there is no news: it has kept what stands elsewhere.
    known = known_damage(layout)
    last: StoreFile | None = None
    for file in files.files:
        fits = file.base % size == start
        is_far = last is not None and file.base - last.base > _MOST_BLANKS * size
        reason = _why_wrong(layout, file, start, known, may_be_right=fits and not is_far)
        if not fits or is_far:
            reason = reason or "nothing in it says that it is of this log"
            where = "no place where a file of the log begins" if not fits else "far behind the log"
            found.append((file, f"its name is {where}, and {reason}"))
        else:
            last = file
    return found


def _why_wrong(
    layout: StoreLayout,
    file: StoreFile,
    start: int,
    known: Container[int],
    *,
    may_be_right: bool,
) -> str | None:
    """What the messages of a file say against its name, None if they do not.

    Raises:
        StoreUnavailable: if they say where it belongs, and nothing is there.
    """
    files = layout.commit_log
    if file.size < frame.HEAD.size:
        return None
    data = layout.open_file(file.path).window(0, min(file.size, files.file_size))
    magic, told = (_field(data, name) for name in ("magic", "physical_offset"))
    is_message = magic % (1 << 32) in (frame.MAGIC_V1, frame.MAGIC_V2)
    if may_be_right and (told == file.base or not is_message or file.base in known):
        return None
    path = layout.filesystem.full_path(file.path)
    window = Window.of(data, file.base, files.file_size)
    _, code = codec.find_frame(window, 0, len(data), check_crc=True)
    if code == REACHED_STOP or (is_message and told == file.base):
        if may_be_right:
            return None
        raise StoreUnavailable(
            f"{path}: no file of this log can have this name, and there are messages in it that "
            f"belong where it says: is {files.file_size} the size of the log's files? Nothing was "
            "changed"
        )
    # Where all files were renamed alike, their names say nothing of where the log begins.
    if told < 0 or (not may_be_right and told % files.file_size != start):
        return None
    rows = codec.empty_rows(_LEAST_FRAMES)
    window = Window.of(data, told, files.file_size)
    count, _, _ = codec.walk(window, 0, len(data), rows, check_crc=True)
    if count < (_LEAST_FRAMES if may_be_right else 1):
        return None
    right = f"{told:0{NAME_DIGITS}d}"
    if all(other.base != told for other in files.files):
        raise _renamed(path, told)
    return f"its messages are those of {right}, which is there"


def _check_length(layout: StoreLayout, file: StoreFile) -> None:
    """See that no messages of a file stand behind the room that it is said to have.

    Raises:
        StoreUnavailable: if there are: the settings are of another store.
    """
    size = layout.commit_log.file_size
    if file.size <= size:
        return
    view = layout.open_file(file.path)
    stop = min(view.size, java.INT_MAX)
    data = view.window(0, stop)[:stop]
    start = view.next_data(size)
    if start >= stop:
        return
    window = Window.of(data, file.base, stop)
    position, code = codec.find_frame(window, start, stop, check_crc=True)
    if code == REACHED_STOP:
        raise StoreUnavailable(
            f"{layout.filesystem.full_path(file.path)}: it has {file.size} bytes, and there is a "
            f"message of it at {position}: is {size} the size of the log's files? Nothing was "
            "changed"
        )


def _check_others(layout: StoreLayout) -> None:
    """See that no file of the log has a name that is no number, ``00000000000000000000.bak``.

    Copies of files that are there do not matter, nor do those of files from before the log's start.

    Raises:
        StoreUnavailable: if one has.
    """
    files = layout.commit_log
    bases = {file.base for file in files.files}
    paths = {file.path for file in files.files}
    for entry in layout.filesystem.list(COMMIT_LOG):
        path = f"{COMMIT_LOG}/{entry.name}"
        if entry.is_dir or path in paths or entry.size < frame.HEAD.size:
            continue
        try:
            file = layout.open_file(path)
        except FileNotFoundError:
            continue
        size = files.file_size or min(file.size, java.INT_MAX)
        data = file.window(0, file.size)[:size]
        magic, told = (_field(data, name) for name in ("magic", "physical_offset"))
        if magic % (1 << 32) not in (frame.MAGIC_V1, frame.MAGIC_V2) or told in bases:
            continue
        if not 0 <= told <= LARGEST_BASE or (bases and told < files.start - size):
            continue
        rows = codec.empty_rows(1)
        if codec.walk(Window.of(data, told, size), 0, len(data), rows, check_crc=True)[0]:
            raise _renamed(layout.filesystem.full_path(path), told)


def _renamed(path: str, told: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"{path}: it was renamed: its messages say that it is {told:0{NAME_DIGITS}d}. Give it that "
        "name, and recover again. Nothing was changed"
    )


def _field(data: memoryview, name: str) -> int:
    at, width = frame.HEAD.offsets[name], 4 if name == "magic" else 8
    return int.from_bytes(data[at : at + width], "big", signed=True)


def leave_out(layout: StoreLayout, misnamed: list[tuple[StoreFile, str]]) -> None:
    """Let some files count as no part of a store's log."""
    gone = {file for file, _ in misnamed}
    files = layout.commit_log
    left = tuple(file for file in files.files if file not in gone)
    layout.use_commit_log(FileSequence(left, files.file_size))
