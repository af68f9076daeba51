"""What all kernels share: how they are compiled, and places in a frame from the format's tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from logquarry.format import frame, sys_flag

Array = npt.NDArray[Any]


def kernel(function: Any) -> Any:
    """Compile on the first call. The result is kept on disk and runs without the GIL."""
    return njit(cache=True, nogil=True, error_model="numpy")(function)


_H = frame.HEAD.offsets
AT_MAGIC = _H["magic"]
AT_CRC = _H["body_crc"]
AT_PHYSICAL_OFFSET = _H["physical_offset"]
AT_SYS_FLAG = _H["sys_flag"]
HEAD_SIZE = frame.HEAD.size
STORE_TIME_SIZE = frame.STORE_TIME.size
TAIL_SIZE = frame.TAIL.size
AT_BODY_LENGTH = frame.TAIL.offsets["body_length"]
BLANK_SIZE = frame.BLANK.size
FIXED_V1 = frame.FIXED_SIZE_V1
HOST_V4 = frame.HOST_SIZE_V4
HOST_EXTRA = frame.HOST_SIZE_V6 - frame.HOST_SIZE_V4
BODY_AT_V4 = frame.BODY_POSITION
BORN_V6 = sys_flag.BORN_HOST_V6
STORE_V6 = sys_flag.STORE_HOST_V6
TRANSACTION_MASK = sys_flag.TRANSACTION_MASK


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


MAGIC_V1 = np.int32(_signed(frame.MAGIC_V1))
MAGIC_V2 = np.int32(_signed(frame.MAGIC_V2))
MAGIC_BLANK = np.int32(_signed(frame.MAGIC_BLANK))
MAGIC_FIRST = frame.MAGIC_V1 >> 24
