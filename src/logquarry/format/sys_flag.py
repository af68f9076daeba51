"""The bits of SYSFLAG (``MessageSysFlag``): of 4.9.3, and of 4.9.8 and 5.x for readers."""

from __future__ import annotations

from typing import Final

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


def transaction_type(sys_flag: int) -> int:
    """One of the ``TRANSACTION_*`` values."""
    return sys_flag & TRANSACTION_MASK


def advances_queue(sys_flag: int) -> bool:
    """Whether a frame with this flag gets a queue entry (transaction types NOT and COMMIT)."""
    return transaction_type(sys_flag) in (TRANSACTION_NOT, TRANSACTION_COMMIT)
