"""The bits of SYSFLAG (``MessageSysFlag``), and the decompression of bodies.

RocketMQ 4.9.3 compresses bodies with zlib. Since 4.9.8, RocketMQ can also use LZ4 or Zstandard.
"""

from __future__ import annotations

import io
import zlib
from typing import Final

from logquarry.errors import DecompressionError
from logquarry.text import counted

COMPRESSED: Final = 0x1
MULTI_TAGS: Final = 0x2
TRANSACTION_NOT: Final = 0x0
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC
TRANSACTION_MASK: Final = 0xC
BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300

DEFAULT_LIMIT: Final = 64 << 20
"""Maximum bytes of one decompressed body. A small body that decompresses to more bytes (a zip bomb)
raises an error instead of filling the memory.
"""


def transaction_type(sys_flag: int) -> int:
    """Return one of the ``TRANSACTION_*`` values."""
    return sys_flag & TRANSACTION_MASK


def advances_queue(sys_flag: int) -> bool:
    """Whether a frame gets a queue entry: its transaction type is NOT or COMMIT."""
    return transaction_type(sys_flag) in (TRANSACTION_NOT, TRANSACTION_COMMIT)


def is_compressed(flag: int) -> bool:
    """Whether SYSFLAG marks the body as compressed."""
    return bool(flag & COMPRESSED)


def decompress(body: bytes, flag: int, *, limit: int = DEFAULT_LIMIT) -> bytes:
    """Decompress a body by its SYSFLAG; return an uncompressed body unchanged.

    Raises DecompressionError if the body is damaged, or has more than ``limit`` bytes after the
    decompression.
    """
    if not is_compressed(flag) or not body:
        return body
    method = flag & COMPRESSION_MASK
    if method in (0, COMPRESSION_ZLIB):
        return _zlib(body, limit)
    if method == COMPRESSION_LZ4:
        return _stream(body, "lz4", limit)
    if method == COMPRESSION_ZSTD:
        return _stream(body, "zstd", limit)
    raise DecompressionError(f"unknown compression {method >> 8} in SYSFLAG {flag:#x}")


def _zlib(body: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise DecompressionError(f"not a zlib body: {error}") from error
    if len(content) > limit:
        raise DecompressionError(f"more than {counted(limit, 'byte')} of content")
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
                    raise DecompressionError(f"more than {counted(limit, 'byte')} of content")
    except MemoryError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise DecompressionError(f"not a {codec} body: {error}") from error
    return b"".join(parts)
