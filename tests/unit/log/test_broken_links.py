"""Links to disks that are not mounted: the error names the link, its target and the next step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, StoreNotFound, StoreUnavailable
from tests.helpers.small_store import bodies, config, forget_start, opened

TEXT = r"{}: it is a link to /nowhere/disk, which does not exist: mount that disk, or correct"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with opened(root) as writer:
        for number in range(60):
            writer.put(lq.Message("t", bytes(600), keys=f"k{number}"))
    return root


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_a_folder(store: Path, folder: str) -> None:
    (store / folder).rename(store / "elsewhere")
    (store / folder).symlink_to("/nowhere/disk")
    for call in (
        lambda: lq.MessageStore.open(store),
        lambda: opened(store),
        lambda: lq.recover(store, apply=True, config=config()),
    ):
        with pytest.raises((StoreNotFound, StoreUnavailable), match=TEXT.format(folder)):
            call()
    assert sorted(path.name for path in (store / "elsewhere").iterdir())


def test_a_file_of_the_log(store: Path) -> None:
    path = store / "commitlog" / f"{16_384:020d}"
    path.rename(store / "elsewhere")
    path.symlink_to("/nowhere/disk")
    with pytest.raises(CorruptFrame, match="its file is a link to /nowhere/disk, which does not"):
        bodies(lq.MessageStore.open(store))
    with pytest.raises(StoreUnavailable, match=TEXT.format(path.name)):
        lq.recover(store, apply=True, config=config())


def replace_by(path: Path, kind: str) -> str:
    """Replace a file by something that is no file; return the words that explain it."""
    path.unlink()
    if kind == "link":
        path.symlink_to("/nowhere/disk")
        return "a link to /nowhere/disk, which does not exist: mount that disk"
    if kind == "pipe":
        os.mkfifo(path)
        return "not a plain file: move it out of the store"
    path.mkdir()
    return "a folder: move it out of the store"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("base", [0, 16_384, 32_768])
def test_no_reader_skips_a_log_file_without_an_error(store: Path, base: int, kind: str) -> None:
    path = store / "commitlog" / f"{base:020d}"
    with lq.MessageStore.open(store) as reader:
        lost = next(m for m in reader.scan() if base <= m.physical_offset < base + 16_384)
    words = replace_by(path, kind)
    queue_offset, key = lost.queue_offset, f"k{lost.queue_offset}"
    with lq.MessageStore.open(store) as reader:

        def consume() -> None:
            consumer = reader.consumer("g", ["t"], start="earliest")
            while consumer.poll(7, timeout=0):
                pass

        if base:
            before = reader.get("t", 0, queue_offset - 3)
            assert len(before.messages) == 3 and before.next_offset == queue_offset
        for call in (
            lambda: bodies(reader),
            lambda: bodies_of_topic(reader),
            lambda: reader.get("t", 0, queue_offset),
            consume,
            lambda: reader.message_at(lost.physical_offset),
            lambda: reader.query("t", key),
        ):
            with pytest.raises(CorruptFrame, match=f"its file is {words}") as raised:
                call()
            assert raised.value.kind == "missing_file"
            assert raised.value.path == str(path)


def bodies_of_topic(store: lq.MessageStore) -> list[bytes]:
    return [message.body for message in store.scan(topics=["t"])]


@pytest.mark.parametrize("size", [None, 0, 5_000])
def test_consumers_warn_of_a_log_file_that_is_missing_or_short(
    store: Path, size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = store / "commitlog" / f"{16_384:020d}"
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    with lq.MessageStore.open(store) as reader:
        status = lq.GetMessageStatus.MESSAGE_WAS_REMOVING
        offset = next(n for n in range(60) if reader.get("t", 0, n, 1).status is status)
        assert reader.get("t", 0, offset, 1).messages == ()
    [text] = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    reason = f"the file ends after {size} of 16384 bytes"
    if size is None:
        reason = "there is no file for this part of the log"
    assert text == f"{path}: {reason}: its messages are left out"


def test_no_warning_of_expired_log_files(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_start(store)
    (store / "commitlog" / f"{0:020d}").unlink()
    with lq.MessageStore.open(store) as reader:
        reader.get("t", 0, 0)
    assert not [one for one in caplog.records if "left out" in one.getMessage()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("base", [0, 400, 800])
def test_a_queue_file_that_is_a_pipe(store: Path, base: int) -> None:
    path = store / "consumequeue/t/0" / f"{base:020d}"
    words = f"{path}: it is {replace_by(path, 'pipe')}"
    with lq.MessageStore.open(store) as reader:
        assert len(bodies(reader)) == 60
        for call in (
            lambda: reader.get("t", 0, 0),
            lambda: reader.queue_offsets("t", 0),
            lambda: reader.offset_by_time("t", 0, 0),
            lambda: reader.consumer("g", ["t"], start="earliest").poll(timeout=0),
        ):
            for _ in range(2):
                with pytest.raises(StoreNotFound, match=words):
                    call()
    with lq.MessageStore.open(store) as reader:
        reader.refresh()
        with pytest.raises(StoreNotFound, match=words):
            reader.get("t", 0, 0)
    report = lq.verify(store)
    assert any(one.kind == "wrong_entry" and one.file in str(path) for one in report.findings)
