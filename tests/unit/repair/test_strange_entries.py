"""Pipes, broken links, links in a circle and files without end, in the folders of a store.

No command may wait for a pipe, follow links round and round, or leave a file out without a word.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound, StoreUnavailable
from logquarry.repair.recover.store_folders import WrongEntry
from tests.helpers.command import run
from tests.helpers.operator_faults import make_store
from tests.helpers.small_store import config

OFFSETS = "config/consumerOffset.json"
pytestmark = pytest.mark.timeout(60)


def broken_link(path: Path) -> None:
    path.symlink_to("/nowhere/file")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    """A sparse file that is larger than the memory."""
    path.touch()
    os.truncate(path, 1 << 42)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = make_store(tmp_path / "store")
    (root / "config/inner").mkdir()
    (root / "config/inner/file").write_text("kept")
    return root


@pytest.fixture
def deep_tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed here: ``shutil.rmtree`` of pytest calls itself for each folder."""
    yield tmp_path
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def deep(folder: Path, count: int = 1_200) -> None:
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(count):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)


@pytest.mark.parametrize("place", [OFFSETS, "config/topics.json", "config/inner/other"])
@pytest.mark.parametrize("make", [os.mkfifo, broken_link, circle, device])
def test_verify_and_salvage_name_a_file_that_cannot_be_read(
    store: Path, tmp_path: Path, make: Callable[[Path], None], place: str
) -> None:
    (store / place).unlink(missing_ok=True)
    make(store / place)
    report = lq.verify(store)
    assert [(one.kind, one.file) for one in report.findings] == [("wrong_entry", place)]
    run("verify", store, code=1)
    for salvaged in (lq.salvage(store), lq.salvage(store, into=tmp_path / "new")):
        assert salvaged.plan.messages == 80
        assert (place,) in [one.paths for one in salvaged.left_behind]
    new = tmp_path / "new"
    assert (new / "config/inner/file").read_text() == "kept"
    assert not os.path.lexists(new / place) or place == "config/topics.json"


def test_verify_names_all_wrong_paths(store: Path) -> None:
    last = max((store / "consumequeue/orders/0").iterdir())
    after = f"{int(last.name) + last.stat().st_size:020d}"
    places = ["checkpoint", f"consumequeue/orders/0/{after}", "consumequeue/other"]
    for place in places:
        (store / place).unlink(missing_ok=True)
        broken_link(store / place)
    found = [one for one in lq.verify(store).findings if one.kind == "wrong_entry"]
    assert [one.file for one in found] == places
    assert all(one.reason.startswith("it is a link to /nowhere/file") for one in found)
    with pytest.raises(WrongEntry, match=f"^{store}/checkpoint: "):
        lq.recover(store, apply=True)


def test_links_to_the_folder_above_are_followed_once(store: Path, tmp_path: Path) -> None:
    for name in "abc":
        (store / "config/inner" / name).symlink_to("../..")
    (store / "config/other").mkdir()
    (store / "config/other/there").symlink_to("../inner")
    (store / "config/inner/back").symlink_to("../other")
    assert {one.kind for one in lq.verify(store).findings} == {"wrong_entry"}
    salvaged = lq.salvage(store, into=tmp_path / "new")
    assert salvaged.plan.messages == 80
    assert ("config/inner/a",) in [one.paths for one in salvaged.left_behind]
    assert (tmp_path / "new/config/other/there/file").read_text() == "kept"
    assert sum(1 for _ in (tmp_path / "new").rglob("*")) < 60


def test_very_deep_folders(store: Path, deep_tmp_path: Path) -> None:
    tmp_path = deep_tmp_path
    deep(store / "config/deep")
    run("verify", store, code=1)
    run("salvage", store, "--into", tmp_path / "new", code=1)
    assert (tmp_path / "new/config/deep/d/d").is_dir()
    deep(store / "consumequeue/odd")
    run("rebuild", store)
    run("rebuild", store, "--in-place", "--apply")
    deep(store / "consumequeue/odd")
    (store / "abort").touch()
    run("recover", store, "--apply")


def test_a_sparse_document_is_left_out(store: Path, tmp_path: Path) -> None:
    endless(store / OFFSETS)
    endless(store / "config/inner/large")
    (store / "config/topics.json").unlink()
    endless(store / "config/topics.json")
    report = lq.verify(store)
    assert {one.file for one in report.findings} == {OFFSETS, "config/topics.json"}
    left = {one.paths: one.reason for one in lq.salvage(store).left_behind}
    for place in (OFFSETS, "config/topics.json"):
        assert left[place,].endswith("the file is left out")


@pytest.mark.parametrize(
    "place",
    [
        *(OFFSETS, "config/topics.json", "config/delayOffset.json", "config/delayOffset.json.bak"),
        *(".logquarry/settings.json", ".logquarry/kept_units.json"),
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, device])
def test_a_writer_waits_for_no_pipe(store: Path, make: Callable[[Path], None], place: str) -> None:
    (store / place).unlink(missing_ok=True)
    make(store / place)
    with lq.MessageStore.open(store, mode="rw") as writer:
        writer.put(lq.Message("orders", b"one more"))
        writer.wait_dispatched()
        with writer.consumer("group", "orders", timeout=0) as consumer:
            assert sum(1 for _ in consumer) == 81


@pytest.mark.parametrize("make", [os.mkfifo, device])
def test_a_lock_that_is_no_file(store: Path, make: Callable[[Path], None]) -> None:
    (store / "lock").unlink()
    make(store / "lock")
    (store / "abort").touch()
    for call in (
        lambda: lq.recover(store, apply=True),
        lambda: lq.MessageStore.open(store, mode="rw"),
    ):
        with pytest.raises(StoreUnavailable, match="lock: it is not a plain file"):
            call()


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("folder", ["commitlog", "index", "consumequeue/orders/0"])
def test_a_circle_of_links_beside_the_files_of_a_sequence_stops_no_writer(
    folder: str, crashed: bool, store: Path
) -> None:
    circle(store / folder / "odd")
    if crashed:
        (store / "abort").touch()
        (store / ".logquarry/durable").unlink()
    with lq.MessageStore.open(store, mode="rw") as writer:
        writer.put(lq.Message("orders", b"one more", queue_id=0))
        writer.wait_dispatched()
    assert (store / folder / "odd").is_symlink()


@pytest.mark.parametrize("name", ["checkpoint", "abort", "lock", ".logquarry/durable"])
@pytest.mark.parametrize("make", [os.mkfifo, circle, broken_link])
def test_a_writer_that_meets_no_plain_file_changes_nothing(
    make: Callable[[Path], None], name: str, store: Path
) -> None:
    (store / name).unlink(missing_ok=True)
    make(store / name)
    before = sorted(store.rglob("*"))
    with pytest.raises(StoreUnavailable, match=f"{name}: it is "):
        lq.MessageStore.open(store, mode="rw")
    assert sorted(store.rglob("*")) == before


@pytest.mark.parametrize("place", ["other", "orders/7", "orders/0/next"])
@pytest.mark.parametrize("make", [os.mkfifo, broken_link, circle])
def test_a_clean_store_with_a_strange_entry_in_a_queues_place_is_refused(
    store: Path, make: Callable[[Path], None], place: str
) -> None:
    last = max((store / "consumequeue/orders/0").iterdir())
    place = place.replace("next", f"{int(last.name) + last.stat().st_size:020d}")
    make(store / "consumequeue" / place)
    with pytest.raises(WrongEntry, match=f"{place}: .*Nothing was changed"):
        lq.MessageStore.open(store, mode="rw", config=config())
    assert not (store / "abort").exists()


@pytest.mark.parametrize("place", ["config", OFFSETS, f"{OFFSETS}.bak", "config/topics.json"])
def test_a_writer_does_not_replace_a_broken_link_in_config(store: Path, place: str) -> None:
    path = store / place
    if path.is_dir():
        path.rename(store.parent / "away")
    path.unlink(missing_ok=True)
    broken_link(path)
    with pytest.raises(WrongEntry, match=f"{place}: it is a link to /nowhere/file"):
        lq.MessageStore.open(store, mode="rw", config=config())
    assert path.is_symlink()
    assert not (store / "abort").exists()


@pytest.mark.parametrize("make", [os.mkfifo, broken_link, circle])
def test_verify_and_salvage_name_a_config_folder_that_cannot_be_read(
    store: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (store / "config").rename(tmp_path / "away")
    make(store / "config")
    assert [(one.kind, one.file) for one in lq.verify(store).findings] == [
        ("wrong_entry", "config")
    ]
    run("recover", store, code=4)
    run("verify", store, code=1)
    assert lq.salvage(store, into=tmp_path / "new").plan.messages == 80


@pytest.mark.parametrize("place", ["config", OFFSETS])
def test_a_reader_warns_of_a_broken_link_to_the_consumer_offsets(
    store: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = store / place
    if path.exists():
        path.rename(store.parent / "away")
    broken_link(path)
    with lq.MessageStore.open(store) as reader, reader.consumer("group", "orders", timeout=0):
        pass
    assert f"{path}: it is a link to a missing file or folder" in caplog.text
    assert f"{place}: it is a link to /nowhere/file" in run("stats", store).stderr


@pytest.mark.parametrize("level", range(1, 4))
def test_a_reader_of_a_queue_behind_a_broken_link(
    store: Path, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with lq.MessageStore.open(store, mode="rw", config=config()) as writer:
        writer.put(lq.Message("other", b""))
    first = min((store / "consumequeue/orders/0").iterdir())
    path = [first, *first.parents][3 - level]
    path.rename(store.parent / "away")
    broken_link(path)
    with lq.MessageStore.open(store) as reader:
        for call in (reader.get, reader.queue_offsets):
            with pytest.raises(StoreNotFound, match=f"{path}: it is a link to /nowhere/file"):
                call("orders", 0)
        assert list(reader.scan("orders"))
        _ = reader.topics
    if level < 3:
        assert f"{path}: a link to /nowhere/file, which is missing, ignored" in caplog.text
