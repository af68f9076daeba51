"""Files with unreadable blocks, for tests: a probe that fails like a bad disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Final

from logquarry.log.readable import BLOCK, Probe

_ERROR: Final = errno.EIO


class BadBlocks(Probe):
    """Simulates blocks that the disk cannot read.

    Use it with :func:`logquarry.log.readable.probed_by`.

    Args:
        blocks: end of a path, and the number of the block of 4,096 bytes in that file.
        has_populate: whether the system has ``MADV_POPULATE_READ``.
    """

    def __init__(self, blocks: Iterable[tuple[str, int]], *, has_populate: bool = True) -> None:
        self._blocks = tuple(blocks)
        self._has_populate = has_populate

    def populate(self, path: str, position: int, address: int, length: int) -> bool | None:
        """See :meth:`Probe.populate`."""
        if not self._has_populate:
            return None
        return not self._fails(path, position, length)

    def read(self, path: str, descriptor: int, position: int, length: int) -> bytes:
        """See :meth:`Probe.read`."""
        if self._fails(path, position, length):
            raise OSError(_ERROR, os.strerror(_ERROR))
        return super().read(path, descriptor, position, length)

    def _fails(self, path: str, position: int, length: int) -> bool:
        return any(
            path.endswith(name)
            and number * BLOCK < position + length
            and position < (number + 1) * BLOCK
            for name, number in self._blocks
        )
