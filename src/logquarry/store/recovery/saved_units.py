"""Units of lost messages, on the disk while their queue is cut and written anew.

A unit that names damage of the log is known to its queue alone. An interrupt between the cut and
what is written behind it would leave fillers in their place, so that they are noted before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from logquarry.format import queue_entry
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.store.disk.disk import Disk
from logquarry.store.queue.log_queues import QueueKey

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
