"""Renames, syncs and saved queue entries of a recovery.

A rename never replaces a file. The entry of a lost message exists only in its queue. So a recovery
saves such entries in a file before it cuts the queue: if it were interrupted after that, the next
recovery would have to write fillers instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.format import queue_entry
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.log.log_names import RENAMING, right_path
from logquarry.log.readable import BLOCK
from logquarry.log.store_files import (
    BATCH_QUEUE,
    COMMIT_LOG,
    CONSUME_QUEUE,
    INDEX,
    TRANSACTION,
)
from logquarry.read.log_queues import QueueKey
from logquarry.repair.recover.plan import Step
from logquarry.systems import folders_below, read_file


def rename_files(disk: Disk, root: Path, steps: Sequence[Step]) -> None:
    """Carry out the RENAME steps of a plan, and sync the folders.

    If two files swap names, one of them first gets a temporary name, which contains its new name.

    Raises:
        StoreUnavailable: if a rename fails, or if a file that is not renamed has one of the new
            names.
    """
    left: dict[Path, Path] = {}
    for step in steps:
        assert step.offset is not None
        left[root / step.file] = root / right_path(step.offset)
    while left:
        ready = [path for path, target in left.items() if not target.exists()]
        for path in ready:
            disk.move(path, left.pop(path))
        if ready:
            continue
        path, target = next(iter(left.items()))
        if not any(target == other for other in left):
            raise StoreUnavailable(f"{target}: it exists, so {path} cannot get its name")
        made = free_path(target.with_name(f"{target.name}{RENAMING}"))
        disk.move(path, made)
        left[made] = left.pop(path)


def free_path(path: Path) -> Path:
    """Return ``path`` if no file has this path. Otherwise, append the first number that makes it
    free.
    """
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(one for one in chain([path], numbered) if not one.exists())


logger = logging.getLogger(__name__)

KEPT_ENTRIES: Final = "kept_units.json"


def load_kept(path: Path) -> dict[QueueKey, dict[int, QueueEntry]]:
    """Return the entries that an interrupted recovery saved; {} if their file is missing or
    invalid.
    """
    found: dict[QueueKey, dict[int, QueueEntry]] = {}
    try:
        for queue in json.loads(read_file(path)):
            entries = found.setdefault((str(queue["topic"]), int(queue["queue_id"])), {})
            for offset, data in queue["units"]:
                entries[int(offset)] = queue_entry.decode_at(bytes.fromhex(data)[:UNIT_SIZE], 0)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        logger.warning("%s: %s", path, error)
        return {}
    return found


def save_kept(disk: Disk, path: Path, kept: Mapping[QueueKey, Mapping[int, bytes]]) -> None:
    """Save entries in a file for the next recovery, and sync it. Without entries,
    delete the file.
    """
    document = [
        {
            "topic": topic,
            "queue_id": queue_id,
            "units": [[offset, entry.hex()] for offset, entry in sorted(entries.items())],
        }
        for (topic, queue_id), entries in sorted(kept.items())
        if entries
    ]
    if document:
        disk.replace(path, json.dumps(document).encode())
    else:
        disk.remove(path)


# -------------------------------------------------------------------------------- files of a store
# The last writer may have ended without a successful sync. If its sync failed, the operating system
# takes the pages for written, and another sync would not write them. So the recovery writes these
# bytes again.
_PARTS: Final = (CONSUME_QUEUE, BATCH_QUEUE, INDEX, TRANSACTION)
_COPY_BYTES: Final = 1 << 20


def sync_files(
    disk: Disk,
    root: Path,
    *,
    rewrite: tuple[int, int] = (0, 0),
    log: tuple[str, ...] = (COMMIT_LOG,),
    parts: tuple[str, ...] = _PARTS,
) -> None:
    """Sync the files of a store and their names.

    ``rewrite`` has two physical offsets. The bytes of the log between them are first written again.
    """
    for part in (*log, *parts):
        again = rewrite if part in log else (0, 0)
        for folder, names in folders_below(root / part, partial(_refuse, disk)):
            for name in names:
                if name.isascii() and name.isdigit():
                    _sync_file(disk, folder / name, *again)
            disk.sync_names(folder)
    disk.sync_names(root)
    disk.sync_parent(root)


def _refuse(disk: Disk, folder: Path, error: OSError) -> None:
    # The last writer cannot have written to a folder that this user may not list, for example
    # lost+found of the file system.
    if not isinstance(error, PermissionError):
        raise disk.refused(folder, error) from error


def _sync_file(disk: Disk, path: Path, start: int, stop: int) -> None:
    base = int(path.name)
    with disk.writing(path) as descriptor:
        _write_again(disk, descriptor, start - base, stop - base)


def _write_again(disk: Disk, descriptor: int, start: int, stop: int) -> None:
    """Read a range of a file, and write the same bytes again. Skip blocks that cannot be read."""
    position, stop = max(0, start), min(disk.size(descriptor), stop)
    most = _COPY_BYTES
    while position < stop:
        block_end = (position // BLOCK + 1) * BLOCK
        try:
            data = disk.read(descriptor, min(most, stop - position), position)
        except OSError:
            if most > block_end - position:
                most = block_end - position
                continue
            # The block is not in memory, so no writer has changed it: there is nothing to write.
            position = block_end
            continue
        if not data:
            break
        disk.write_all(descriptor, data, position)
        position += len(data)
        # After one unreadable block, read the next blocks one by one.
        most = most if most == _COPY_BYTES else BLOCK
