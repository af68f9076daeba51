"""Checks the names in a store's folders before a recovery or a retention changes anything.

A folder or a link in the place of a file, or one file under two names, would stop a recovery half
way, or let it overwrite under one name the bytes that another name needs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Container, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from logquarry.errors import StoreUnavailable, UnsupportedStore
from logquarry.format import frame, java
from logquarry.format.rows import REACHED_STOP
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.filesystem import FileView
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
from logquarry.log.log_place import LOG_ELSEWHERE
from logquarry.read.fence import Action, refusal
from logquarry.read.log_end import known_damage
from logquarry.repair.recover.kept_entries import KEPT_ENTRIES

REPORT: Final = "recovery.json"
_FILES: Final = (ABORT, LOCK, CHECKPOINT, DURABLE)
_FOLDERS: Final = (COMMIT_LOG, CONSUME_QUEUE, INDEX, SIDECAR, TRANSACTION, STATE_TABLE, REDO_LOG)


def check_entries(root: Path) -> None:
    """Check that each name of a store's file is a file, and that no file has two names.

    Raises:
        StoreUnavailable: if not.
    """
    aside = quarantine(root)
    for folder in (*(root / name for name in _FOLDERS), aside):
        _check(folder, is_folder=True)
    for path in (*(root / name for name in _FILES), aside / REPORT, aside / KEPT_ENTRIES):
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
            # A file in the place of a queue's folder is ignored.
            if found is not None and stat.S_ISDIR(found.st_mode):
                _check_once(queue, found, places)
            for path in _entries(queue):
                _check_numbered(path, places)
    for path in _entries(root / INDEX):
        # A folder there is ignored.
        if path.name.isascii() and path.name.isdigit() and not _is_folder(path):
            _check_once(path, _check(path), places)


def _check_numbered(path: Path, places: dict[tuple[int, int], Path]) -> None:
    if len(path.name) == NAME_DIGITS and path.name.isascii() and path.name.isdigit():
        _check_once(path, _check(path), places)


def _check(path: Path, *, is_folder: bool = False) -> os.stat_result | None:
    """The status of a file or folder, None if it is missing."""
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
        raise _refused(path, "is a link to a missing file") from error


def _refused(path: Path, what: str) -> StoreUnavailable:
    return StoreUnavailable(f"{path}: it {what}: move it out of the store. Nothing was changed")


def _check_once(
    path: Path, found: os.stat_result | None, places: dict[tuple[int, int], Path]
) -> None:
    if found is None:
        return
    other = places.setdefault((found.st_dev, found.st_ino), path)
    if other != path:
        raise StoreUnavailable(
            f"{path}: it is another name of {other}: remove one of the two names, or make a copy. "
            "Nothing was changed"
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _entries(folder: Path) -> Iterator[Path]:
    """The paths in a folder, by name; none if the folder cannot be read: its reader reports the
    error."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(folder))
    for name in names:
        yield folder / name


# ---------------------------------------------------------------------- wrong names of log files
# The name of a file shows where in the log it begins, and so does each message in it. A recovery
# does not touch a renamed file: you can rename it back. A file whose messages do not show its place
# does not belong to the log, and goes to quarantine.

_MOST_BLANKS: Final = 1 << 12
"""Files of the log that may be missing in a row: 4 TiB with files of 1 GiB."""
_LEAST_FRAMES: Final = 2
"""Messages that must agree before a file whose name may be right counts as renamed."""


def misnamed_files(layout: StoreLayout) -> list[tuple[StoreFile, str]]:
    """The files that do not belong to the log, each with its reason.

    Raises:
        StoreUnavailable: if a file was renamed, or belongs to a log with files of another size.
    """
    files = layout.commit_log
    check_renamed(layout)
    size = files.file_size
    if not size:
        return []
    for file in files.files:
        _check_length(layout, file)
    names = Counter(file.base % size for file in files.files)
    # In Java's logs names are multiples of the size. Else the majority decides.
    start = max(names, key=lambda rest: (names[rest], not rest), default=0)
    found: list[tuple[StoreFile, str]] = []
    # An earlier recovery has decided about the damage that it recorded.
    known = known_damage(layout)
    last: StoreFile | None = None
    for file in files.files:
        fits = file.base % size == start
        is_far = last is not None and file.base - last.base > _MOST_BLANKS * size
        reason = _why_wrong(layout, file, start, known, may_be_right=fits and not is_far)
        if not fits or is_far:
            reason = reason or "no message in it shows that it belongs to this log"
            where = "no place of a log file" if not fits else "far behind the log"
            found.append((file, f"its name is {where}, and {reason}"))
        else:
            last = file
    return found


def check_file_size(layout: StoreLayout) -> None:
    """Check that the log's files can have the size that the settings give. Reads few bytes.

    Raises:
        StoreUnavailable: if a message lies behind that size, or where another file begins: the
            settings belong to another store, and most of the log would be read as damage.
    """
    files = layout.commit_log
    if layout.config.mapped_file_size_commit_log is None or not files.file_size:
        return
    for file in files.files:
        _check_length(layout, file)
    for file, following in pairwise(files.files):
        if file.base + files.file_size > following.base and _begins_with_own_message(
            layout, following
        ):
            raise _no_place(layout, following)


def _begins_with_own_message(layout: StoreLayout, file: StoreFile) -> bool:
    view = layout.open_file(file.path)
    return _starts_with_frame(view, file.base, min(view.size, file.size))


def _starts_with_frame(view: FileView, base: int, size: int) -> bool:
    """Whether a file of ``size`` bytes starts with a sound frame. Reads that frame alone."""
    head = view.window(0, frame.FIXED_SIZE_V1)
    if len(head) < frame.BLANK.size:
        return False
    length, _ = frame.BLANK.struct.unpack_from(head, 0)
    data = view.window(0, min(max(length, frame.FIXED_SIZE_V1), size))[:size]
    window = Window.of(data, base, size)
    return bool(codec.walk(window, 0, 1, codec.empty_rows(1), check_crc=True)[0])


def _no_place(layout: StoreLayout, file: StoreFile) -> StoreUnavailable:
    return StoreUnavailable(
        f"{layout.filesystem.full_path(file.path)}: no log file of {layout.commit_log.file_size} "
        "bytes can have this name, but its messages belong there: give the right size of the log's "
        "files. Nothing was changed"
    )


def _why_wrong(
    layout: StoreLayout,
    file: StoreFile,
    start: int,
    known: Container[int],
    *,
    may_be_right: bool,
) -> str | None:
    """Why the messages of a file contradict its name, None if they do not.

    Raises:
        StoreUnavailable: if they show that it was renamed.
    """
    files = layout.commit_log
    if file.size < frame.HEAD.size:
        return None
    view = layout.open_file(file.path)
    data = view.window(0, frame.FIXED_SIZE_V1)
    magic, told = (_field(data, name) for name in ("magic", "physical_offset"))
    is_message = magic % (1 << 32) in (frame.MAGIC_V1, frame.MAGIC_V2)
    if may_be_right and (told == file.base or not is_message or file.base in known):
        return None
    data = view.window(0, min(file.size, files.file_size))
    window = Window.of(data, file.base, files.file_size)
    _, code = codec.find_frame(window, 0, len(data), check_crc=True)
    if code == REACHED_STOP or (is_message and told == file.base):
        if may_be_right:
            return None
        raise _no_place(layout, file)
    # If all files were renamed alike, their names do not show where the log begins.
    if told < 0 or (not may_be_right and told % files.file_size != start):
        return None
    rows = codec.empty_rows(_LEAST_FRAMES)
    window = Window.of(data, told, files.file_size)
    count, _, _ = codec.walk(window, 0, len(data), rows, check_crc=True)
    if count < (_LEAST_FRAMES if may_be_right else 1):
        return None
    right = f"{told:0{NAME_DIGITS}d}"
    if all(other.base != told for other in files.files):
        raise _renamed(layout.filesystem.full_path(file.path), told)
    return f"it has the messages of {right}, which exists"


def _check_length(layout: StoreLayout, file: StoreFile) -> None:
    """Check that a file that is too long has no messages after its size.

    Raises:
        StoreUnavailable: if the file has such messages: the settings belong to another store.
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
            f"{layout.filesystem.full_path(file.path)}: {file.size} bytes, with a message at "
            f"{position}, but the size of the log's files is {size}: give the right size. Nothing "
            "was changed"
        )


def refusal_to_change(
    layout: StoreLayout, action: Action, *, mode: str = "safe"
) -> UnsupportedStore | None:
    """The refusal of :func:`logquarry.read.fence.refusal`, None if the store allows the action.

    Raises:
        StoreUnavailable: if the log is missing only because its files were renamed.
    """
    found = refusal(layout, action, mode=mode)
    if found is not None and found.feature == LOG_ELSEWHERE:
        check_renamed(layout)
    return found


def check_renamed(layout: StoreLayout) -> None:
    """Check that no file of the log has a name like ``00000000000000000000.bak``.

    Copies of existing files, and of files from before the log's start, are ignored.

    Raises:
        StoreUnavailable: if a file has such a name.
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
        data = file.window(0, frame.FIXED_SIZE_V1)
        magic, told = (_field(data, name) for name in ("magic", "physical_offset"))
        if magic % (1 << 32) not in (frame.MAGIC_V1, frame.MAGIC_V2) or told in bases:
            continue
        if not 0 <= told <= LARGEST_BASE or (bases and told < files.start - size):
            continue
        if _starts_with_frame(file, told, size):
            raise _renamed(layout.filesystem.full_path(path), told)


def _renamed(path: str, told: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"{path}: it was renamed: by its messages it is {told:0{NAME_DIGITS}d}. Give it that "
        "name, and recover again. Nothing was changed"
    )


def _field(data: memoryview, name: str) -> int:
    at, width = frame.HEAD.offsets[name], 4 if name == "magic" else 8
    return int.from_bytes(data[at : at + width], "big", signed=True)


def leave_out(layout: StoreLayout, misnamed: list[tuple[StoreFile, str]]) -> None:
    """Remove some files from a layout's log."""
    gone = {file for file, _ in misnamed}
    files = layout.commit_log
    left = tuple(file for file in files.files if file not in gone)
    layout.use_commit_log(FileSequence(left, files.file_size))
