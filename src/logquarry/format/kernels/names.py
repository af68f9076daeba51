"""Names of properties that a kernel looks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from logquarry.format.kernels.base import Array, kernel
from logquarry.format.native import load_u8


def name_table(names: Sequence[str]) -> tuple[Array, Array, Array]:
    """The bytes of some names, the length of each, and where each starts."""
    lengths = np.array([len(name.encode()) for name in names])
    return (
        np.frombuffer("".join(names).encode(), np.uint8).copy(),
        lengths,
        (np.cumsum(lengths) - lengths),
    )


@kernel
def which_name(key: int, length: int, data: Array, lengths: Array, starts: Array) -> int:
    """The number of the name that stands at an address, -1 for none of them."""
    for name in range(lengths.shape[0]):
        if lengths[name] == length:
            same = True
            start = starts[name]
            for k in range(length):
                if load_u8(key + k) != data[start + k]:
                    same = False
                    break
            if same:
                return name
    return -1
