"""Program that runs the kernels over bytes between two memory pages that may not be read.

A read beyond the bytes ends the process with SIGSEGV. test_no_overread.py starts it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import random
import sys
from collections.abc import Iterator

import numpy as np

from logquarry.format.arrays import POSITION, REACHED_STOP, SIZE
from logquarry.log import codec, columns
from logquarry.log.codec import Rows, Window
from logquarry.log.columns import Decoding
from logquarry.read.get_kernel import LogAtHand
from logquarry.read.get_message import TransferLimits
from logquarry.read.queue import UNIT_DTYPE
from logquarry.testing import strategies
from tests.helpers.small_log import FRAMES, small_log

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ_WRITE = 0, 3


class GuardedMemory:
    """Some pages between two that may not be touched."""

    def __init__(self, pages: int) -> None:
        self._map = mmap.mmap(-1, (pages + 2) * PAGE)
        self._whole = np.frombuffer(self._map, np.uint8)
        self.room = pages * PAGE
        address = int(self._whole.ctypes.data)
        libc = ctypes.CDLL(None, use_errno=True)
        for start in (address, address + PAGE + self.room):
            if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(PAGE), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def hold(self, data: bytes, *, at_end: bool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Place the bytes at the end (or begin) of the memory."""
        start = PAGE + self.room - len(data) if at_end else PAGE
        part = self._whole[start : start + len(data)]
        part[:] = np.frombuffer(data, np.uint8)
        return part


def read_all(window: Window, *, check_crc: bool) -> None:
    """Call each kernel that reads a window."""
    length = window.length
    rows = codec.empty_rows(32)
    position = 0
    found = []
    while position < length:
        count, after, _ = codec.walk(window, position, window.end, rows, check_crc=check_crc)
        found.append(rows[:count].copy())
        place, code = codec.find_frame(
            window, min(after + 1, length), window.end, check_crc=check_crc
        )
        if code != REACHED_STOP or place <= position:
            break
        position = place
    codec.last_nonzero(window, 0, length)
    places = np.array([0, 1, length - 8, length - 1, length, window.end - 1, -1], np.int64)
    codec.check_places(window, places, np.zeros(len(places), np.int32), check_crc=check_crc)
    taken = np.concatenate(found) if found else rows[:0]
    get_all(window, taken)
    if len(taken):
        columns.record_batch(window, taken, Decoding())
        columns.topic_ids(window, taken)
        columns.fixed_fields(window, taken, ["queue_id", "store_timestamp"])


def get_all(window: Window, rows: Rows) -> None:
    """Gets by correct entries, and by entries whose frames reach the end of the bytes."""
    places = [*rows[:, POSITION].tolist(), 0, max(0, window.length - 200)]
    sizes = [*rows[:, SIZE].tolist(), window.length, min(200, window.length)]
    units = np.array(
        [(window.base + place, size, 0) for place, size in zip(places, sizes, strict=True)],
        UNIT_DTYPE,
    )
    end = window.base + window.length
    limits = TransferLimits(0, 32, 1 << 20, 32, 1 << 20)
    log = LogAtHand(window.base, end, window.data.data, limits)
    kernels = codec.kernels()
    assert kernels is not None
    scratch = np.empty(1 << 14, np.uint8)
    for number in range(len(units)):
        at = int(units[number:].ctypes.data)
        for room in (len(scratch), 300):
            for count in (1, len(units) - number):
                kernels.get_frames(at, count, 32, 0, 0, log.address, int(scratch.ctypes.data), room)


def cases(amount: int, rng: random.Random) -> Iterator[tuple[bytes, int]]:
    """Bytes of a log file, and the physical offset of the first."""
    log = small_log(start=1)
    odd = strategies.place(
        [FRAMES[0].with_crc() for _ in range(3)], file_size=1024, start=0, fill=b"\xda\xa3\x20\xa7"
    )
    for source in (log, odd):
        for base, data in zip(source.bases(), source.files, strict=True):
            for length in range(0, len(data) + 1, 1 if source is log else 9):
                yield data[:length], base
                yield data[length:], base + length
            for _ in range(amount):
                broken = bytearray(data)
                for _ in range(rng.randint(1, 3)):
                    broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
                yield bytes(broken[: rng.choice([len(broken), rng.randrange(len(broken))])]), base
            # An overread would begin at a length: try every value of its bytes.
            for item in source.frames:
                if not base <= item.physical_offset < base + len(data):
                    continue
                at = item.physical_offset - base
                tail = at + item.size - len(item.properties)
                for place in [*range(at, at + 4), *range(at + 84, at + 112), tail - 2, tail - 1]:
                    for value in (0, 0x7F, 0xFF, rng.randrange(256)):
                        broken = bytearray(data)
                        broken[place] = value
                        yield bytes(broken[: at + item.size]), base
    for _ in range(amount):
        yield rng.randbytes(rng.randrange(64)), 0


def main(amount: int, seed: int) -> None:
    """Try all cases at both ends of the memory."""
    faulthandler.enable()
    assert codec.kernels_enabled()
    memory = GuardedMemory(2)
    count = 0
    for data, base in cases(amount, random.Random(seed)):
        count += 1
        # A wrong read is nearly always after the bytes, and rarely before them.
        for at_end in (True,) if count % 8 else (True, False):
            held = memory.hold(data, at_end=at_end)
            for end in (len(data), len(data) + 4096):
                for check_crc in (True, False):
                    read_all(Window(held, base, end), check_crc=check_crc)
    print(count, "cases")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
