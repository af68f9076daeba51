"""Logs in several folders, or in one other folder: read, written, recovered, rebuilt, expired."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.errors import StoreUnavailable, UnsupportedStore
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from logquarry.store.retention.rules import RetentionRules
from tests.conformance.rocketmq5 import Copied, expected_offsets, state_of
from tests.helpers.command import run
from tests.helpers.files import zero
from tests.helpers.golden_data import copy_store

FILE_SIZE = 16_384
FOLDERS = ("clA", "clB")


@pytest.fixture
def scenario(rocketmq5: Path, tmp_path: Path) -> Path:
    """A copy of a store, with the files of its log in two folders in turn."""
    source = rocketmq5 / "5.5.0-multipath"
    ignored = shutil.ignore_patterns("timerwheel*")
    copy_store(source / "store", tmp_path / "store", ignore=ignored)
    shutil.copy(source / "broker.conf", tmp_path)
    return tmp_path


def _settings(scenario: Path, **changes: str) -> StoreConfig:
    lines = (scenario / "broker.conf").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    return StoreConfig.from_mapping({**pairs, **changes})


def _files(root: Path) -> dict[int, str]:
    """The folder of each file of the log, by offset."""
    found = [path for name in FOLDERS for path in (root / name).iterdir()]
    return {int(path.name): path.parent.name for path in sorted(found, key=lambda p: p.name)}


def _offsets(root: Path, config: StoreConfig | None = None) -> list[int]:
    with lq.MessageStore.open(root, config=config) as store:
        return [message.physical_offset for message in store.scan()]


def _put(root: Path, config: StoreConfig | None, count: int = 60) -> None:
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for number in range(count):
            store.put(lq.Message("Orders", b"x" * 1_000, keys=f"new{number}"))
        assert store.wait_dispatched(timeout=20)


def _has_no_damage(root: Path, config: StoreConfig | None = None) -> bool:
    return not verify_store(StoreLayout.open(root, config)).has_damage


@pytest.mark.parametrize("is_stated", [True, False])
def test_files_are_added_to_the_folders_in_turn(is_stated: bool, scenario: Path) -> None:
    root = scenario / "store"
    config = _settings(scenario) if is_stated else None
    before = _offsets(root)
    _put(root, config)
    assert _offsets(root) == sorted(set(_offsets(root)) | set(before))
    assert len(_offsets(root)) == len(before) + 60
    files = _files(root)
    assert list(files) == list(range(0, FILE_SIZE * len(files), FILE_SIZE)) and len(files) > 6
    assert all(folder == FOLDERS[base // FILE_SIZE % 2] for base, folder in files.items())
    assert not (root / "commitlog").exists()
    assert _has_no_damage(root)


def test_a_read_only_folder_gets_no_file(scenario: Path) -> None:
    root = scenario / "store"
    before = _files(root)
    config = _settings(
        scenario,
        storePathCommitLog="store/clA,store/clB",
        readOnlyCommitLogStorePaths="store/clB",
    )
    _put(root, config)
    added = {base: folder for base, folder in _files(root).items() if base not in before}
    assert set(added.values()) == {"clA"}
    assert _has_no_damage(root)


@pytest.mark.parametrize("harm", ["pipe", "second name"])
def test_what_is_no_file_is_refused_in_each_folder(harm: str, scenario: Path) -> None:
    root = scenario / "store"
    (root / "abort").touch()
    base, folder = max(_files(root).items())
    path = root / folder / f"{base + FILE_SIZE:020d}"
    if harm == "pipe":
        os.mkfifo(path)
    else:
        path.hardlink_to(root / folder / f"{base:020d}")
    before = _times(root)
    for change in (
        lambda: lq.recover(root, apply=True),
        lambda: lq.MessageStore.open(root, mode="rw").close(),
    ):
        with pytest.raises(StoreUnavailable, match="Nothing was changed"):
            change()
    assert _times(root) == before


def _times(root: Path) -> dict[Path, int]:
    files = (path for path in root.rglob("*") if not path.is_dir() and path.name != "lock")
    return {path: path.stat().st_mtime_ns for path in files}


def test_damage_and_a_torn_tail_are_recovered(scenario: Path) -> None:
    root = scenario / "store"
    before = _offsets(root)
    (root / "abort").touch()
    last = max(before)
    folder = _files(root)[last - last % FILE_SIZE]
    zero(root / folder / f"{last - last % FILE_SIZE:020d}", last % FILE_SIZE + 40)
    shutil.rmtree(root / "consumequeue" / "Orders")
    plan = lq.recover(root, apply=True, accept_loss=1 << 20)
    assert plan.log_end == last
    assert _offsets(root) == before[:-1]
    assert _has_no_damage(root)
    assert not lq.recover(root).is_needed
    rebuild(root, apply=True)
    assert _offsets(root) == before[:-1]
    assert _has_no_damage(root)


def test_a_lost_file_becomes_a_blank_in_its_folder(scenario: Path) -> None:
    root = scenario / "store"
    _put(root, None)
    kept = [at for at in _offsets(root) if not FILE_SIZE <= at < 2 * FILE_SIZE]
    (root / "clB" / f"{FILE_SIZE:020d}").unlink()
    lq.recover(root, apply=True, accept_loss=1 << 20)
    assert _offsets(root) == kept
    lq.MessageStore.open(root, mode="rw").close()


def test_retention_deletes_the_oldest_files_of_both_folders(scenario: Path) -> None:
    root = scenario / "store"
    _put(root, None)
    before = _offsets(root)
    plan = lq.retain(root, RetentionRules(keep_bytes=2 * FILE_SIZE), apply=True)
    assert {file.path.partition("/")[0] for file in plan.log} == set(FOLDERS)
    assert min(_files(root)) == plan.new_min_offset
    assert _offsets(root) == [at for at in before if at >= plan.new_min_offset]
    assert _has_no_damage(root)


def test_a_log_in_one_other_folder(scenario: Path, rocketmq5: Path) -> None:
    root = scenario / "plain" / "store"
    ignored = shutil.ignore_patterns("timerwheel*")
    copy_store(rocketmq5 / "5.5.0-plain" / "store", root, ignore=ignored)
    (root / "commitlog").rename(scenario / "plain" / "log")
    config = StoreConfig.from_mapping({"storePathCommitLog": "log"})
    before = _offsets(root, config)
    with pytest.raises(UnsupportedStore):
        lq.MessageStore.open(root, mode="rw")
    _put(root, config)
    assert len(_offsets(root, config)) == len(before) + 60
    (root / "abort").touch()
    shutil.rmtree(root / "consumequeue")
    (root / "consumequeue").mkdir()
    lq.recover(root, config=config, apply=True)
    assert len(_offsets(root, config)) == len(before) + 60
    assert _has_no_damage(root, config)
    assert not (root / "commitlog").exists()


def test_an_empty_folder_is_no_whole_log(scenario: Path) -> None:
    root, config = scenario / "store", _settings(scenario)
    shutil.rmtree(root / "clB")
    (root / "clB").mkdir()
    before = state_of(root)
    calls: list[Callable[[], object]] = [
        lambda: lq.MessageStore.open(root, mode="rw", config=config),
        lambda: lq.recover(root, config=config, apply=True, accept_loss=1 << 20),
        lambda: lq.retain(root, RetentionRules(keep_bytes=1), config=config, apply=True),
    ]
    for call in calls:
        with pytest.raises(UnsupportedStore, match=r"no file of the log is in \S*clB: .*--config"):
            call()
    assert state_of(root) == before


def test_a_folder_without_files_can_be_left_out(scenario: Path) -> None:
    """A broker's folder is empty if it has no file yet, or if its files have expired."""
    root = scenario / "store"
    expected = _offsets(root)
    (root / "new").mkdir()
    paths = [str(root / name) for name in (*FOLDERS, "new")]
    with pytest.raises(UnsupportedStore, match="names only the other folders"):
        _offsets(root, StoreConfig.from_mapping({"storePathCommitLog": ",".join(paths)}))
    others = StoreConfig.from_mapping({"storePathCommitLog": ",".join(paths[:-1])})
    assert _offsets(root, others) == expected


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_folder_that_a_recovery_emptied_is_used_again(is_stated: bool, scenario: Path) -> None:
    root = scenario / "store"
    config = _settings(scenario) if is_stated else None
    kept = [at for at in _offsets(root) if at < FILE_SIZE // 2][:-1]
    for base, folder in _files(root).items():
        start = max(0, FILE_SIZE // 2 - base)
        zero(root / folder / f"{base:020d}", start)
    (root / "abort").touch()
    lq.recover(root, config=config, apply=True, accept_loss=1 << 20)
    assert set(_files(root).values()) == {"clA"}
    assert _offsets(root, config) == kept
    _put(root, config)
    assert len(_offsets(root, config)) == len(kept) + 60
    assert set(_files(root).values()) == (set(FOLDERS) if is_stated else {"clA"})


def test_two_folders_with_the_same_file_are_refused(scenario: Path) -> None:
    root = scenario / "store"
    config = _settings(scenario)
    name = min((root / "clA").iterdir()).name
    shutil.copy(root / "clA" / name, root / "clB")
    before = state_of(root)
    for mode in ("r", "rw"):
        with pytest.raises(UnsupportedStore, match="two folders of its log have the same file"):
            lq.MessageStore.open(root, mode=mode, config=config)
    assert state_of(root) == before


def test_several_log_folders_are_one_log(copied: Copied, rocketmq5: Path) -> None:
    root = copied("5.5.0-multipath")
    stated = StoreConfig.from_mapping({"storePathCommitLog": "store/clA,store/clB"})
    expected = expected_offsets(rocketmq5 / "5.5.0-multipath")
    for config in (None, stated):
        assert _offsets(root, config) == expected
        assert not verify_store(StoreLayout.open(root, config)).findings
    # The new store has one folder for its log, whatever the configuration of the old one says.
    with_timers = list((root / "consumequeue").glob("rmq_sys_wheel_timer"))
    done = salvage_store(StoreLayout.open(root, stated), root.parent / "new")
    assert with_timers and done.is_whole
    assert not verify_store(StoreLayout.open(root.parent / "new")).has_damage
    # The log is in commitlog/ and two other folders, as after a change of the setting.
    (root / "commitlog").mkdir()
    shutil.move(root / "clA" / ("0" * 20), root / "commitlog")
    assert _offsets(root) == expected
    # A disk that is not mounted is an error, not a shorter log.
    shutil.rmtree(root / "clB")
    path = root.parent / "broker.conf"
    path.write_text("storePathCommitLog=store/clA,store/clB\n")
    for command in ("messages", "info", "stats", "verify", "salvage"):
        assert "is a disk not mounted?" in run(command, root, "--config", path, code=4).stderr


def test_log_folders_outside_of_the_store(copied: Copied, rocketmq5: Path, tmp_path: Path) -> None:
    root = copied("5.5.0-multipath")
    paths = []
    for name in ("clA", "clB"):
        (root / name).rename(tmp_path / f"disk-{name}")
        paths.append(str(tmp_path / f"disk-{name}"))
    config = StoreConfig.from_mapping({"storePathCommitLog": ",".join(paths)})
    expected = expected_offsets(rocketmq5 / "5.5.0-multipath")
    assert _offsets(root, config) == expected
    assert not verify_store(StoreLayout.open(root, config)).findings
    with pytest.raises(UnsupportedStore, match="is a disk not mounted"):
        lq.MessageStore.open(root)


def test_a_log_on_another_disk(copied: Copied, rocketmq5: Path, tmp_path: Path) -> None:
    root = copied("5.3.3-plain")
    (root / "commitlog").rename(tmp_path / "other-disk")
    before = state_of(root)
    config = StoreConfig.from_mapping({"storePathCommitLog": str(tmp_path / "other-disk")})
    with pytest.raises(UnsupportedStore, match="is a disk not mounted") as raised:
        lq.MessageStore.open(root, mode="rw")
    assert raised.value.feature == "log_elsewhere"
    with pytest.raises(UnsupportedStore, match="is a disk not mounted"):
        lq.recover(root, apply=True)
    # Salvage says what is lost, and its exit code is not 0.
    assert not salvage_store(StoreLayout.open(root)).plan.is_whole
    # With the configuration the log is read and written there.
    expected = expected_offsets(rocketmq5 / "5.3.3-plain")
    assert _offsets(root, config) == expected
    assert salvage_store(StoreLayout.open(root, config)).plan.is_whole
    assert state_of(root) == before
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        put = store.put(lq.Message("Orders", b"new"))
    assert not (root / "commitlog").exists()
    (root / "commitlog").symlink_to(tmp_path / "other-disk")
    assert _offsets(root) == [*expected, put.physical_offset]


def test_a_new_store_has_no_log_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "store"
    lq.MessageStore.open(root, mode="rw").close()
    for path in (root / "commitlog").iterdir():
        path.unlink()
    with lq.MessageStore.open(root) as store:
        assert not list(store.scan())
