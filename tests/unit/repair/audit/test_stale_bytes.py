"""Which bytes after the log's end come from the buffers of a broker without maps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from logquarry.format import frame
from logquarry.log.layout import StoreLayout
from logquarry.repair.audit.log import are_stale_bytes
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify_store
from tests.helpers.store_maker import StoreMaker

FILE_SIZE = 1 << 18
PAGE = 4096


def broker_store(root: Path, seed: int, *, count: int = 80) -> tuple[Path, int, int]:
    """A store as DefaultMappedFile of 5.5.0 writes it.

    Returns:
        The log's file, the log's end, and one past the last stale byte.
    """
    rng = random.Random(seed)
    maker = StoreMaker(log_file_size=FILE_SIZE, queue_file_units=200)
    buffers = [bytearray(PAGE * 3) for _ in range(rng.choice((1, 2, 16)))]
    disk = bytearray(FILE_SIZE)
    while len(maker.frames) < count:
        start = len(maker.log)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            body = rng.randbytes(rng.randrange(1, 700))
            maker.put("t", rng.randrange(3), body, tags=rng.choice(("a", "bb")))
        data = maker.log[start:]
        buffer = rng.choice(buffers)
        buffer[: len(data)] = data
        written = len(data) + -len(maker.log) % PAGE
        disk[start : start + written] = buffer[:written]
    maker.write(root)
    log = root / "commitlog" / f"{0:020d}"
    log.write_bytes(disk)
    return log, len(maker.log), len(bytes(disk).rstrip(b"\0"))


def judge(log: Path, end: int) -> tuple[bool, bool]:
    """The judgements of a store that was killed and of a closed one."""
    layout = StoreLayout.open(log.parent.parent)
    return (
        are_stale_bytes(layout, end, is_closed=False),
        are_stale_bytes(layout, end, is_closed=True),
    )


@pytest.mark.parametrize("seed", range(30))
def test_what_the_buffers_leave_is_known(seed: int, tmp_path: Path) -> None:
    log, end, stale_end = broker_store(tmp_path / "store", seed)
    is_stale = stale_end > end
    assert judge(log, end) == (is_stale, is_stale)
    root = log.parent.parent
    kinds = [(f.kind, f.severity) for f in verify_store(StoreLayout.open(root)).findings]
    assert (("stale_bytes", "note") in kinds) is is_stale
    assert "torn_tail" not in dict(kinds)
    assert not any(step.offset == end for step in recover(root).steps)


def test_other_bytes_are_no_stale_bytes(tmp_path: Path) -> None:
    tried = 0
    for seed in range(20):
        log, end, stale_end = broker_store(tmp_path / str(seed), seed)
        if stale_end - end < 64:
            continue
        tried += 1
        sound = log.read_bytes()
        # One wrong byte: a killed store may have lost a message there.
        data = bytearray(sound)
        data[(end + stale_end) // 2] ^= 0x55
        log.write_bytes(data)
        assert not judge(log, end)[0]
        # After the page there are no stale bytes.
        data = bytearray(sound)
        data[end - end % -(64 << 10) + 1] = 1
        log.write_bytes(data)
        assert judge(log, end) == (False, False)
    assert tried > 5


def test_whole_frames_after_the_end_are_no_stale_bytes(tmp_path: Path) -> None:
    log, end, _ = broker_store(tmp_path / "store", 3)
    # As after a truncation: the stale bytes go on, but contain a whole frame.
    data = bytearray(log.read_bytes())
    size = int.from_bytes(data[:4], "big")
    copy = bytearray(data[:size])
    at = frame.HEAD.offsets["physical_offset"]
    copy[at : at + 8] = (end + 40).to_bytes(8, "big")
    data[end + 40 : end + 40 + size] = copy
    log.write_bytes(data)
    assert judge(log, end) == (False, False)


@pytest.mark.parametrize("seed", range(10))
def test_the_head_of_a_torn_message_is_no_stale_byte(seed: int, tmp_path: Path) -> None:
    log, end, _ = broker_store(tmp_path / "store", seed)
    data = bytearray(log.read_bytes())
    size = int.from_bytes(data[:4], "big")
    torn = bytearray(data[:size])
    at = frame.HEAD.offsets["physical_offset"]
    torn[at : at + 8] = end.to_bytes(8, "big")
    for length in (17, 60, size - 1):
        data[end : end + length] = torn[:length]
        log.write_bytes(data)
        assert judge(log, end) == (False, False)
