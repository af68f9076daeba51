"""The address of zlib-ng's CRC-32, for kernels and compiled modules."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def crc32_address() -> int:
    """Address of ``crc32(uint32, const uint8_t *, size_t)`` in zlib-ng, or 0.

    With 0 the kernels compute the CRC themselves, which is slower.
    """
    try:
        from zlib_ng import zlib_ng

        function = ctypes.CDLL(zlib_ng.__file__).zng_crc32_z
    except (ImportError, OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
