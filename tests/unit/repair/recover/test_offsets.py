"""One harmed queue offset, which no CRC covers, costs no other message its place."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import frame
from tests.helpers.small_store import bodies, config, opened

COUNT = 40
POSITION = frame.HEAD.offsets["queue_offset"]


def harmed(root: Path, number: int, bit: int) -> list[int]:
    """A store with one bit of one message's QUEUEOFFSET flipped; all physical offsets."""
    with opened(root) as store:
        places = [store.put(lq.Message("t", b"%d" % n)).physical_offset for n in range(COUNT)]
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    at = places[number] + POSITION
    (value,) = struct.unpack_from(">q", data, at)
    struct.pack_into(">q", data, at, value ^ (1 << bit))
    path.write_bytes(data)
    return places


@pytest.mark.parametrize("queues", ["there", "lost"])
@pytest.mark.parametrize("bit", [0, 2, 4, 5, 20, 40])
@pytest.mark.parametrize("number", [1, 17, 38])
def test_one_bit(number: int, bit: int, queues: str, tmp_path: Path) -> None:
    harmed(tmp_path, number, bit)
    (tmp_path / "abort").touch()
    if queues == "lost":
        shutil.rmtree(tmp_path / "consumequeue")
    with opened(tmp_path) as store:
        assert store.wait_dispatched(timeout=60)
        assert store.queue_offsets("t", 0).max == COUNT
        found: list[bytes] = []
        offset = 0
        while offset < COUNT:
            answer = store.get("t", 0, offset)
            found += [message.body for message in answer.messages]
            offset = answer.next_offset
        assert found == [b"%d" % n for n in range(COUNT)]
        assert store.put(lq.Message("t", b"next")).queue_offset == COUNT
        assert len(bodies(store)) == COUNT + 1


def test_a_topic_that_came_again(tmp_path: Path) -> None:
    """Its offsets begin at 0 again, and only those of its new life count."""
    with opened(tmp_path) as store:
        for number in range(10):
            store.put(lq.Message("t", b"old %d" % number))
    shutil.rmtree(tmp_path / "consumequeue" / "t")
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    with lq.MessageStore.open(tmp_path) as reader:
        places = [message.physical_offset for message in reader.scan()]
    for number, place in enumerate(places[6:]):
        struct.pack_into(">q", data, place + POSITION, number)
    log.write_bytes(data)
    (tmp_path / "abort").touch()
    with opened(tmp_path) as store:
        assert store.wait_dispatched(timeout=60)
        assert store.queue_offsets("t", 0) == (0, 4)
        assert [m.body for m in store.get("t", 0).messages] == [b"old %d" % n for n in range(6, 10)]


@pytest.mark.parametrize("queues", ["there", "lost"])
@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("leap", [1 << 25, 1 << 50, -(1 << 40)])
def test_neighbours_that_agree_on_an_offset_that_cannot_be(
    first: int, leap: int, queues: str, tmp_path: Path
) -> None:
    with opened(tmp_path) as store:
        places = [store.put(lq.Message("t", b"%d" % n)).physical_offset for n in range(10)]
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    for number, place in list(enumerate(places))[first:]:
        struct.pack_into(">q", data, place + POSITION, number + leap)
    log.write_bytes(data)
    (tmp_path / "abort").touch()
    if queues == "lost":
        shutil.rmtree(tmp_path / "consumequeue")
    with opened(tmp_path) as store:
        assert store.wait_dispatched(timeout=60)
        bounds = store.queue_offsets("t", 0)
        found: list[bytes] = []
        offset = bounds.min
        while offset < bounds.max:
            answer = store.get("t", 0, offset)
            found += [message.body for message in answer.messages]
            assert answer.next_offset > offset
            offset = answer.next_offset
        assert found == [b"%d" % n for n in range(10)]
    assert not lq.recover(tmp_path, config=config()).steps
    with opened(tmp_path) as store:
        assert store.put(lq.Message("t", b"next")).queue_offset == bounds.max
