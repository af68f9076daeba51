"""Decompression of bodies: zlib (RocketMQ 4.9.3), LZ4 and Zstandard frames (from 4.9.8 on)."""

from __future__ import annotations

import io
import zlib
from typing import Final

from logquarry.errors import DecompressionError
from logquarry.format import sys_flag

DEFAULT_LIMIT: Final = 64 << 20
"""Maximum bytes of one decompressed body: a zip bomb raises an error before it fills the memory."""


def is_compressed(flag: int) -> bool:
    """Whether SYSFLAG marks the body as compressed."""
    return bool(flag & sys_flag.COMPRESSED)


def decompress(body: bytes, flag: int, *, limit: int = DEFAULT_LIMIT) -> bytes:
    """Decompress a body stored with SYSFLAG ``flag``; returns it unchanged if not compressed.

    Raises:
        DecompressionError: if the bytes do not decompress, or to more than ``limit`` bytes.
    """
    if not is_compressed(flag) or not body:
        return body
    method = flag & sys_flag.COMPRESSION_MASK
    if method in (0, sys_flag.COMPRESSION_ZLIB):
        return _zlib(body, limit)
    if method == sys_flag.COMPRESSION_LZ4:
        return _stream(body, "lz4", limit)
    if method == sys_flag.COMPRESSION_ZSTD:
        return _stream(body, "zstd", limit)
    raise DecompressionError(f"unknown compression {method >> 8} in SYSFLAG {flag:#x}")


def _zlib(body: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise DecompressionError(f"not a zlib body: {error}") from error
    if len(content) > limit:
        raise DecompressionError(f"more than {limit} bytes of content")
    if not inflater.eof:
        raise DecompressionError("the zlib body ends too early")
    return content


def _stream(body: bytes, codec: str, limit: int) -> bytes:
    import pyarrow as pa

    parts: list[bytes] = []
    total = 0
    try:
        with pa.CompressedInputStream(io.BytesIO(body), codec) as stream:
            while part := stream.read(min(1 << 20, limit + 1 - total)):
                parts.append(part)
                total += len(part)
                if total > limit:
                    raise DecompressionError(f"more than {limit} bytes of content")
    except (OSError, pa.ArrowException) as error:
        raise DecompressionError(f"not a {codec} body: {error}") from error
    return b"".join(parts)
