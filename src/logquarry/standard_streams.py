"""Keeps the files of a store away from the descriptors 0, 1 and 2."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

_LAST: Final = 2
"""The descriptor of standard error."""


def reserve() -> None:
    """Open the null device at each of the descriptors 0, 1 and 2 that is closed.

    A process can start with closed standard streams (``<&- 2>&-`` in a shell). The system gives the
    lowest free descriptor to the next file that is opened, for example to the checkpoint. A library
    in C, or a child process such as Java, still writes its messages to the descriptors 1 and 2. So
    without this call, such a message would overwrite bytes of the store.
    """
    # If the process has no free descriptor, or no null device, the caller's own opening fails too,
    # or the streams stay closed.
    with suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
