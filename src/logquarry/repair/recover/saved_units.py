"""Units of lost messages, on the disk while their queue is cut and written anew.

A unit that names damage of the log is known to its queue alone. An interrupt between the cut and
what is written behind it would leave fillers in their place, so that they are noted before.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.format import queue_entry
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.log.layout import COMMIT_LOG, CONSUME_QUEUE, INDEX, TRANSACTION
from logquarry.read.log_queues import QueueKey

logger = logging.getLogger(__name__)

NAME: Final = "kept_units.json"
Saved = Mapping[QueueKey, Mapping[int, bytes]]


def load_units(path: Path) -> dict[QueueKey, dict[int, QueueEntry]]:
    """What an interrupted recovery has noted; nothing where there is none, or it cannot be read."""
    found: dict[QueueKey, dict[int, QueueEntry]] = {}
    try:
        for queue in json.loads(path.read_bytes()):
            units = found.setdefault((str(queue["topic"]), int(queue["queue_id"])), {})
            for offset, data in queue["units"]:
                units[int(offset)] = queue_entry.decode_at(bytes.fromhex(data)[:UNIT_SIZE], 0)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        logger.warning("%s: %s", path, error)
        return {}
    return found


def save_units(disk: Disk, path: Path, saved: Saved) -> None:
    """Note them, durably; take an old note away where there are none.

    Raises:
        StoreUnavailable: if the disk does not take them.
    """
    document = [
        {
            "topic": topic,
            "queue_id": queue_id,
            "units": [[offset, unit.hex()] for offset, unit in sorted(units.items())],
        }
        for (topic, queue_id), units in sorted(saved.items())
        if units
    ]
    if document:
        disk.replace(path, json.dumps(document).encode())
    else:
        disk.remove(path)


# --------------------------------------------------------------------------------------------------
# Brings to the disk what a recovery only read, and so may be nowhere but in the page cache.
#
# The process that wrote it may have died before its sync, or of a sync that failed. Of the latter
# the system takes the pages for written, so that those of the log that are in doubt are written
# again.

_PARTS: Final = (COMMIT_LOG, CONSUME_QUEUE, INDEX, TRANSACTION)
_COPY_BYTES: Final = 1 << 20


def sync_files(
    disk: Disk, root: Path, *, write_from: int, log_end: int, parts: tuple[str, ...] = _PARTS
) -> None:
    """Wait until the files of a store are on the disk, and their names.

    Args:
        disk: what it is on.
        root: its folder.
        write_from: physical offset from which on the bytes of the log are written again, up to
        log_end: where the log ends.
        parts: which folders of it.

    Raises:
        StoreUnavailable: if the disk fails.
    """
    for part in parts:
        start = write_from if part == COMMIT_LOG else None
        for folder, _, names in os.walk(root / part):
            for name in names:
                if name.isascii() and name.isdigit():
                    _sync_file(disk, Path(folder, name), start, log_end)
            disk.sync_names(Path(folder))
    disk.sync_names(root)
    disk.sync_parent(root)


def _sync_file(disk: Disk, path: Path, write_from: int | None, log_end: int) -> None:
    try:
        descriptor = disk.open(path)
    except OSError as error:
        raise disk.refused(path, error) from error
    try:
        if write_from is not None:
            base = int(path.name)
            _write_again(disk, descriptor, write_from - base, log_end - base)
        disk.sync(descriptor, path)
    except OSError as error:
        raise disk.refused(path, error) from error
    finally:
        disk.let_go(descriptor)


def _write_again(disk: Disk, descriptor: int, start: int, stop: int) -> None:
    """Write the bytes of a file that stand there from one position to another."""
    position, stop = max(0, start), min(disk.size(descriptor), stop)
    while position < stop:
        data = disk.read(descriptor, min(_COPY_BYTES, stop - position), position)
        if not data:
            break
        disk.write_all(descriptor, data, position)
        position += len(data)
