"""Log files that were replaced by those of another store: the queues show what was lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.config import RECOVERIES
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.format.sys_flag import TRANSACTION_PREPARED
from logquarry.log.layout import StoreLayout
from logquarry.repair.findings import next_step
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.plan import RecoveryMode
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.small_store import config, opened

COUNT = 200


def make(root: Path, topics: tuple[str, ...], width: int) -> Path:
    with opened(root) as writer:
        for number in range(COUNT):
            topic = topics[number % len(topics)]
            writer.put(lq.Message(topic, b"%06d " % number * width, queue_id=number // 3 % 2))
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "store", ("orders", "bills"), 30)


@pytest.fixture(scope="module", params=["other topics", "the same topics"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    topics = ("other", "topics") if request.param == "other topics" else ("orders", "bills")
    return make(tmp_path_factory.mktemp("foreign") / "store", topics, 41)


@pytest.fixture(params=["with durable offset", "of another program"])
def store(request: pytest.FixtureRequest, made: Path, tmp_path: Path) -> Path:
    root = tmp_path / "store"
    shutil.copytree(made, root)
    if request.param == "of another program":
        shutil.rmtree(root / ".logquarry")
    return root


def files(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def places(root: Path) -> dict[int, int]:
    """Physical offset -> size of each message."""
    with lq.MessageStore.open(root) as reader:
        return {one.physical_offset: one.size for one in reader.scan()}


@pytest.mark.parametrize("mode", RECOVERIES)
def test_a_replaced_log_needs_consent(store: Path, foreign: Path, mode: RecoveryMode) -> None:
    had = places(store)
    for path in files(store):
        shutil.copy(foreign / "commitlog" / path.name, path)
    has = places(foreign)
    before = contents(store)
    loss = lq.recover(store, mode=mode).loss
    assert loss is not None
    assert loss.needs_consent
    assert loss.messages == sum(has.get(place) != size for place, size in had.items())
    assert "has other messages than the queues point to, from 0 on" in loss.reason
    with pytest.raises(LossRefused, match=f"^.*: {loss.messages} messages would be lost"):
        lq.recover(store, mode=mode, apply=True)
    with pytest.raises(LossRefused, match="--accept-loss"):
        rebuild(store, apply=True, config=config())
    assert contents(store) == before


def test_opening_for_writing_and_consent(store: Path, foreign: Path) -> None:
    for path in files(store):
        shutil.copy(foreign / "commitlog" / path.name, path)
    with pytest.raises(LossRefused, match="has other messages"):
        lq.MessageStore.open(store, mode="rw", config=config())
    loss = lq.recover(store).loss
    assert loss is not None
    lq.recover(store, apply=True, accept_loss=loss.bytes)
    assert lq.recover(store).loss is None


def test_verify_and_salvage_report_a_replaced_file(
    store: Path, foreign: Path, tmp_path: Path
) -> None:
    had = places(store)
    first, last = files(store)[1:3]
    shutil.copy(foreign / "commitlog" / first.name, first)
    lost = [place for place in had if int(first.name) <= place < int(last.name)]
    report = verify_store(StoreLayout.open(store))
    assert report.counts["lost_messages"] == len(lost)
    assert report.counts["lost_bytes"] == sum(had[place] for place in lost)
    assert [f.offset for f in report.findings if f.kind == "missing_file"] == [lost[0]]
    step = next_step(report)
    assert step is not None
    assert step.words == ("recover",)
    found = salvage_store(StoreLayout.open(store))
    assert not found.is_whole
    assert [span.offset for span in found.plan.lost] == [lost[0]]
    ranges = [one for some in found.plan.lost[0].messages.values() for one in some]
    assert sum(stop - start for start, stop in ranges) == len(lost)
    assert found.plan.lost_messages == len(lost)
    loss = lq.recover(store).loss
    assert loss is not None
    assert (loss.messages, loss.bytes) == (len(lost), sum(had[place] for place in lost))
    lq.recover(store, apply=True, accept_loss=loss.bytes)
    assert not verify_store(StoreLayout.open(store)).counts["lost_messages"]
    assert salvage_store(StoreLayout.open(store), tmp_path / "new").is_whole


@pytest.mark.parametrize("mode", RECOVERIES)
def test_a_replaced_middle_file_needs_consent(
    store: Path, foreign: Path, mode: RecoveryMode
) -> None:
    had = places(store)
    first, second, third = files(store)[1:4]
    shutil.copy(foreign / "commitlog" / second.name, second)
    loss = lq.recover(store, mode=mode).loss
    assert loss is not None
    assert loss.needs_consent
    inside = [place for place in had if int(second.name) <= place < int(third.name)]
    assert loss.messages == len(inside) > 10
    assert str(second) in loss.reason
    assert first.name not in loss.reason


def test_a_replaced_file_needs_consent_even_if_its_messages_are_few(
    store: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without consent, a recovery would serve the messages of the other store."""
    monkeypatch.setattr("logquarry.repair.recover.loss._SMALL_SHARE", 1)
    second = files(store)[1]
    shutil.copy(foreign / "commitlog" / second.name, second)
    loss = lq.recover(store).loss
    assert loss is not None and loss.bytes < 64 << 10
    with pytest.raises(LossRefused, match="move this file out of the log's folder"):
        lq.recover(store, apply=True)


# ---------------------------------------------------------------------------------- no false alarm
def test_swapped_queues_lose_nothing(store: Path) -> None:
    one, other = (store / "consumequeue" / "orders" / name for name in "01")
    one.rename(store / "aside")
    other.rename(one)
    (store / "aside").rename(other)
    assert lq.recover(store, config=config(), apply=True).loss is None


@pytest.mark.parametrize("mode", RECOVERIES)
def test_a_queue_of_another_store_loses_nothing(
    store: Path, tmp_path: Path, mode: RecoveryMode
) -> None:
    # Its entries end before the log does.
    other = make(tmp_path / "other", ("orders", "bills"), 20)
    shutil.rmtree(store / "consumequeue" / "orders" / "0")
    shutil.copytree(
        other / "consumequeue" / "orders" / "0", store / "consumequeue" / "orders" / "0"
    )
    assert lq.recover(store, mode=mode).loss is None


@pytest.mark.parametrize("mode", RECOVERIES)
def test_lagging_queues_and_a_torn_tail_lose_nothing_within_the_log(
    store: Path, mode: RecoveryMode
) -> None:
    (store / "abort").touch()
    end = max(places(store))
    path = [one for one in files(store) if int(one.name) <= end][-1]
    data = path.read_bytes()
    at = end - int(path.name)
    path.write_bytes(data[: at + 40].ljust(len(data), b"\0"))
    loss = lq.recover(store, mode=mode).loss
    assert loss is not None and loss.messages == 1, "the torn message"


def test_a_sound_store_has_no_message_without_a_frame(store: Path) -> None:
    layout = StoreLayout.open(store)
    from logquarry.repair.recover.loss import LossSearch

    assert LossSearch(layout, end=layout.commit_log.end).loss() is None


@pytest.mark.parametrize("first", ["a deleted topic", "half messages", "an expired queue"])
def test_new_messages_after_a_crash_need_no_consent(tmp_path: Path, first: str) -> None:
    """The file begins with frames that need no entry, and ends with messages after a crash."""
    root, kept = tmp_path / "store", 400
    settings = config(mapped_file_size_commit_log=65_536)
    with StoreWriter.start(root, config=settings) as writer:
        topic = "gone" if first == "a deleted topic" else "kept"
        flag = TRANSACTION_PREPARED if first == "half messages" else 0
        for number in range(20):
            writer.put(lq.Message(topic, b"%06d" % number, sys_flag=flag))
        for number in range(kept):
            writer.put(lq.Message("kept", b"%06d" % number))
    if first == "a deleted topic":
        shutil.rmtree(root / "consumequeue" / "gone")
    queue = sorted((root / "consumequeue" / "kept" / "0").iterdir())
    if first == "an expired queue":
        queue.pop(0).unlink()
    units = bytearray(queue[-1].read_bytes())
    written = [at for at in range(0, len(units), UNIT_SIZE) if any(units[at : at + UNIT_SIZE])]
    for at in written[-2:]:
        # The entries point to messages that other messages have replaced.
        units[at : at + 8] = (int.from_bytes(units[at : at + 8], "big") - 7).to_bytes(8, "big")
    queue[-1].write_bytes(units)
    (root / "abort").touch()
    loss = lq.recover(root, config=settings).loss
    assert loss is not None
    assert loss.messages == 2
    assert "has other messages than the queues point to" in loss.reason
    assert not loss.needs_consent


def test_the_index_is_built_again_from_a_replaced_file_on(tmp_path: Path) -> None:
    """The first and the last key of the index still point to messages."""
    for name, size in (("store", 500), ("other", 530)):
        with opened(tmp_path / name) as store:
            for number in range(100):
                store.put(lq.Message("t", bytes(size), keys=f"{name}{number}"))
    second = sorted((tmp_path / "store" / "commitlog").iterdir())[1]
    shutil.copyfile(tmp_path / "other" / "commitlog" / second.name, second)
    lq.recover(tmp_path / "store", apply=True, accept_loss=1 << 40)
    assert [f for f in lq.verify(tmp_path / "store").findings if f.kind.startswith("index")] == []
    with lq.MessageStore.open(tmp_path / "store") as store:
        keys = [m.keys for m in store.scan()]
        assert {"store0", "store99", "other40"} < set(keys)
        assert [[m.keys for m in store.query("t", str(key))] for key in keys] == [[k] for k in keys]


def test_the_index_is_built_again_after_an_interrupted_recovery(tmp_path: Path) -> None:
    """Only the queue that the recovery sets aside shows that the keys are wrong."""
    settings = config(max_index_num=66, max_hash_slot_num=5)
    for name, size in (("store", 500), ("other", 530)):
        with StoreWriter.start(tmp_path / name, config=settings) as store:
            for number in range(70):
                topic = "early" if number < 25 else "late"
                store.put(lq.Message(topic, bytes(size), keys=f"{name}{number}"))
    second = sorted((tmp_path / "store" / "commitlog").iterdir())[1]
    shutil.copyfile(tmp_path / "other" / "commitlog" / second.name, second)
    whole = StoppedDisk()
    shutil.copytree(tmp_path / "store", tmp_path / "whole")
    lq.recover(tmp_path / "whole", apply=True, accept_loss=1 << 40, disk=whole, config=settings)
    renames = [number for number, name in enumerate(whole.order) if name == "rename"]
    assert len(renames) > 2
    for number in renames:
        copy = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path / "store", copy)
        stopped = StoppedDisk(number)
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, accept_loss=1 << 40, disk=stopped, config=settings)
        lq.recover(copy, apply=True, accept_loss=1 << 40, config=settings)
        with lq.MessageStore.open(copy, config=settings) as reader:
            messages = list(reader.scan())
            assert {"other25", "store69"} < {message.keys for message in messages}
            for message in messages:
                found = reader.query(message.topic, str(message.keys))
                assert [one.keys for one in found] == [message.keys]
