"""CRC-32 of bytes, by the quickest there is: zlib-ng's, where that is installed."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
