"""Machine instructions for the kernels: unaligned loads and stores, memcpy, zlib-ng's CRC-32.

Numba has no unaligned big-endian load and no memcpy; these intrinsics do both, over addresses. An
address keeps no buffer alive and is not bounds-checked: callers hold the buffer and check every
index first.

A kernel that captures a ctypes function is not cached, so kernels take the CRC function's address
as an argument.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from logquarry.systems import cache_folder

_BYTE = ir.IntType(8)


def _prepare_cache() -> None:
    """Set numba's cache folder if numba cannot write to the package's folder.

    Numba itself only tries the home directory; if that is not writable either, ``cache=True``
    raises "no locator available".
    """
    if os.environ.get("NUMBA_CACHE_DIR") or os.access(Path(__file__).parent, os.W_OK):
        return
    numba.config.CACHE_DIR = str(cache_folder() / "kernels")


_prepare_cache()


def _load(width: int) -> Any:
    def typed(typingctx: Any, address: Any) -> Any:
        signature = {1: types.uint8, 4: types.int32, 8: types.int64}[width](types.uintp)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            word = ir.IntType(8 * width)
            pointer = builder.inttoptr(args[0], word.as_pointer())
            value = builder.load(pointer, align=1)
            return builder.bswap(value) if width > 1 else value

        return signature, codegen

    typed.__name__ = f"load{8 * width}"
    return intrinsic(typed)


load_u8 = _load(1)
load_i32 = _load(4)
"""A big-endian signed 32-bit integer at an address."""
load_i64 = _load(8)
"""A big-endian signed 64-bit integer at an address."""


def _store(width: int) -> Any:
    def typed(typingctx: Any, address: Any, value: Any) -> Any:
        kind = {1: types.uint8, 2: types.int16, 4: types.int32, 8: types.int64}[width]

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(8 * width).as_pointer())
            word = builder.bswap(args[1]) if width > 1 else args[1]
            builder.store(word, pointer, align=1)
            return context.get_dummy_value()

        return types.none(types.uintp, kind), codegen

    typed.__name__ = f"store{8 * width}"
    return intrinsic(typed)


store_u8 = _store(1)
store_i16 = _store(2)
"""Store a big-endian signed 16-bit integer; higher bits are cut off."""
store_i32 = _store(4)
store_i64 = _store(8)


@intrinsic
def load_raw64(typingctx: Any, address: Any) -> Any:
    """Eight bytes at an address in the machine's byte order."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.uintp), codegen


def _store_raw(width: int) -> Any:
    def typed(typingctx: Any, address: Any, value: Any) -> Any:
        kind = {4: types.int32, 8: types.int64}[width]

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(8 * width).as_pointer())
            builder.store(args[1], pointer, align=1)
            return context.get_dummy_value()

        return types.none(types.uintp, kind), codegen

    typed.__name__ = f"store_raw{8 * width}"
    return intrinsic(typed)


store_raw32 = _store_raw(4)
"""Store a 32-bit integer in the machine's byte order; higher bits are cut off."""
store_raw64 = _store_raw(8)


@intrinsic
def trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Zero bits below the lowest set bit of a 64-bit word that is not 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), codegen


def _copy_word(width: int) -> Any:
    def typed(typingctx: Any, target: Any, source: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            word = ir.IntType(8 * width).as_pointer()
            value = builder.load(builder.inttoptr(args[1], word), align=1)
            builder.store(value, builder.inttoptr(args[0], word), align=1)
            return context.get_dummy_value()

        return types.none(types.uintp, types.uintp), codegen

    typed.__name__ = f"copy{8 * width}"
    return intrinsic(typed)


copy16 = _copy_word(2)
"""Copy two bytes from one address to another."""
copy32 = _copy_word(4)
copy64 = _copy_word(8)


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        to, source_address, length = args
        cgutils.raw_memcpy(
            builder,
            builder.inttoptr(to, _BYTE.as_pointer()),
            builder.inttoptr(source_address, _BYTE.as_pointer()),
            length,
            1,
        )
        return context.get_dummy_value()

    return types.none(types.uintp, types.uintp, types.intp), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at an address for a read. Never faults."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        pointer = builder.inttoptr(args[0], _BYTE.as_pointer())
        instruction = builder.module.declare_intrinsic(
            "llvm.prefetch",
            (_BYTE.as_pointer(),),
            ir.FunctionType(ir.VoidType(), (_BYTE.as_pointer(), word, word, word)),
        )
        # The arguments after the address: 0 for a read, 3 to keep the line in all caches, 1 for the
        # data cache.
        builder.call(instruction, (pointer, word(0), word(3), word(1)))
        return context.get_dummy_value()

    return types.none(types.uintp), codegen


@intrinsic
def call_crc32(typingctx: Any, function: Any, address: Any, count: Any) -> Any:
    """``function(0, address, count)``: a CRC-32 with zlib's polynomial."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        prototype = ir.FunctionType(word, (word, _BYTE.as_pointer(), ir.IntType(64)))
        crc32 = builder.inttoptr(args[0], prototype.as_pointer())
        data = builder.inttoptr(args[1], _BYTE.as_pointer())
        return builder.call(crc32, (word(0), data, args[2]))

    return types.uint32(types.uintp, types.uintp, types.intp), codegen
