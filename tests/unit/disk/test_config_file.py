"""Can a document in config/ be read at any moment, whatever fails while it is written?"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import logquarry as lq
from logquarry import systems
from logquarry.disk.config_file import (
    CONSUMER_OFFSETS,
    DELAY_OFFSETS,
    ConfigFile,
    ConfigTable,
    ConsumerOffsets,
)
from logquarry.disk.disk import Disk
from logquarry.errors import StoreNotFound, StoreUnavailable
from logquarry.format import broker_json
from logquarry.log.store_files import CONFIG, SETTINGS, quarantine
from logquarry.systems import read_file
from tests.helpers.failing_disk import EIO, ENOSPC, FaultyDisk, StoppedDisk
from tests.helpers.operator_faults import make_store


def config_file(disk: Disk, root: Path, table: ConfigTable = DELAY_OFFSETS) -> ConfigFile:
    return ConfigFile(disk, root, table)


def test_what_was_saved_is_loaded_and_the_one_before_is_kept(tmp_path: Path) -> None:
    file = config_file(Disk(), tmp_path)
    assert file.load().value is None
    assert file.save({1: 2}) and file.save({1: 3})
    assert not file.save({1: 3}), "nothing new"
    again = config_file(Disk(), tmp_path).load()
    assert (again.value, again.path, again.problems) == ({1: 3}, file.path, ())
    assert broker_json.decode_delay_offsets(file.backup.read_bytes()) == {1: 2}
    assert sorted(path.name for path in file.path.parent.iterdir()) == [
        "delayOffset.json",
        "delayOffset.json.bak",
    ]


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


@pytest.mark.parametrize("harm", [b"", b"{", b"[]", b"\xff\xfe", b'{"offsetTable":{1:"x"}}'])
def test_bak_serves_where_the_file_cannot_be_read(tmp_path: Path, harm: bytes) -> None:
    first = config_file(Disk(), tmp_path)
    first.save({1: 2})
    first.save({1: 3})
    first.path.write_bytes(harm)
    file = config_file(Disk(), tmp_path)
    loaded = file.load()
    assert loaded.value == {1: 2} and loaded.path == file.backup
    assert len(loaded.problems) == 1 and str(file.path) in loaded.problems[0]
    assert file.path.read_bytes() == harm, "reading changes nothing"
    # The bad file does not replace the good one, and is kept for a look at it.
    file.save({1: 4})
    assert config_file(Disk(), tmp_path).load().value == {1: 4}
    assert broker_json.decode_delay_offsets(file.backup.read_bytes()) == {1: 2}
    assert (quarantine(tmp_path, CONFIG) / file.path.name).read_bytes() == harm


NETWORK = [errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EAGAIN]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM, *NETWORK])
def test_a_file_that_this_process_may_not_open_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root = make_store(tmp_path / "store")
    path = root / CONFIG / CONSUMER_OFFSETS.file
    for offset in (2, 3):
        ConfigFile(Disk(), root, CONSUMER_OFFSETS).save({("orders", "g"): {0: offset}})
    before = {file: file.read_bytes() for file in path.parent.glob(f"{path.name}*")}

    def refuse(wanted: Path) -> bytes:
        if wanted == path:
            raise OSError(number, os.strerror(number))
        return read_file(wanted)

    with monkeypatch.context() as patched:
        patched.setattr("logquarry.disk.config_file.read_file", refuse)
        match = f"{path}: cannot be read: {os.strerror(number)}"
        with pytest.raises(StoreNotFound, match=match):
            config_file(Disk(), root, CONSUMER_OFFSETS).load()
        with lq.MessageStore.open(root) as reader, pytest.raises(StoreNotFound, match=match):
            reader.consumer("g", "orders")
        with lq.MessageStore.open(root, mode="rw") as writer:
            with pytest.raises(StoreNotFound, match=match):
                writer.consumer("g", "orders")
            writer.put(lq.Message("orders", b"more"))
    assert {file: file.read_bytes() for file in before} == before
    with lq.MessageStore.open(root, mode="rw") as writer, writer.consumer("g", "orders"):
        assert writer.consumer_offsets.of("orders", "g")[0] == 3


def test_a_file_that_does_not_fit_into_memory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(Disk(), tmp_path)
    file.save({1: 2})
    with monkeypatch.context() as patched:
        patched.setattr(systems, "open", Mock(side_effect=MemoryError), raising=False)
        match = f"{file.path}: cannot be read: .*: free memory"
        with pytest.raises(StoreNotFound, match=match):
            config_file(Disk(), tmp_path).load()
    assert config_file(Disk(), tmp_path).load().value == {1: 2}


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, circle, listening])
def test_bak_serves_where_the_file_is_no_plain_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    first = config_file(Disk(), tmp_path)
    first.save({1: 2})
    first.save({1: 3})
    first.path.unlink()
    # The path of a socket must be short.
    monkeypatch.chdir(first.path.parent)
    make(Path(first.path.name))
    file = config_file(Disk(), tmp_path)
    assert file.load().path == file.backup
    file.save({1: 4})
    assert config_file(Disk(), tmp_path).load().value == {1: 4}
    # A link to itself has no content to keep.
    assert make is circle or (quarantine(tmp_path, CONFIG) / file.path.name).exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, *NETWORK])
def test_settings_that_this_process_may_not_open_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    root = make_store(tmp_path / "store")
    path = root / SETTINGS
    before = path.read_bytes()
    opened = os.open

    def refuse(at: Any, *more: Any, **options: Any) -> int:
        if str(at) == str(path):
            raise OSError(number, os.strerror(number), at)
        return opened(at, *more, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with lq.MessageStore.open(root, mode="rw") as writer:
            writer.put(lq.Message("orders", b"more"))
    assert path.read_bytes() == before
    assert f"the settings of the store are not recorded: {path}: cannot be read" in caplog.text


def test_two_unreadable_files_are_told_of_and_kept(tmp_path: Path) -> None:
    file = config_file(Disk(), tmp_path)
    file.path.parent.mkdir()
    file.path.write_bytes(b"{")
    file.backup.write_bytes(b"}")
    loaded = file.load()
    assert loaded.value is None and len(loaded.problems) == 2
    file.save({1: 4})
    kept = {path.name: path.read_bytes() for path in (quarantine(tmp_path, CONFIG)).iterdir()}
    assert kept == {file.path.name: b"{", file.backup.name: b"}"}


def test_whatever_call_it_dies_at_one_of_the_two_values_is_there(tmp_path: Path) -> None:
    number = 0
    while True:
        root = tmp_path / str(number)
        config_file(Disk(), root).save({1: 1})
        config_file(Disk(), root).save({1: 2})
        disk = StoppedDisk(number)
        dying = config_file(disk, root)
        dying.load()
        try:
            dying.save({1: 3})
        except KeyboardInterrupt:
            loaded = config_file(Disk(), root).load()
            assert loaded.value in ({1: 2}, {1: 3}) and not loaded.problems
            # And the next write finds nothing in its way.
            again = config_file(Disk(), root)
            again.load()
            again.save({1: 4})
            assert config_file(Disk(), root).load().value == {1: 4}
        else:
            break
        number += 1
    assert number > 8


@pytest.mark.parametrize("call", ["open", "allocate", "write", "rename"])
def test_a_full_disk_leaves_what_was_saved(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    file = config_file(disk, tmp_path)
    file.save({1: 2})
    disk.failing[call] = ENOSPC
    with pytest.raises(StoreUnavailable):
        file.save({1: 3})
    assert config_file(Disk(), tmp_path).load().value == {1: 2}
    del disk.failing[call]
    assert disk.health.reason is None
    assert file.save({1: 3})
    assert config_file(Disk(), tmp_path).load().value == {1: 3}


def test_a_failed_sync_is_never_tried_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    file = config_file(disk, tmp_path)
    file.save({1: 2})
    disk.failing["fdatasync"] = EIO
    with pytest.raises(StoreUnavailable):
        file.save({1: 3})
    del disk.failing["fdatasync"]
    with pytest.raises(StoreUnavailable):
        file.save({1: 3})
    assert config_file(Disk(), tmp_path).load().value == {1: 2}


def test_consumer_offsets_of_a_broker_come_back(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "config" / broker_json.CONSUMER_OFFSET_FILE
    path.parent.mkdir()
    path.write_bytes((golden / "real-broker/store/config" / path.name).read_bytes())
    offsets = ConsumerOffsets(Disk(), tmp_path)
    assert offsets.found == path and not offsets.problems
    assert offsets.of("MainTopic", "cg_main") == {0: 43, 1: 43, 2: 44, 3: 43}
    assert offsets.of("MainTopic", "other") == {}
    assert not offsets.save(), "it says that already"
    offsets.commit("MainTopic", "cg_main", 2, 45)
    offsets.commit("New", "other", 0, 1)
    assert offsets.save()
    again = ConsumerOffsets(Disk(), tmp_path)
    assert again.groups() == offsets.groups()
    assert again.of("MainTopic", "cg_main")[2] == 45 and again.of("New", "other") == {0: 1}
    assert "\t\t" in path.read_text() and "{0:1\n" in path.read_text()


def test_lost_consumer_offsets_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "config" / broker_json.CONSUMER_OFFSET_FILE
    path.parent.mkdir()
    path.write_bytes(b"{")
    offsets = ConsumerOffsets(Disk(), tmp_path)
    assert offsets.found is None and offsets.groups() == {}
    assert len(offsets.problems) == 1 and str(path) in offsets.problems[0]


def test_members_that_are_not_known_stay(tmp_path: Path) -> None:
    path = tmp_path / "config" / broker_json.CONSUMER_OFFSET_FILE
    path.parent.mkdir()
    before = (
        '{\n\t"dataVersion":{\n\t\t"counter":7\n\t},\n\t"groupTopicMap":{\n\t\t"1":["A,\\"}"]\n\t},\n'
        '\t"offsetTable":{\n\t\t"A@g":{0:1\n\t\t}\n\t},\n\t"pullOffsetTable":{\n\t\t"A@g":{0:3}\n\t}\n}'
    )
    path.write_text(before)
    offsets = ConsumerOffsets(Disk(), tmp_path)
    head, _, tail = before.partition('"offsetTable":{\n\t\t"A@g":{0:1\n\t\t}\n\t}')
    for offset in (5, 6):
        offsets.commit("A", "g", 0, offset)
        assert offsets.save() and not offsets.save()
        after = path.read_text()
        assert after.startswith(head) and after.endswith(tail)
        assert broker_json.decode_consumer_offsets(after) == {("A", "g"): {0: offset}}
    # All values that only .bak has stay, too.
    path.write_text("{")
    again = ConsumerOffsets(Disk(), tmp_path)
    again.commit("A", "g", 1, 7)
    assert again.save()
    assert path.read_text().endswith(tail)
    assert broker_json.decode_consumer_offsets(path.read_text())["A", "g"] == {0: 5, 1: 7}


@pytest.mark.parametrize(
    "before",
    [
        '{"offsetTable":{"A@g":{0:1}},"offsetTable":{"A@g":{0:2}}}',
        r'{"\u006fffsetTable":{"A@g":{0:2}}}',
    ],
)
def test_offsets_of_an_unusual_document_are_replaced(tmp_path: Path, before: str) -> None:
    path = tmp_path / "config" / broker_json.CONSUMER_OFFSET_FILE
    path.parent.mkdir()
    path.write_text(before)
    offsets = ConsumerOffsets(Disk(), tmp_path)
    assert offsets.of("A", "g") == {0: 2}
    offsets.commit("A", "g", 0, 5)
    assert offsets.save()
    assert ConsumerOffsets(Disk(), tmp_path).of("A", "g") == {0: 5}
