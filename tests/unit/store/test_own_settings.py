"""A store that this library made opens again without a configuration."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import UsageError
from logquarry.log.filesystem import Entry, FileView, LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.read import features, index
from logquarry.read.commit_log import CommitLog
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.recover import recover
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.small_store import bodies

SIZES: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 500,
    "max_index_num": 700,
}
RECORD = Path(".logquarry", "settings.json")


def made(root: Path, *messages: lq.Message, **settings: Any) -> Path:
    with lq.MessageStore.open(root, mode="rw", config=lq.StoreConfig(**SIZES, **settings)) as store:
        for message in messages:
            store.put(message)
    return root


def sizes(root: Path) -> dict[str, Any]:
    with lq.MessageStore.open(root, mode="rw") as store:
        return {name: getattr(store.config, name) for name in SIZES}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_store_without_keys_opens_again(tmp_path: Path, count: int) -> None:
    root = made(tmp_path / "s", *[lq.Message("t", b"%d" % n) for n in range(count)])
    with lq.MessageStore.open(root) as store:
        assert len(bodies(store)) == count
    assert not verify_store(StoreLayout.open(root)).has_damage
    assert recover(root).steps == ()
    assert rebuild(root, into=tmp_path / "i").messages == count
    assert sizes(root) == SIZES
    with lq.MessageStore.open(root, mode="rw") as store:
        store.put(lq.Message("t", b"keyed", keys="k"))
        store.wait_dispatched()
        assert len(store.query("t", "k")) == 1
    with lq.MessageStore.open(root) as store:
        assert len(store.query("t", "k")) == 1


def test_a_salvaged_store_opens_again(tmp_path: Path) -> None:
    root = made(tmp_path / "s", lq.Message("t", b"1"))
    salvage_store(StoreLayout.open(root), tmp_path / "saved")
    assert sizes(tmp_path / "saved") == SIZES


def test_a_copy_without_the_record_works_as_far_as_the_files_show(tmp_path: Path) -> None:
    root = made(tmp_path / "s", lq.Message("t", b"1"))
    shutil.rmtree(root / RECORD.parent)
    found = sizes(root)
    # Files of this size fit these two settings as well.
    assert (found.pop("max_hash_slot_num"), found.pop("max_index_num")) == (190, 762)
    assert found.items() <= SIZES.items()
    size = (root / "index").iterdir().__next__().stat().st_size
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.config.index_shape is not None
        assert store.config.index_shape.file_size == size
        store.put(lq.Message("t", b"2", keys="k"))
        store.wait_dispatched()
        assert len(store.query("t", "k")) == 1


def test_a_store_with_keys_shows_its_sizes(tmp_path: Path) -> None:
    root = made(tmp_path / "s", *[lq.Message("t", b"1", keys=f"k{n}") for n in range(9)])
    shutil.rmtree(root / RECORD.parent)
    assert sizes(root) == SIZES


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b'{"version": 9, "settings": {}}'])
def test_a_record_that_cannot_be_read_is_a_note(tmp_path: Path, data: bytes) -> None:
    root = made(tmp_path / "s", lq.Message("t", b"1", keys="k"))
    (root / RECORD).write_bytes(data)
    found = verify_store(StoreLayout.open(root)).findings
    assert [(one.kind, one.severity) for one in found] == [("bad_settings", "note")]
    with lq.MessageStore.open(root, mode="rw") as store:
        store.put(lq.Message("t", b"2"))
    assert not verify_store(StoreLayout.open(root)).findings


def test_the_files_win_over_the_record(tmp_path: Path) -> None:
    """Another program made a new store in the same folder."""
    keyed = [lq.Message("t", b"%d" % n * 300, keys=f"k{n}") for n in range(9)]
    root = made(tmp_path / "s", *keyed)
    other: dict[str, Any] = {
        "mapped_file_size_commit_log": 1_024,
        "mapped_file_size_consume_queue": 40,
    }
    shape = {"max_hash_slot_num": 30, "max_index_num": 400}
    config = lq.StoreConfig(**(other | shape))
    with lq.MessageStore.open(tmp_path / "other", mode="rw", config=config) as store:
        for message in keyed:
            store.put(message)
    shutil.copy(root / RECORD, tmp_path / "other" / RECORD)
    assert recover(tmp_path / "other").steps == ()
    assert sizes(tmp_path / "other") == other | shape


@pytest.mark.parametrize("name", list(SIZES))
def test_sizes_of_another_store_are_refused(tmp_path: Path, name: str) -> None:
    small: dict[str, Any] = {
        "mapped_file_size_commit_log": 4_096,
        "mapped_file_size_consume_queue": 400,
    }
    messages = [lq.Message("t", b"x" * 300, keys=f"k{n}") for n in range(60)]
    with lq.MessageStore.open(
        tmp_path / "s", mode="rw", config=lq.StoreConfig(**(SIZES | small))
    ) as store:
        for message in messages:
            store.put(message)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    stated: dict[str, Any] = {name: 777}
    with pytest.raises(UsageError, match=r"leave (the setting|both settings) out"):
        lq.MessageStore.open(tmp_path / "s", mode="rw", config=lq.StoreConfig(**stated))
    assert before == {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}


# ------------------------------------------------------------------------ settings without size
def test_multi_dispatch_goes_on(tmp_path: Path) -> None:
    def named(body: bytes) -> lq.Message:
        return lq.Message("t", body, queue_id=3, properties={"INNER_MULTI_DISPATCH": "%LMQ%a,b"})

    root = made(tmp_path / "s", enable_multi_dispatch=True, enable_lmq=True)
    for body in (b"1", b"2"):
        with lq.MessageStore.open(root, mode="rw") as store:
            store.put(named(body))
            store.wait_dispatched()
    with lq.MessageStore.open(root) as reader:
        assert reader.queues() == (("%LMQ%a", 0), ("b", 3), ("t", 3))
        assert [m.body for m in reader.get("%LMQ%a", 0, 0).messages] == [b"1", b"2"]


@pytest.mark.parametrize("has_record", [True, False])
def test_a_message_that_only_carries_offsets_is_in_no_further_queue(
    tmp_path: Path, has_record: bool
) -> None:
    """An export of another store has such messages; multi-dispatch is off here."""
    carried = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": "57"}
    root = made(tmp_path / "s", lq.Message("t", b"1"))
    if not has_record:
        (root / RECORD).unlink()
    with lq.MessageStore.open(root, mode="rw") as store:
        store.put(lq.Message("t", b"2", properties=carried))
        store.wait_dispatched()
        assert store.queues() == (("t", 0),)
    assert not verify_store(StoreLayout.open(root)).has_damage
    assert recover(root).steps == ()


def test_a_store_without_an_index_goes_on_without_one(tmp_path: Path) -> None:
    root = made(tmp_path / "s", lq.Message("t", b"1", keys="k"), message_index_enable=False)
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.config.message_index_enable is False
    # RocketMQ does not make a folder then.
    shutil.rmtree(root / "index")
    shutil.rmtree(root / RECORD.parent)
    assert recover(root).steps == ()
    assert sizes(root)
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.config.message_index_enable is False


def test_a_lost_index_of_a_store_with_a_record_is_built_again(tmp_path: Path) -> None:
    root = made(tmp_path / "s", lq.Message("t", b"1", keys="k"))
    shutil.rmtree(root / "index")
    assert recover(root, apply=True).steps
    with lq.MessageStore.open(root) as store:
        assert len(store.query("t", "k")) == 1


def test_dialect_and_delay_levels(tmp_path: Path) -> None:
    root = made(tmp_path / "s", dialect="3.1", message_delay_level="2s 9s")
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.config.is_3_1
        assert store.config.delay_levels_ms == (2_000, 9_000)
    shutil.rmtree(root / RECORD.parent)
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.config.is_3_1
    with lq.MessageStore.open(root, mode="rw", config=lq.StoreConfig(dialect="4.9")) as store:
        assert not store.config.is_3_1
    with lq.MessageStore.open(root, mode="rw") as store:
        assert not store.config.is_3_1


def test_the_index_tags_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made(tmp_path / "s", lq.Message("t", b"1", keys="k", tags="a"))
    calls = []

    def counted(layout: StoreLayout, files: OpenFiles) -> index.TagEntries | None:
        calls.append(layout)
        return find(layout, files)

    find = index.find_tag_entries
    for module in (index, features):
        monkeypatch.setattr(module, "find_tag_entries", counted)
    lq.MessageStore.open(root, mode="rw").close()
    assert len(calls) == 1


def test_old_index_files_without_tags_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path / "s", *(lq.Message("t", b"1", keys=f"k{n}") for n in range(4_000)))
    assert len(list((root / "index").iterdir())) == 6
    checked = []

    def counted(log: CommitLog, offset: int, hashes: set[int]) -> bool | None:
        checked.append(offset)
        return has_tag(log, offset, hashes)

    has_tag = index._has_tag
    monkeypatch.setattr(index, "_has_tag", counted)
    lq.MessageStore.open(root, mode="rw").close()
    assert 256 < len(checked) <= 256 + 5 * 32


def test_each_queue_is_read_once_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path / "s", lq.Message("t", b"1", queue_id=0))
    calls: Counter[str] = Counter()

    def list_counted(files: LocalFileSystem, path: str) -> list[Entry]:
        calls[path] += 1
        return listed(files, path)

    def open_counted(files: LocalFileSystem, path: str) -> FileView:
        calls[path] += 1
        return opened(files, path)

    listed, opened = LocalFileSystem.list, LocalFileSystem.open
    monkeypatch.setattr(LocalFileSystem, "list", list_counted)
    monkeypatch.setattr(LocalFileSystem, "open", open_counted)
    lq.MessageStore.open(root, mode="rw").close()
    folder = "consumequeue/t/0"
    # The first read is before the lock is taken: it looks for features that forbid writing.
    assert (calls[folder], calls[f"{folder}/{0:020d}"]) == (2, 2)
