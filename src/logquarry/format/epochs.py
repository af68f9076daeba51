"""The epochs of controller mode: the file ``epochFileCheckpoint`` (``EpochFileCache``).

A new epoch begins when the controller elects a master. The file has a line with the number of
epochs, a line with a CRC, and a line ``EPOCH-OFFSET`` for each epoch. The CRC covers the lines
``EPOCH-OFFSET``; OFFSET is the physical offset at which the epoch begins.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

EPOCH_FILE: Final = "epochFileCheckpoint"
BACKUP_FILE: Final = f"{EPOCH_FILE}.bak"
"""Copy of the previous version of :data:`EPOCH_FILE`. A broker reads this copy if the file is
invalid.
"""

_FILE: Final = re.compile(
    r"(\d{1,9})\r?\n(-?\d{1,11})((?:\r?\n\d{1,9}-\d{1,19})*)(?:\r?\n)?", re.ASCII
)
_CRC_MASK: Final = 0x7FFFFFFF
_UNCHECKED: Final = 0
"""A broker does not check the epochs of a file with this CRC (``NOT_CHECK_CRC_MAGIC_CODE``)."""


def decode_epochs(data: bytes) -> list[int]:
    """Return the physical offsets at which the epochs begin. Raises ValueError if the file is
    invalid.
    """
    found = _FILE.fullmatch(data.decode("ascii", "replace"))
    if found is None:
        raise ValueError("it is not a list of epochs")
    count, crc, epochs = found.groups()
    lines = epochs.split()
    starts = [int(line.partition("-")[2]) for line in lines]
    if int(count) != len(starts):
        raise ValueError(f"its first line says {count} epochs, but the file has {len(starts)}")
    actual = zlib.crc32("".join(f"{line}\n" for line in lines).encode()) & _CRC_MASK
    if int(crc) not in (_UNCHECKED, actual):
        raise ValueError(f"the file contains the CRC {crc}, but its epochs have the CRC {actual}")
    return starts
