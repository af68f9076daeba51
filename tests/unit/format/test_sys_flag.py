"""Do compressed bodies come back, and broken ones and bombs stop short?"""

from __future__ import annotations

import tracemalloc
import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import DecompressionError
from logquarry.format import sys_flag
from logquarry.format.sys_flag import decompress, is_compressed

ZLIB_49 = sys_flag.COMPRESSED
METHODS = {
    "zlib as of 4.9.3": ZLIB_49,
    "zlib": ZLIB_49 | sys_flag.COMPRESSION_ZLIB,
    "lz4": ZLIB_49 | sys_flag.COMPRESSION_LZ4,
    "zstd": ZLIB_49 | sys_flag.COMPRESSION_ZSTD,
}
FLAGS = pytest.mark.parametrize("flag", METHODS.values(), ids=METHODS)


def compress(content: bytes, flag: int) -> bytes:
    method = flag & sys_flag.COMPRESSION_MASK
    if method in (sys_flag.COMPRESSION_LZ4, sys_flag.COMPRESSION_ZSTD):
        sink = pa.BufferOutputStream()
        codec = "lz4" if method == sys_flag.COMPRESSION_LZ4 else "zstd"
        with pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(content)
        return bytes(sink.getvalue())
    return zlib.compress(content)


@FLAGS
@given(st.binary(max_size=2000) | st.integers(0, 100_000).map(bytes))
def test_what_was_compressed_comes_back(flag: int, content: bytes) -> None:
    assert decompress(compress(content, flag), flag) == content


@FLAGS
def test_the_limit_is_the_most_that_comes(flag: int) -> None:
    body = compress(bytes(1000), flag)
    assert decompress(body, flag, limit=1000) == bytes(1000)
    with pytest.raises(DecompressionError, match="more than 999 bytes"):
        decompress(body, flag, limit=999)


@FLAGS
def test_a_bomb_takes_no_more_memory_than_the_limit(flag: int) -> None:
    bomb = compress(bytes(40 << 20), flag)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(DecompressionError, match="more than"):
            decompress(bomb, flag, limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert pa.total_allocated_bytes() == before


@FLAGS
def test_every_truncation_is_an_error(flag: int) -> None:
    body = compress(b"0123456789" * 30 + bytes(range(256)), flag)
    for length in range(1, len(body)):
        with pytest.raises(DecompressionError):
            decompress(body[:length], flag)


@FLAGS
@given(st.binary(min_size=1, max_size=100))
def test_garbage_is_an_error_or_content(flag: int, garbage: bytes) -> None:
    try:
        decompress(garbage, flag, limit=1 << 16)
    except DecompressionError as error:
        assert str(error)


@FLAGS
def test_another_method_than_the_flag_says_is_an_error(flag: int) -> None:
    for other in METHODS.values():
        same = {flag, other} <= {METHODS["zlib"], ZLIB_49}
        if flag != other and not same:
            with pytest.raises(DecompressionError):
                decompress(compress(b"content", other), flag)


def test_what_is_not_compressed_is_left_alone() -> None:
    assert decompress(b"plain", 0) == b"plain"
    assert decompress(b"plain", sys_flag.COMPRESSION_LZ4) == b"plain"
    assert decompress(b"", ZLIB_49) == b""
    assert is_compressed(1)
    assert not is_compressed(0x700)


@pytest.mark.parametrize("method", [0x400, 0x500, 0x600, 0x700])
def test_unknown_methods_are_an_error(method: int) -> None:
    with pytest.raises(DecompressionError, match=f"unknown compression {method >> 8}"):
        decompress(b"body", ZLIB_49 | method)


def test_a_lack_of_memory_is_no_invalid_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise pa.ArrowMemoryError("realloc of size 256 failed")

    monkeypatch.setattr(pa, "CompressedInputStream", refuse)
    with pytest.raises(MemoryError):
        sys_flag.decompress(b"body", sys_flag.COMPRESSED | sys_flag.COMPRESSION_ZSTD)
