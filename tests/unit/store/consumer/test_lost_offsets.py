"""Torn, rotten or lost offset files: offsets are estimated and reported, never silently reset."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk import config_file
from logquarry.disk.config_file import ConsumerOffsets
from logquarry.format import broker_json
from logquarry.message import Message
from logquarry.store.consumer import offsets as offsets_module
from logquarry.testing.clock import FakeClock
from tests.helpers.consumer_stores import numbers, saved
from tests.helpers.small_store import NOW, config

STEP = 1_000
"""Milliseconds between two messages."""
SAVED = 60
"""When the offsets were last written: with the message of this number."""
BEFORE = 10
"""Messages before that one with which an estimate begins."""


@pytest.fixture(name="root")
def past(tmp_path: Path) -> Path:
    """A store with 100 messages a topic, one a second, and offsets of two groups."""
    root = tmp_path / "s"
    clock = FakeClock(NOW)
    with lq.MessageStore.open(root, mode="rw", config=config(), clock=clock) as store:
        for number in range(100):
            for topic in ("t", "u"):
                store.put(Message(topic, b"%d" % number))
            clock.advance(STEP)
    write(root, offsets())
    return root


def offsets() -> dict[tuple[str, str], dict[int, int]]:
    return {("t", "g"): {0: 58}, ("u", "g"): {0: 59}, ("t", "other"): {0: 20}}


def file(root: Path) -> Path:
    return root / "config/consumerOffset.json"


def write(root: Path, table: dict[tuple[str, str], dict[int, int]]) -> None:
    file(root).parent.mkdir(exist_ok=True)
    file(root).write_text(broker_json.encode_consumer_offsets(table))
    touch(file(root))


def touch(path: Path, number: int = SAVED) -> None:
    at = (NOW + number * STEP) / 1_000
    os.utime(path, (at, at))


def opened(root: Path) -> lq.StoreWriter:
    return lq.MessageStore.open(root, mode="rw", config=config())


def test_a_file_that_says_nothing(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    file(root).write_bytes(b'{"offsetTable":{"t@g":{\0\0\0')
    touch(file(root))
    with opened(root) as store, store.consumer("g", "t", start="latest", timeout=0) as consumer:
        (estimate,) = consumer.estimates
        assert estimate[:3] == ("t", 0, SAVED - BEFORE)
        assert "consumerOffset.json" in estimate.reason and len(consumer.problems) == 1
        assert numbers(consumer) == list(range(SAVED - BEFORE, 100))
    assert "its offset was lost" in caplog.text
    assert saved(store)[("t", "g")] == {0: 100}
    # The unreadable file is kept, and still shows the offsets of groups that come later.
    (aside,) = (root / ".logquarry/quarantine/config").iterdir()
    assert aside.read_bytes().endswith(b"{\0\0\0")


def test_a_torn_file(root: Path) -> None:
    text = file(root).read_text()
    cut = text.index('"t@other"') + 12
    file(root).write_text(text[:cut])
    touch(file(root))
    with opened(root) as store:
        # Complete parts of the file are used as they are.
        with store.consumer("g", ["t", "u"], start="latest", timeout=0) as consumer:
            found = {estimate.topic: estimate.offset for estimate in consumer.estimates}
            assert found == {"t": 58, "u": 59}
            assert sorted(numbers(consumer)) == sorted([*range(58, 100), *range(59, 100)])
        with store.consumer("other", "t", start="latest", timeout=0) as consumer:
            assert numbers(consumer) == list(range(SAVED - BEFORE, 100))
        with store.consumer("new", "t", start="latest", timeout=0) as consumer:
            assert consumer.estimates == () and numbers(consumer) == []


def test_a_group_that_comes_after_the_file_was_written_anew(root: Path) -> None:
    file(root).write_bytes(b'{"offsetTable":{"t@other":')
    touch(file(root))
    with opened(root) as store, store.consumer("g", "t", timeout=0) as consumer:
        list(consumer)
    with opened(root) as store:
        with store.consumer("other", "t", start="latest", timeout=0) as consumer:
            assert [estimate.offset for estimate in consumer.estimates] == [SAVED - BEFORE]
            assert numbers(consumer) == list(range(SAVED - BEFORE, 100))
        # This group has never read u, and has lost no offset there.
        with store.consumer("other", "u", start="earliest", timeout=0) as consumer:
            assert consumer.estimates == () and numbers(consumer) == list(range(100))


@pytest.mark.parametrize("start", ["latest", "timestamp", "earliest"])
def test_a_file_that_the_disk_does_not_deliver(
    root: Path, start: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file may name any group, so no group starts after the estimate."""

    def failing(path: Path) -> bytes:
        if file(root).name in path.name and path.read_bytes() == lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return path.read_bytes()

    def begin(group: str) -> None:
        at = NOW + 80 * STEP if start == "timestamp" else None
        first = 0 if start == "earliest" else SAVED - BEFORE
        with (
            opened(root) as store,
            store.consumer(group, "t", start=start, timestamp=at, timeout=0) as consumer,
        ):
            assert numbers(consumer) == list(range(first, 100))
            assert len(consumer.estimates) == (start != "earliest")

    lost = file(root).read_bytes()
    for module in (config_file, offsets_module):
        monkeypatch.setattr(module, "read_file", failing)
    begin("g")
    # The file is in quarantine now, and still cannot be read.
    begin("other")
    if start != "earliest":
        assert "quarantine/config/consumerOffset.json cannot be read" in caplog.text


def test_a_backup_that_the_disk_does_not_deliver(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole file has all groups."""
    backup = file(root).with_name("consumerOffset.json.bak")
    shutil.copy2(file(root), backup)

    def failing(path: Path) -> bytes:
        if path == backup:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return path.read_bytes()

    for module in (config_file, offsets_module):
        monkeypatch.setattr(module, "read_file", failing)
    with (
        opened(root) as store,
        store.consumer("new", "t", start="latest", timeout=0) as consumer,
    ):
        assert consumer.estimates == () and numbers(consumer) == []


def test_a_file_that_the_disk_does_not_deliver_and_whose_time_is_unknown(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(offsets_module, "read_file", failing)
    monkeypatch.setattr(offsets_module, "_changed_at", lambda _: None)
    with opened(root) as store, store.consumer("new", "t", start="latest", timeout=0):
        pass
    assert "starts at latest, because the time of its last write is unknown" in caplog.text


def test_the_backup_is_read(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    backup = file(root).with_name("consumerOffset.json.bak")
    backup.write_text(file(root).read_text().replace("58", "55"))
    file(root).write_bytes(bytes(200))
    with opened(root) as store, store.consumer("g", "t", timeout=0) as consumer:
        assert consumer.estimates == () and len(consumer.problems) == 1
        assert numbers(consumer) == list(range(55, 100))
    assert ".bak instead" in caplog.text
    file(root).unlink()
    with opened(root) as store, store.consumer("other", "t", timeout=0) as consumer:
        assert consumer.problems == () and numbers(consumer) == list(range(20, 100))


def test_no_file_at_all(root: Path) -> None:
    file(root).unlink()
    groups = root / "config/subscriptionGroup.json"
    groups.write_text('{"subscriptionGroupTable":{"g":{"groupName":"g"}}}')
    touch(groups)
    with opened(root) as store:
        with store.consumer("g", "t", start="latest", timeout=0) as consumer:
            assert [estimate.offset for estimate in consumer.estimates] == [SAVED - BEFORE]
        with store.consumer("new", "t", start="latest", timeout=0) as consumer:
            assert consumer.estimates == () and numbers(consumer) == []


def test_a_group_that_has_sent_back_was_there(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(file(root).parent)
    with opened(root) as store:
        store.put(Message("%RETRY%g", b"100", properties={"RETRY_TOPIC": "t"}))
        store.wait_dispatched()
        with store.consumer("g", "t", start="latest", timeout=0) as consumer:
            assert numbers(consumer) == [100]
    assert "the time of their last write is unknown: the group starts at latest" in caplog.text


def test_estimates_stay_within_the_queue(root: Path) -> None:
    for number, first in ((-1_000, 0), (10_000, 100)):
        file(root).write_bytes(b'{"offsetTable":{"t@g":')
        touch(file(root), number)
        with lq.MessageStore.open(root) as store:
            consumer = store.consumer("g", "t", timeout=0)
            assert [estimate.offset for estimate in consumer.estimates] == [first]
            assert numbers(consumer) == list(range(first, 100))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"offsetTable":[]}',
        '{"offsetTable":{"t@g":{0:"x"}}}',
        '{"offsetTable":{"t":{0:1}}}',
        "[" * 5_000,
        '{"offsetTable":{"t@g":{0:99999999999999999999999}}}',
        '{"offsetTable":{"t@g":{0:-5}}}',
        '{"offsetTable":{"t@g":{0:1e3}}}',
    ],
)
def test_whatever_stands_there(root: Path, text: str) -> None:
    file(root).write_text(text)
    with opened(root) as store, store.consumer("g", ["t"], timeout=0) as consumer:
        found = numbers(consumer)
        assert found == list(range(100 - len(found), 100))
    assert saved(store)[("t", "g")] == {0: 100}


def test_a_kill_before_the_first_periodic_save_does_not_move_the_start(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with lq.MessageStore.open(root, mode="rw", config=config()) as store:
        store.put(Message("t", b"0"))
        store.wait_dispatched()
        for group in ("g", "h"):
            with store.consumer("other", "t", timeout=0) as consumer:
                consumer.poll()
            store.consumer(group, "t", start="latest" if group == "g" else NOW, timeout=0)
        store.put(Message("t", b"1"))
        store.wait_dispatched()
        shutil.copytree(root, tmp_path / "killed")
    with opened(tmp_path / "killed") as store:
        for group, expected in (("g", [1]), ("h", [0, 1])):
            with store.consumer(group, "t", start="latest", timeout=0) as consumer:
                assert numbers(consumer) == expected and consumer.estimates == ()


def test_the_start_in_a_later_queue_survives_a_kill(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with (
        lq.MessageStore.open(root, mode="rw", config=config()) as store,
        store.consumer("g", "t", start="latest", timeout=0) as consumer,
    ):
        store.put(Message("t", b"0", queue_id=3))
        store.wait_dispatched()
        assert numbers(consumer.poll(timeout=60)) == [0]
        shutil.copytree(root, tmp_path / "killed")
    with (
        opened(tmp_path / "killed") as store,
        store.consumer("g", "t", start="latest", timeout=0) as consumer,
    ):
        assert numbers(consumer) == [0]


def test_a_group_starts_although_its_start_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=config()) as store:
        store.put(Message("t", b"0"))
        store.wait_dispatched()
        with monkeypatch.context() as patch:
            patch.setattr(ConsumerOffsets, "save", no_room)
            assert numbers(store.consumer("g", "t", timeout=0).poll()) == [0]
        assert "group g: start offsets not written: no room" in caplog.text


def no_room(offsets: ConsumerOffsets) -> bool:
    raise lq.errors.StoreUnavailable("no room on the disk")
