"""The calls of a store that a broker uses: half messages of producers, tables, frames of a get."""

from __future__ import annotations

import enum
import json
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import UsageError
from logquarry.format import frame
from logquarry.format.broker_json import TopicConfig
from tests.helpers.small_store import opened


class End(str, enum.Enum):  # noqa: UP042 - StrEnum has another str()
    COMMIT = "commit"


def test_a_producer_ends_its_half_message(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        kept = store.put_half(lq.Message("t", b"kept"), "g").result()
        dropped = store.put_half(lq.Message("t", b"dropped"), "g").result()
        for group, offset in (("other", kept.physical_offset), ("g", kept.physical_offset + 1)):
            with pytest.raises(UsageError, match="half message"):
                store.end_transaction(offset, "commit", group=group)
        future = store.end_transaction(kept.physical_offset, End.COMMIT, group="g")
        assert future is not None and future.result().ok
        assert store.end_transaction(dropped.physical_offset, "rollback", group="g") is not None
        # The client repeats its one-way request.
        assert store.end_transaction(kept.physical_offset, "commit", group="g") is None
        store.wait_dispatched()
        assert [message.body for message in store.get("t", 0).messages] == [b"kept"]


def test_topics_are_added_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s" / "config" / "topics.json"
    with opened(tmp_path / "s") as store:
        store.put(lq.Message("t", b"x", queue_id=2))
        store.wait_dispatched()
        # Topics of messages are known before the next flush writes the file.
        assert store.topic_table.configs()["t"].write_queues == 3
        store.topic_table.change({"made": TopicConfig("made", 5, 6, 4, 0, True)})
        assert store.topic_table.configs()["made"] == TopicConfig("made", 5, 6, 4, 0, True)
        store.topic_table.change({"t": None})
        store.flush()
    assert list(json.loads(path.read_text())["topicConfigTable"]) == ["made"]


def test_offsets_of_a_group_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        offsets = store.consumer_offsets
        for topic, group in (("t", "g"), ("u", "g"), ("t", "h")):
            offsets.commit(topic, group, 0, 1)
        offsets.remove("g")
        assert set(offsets.groups()) == {("t", "h")}


@pytest.mark.parametrize("count", [1, 3, 32])
def test_the_frames_of_a_get_are_those_of_the_log(tmp_path: Path, count: int) -> None:
    with opened(tmp_path / "s") as store:
        for number in range(100):
            store.put(lq.Message("t", b"%d" % number, tags="ab"[number % 2]))
        store.wait_dispatched()
        for tag in (None, "b", "c"):
            # The reference serves the first gets, the kernel later ones.
            for offset in range(0, 90, 1 if tag else 9):
                result = store.get("t", 0, offset, count, tag)
                expected = b"".join(frame.encode(m.frame) for m in result.messages)
                assert result.frames == expected
                assert len(result.frames) == result.size


def test_a_topic_that_is_not_utf8_is_no_half_message(tmp_path: Path) -> None:
    """A client of a broker chooses the physical offset."""
    with opened(tmp_path / "s") as store:
        assert store.append_data(0, frame.encode(frame.Frame(b"\xff\xfe", b"x").with_crc()))
        with pytest.raises(UsageError, match="no half message at physical offset 0"):
            store.end_transaction(0, "commit", group="g")
