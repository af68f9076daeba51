"""Frames with a harmed queue id, in an audit with a small limit of work."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.frame import HEAD
from logquarry.log.layout import StoreLayout
from logquarry.repair.audit import harmed_frames
from logquarry.repair.salvage.plan import plan_salvage
from tests.helpers.files import overwrite


def test_one_long_search_leaves_work_for_the_next_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harmed_frames, "_MOST_SEARCHED", 20_000)
    root = tmp_path / "store"
    sizes = lq.StoreConfig(mapped_file_size_commit_log=64 << 20)
    others = []
    with lq.MessageStore.open(root, config=sizes, mode="rw") as store:
        # The last message of an idle queue: the search for it reads the log up to its end.
        idle = [store.put(lq.Message("idle", b"a", queue_id=1)) for _ in range(3)][-1]
        for _ in range(20):
            store.put_many([lq.Message("busy", bytes(2_000)) for _ in range(1_000)])
            others.append(store.put(lq.Message("other", b"c")))
        for topic, queue_id in (("idle", 0), ("other", 1)):
            store.put(lq.Message(topic, b"d", queue_id=queue_id))
    places = [idle.physical_offset, others[10].physical_offset]
    for place, wrong in zip(places, (0, 1), strict=True):
        at = place + HEAD.offsets["queue_id"]
        overwrite(root / "commitlog" / f"{0:020d}", at, struct.pack(">i", wrong))
    found = plan_salvage(StoreLayout.open(root, sizes))
    assert found.right_queues == {places[1]: ("other", 0)}
    monkeypatch.undo()
    found = plan_salvage(StoreLayout.open(root, sizes))
    assert found.right_queues == {places[0]: ("idle", 1), places[1]: ("other", 0)}
