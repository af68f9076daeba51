"""The room for the CRC of a whole frame at the end of its properties."""

from __future__ import annotations

import pytest

from logquarry.format.property_crc import SIZE, with_room

CRC = b"__CRC32#\x010123456789\x02"


@pytest.mark.parametrize(
    ("properties", "left"),
    [
        (b"", b""),
        (CRC, b""),
        (CRC[:-1], b""),
        (CRC + CRC, b""),
        (b"a\x01b", b"a\x01b\x02"),
        (b"a\x01b\x02" + CRC, b"a\x01b\x02"),
        (CRC + b"a\x01b\x02" + CRC, b"a\x01b\x02"),
        (b"a\x01x__CRC32#\x01y\x02" + CRC, b"a\x01x__CRC32#\x01y\x02"),
        (b"x__CRC32#\x01y\x02", b"x__CRC32#\x01y\x02"),
        (b"a\x01__CRC32#\x02" + CRC + b"c\x01d", b"a\x01__CRC32#\x02c\x01d\x02"),
    ],
)
def test_each_old_crc_is_removed(properties: bytes, left: bytes) -> None:
    assert with_room(properties) == left + bytes(SIZE)
