"""The entries of all index files against the log."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.index import IndexHeader
from logquarry.repair.audit import index_entries
from logquarry.repair.audit.differences import names_ends
from logquarry.repair.verification import verify_store
from tests.helpers.small_store import opened


def test_the_header_of_each_index_file_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the work would grow with the square of the number of files."""
    with opened(tmp_path / "store", max_hash_slot_num=3, max_index_num=4) as store:
        for number in range(60):
            store.put(lq.Message("t", b"body", keys=f"k{number}"))
        assert store.wait_dispatched(timeout=60)
    compared = 0

    def counted(header: IndexHeader, first: int, last: int) -> bool:
        nonlocal compared
        compared += 1
        return names_ends(header, first, last)

    monkeypatch.setattr(index_entries, "names_ends", counted)
    with lq.MessageStore.open(tmp_path / "store") as reader:
        files = len(reader.layout.index_files)
        assert not verify_store(reader.layout).has_damage
    assert files == 20
    assert compared == files


def test_tags_in_the_older_index_files_of_a_newer_broker_are_right(tmp_path: Path) -> None:
    """A broker before 5.4 that continues a store of 5.4 or later writes no entries for tags."""
    for number, tags in enumerate((True, False)):
        with opened(tmp_path, max_hash_slot_num=3, max_index_num=10, index_tags=tags) as store:
            for key in range(30):
                store.put(lq.Message("t", b"body", tags="paid", keys=f"k{number}-{key}"))
            assert store.wait_dispatched(timeout=60)
    with lq.MessageStore.open(tmp_path) as reader:
        assert reader.features.get("index_tags") is None
        assert len(reader.query("t", "T#paid")) == 30
        found = verify_store(reader.layout)
    assert found.findings == []
    assert found.counts["index_entries"] == 90
