"""An opening for writing detects queue entries after the entry of the queue's last message."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from tests.helpers.small_store import opened


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that was shut down cleanly, with 15 messages in one queue file for 20 entries."""
    with opened(tmp_path) as writer:
        for number in range(15):
            writer.put(lq.Message("t", b"%d" % number))
            writer.put(lq.Message("other", b"%d" % number))
    return tmp_path


def put_offset(store: Path) -> int:
    with opened(store) as writer:
        assert writer.queue_offsets("t", 0) == (0, 15)
        assert writer.queue_offsets("other", 0) == (0, 15)
        return writer.put(lq.Message("t", b"new")).queue_offset


def test_a_copy_of_a_queue_file_gives_no_queue_offsets(store: Path) -> None:
    """Without the check, the queue would end at 35: the next message would get the offset 35, and
    consumers would get the 15 messages twice.
    """
    folder = store / "consumequeue/t/0"
    shutil.copyfile(folder / f"{0:020d}", folder / f"{400:020d}")
    assert put_offset(store) == 15
    assert not lq.verify(store).has_damage


def test_entries_copied_to_the_end_of_their_file(store: Path) -> None:
    path = store / f"consumequeue/t/0/{0:020d}"
    data = path.read_bytes()
    path.write_bytes(data[:300] + data[:40] + data[340:])
    assert put_offset(store) == 15
    assert not lq.verify(store).has_damage


def test_a_sound_store_opens_without_a_recovery(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert put_offset(store) == 15
    assert not [text for text in caplog.messages if "recovery" in text]
