"""Finds log files with wrong names, for a recovery.

A recovery renames a log file to the name that its PHYSICALOFFSET fields show
(:mod:`logquarry.log.log_names`). A misnamed file without such frames moves to quarantine.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from logquarry.errors import StoreUnavailable
from logquarry.log.layout import StoreLayout
from logquarry.log.log_names import MOST_GAP, right_path
from logquarry.log.store_files import FileSequence, StoreFile
from logquarry.read.commit_log import CommitLog
from logquarry.read.fence import Action, refusal
from logquarry.read.store_sizes import message_behind, require_stated_size


def what_helps(layout: StoreLayout, links: Mapping[str, str]) -> str | None:
    """Return what a user must do about wrong names if a recovery refuses the store, else None.
    ``links`` is the result of :func:`wrong_links`.
    """
    names = layout.log_names
    if names.are_right and not names.strangers:
        return None
    if refusal(layout, Action.RECOVER) is not None:
        reads = "`logquarry salvage` reads the log files at their right offsets"
        return f"`logquarry recover` does not support this store; {reads}"
    if names.doubts:
        path, _ = names.doubts[0]
        return f"`logquarry recover` refuses the store until you do what the finding of {path} says"
    try:
        misnamed_files(layout, links)
    except StoreUnavailable as error:
        return f"`logquarry recover` refuses the store: {error}"
    return None


def wrong_links(layout: StoreLayout) -> dict[str, str]:
    """Return path -> reason for each hard link that gives a log file a second, wrong name. Only
    links whose name is wrong according to the file's frames are returned. ``layout`` must come from
    :meth:`StoreLayout.by_content`.

    A power cut during the rename of a file can leave both names.
    """
    root, names = Path(layout.root), layout.log_names
    if not (names.strangers or names.renames):
        return {}
    files = {file.base: file.path for file in names.files}
    found: dict[str, str] = {}
    for path, _, base in names.strangers:
        if base is not None and _is_same_file(root / path, root / files.get(base, path)):
            found[path] = f"it is a hard link to {right_path(base)}, where its frames belong"
    # A file without frames may have a name that another file must get, according to the frames of
    # the other file.
    right = [path for base, path in files.items() if path == right_path(base)]
    for one in names.renames:
        other = next((path for path in right if _is_same_file(root / one.path, root / path)), None)
        if other is not None:
            found[one.path] = f"it is a hard link to {other}, and another file needs its name"
    return found


def _is_same_file(path: Path, other: Path) -> bool:
    """Whether two different paths are hard links to one file. A symbolic link is no hard link."""
    try:
        found = os.lstat(path)
        is_same = path != other and os.path.samestat(found, os.lstat(other))
    except OSError:
        return False
    return is_same and stat.S_ISREG(found.st_mode)


def misnamed_files(layout: StoreLayout, links: Mapping[str, str]) -> list[tuple[StoreFile, str]]:
    """Return the files in the log's folder that do not belong to the log, each with the reason.
    ``layout`` must come from :meth:`StoreLayout.by_content`. ``links`` is the result of
    :func:`wrong_links`.

    Raises:
        StoreUnavailable: if a file belongs to a log with another file size, or if its place in the
            log cannot be found.
    """
    files = layout.commit_log
    for path, reason in layout.log_names.doubts:
        full = layout.filesystem.full_path(path)
        raise StoreUnavailable(f"{full}: {reason}. Nothing was changed")
    size = files.file_size
    if not size:
        return []
    for file in files.files:
        _check_length(layout, file)
    found = [
        (StoreFile(int(Path(path).name.split(".")[0]), 0, path), f"its name is wrong: {reason}")
        for path, reason, _ in layout.log_names.strangers
    ]
    found += [(file, links[file.path]) for file in files.files if file.path in links]
    left = [file for file in files.files if file.path not in links]
    names = Counter(file.base % size for file in left)
    # Divide each name by ``size``: the remainder is the same for all right names. So use the most
    # frequent remainder. If 0 is among the most frequent remainders, use 0.
    start = max(names, key=lambda rest: (names[rest], not rest), default=0)
    last: StoreFile | None = None
    log = CommitLog(layout)
    for file in left:
        fits = file.base % size == start
        is_far = last is not None and file.base - last.base > MOST_GAP * size
        if fits and not is_far:
            last = file
            continue
        if log.sound_frame_at(file.base) is not None:
            raise _no_place(layout, file)
        where = "not the offset of a log file" if not fits else "far after the log"
        reason = "no message in it shows that it belongs to this log"
        found.append((file, f"its name is {where}, and {reason}"))
    return found


_SIZES_DIFFER: Final = (
    "give the right size of the log's files (mappedFileSizeCommitLog in --config), or move the "
    "files of another store out of the log's folder. Nothing was changed"
)


def check_file_size(layout: StoreLayout) -> None:
    """Check that the size of the log's files can be right. This is the size in the settings or, if
    the settings have none, the inferred size. Reads few bytes.

    Raises:
        StoreUnavailable: if a file has a message beyond this size, or would overlap the next file,
            which starts with a message.
        UsageError: if the size in the settings differs from the size of the files.
    """
    require_stated_size(layout)
    files = layout.commit_log
    if not files.file_size:
        return
    for file in files.files:
        _check_length(layout, file)
    log = CommitLog(layout)
    for file, following in pairwise(files.files):
        overlaps = file.base + files.file_size > following.base
        if overlaps and log.sound_frame_at(following.base) is not None:
            raise _no_place(layout, following)


def _no_place(layout: StoreLayout, file: StoreFile) -> StoreUnavailable:
    return StoreUnavailable(
        f"{layout.filesystem.full_path(file.path)}: no log file of {layout.commit_log.file_size} "
        f"bytes can have this name, but its messages belong there: {_SIZES_DIFFER}"
    )


def _check_length(layout: StoreLayout, file: StoreFile) -> None:
    """Raise StoreUnavailable if a file has a message beyond the file size in the settings."""
    size = layout.commit_log.file_size
    place = message_behind(layout, file, size)
    if place is not None:
        raise StoreUnavailable(
            f"{layout.filesystem.full_path(file.path)}: {file.size} bytes, with a message at "
            f"{place}, but the size of the log's files is {size}: {_SIZES_DIFFER}"
        )


def refuse_wrong_names(layout: StoreLayout) -> None:
    """Raise StoreUnavailable if a log file has a wrong name: RocketMQ would use the wrong name."""
    names = layout.by_content().log_names
    if names.are_right:
        return
    path, reason = next(
        ((one.path, one.reason) for one in names.renames), (names.doubts or (("", ""),))[0]
    )
    raise StoreUnavailable(
        f"{layout.filesystem.full_path(path)}: {reason}. RocketMQ uses the names, and its recovery "
        f"would cut the log there. Nothing was changed. Run `logquarry recover {layout.root} "
        "--apply` in mode safe first: it renames the files"
    )


def leave_out(layout: StoreLayout, misnamed: list[tuple[StoreFile, str]]) -> None:
    """Remove files from the layout's list of log files. The files themselves are not touched."""
    gone = {file for file, _ in misnamed}
    files = layout.commit_log
    left = tuple(file for file in files.files if file not in gone)
    layout.use_commit_log(FileSequence(left, files.file_size, files.has_heads))
