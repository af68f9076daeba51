"""A filtered read of a log whose frames have other topics than the queues that point to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.frame import Outcome
from logquarry.log.batches import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.read.selection import Selection, plan_read
from tests.helpers.small_store import opened

LOG = Path("commitlog") / ("0" * 20)


def written(root: Path, topics: str) -> None:
    with opened(root) as store:
        for topic in topics:
            store.put(lq.Message(topic, b"body" * 20))


@pytest.mark.parametrize(
    ("topics", "foreign"),
    [
        pytest.param("ABBBBBBB", "BAABBBBB", id="the first frame differs"),
        pytest.param("CABBBBBB", "CBABBBBA", id="the first frame of a queue differs"),
        pytest.param("CABBBBAB", "CABBBBBA", id="the last frame of a queue differs"),
    ],
)
def test_a_log_file_of_another_store(tmp_path: Path, topics: str, foreign: str) -> None:
    """The frames begin at exactly the places to which the queues point."""
    written(tmp_path / "store", topics)
    written(tmp_path / "other", foreign)
    shutil.copyfile(tmp_path / "other" / LOG, tmp_path / "store" / LOG)
    with lq.MessageStore.open(tmp_path / "store") as store:
        found = [message.physical_offset for message in store.scan("A")]
        assert found == [m.physical_offset for m in store.scan() if m.topic == "A"]
        assert len(found) == foreign.count("A")


def test_a_sound_store_is_read_through_its_queues(tmp_path: Path) -> None:
    written(tmp_path / "store", "CABBBBAB")
    layout = StoreLayout.open(tmp_path / "store")
    selection = Selection(wanted=MessageFilter(topics=frozenset({"A"})))
    assert plan_read(layout, selection).uses_queues


def test_only_the_wanted_part_of_the_log_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a remote store, the read of each frame takes a request."""
    written(tmp_path / "store", "B" * 60 + "AAA" + "B" * 600)
    layout = StoreLayout.open(tmp_path / "store")
    with lq.MessageStore.open(tmp_path / "store") as store:
        places = [message.physical_offset for message in store.scan()]
    read: list[int] = []
    outcome_at = CommitLog.outcome_at

    def noted(log: CommitLog, offset: int, *, check_crc: bool = True) -> Outcome:
        read.append(offset)
        return outcome_at(log, offset, check_crc=check_crc)

    monkeypatch.setattr(CommitLog, "outcome_at", noted)
    for topic, uses_queues in (("A", True), ("B", False)):
        selection = Selection(
            wanted=MessageFilter(topics=frozenset({topic})),
            start_offset=places[50],
            stop_offset=places[90],
        )
        read.clear()
        assert plan_read(layout, selection).uses_queues == uses_queues
        checked = [offset for offset in read if offset != places[-1]]
        assert bool(checked) == uses_queues
        assert all(places[50] <= offset < places[90] for offset in checked)
