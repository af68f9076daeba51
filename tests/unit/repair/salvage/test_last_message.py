"""Salvage of a queue whose last message alone comes after a gap in the queue offsets."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import frame
from tests.helpers.small_store import config, opened

COUNT = 60
KEPT = 20
"""Messages before the loss."""
_LOG = "commitlog/" + "0" * 20


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with opened(tmp_path / "store") as writer:
        for number in range(COUNT):
            writer.put(lq.Message("t", b"%d" % number, keys="k"))
        writer.wait_dispatched()
    return tmp_path / "store"


def places(root: Path) -> list[int]:
    with lq.MessageStore.open(root, config=config()) as reader:
        return [message.physical_offset for message in reader.scan()]


def check(root: Path, offsets: list[int]) -> None:
    """The store is sound, and its messages have these queue offsets, also in its queue."""
    assert lq.verify(root).by_kind.keys() <= {"queue_filler"}
    with lq.MessageStore.open(root) as reader:
        assert [message.queue_offset for message in reader.scan()] == offsets
        (found,) = reader.get("t", 0, offsets[-1], max_count=1).messages
        assert found.body == b"%d" % (COUNT - 1)


def test_many_messages_before_it_are_lost(store: Path, tmp_path: Path) -> None:
    """The new log does not show how many."""
    at = places(store)
    log = store / _LOG
    data = bytearray(log.read_bytes())
    data[at[KEPT] : at[-1]] = b"\xff" * (at[-1] - at[KEPT])
    log.write_bytes(data)
    into = tmp_path / "into"
    lq.salvage(store, into=into)
    offsets = [*range(KEPT), COUNT - 1]
    check(into, offsets)
    (into / "abort").touch()
    lq.recover(into, apply=True)
    check(into, offsets)
    with lq.MessageStore.open(into, mode="rw") as writer:
        assert writer.put(lq.Message("t")).queue_offset == COUNT


@pytest.mark.parametrize(("behind", "right"), [(1000, COUNT + 1000), (1 << 20, COUNT - 1)])
def test_its_queue_offset_is_harmed(store: Path, tmp_path: Path, behind: int, right: int) -> None:
    """A small gap may be true: a log that was salvaged before shows no room for it."""
    log = store / _LOG
    data = bytearray(log.read_bytes())
    at = places(store)[-1] + frame.HEAD.offsets["queue_offset"]
    data[at : at + 8] = struct.pack(">q", COUNT + behind)
    log.write_bytes(data)
    into = tmp_path / "into"
    lq.salvage(store, into=into)
    check(into, [*range(COUNT - 1), right])
