"""The version of the broker that wrote a store, if damage has changed the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import logquarry as lq
from logquarry.log.earlier_writers import OFFSET_AT, find_writer, harmed_offset
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from tests.helpers.files import overwrite
from tests.helpers.golden_data import copy_store
from tests.helpers.small_store import config, opened


def put_offset(root: Path, value: int) -> LocalFileSystem:
    overwrite(root / "checkpoint", OFFSET_AT, value.to_bytes(8, "big", signed=True))
    return LocalFileSystem(root)


def test_no_flipped_bit_makes_a_store_of_4_9_one_of_5_5(golden: Path, tmp_path: Path) -> None:
    root = copy_store(golden / "real-broker" / "store", tmp_path / "store")
    right = find_writer(LocalFileSystem(root))
    assert (right.at_least, right.before) == (None, "5.0.0")
    with lq.MessageStore.open(root) as store:
        last = max(message.physical_offset for message in store.scan())
    for value in (*(1 << bit for bit in range(63)), -1, -(1 << 63), last):
        files = put_offset(root, value)
        assert find_writer(files) == right
        assert harmed_offset(files) == value


def test_verify_names_the_harmed_bytes_and_recover_clears_them(
    golden: Path, tmp_path: Path
) -> None:
    root = copy_store(golden / "real-broker" / "store", tmp_path / "store")
    before = {found.kind for found in verify_store(StoreLayout.open(root)).findings}
    put_offset(root, 64)
    report = verify_store(StoreLayout.open(root))
    found = next(one for one in report.findings if one.kind == "checkpoint_offset")
    assert (found.file, found.offset, found.length) == ("checkpoint", 40, 8)
    assert found.severity == "damage"
    lq.recover(root, apply=True)
    assert (root / "checkpoint").read_bytes()[OFFSET_AT:][:8] == bytes(8)
    after = {found.kind for found in verify_store(StoreLayout.open(root)).findings}
    assert after <= before
    assert not lq.recover(root).is_needed


def test_a_store_without_other_signs(tmp_path: Path) -> None:
    """A copy of a 5.5 store can lack all other signs: a message must begin at the offset."""
    with opened(tmp_path) as store:
        for number in range(40):
            store.put(lq.Message("t", b"%d" % number * 500))
        places = [message.physical_offset for message in store.scan()]
    shutil.rmtree(tmp_path / "config")
    assert find_writer(put_offset(tmp_path, 0)).at_least is None
    for value in (places[3] + 1, 64, 1 << 40, -places[3]):
        files = put_offset(tmp_path, value)
        assert find_writer(files).at_least is None
        assert harmed_offset(files) == value
    for value in (places[3], places[-1]):
        files = put_offset(tmp_path, value)
        assert find_writer(files).at_least == "5.5.0"
        assert harmed_offset(files) is None
    put_offset(tmp_path, 64)
    assert verify_store(StoreLayout.open(tmp_path, config())).by_kind["checkpoint_offset"]
