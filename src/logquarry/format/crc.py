"""CRC-32 by the fastest available library: zlib-ng if it is installed, else zlib."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
