"""Functions that all kernels use: they compile kernels, load, store and copy bytes, compute CRC-32s
and hashes, and check UTF-8.

Numba has no unaligned big-endian load and no memcpy, so this module defines them as intrinsics,
functions that generate LLVM code. The arguments of these intrinsics are plain memory addresses. An
intrinsic does not keep the buffer at the address alive, and does not check its bounds. So callers
must hold a reference to the buffer, and check each index before the call. Numba caches no kernel
that reads a ctypes function from a global variable, so the CRC function is an argument of kernels.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import caching, cgutils
from numba.extending import intrinsic

from logquarry.errors import LIMITS
from logquarry.format import frame, java, sys_flag
from logquarry.systems import cache_folder, held

_BYTE = ir.IntType(8)


def _prepare_cache() -> None:
    """If numba cannot write to the package's folder, set numba's cache folder.

    Without this setting, numba tries only the package's folder and the home directory.
    """
    if os.environ.get("NUMBA_CACHE_DIR") or os.access(Path(__file__).parent, os.W_OK):
        return
    numba.config.CACHE_DIR = str(cache_folder() / "kernels")


_prepare_cache()


def sources_digest(folder: Path) -> str:
    """Return a hash of all Python files in a folder and its subfolders."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        # An editor may have made a hidden file or link.
        if not path.name.startswith("."):
            found.update(path.read_bytes())
    return found.hexdigest()


_KERNELS: Final = Path(__file__).parent
_DIGEST: Final = sources_digest(_KERNELS.parent)


def _stamped(locator: Any) -> Any:
    class Locator(locator):
        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            if Path(py_file).parent != _KERNELS:
                return None
            return super().from_function(py_func, py_file)

        def get_source_stamp(self) -> Any:
            return super().get_source_stamp(), _DIGEST

    return Locator


# Numba compiles a kernel again only if the kernel's own file has changed. But a kernel contains the
# code of functions from other files, and constants from the formats. After an upgrade, numba would
# load such a kernel with the old code. So the cache of a kernel depends on all these files.
_CACHE: Final = caching.FunctionCache._impl_class
_CACHE._locator_classes = [*map(_stamped, _CACHE._locator_classes), *_CACHE._locator_classes]


class _KernelCache(caching.FunctionCache):
    # The cached code of one kernel. If the files of the cache are invalid, belong to another user,
    # or do not fit on the disk, numba compiles the kernel.
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            # If memory or descriptors are used up, the cache can be sound, so keep it.
            is_limit = isinstance(error, MemoryError) or getattr(error, "errno", None) in LIMITS
            return self.disable() if is_limit else self._call(self.flush)

    def save_overload(self, sig: Any, data: Any) -> None:
        self._call(super().save_overload, sig, data)

    def _call(self, change: Any, *arguments: Any) -> None:
        try:
            change(*arguments)
        except Exception:
            self.disable()


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(kind.bitwidth).as_pointer())


def _load(kind: Any, *, swaps: bool) -> Any:
    def typed(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], kind), align=1)
            return builder.bswap(value) if swaps else value

        return kind(types.uintp), codegen

    typed.__name__ = f"load_{kind}_{swaps}"
    return intrinsic(typed)


load_u8 = _load(types.uint8, swaps=False)
load_i16 = _load(types.int16, swaps=True)
load_i32 = _load(types.int32, swaps=True)
load_i64 = _load(types.int64, swaps=True)
load_raw64 = _load(types.uint64, swaps=False)
"""Return the eight bytes at an address as a number in the machine's byte order."""


def _store(kind: Any, *, swaps: bool) -> Any:
    def typed(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            word = builder.bswap(args[1]) if swaps else args[1]
            builder.store(word, _pointer(builder, args[0], kind), align=1)
            return context.get_dummy_value()

        return types.none(types.uintp, kind), codegen

    typed.__name__ = f"store_{kind}_{swaps}"
    return intrinsic(typed)


store_u8 = _store(types.uint8, swaps=False)
store_i16 = _store(types.int16, swaps=True)
"""Store the low 16 bits of an integer, big-endian."""
store_i32 = _store(types.int32, swaps=True)
store_i64 = _store(types.int64, swaps=True)
store_raw32 = _store(types.int32, swaps=False)
"""Store the low 32 bits of an integer, in the machine's byte order."""
store_raw64 = _store(types.int64, swaps=False)


@intrinsic
def trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Return the number of zero bits below the word's lowest one bit. The word must not be 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), codegen


def _copy_word(kind: Any) -> Any:
    def typed(typingctx: Any, target: Any, source: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[1], kind), align=1)
            builder.store(value, _pointer(builder, args[0], kind), align=1)
            return context.get_dummy_value()

        return types.none(types.uintp, types.uintp), codegen

    typed.__name__ = f"copy_{kind}"
    return intrinsic(typed)


copy16 = _copy_word(types.int16)
copy32 = _copy_word(types.int32)
copy64 = _copy_word(types.int64)


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy bytes with memcpy."""

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
    """Load the cache line at an address into the processor's cache. An invalid address causes no
    fault.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        pointer = builder.inttoptr(args[0], _BYTE.as_pointer())
        instruction = builder.module.declare_intrinsic(
            "llvm.prefetch",
            (_BYTE.as_pointer(),),
            ir.FunctionType(ir.VoidType(), (_BYTE.as_pointer(), word, word, word)),
        )
        # The last three arguments mean: prefetch for a read (0), keep the line in all caches (3),
        # and use the data cache (1).
        builder.call(instruction, (pointer, word(0), word(3), word(1)))
        return context.get_dummy_value()

    return types.none(types.uintp), codegen


@intrinsic
def call_crc32(typingctx: Any, function: Any, address: Any, count: Any) -> Any:
    """Call ``function(0, address, count)``, which returns a CRC-32 with zlib's polynomial."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        prototype = ir.FunctionType(word, (word, _BYTE.as_pointer(), ir.IntType(64)))
        crc32 = builder.inttoptr(args[0], prototype.as_pointer())
        data = builder.inttoptr(args[1], _BYTE.as_pointer())
        return builder.call(crc32, (word(0), data, args[2]))

    return types.uint32(types.uintp, types.uintp, types.intp), codegen


Array = npt.NDArray[Any]


def kernel(function: Any, *, nogil: bool = True) -> Any:
    """Decorator: compile a function on its first call. Numba caches the machine code on the disk.
    If ``nogil`` is true, the code does not hold the GIL while it runs.
    """
    made = njit(nogil=nogil, error_model="numpy")(function)
    # If numba can write to no folder, it does not cache the code.
    with suppress(RuntimeError, OSError):
        made._cache = _KernelCache(function)
    # Block Ctrl-C: if Ctrl-C interrupted numba while numba loaded a function, numba could load no
    # other function in this process.
    made.compile = held()(made.compile)
    return made


HEAD, TAIL = frame.HEAD.at, frame.TAIL.at
"""The offset of each field in the two parts of a frame."""
HEAD_SIZE = frame.HEAD.size
STORE_TIME_SIZE = frame.STORE_TIME.size
TAIL_SIZE = frame.TAIL.size
BLANK_SIZE = frame.BLANK.size
FIXED_V1 = frame.FIXED_SIZE_V1
HOST_V4 = frame.HOST_SIZE_V4
HOST_EXTRA = frame.HOST_SIZE_V6 - frame.HOST_SIZE_V4
BODY_AT_V4 = frame.BODY_POSITION
BORN_V6 = sys_flag.BORN_HOST_V6
STORE_V6 = sys_flag.STORE_HOST_V6
TRANSACTION_MASK = sys_flag.TRANSACTION_MASK
CRC_MASK = np.uint32(java.INT_MAX)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


MAGIC_V1 = np.int32(_signed(frame.MAGIC_V1))
MAGIC_V2 = np.int32(_signed(frame.MAGIC_V2))
MAGIC_BLANK = np.int32(_signed(frame.MAGIC_BLANK))
MAGIC_FIRST = frame.MAGIC_V1 >> 24


# --------------------------------------------------------------------------------------------------
# Small operations on bytes that several kernels use.


@kernel
def store_time_at(flags: int) -> int:
    """Return the position of STORETIMESTAMP in a frame whose SYSFLAG is ``flags``."""
    return HEAD_SIZE + HOST_V4 + (HOST_EXTRA if flags & BORN_V6 else 0)


@kernel
def is_ascii(address: int, length: int) -> bool:
    """Whether the high bit is 0 in every byte."""
    high = np.uint64(0)
    i = 0
    while i + 8 <= length:
        high |= load_raw64(address + i)
        i += 8
    if i < length and length >= 8:
        high |= load_raw64(address + length - 8)
        i = length
    while i < length:
        high |= np.uint64(load_u8(address + i))
        i += 1
    return high & np.uint64(0x8080808080808080) == 0


@kernel
def is_utf8(address: int, length: int) -> bool:
    """Whether Python's strict decoder accepts the bytes as UTF-8."""
    i = 0
    while i < length:
        if i + 8 <= length and (load_raw64(address + i) & np.uint64(0x8080808080808080)) == 0:
            i += 8
            continue
        lead = load_u8(address + i)
        if lead < 0x80:
            i += 1
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        more = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
        if i + more >= length:
            return False
        second = load_u8(address + i + 1)
        low = 0xA0 if lead == 0xE0 else (0x90 if lead == 0xF0 else 0x80)
        high = 0x9F if lead == 0xED else (0x8F if lead == 0xF4 else 0xBF)
        if second < low or second > high:
            return False
        for k in range(2, more + 1):
            if load_u8(address + i + k) & 0xC0 != 0x80:
                return False
        i += more + 1
    return True


@kernel
def has_zero(address: int, length: int) -> bool:
    """Whether one of the bytes is NUL."""
    i = 0
    while i + 8 <= length:
        word = load_raw64(address + i)
        low = (word - np.uint64(0x0101010101010101)) & ~word & np.uint64(0x8080808080808080)
        if low != 0:
            return True
        i += 8
    while i < length:
        if load_u8(address + i) == 0:
            return True
        i += 1
    return False


@kernel
def is_plain(address: int, length: int) -> bool:
    """Whether every byte is ASCII and is not NUL."""
    if length < 8:
        for k in range(length):
            byte = load_u8(address + k)
            if byte == 0 or byte > 0x7F:
                return False
        return True
    i = 0
    while True:
        # The last word may overlap the previous word.
        at = min(i, length - 8)
        word = load_raw64(address + at)
        # If all bytes are ASCII, the subtraction sets the high bit only in a byte that is NUL or
        # that follows a NUL.
        if (word | (word - np.uint64(0x0101010101010101))) & np.uint64(0x8080808080808080) != 0:
            return False
        i += 8
        if i >= length:
            return True


@kernel
def copy_short(to: int, start: int, length: int) -> None:
    """Copy bytes that are usually few. For few bytes, two copies of overlapping words are faster
    than memcpy.
    """
    if length > 16:
        copy_bytes(to, start, length)
    elif length >= 8:
        copy64(to, start)
        copy64(to + length - 8, start + length - 8)
    elif length >= 4:
        copy32(to, start)
        copy32(to + length - 4, start + length - 4)
    elif length >= 2:
        copy16(to, start)
        copy16(to + length - 2, start + length - 2)
    elif length == 1:
        store_u8(to, load_u8(start))


@kernel
def same_bytes(a: int, b: int, length: int) -> bool:
    """Whether two pieces of ``length`` bytes are equal."""
    i = 0
    while i + 8 <= length:
        if load_raw64(a + i) != load_raw64(b + i):
            return False
        i += 8
    while i < length:
        if load_u8(a + i) != load_u8(b + i):
            return False
        i += 1
    return True


@kernel
def hash_bytes(address: int, length: int) -> np.uint64:
    """Return a hash of bytes, for hash tables that exist only while a batch is processed."""
    value = np.uint64(14695981039346656037) ^ np.uint64(length)
    i = 0
    while i + 8 <= length:
        value = (value ^ load_raw64(address + i)) * np.uint64(1099511628211)
        value ^= value >> np.uint64(29)
        i += 8
    if i < length and length >= 8:
        # The last word may overlap the previous word, so no loop over single bytes is needed.
        value = (value ^ load_raw64(address + length - 8)) * np.uint64(1099511628211)
    elif length >= 4:
        first = np.uint64(np.uint32(load_i32(address)))
        last = np.uint64(np.uint32(load_i32(address + length - 4)))
        value = (value ^ (first << np.uint64(32)) ^ last) * np.uint64(1099511628211)
    else:
        while i < length:
            value = (value ^ np.uint64(load_u8(address + i))) * np.uint64(1099511628211)
            i += 1
    value ^= value >> np.uint64(29)
    return value ^ (value >> np.uint64(32))


@kernel
def hash_number(value: np.uint64) -> np.uint64:
    """Return a hash of a number, for hash tables that exist only while a batch is processed."""
    mixed = value * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32))


@kernel
def java_hash(address: int, length: int) -> int:
    """Return Java's String.hashCode of valid UTF-8, as a signed 32-bit integer."""
    return java_hash_on(np.int64(0), address, length)


@kernel
def java_hash_on(before: int, address: int, length: int) -> int:
    """Return Java's hash of a text that consists of two parts. ``before`` is the hash of the first
    part. The second part is ``length`` bytes of UTF-8 at ``address``.
    """
    value = np.uint32(before)
    thirty_one = np.uint32(31)
    i = 0
    while i < length:
        lead = np.uint32(load_u8(address + i))
        if lead < 0x80:
            value = value * thirty_one + lead
            i += 1
            continue
        if lead < 0xE0:
            more = 1
            point = lead & np.uint32(0x1F)
        elif lead < 0xF0:
            more = 2
            point = lead & np.uint32(0x0F)
        else:
            more = 3
            point = lead & np.uint32(0x07)
        for k in range(1, more + 1):
            point = (point << np.uint32(6)) | np.uint32(load_u8(address + i + k) & 0x3F)
        if point > 0xFFFF:
            point -= np.uint32(0x10000)
            value = value * thirty_one + np.uint32(0xD800) + (point >> np.uint32(10))
            point = np.uint32(0xDC00) + (point & np.uint32(0x3FF))
        value = value * thirty_one + point
        i += more + 1
    return np.int64(np.int32(value))


def _crc_table() -> Any:
    table = np.zeros(256, np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        table[byte] = value
    return table


_CRC_TABLE = _crc_table()


@kernel
def crc32(function: int, address: int, count: int) -> int:
    """Return the CRC-32 of ``count`` bytes. ``function`` is the address of a C function that
    computes the CRC. If ``function`` is 0, this kernel computes the CRC itself.
    """
    if function != 0:
        return call_crc32(function, address, count)
    value = np.uint32(0xFFFFFFFF)
    for i in range(count):
        value = _CRC_TABLE[(value ^ load_u8(address + i)) & 0xFF] ^ (value >> np.uint32(8))
    return value ^ np.uint32(0xFFFFFFFF)
