"""Topics that get messages are listed in ``config/topics.json``; the rest of the file stays."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.write.queue_table import TopicTable, is_listed, topics_of
from tests.helpers.small_store import NOW, opened

OTHERS: dict[str, Any] = {
    "dataVersion": {"counter": 9, "stateVersion": 3, "timestamp": 5},
    "topicConfigTable": {
        "orders": {
            "attributes": {"message.type": "NORMAL"},
            "perm": 2,
            "readQueueNums": 8,
            "topicName": "orders",
            "writeQueueNums": 1,
        }
    },
    "unknown": [1, {"a": None}],
}


def file(root: Path) -> Path:
    return root / "config/topics.json"


def document(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file(root).read_text())
    return found


def counts(root: Path) -> dict[str, tuple[int, int]]:
    table = document(root)["topicConfigTable"]
    return {name: (one["readQueueNums"], one["writeQueueNums"]) for name, one in table.items()}


def put(root: Path, *queues: tuple[str, int]) -> None:
    with opened(root) as store:
        for topic, queue_id in queues:
            store.put(lq.Message(topic, b"x", queue_id=queue_id))


def table_of(
    root: Path, existing: list[tuple[str, int]], *, was_unclean: bool = False
) -> TopicTable:
    return TopicTable(Disk(), root, lambda: NOW, existing, was_unclean=was_unclean)


def test_a_new_store_lists_its_topics(tmp_path: Path) -> None:
    put(tmp_path, ("orders", 2), ("orders", 0), ("%RETRY%g", 0))
    assert counts(tmp_path) == {"orders": (3, 3), "%RETRY%g": (1, 1)}
    before = file(tmp_path).read_bytes()
    put(tmp_path, ("orders", 1))
    assert file(tmp_path).read_bytes() == before
    put(tmp_path, ("orders", 4), ("other", 0))
    assert counts(tmp_path) == {"orders": (5, 5), "%RETRY%g": (1, 1), "other": (1, 1)}
    assert document(tmp_path)["dataVersion"]["counter"] == 2


def test_other_settings_and_unknown_members_stay(tmp_path: Path) -> None:
    put(tmp_path, ("orders", 0), ("deleted", 0))
    file(tmp_path).write_text(json.dumps(OTHERS))
    put(tmp_path, ("orders", 4))
    found = document(tmp_path)
    orders = found["topicConfigTable"]["orders"]
    # A topic that is not listed any more was deleted: opening the store does not list it again.
    assert list(found["topicConfigTable"]) == ["orders"]
    assert orders == OTHERS["topicConfigTable"]["orders"] | {"writeQueueNums": 5}
    assert found["unknown"] == OTHERS["unknown"]
    assert found["dataVersion"]["counter"] == 10 and found["dataVersion"]["stateVersion"] == 3


@pytest.mark.parametrize("counter", [2**63 - 1, -1])
def test_a_counter_overflows_as_in_java(tmp_path: Path, counter: int) -> None:
    file(tmp_path).parent.mkdir()
    version = {"counter": counter}
    file(tmp_path).write_text(json.dumps({"dataVersion": version, "topicConfigTable": {}}))
    put(tmp_path, ("a", 0))
    put(tmp_path, ("b", 0))
    assert set(counts(tmp_path)) == {"a", "b"}
    assert document(tmp_path)["dataVersion"]["counter"] in (1 - 2**63, 1)


def test_a_member_that_is_no_number_does_not_end_the_store(tmp_path: Path) -> None:
    file(tmp_path).parent.mkdir()
    file(tmp_path).write_text('{"x":NaN,"dataVersion":{},"topicConfigTable":{}}')
    put(tmp_path, ("orders", 0))
    assert set(counts(tmp_path)) == {"orders"}
    assert not (tmp_path / "abort").exists()


def test_a_store_whose_file_is_lost_gets_all_topics(tmp_path: Path) -> None:
    put(tmp_path, ("orders", 3), ("other", 0))
    shutil.rmtree(tmp_path / "config")
    opened(tmp_path).close()
    assert counts(tmp_path) == {"orders": (4, 4), "other": (1, 1)}


def test_after_a_crash_queues_that_were_not_listed_in_time_are(tmp_path: Path) -> None:
    file(tmp_path).parent.mkdir()
    file(tmp_path).write_text(json.dumps(OTHERS))
    assert table_of(tmp_path, [("new", 0)]).flush() is False
    assert table_of(tmp_path, [("new", 0)], was_unclean=True).flush() is True
    assert set(counts(tmp_path)) == {"orders", "new"}


def test_an_unreadable_file_is_not_replaced(tmp_path: Path) -> None:
    file(tmp_path).parent.mkdir()
    file(tmp_path).write_bytes(b'{"topicConfigTable":{"orders":')
    put(tmp_path, ("orders", 0))
    assert file(tmp_path).read_bytes() == b'{"topicConfigTable":{"orders":'
    assert [path.name for path in file(tmp_path).parent.iterdir()] == ["topics.json"]


def test_a_full_disk_does_not_end_the_store(tmp_path: Path) -> None:
    class Full(Disk):
        def replace(self, path: Path, data: bytes) -> None:
            raise self.refused(path, OSError(errno.ENOSPC, "No space left on device"))

    table = TopicTable(Full(), tmp_path, lambda: NOW, [("orders", 1)])
    assert table.flush() is False and not file(tmp_path).exists()
    # The queues are still noted: the next flush lists them.
    table._file._disk = Disk()
    assert table.flush() is True and counts(tmp_path) == {"orders": (2, 2)}


def test_a_slave_leaves_the_file_to_its_master(tmp_path: Path) -> None:
    put(tmp_path, ("orders", 0))
    shutil.rmtree(tmp_path / "config")
    opened(tmp_path, broker_role="SLAVE").close()
    assert not file(tmp_path).exists()


def test_system_topics_and_queues_without_a_topic_are_not_listed() -> None:
    queues = [("SCHEDULE_TOPIC_XXXX", 2), ("rmq_sys_wheel_timer", 0), ("%LMQ%a", 0), ("t", 0)]
    assert list(topics_of(queues)) == ["t"]
    assert is_listed("%DLQ%g") and not is_listed("RMQ_SYS_TRANS_HALF_TOPIC")


def test_a_removed_topic_that_gets_messages_again_is_listed(tmp_path: Path) -> None:
    table = table_of(tmp_path, [])
    for _ in range(2):
        table.note([("orders", 1), ("other", 0)])
        table.flush()
        assert set(table.configs()) == set(counts(tmp_path)) == {"orders", "other"}
        table.change({"orders": None})
        assert set(table.configs()) == {"other"}


def test_a_file_without_a_version_gets_new_topics(tmp_path: Path) -> None:
    """RocketMQ accepts such a file: it starts with a new version."""
    put(tmp_path, ("orders", 0))
    without = document(tmp_path)
    del without["dataVersion"]
    file(tmp_path).write_text(json.dumps(without))
    assert not lq.verify(tmp_path).findings
    put(tmp_path, ("paid", 0))
    assert counts(tmp_path) == {"orders": (1, 1), "paid": (1, 1)}
    assert document(tmp_path)["dataVersion"]["counter"] == 1
