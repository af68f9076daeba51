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
