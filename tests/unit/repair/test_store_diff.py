"""``logquarry.repair.store_diff``: stores that diverge, and stores that only lag."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.format import frame
from logquarry.log.layout import StoreLayout
from logquarry.read.queue import ConsumeQueue
from logquarry.repair.store_diff import LogDiff, StoreDiff, compare_stores
from tests.helpers.small_store import NOW, config, forget_start, opened

SIZE = 16_384


def fill(root: Path, count: int, *, clock: Callable[[], int] | None = None) -> None:
    with lq.MessageStore.open(root, mode="rw", config=config(), clock=clock) as store:
        for number in range(count):
            store.put(
                lq.Message("t", b"%03d " % number * 50, queue_id=number % 2, born_timestamp=NOW)
            )


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A store of three files, and its copy."""
    fill(tmp_path / "a", 150, clock=lambda: NOW)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def compared(a: Path, b: Path) -> StoreDiff:
    """Compare in both directions, which must swap the results of a and b."""
    found = compare_stores(*(StoreLayout.open(path) for path in (a, b)))
    other = compare_stores(*(StoreLayout.open(path) for path in (b, a)))
    assert other.verdict == found.verdict
    assert (other.start, other.end) == (found.start, found.end)
    if found.divergence is not None:
        assert other.divergence is not None
        assert other.divergence.offset == found.divergence.offset
        assert other.divergence.a.what == found.divergence.b.what
    return found


def change(root: Path, offset: int, data: bytes) -> None:
    with (root / "commitlog" / f"{offset - offset % SIZE:020d}").open("r+b") as file:
        file.seek(offset % SIZE)
        file.write(data)


def places(root: Path) -> list[lq.StoredMessage]:
    with lq.MessageStore.open(root) as store:
        return list(store.scan())


def test_equal(pair: tuple[Path, Path]) -> None:
    found = compared(*pair)
    assert found.verdict == "equal" and not found.has_diverged and not found.notes
    assert [part.offset for part in found.parts] == [0, SIZE, 2 * SIZE]
    assert sum(part.length for part in found.parts) == found.log_a.max_offset
    assert {queue.state for queue in found.queues} == {"equal"} and len(found.queues) == 2


@pytest.mark.parametrize("number", [0, 57, 149])
def test_one_message_differs(pair: tuple[Path, Path], number: int) -> None:
    a, b = pair
    message = places(a)[number]
    at = message.physical_offset + frame.BODY_POSITION + 3
    change(b, at, b"X")
    found = compared(a, b)
    assert found.verdict == "diverged" and found.divergence is not None
    assert found.divergence.offset == at
    left, right = found.divergence.a, found.divergence.b
    assert left.what == "message" and left.offset == message.physical_offset
    assert (left.topic, left.queue_id, left.queue_offset) == ("t", number % 2, number // 2)
    assert left.store_timestamp == NOW and left.message_id == message.message_id
    assert right.what == "damage" and right.reason is not None and "BODYCRC" in right.reason
    assert right.queue_offset == number // 2, "the frame says it still"
    (part,) = [part for part in found.parts if part.different_bytes]
    assert part.different_bytes == 1 and part.first_difference == at
    # Its queues are sound.
    assert {queue.state for queue in found.queues} == {"equal"}


def test_two_histories(tmp_path: Path) -> None:
    """Both were masters: from some message on, each store has its own messages."""
    a, b = tmp_path / "a", tmp_path / "b"
    fill(a, 100, clock=lambda: NOW)
    shutil.copytree(a, b)
    parted = places(a)[-1]
    for root, body in ((a, b"of a"), (b, b"of b, longer")):
        with lq.MessageStore.open(root, mode="rw", config=config()) as store:
            for _ in range(40):
                store.put(lq.Message("t", body))
    found = compared(a, b)
    assert found.verdict == "diverged" and found.divergence is not None
    start = parted.physical_offset + parted.size
    assert start <= found.divergence.offset < start + 4
    assert {found.divergence.a.what, found.divergence.b.what} == {"message"}
    assert found.divergence.a.offset == found.divergence.b.offset == start
    assert found.divergence.a.size != found.divergence.b.size


def test_a_slave_that_is_behind(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    fill(a, 30)
    found = compared(a, b)
    assert found.verdict == "prefix" and not found.has_diverged
    assert found.end == found.log_b.max_offset < found.log_a.max_offset
    assert any("b ends at" in note for note in found.notes)
    assert {queue.state for queue in found.queues} == {"behind"}


def test_a_slave_that_begins_later(pair: tuple[Path, Path]) -> None:
    a, b = pair
    (b / "commitlog" / f"{0:020d}").unlink()
    forget_start(b)
    found = compared(a, b)
    assert found.verdict == "prefix" and found.start == SIZE
    assert any(note.startswith(f"b begins at {SIZE}") for note in found.notes)
    # The other store has fillers for messages that it never had, or no entries.
    shutil.rmtree(b / "consumequeue")
    fill(b, 0)
    assert compared(a, b).verdict == "prefix"


def test_an_empty_slave(pair: tuple[Path, Path]) -> None:
    a, b = pair
    shutil.rmtree(b)
    fill(b, 0)
    assert compared(a, b).verdict == "prefix"


def test_nothing_in_common(pair: tuple[Path, Path]) -> None:
    a, b = pair
    (b / "commitlog" / f"{0:020d}").unlink()
    for base in (SIZE, 2 * SIZE):
        (a / "commitlog" / f"{base:020d}").unlink()
    for root in pair:
        shutil.rmtree(root / "consumequeue")
        shutil.rmtree(root / ".logquarry")
    found = compared(a, b)
    assert found.verdict == "disjoint" and found.has_diverged


def test_a_file_that_is_gone(pair: tuple[Path, Path]) -> None:
    a, b = pair
    (b / "commitlog" / f"{SIZE:020d}").unlink()
    found = compared(a, b)
    assert found.divergence is not None
    assert found.divergence.offset == SIZE and found.divergence.b.what == "nothing"
    assert [part.missing_in for part in found.parts] == [None, "b", None]


def test_the_rest_of_a_blank_says_nothing(pair: tuple[Path, Path]) -> None:
    a, b = pair
    last = max(m.physical_offset + m.size for m in places(a) if m.physical_offset < SIZE)
    change(b, last + 8, b"stale bytes")
    found = compared(a, b)
    assert found.verdict == "equal"
    assert any(f"the blank at {last}" in note for note in found.notes)
    assert [part.different_bytes for part in found.parts] == [0, 0, 0]
    change(b, 2 * SIZE + frame.BODY_POSITION, b"X")
    found = compared(a, b)
    assert found.divergence is not None
    assert found.divergence.offset == 2 * SIZE + frame.BODY_POSITION


@pytest.mark.parametrize("left", ["mark and queues", "queues", "nothing"])
def test_rot_in_the_last_file_is_found(pair: tuple[Path, Path], left: str) -> None:
    a, b = pair
    for root in pair:
        if left != "mark and queues":
            shutil.rmtree(root / ".logquarry")
        if left == "nothing":
            shutil.rmtree(root / "consumequeue")
    at = places(a)[-10].physical_offset + frame.BODY_POSITION
    change(b, at, b"X")
    found = compared(a, b)
    assert found.verdict == "diverged" and found.divergence is not None
    assert found.divergence.offset == at


def test_messages_behind_the_end_of_a_log(golden: Path) -> None:
    """RocketMQ's recovery has cut the log at a bad bit, in memory only; its slave is whole."""
    slave = golden / "unclean" / "abort-only" / "store"
    master = golden / "unclean" / "crc-third-last-file" / "store-recovered"
    found = compared(master, slave)
    assert found.verdict == "diverged" and found.divergence is not None
    assert found.log_a.max_offset < found.log_b.max_offset
    assert found.divergence.a.what == "damage" and found.divergence.b.what == "message"
    assert any("a has messages after its end" in note for note in found.notes)


@pytest.mark.parametrize("is_crashed", [False, True])
@pytest.mark.parametrize("has_durable", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_lost_last_files(
    pair: tuple[Path, Path], *, is_crashed: bool, has_durable: bool, count: int
) -> None:
    a, b = pair
    if is_crashed:
        (b / "abort").touch()
    if not has_durable:
        shutil.rmtree(b / ".logquarry")
    assert compared(a, b).lost == ()
    for path in sorted((b / "commitlog").iterdir())[-count:]:
        path.unlink()
    found = compared(a, b)
    assert (found.verdict, found.lost) == ("prefix", ("b",))
    assert any("b lacks its last log files" in note for note in found.notes)


def test_a_store_without_its_log(pair: tuple[Path, Path]) -> None:
    shutil.rmtree(pair[1] / "commitlog")
    with pytest.raises(lq.errors.UnsupportedStore, match="is a disk not mounted"):
        compared(*pair)


def test_a_torn_tail_is_no_divergence(pair: tuple[Path, Path]) -> None:
    a, b = pair
    fill(a, 5)
    (b / "abort").touch()
    end = places(b)[-1]
    change(b, end.physical_offset + end.size, b"half a message")
    assert compared(a, b).verdict == "prefix"


def test_queues(pair: tuple[Path, Path]) -> None:
    a, b = pair
    path = b / "consumequeue" / "t" / "1" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[20 * 3 + 19] ^= 1
    path.write_bytes(data)
    found = compared(a, b)
    assert found.verdict == "diverged" and found.divergence is None
    (queue,) = [queue for queue in found.queues if queue.state == "differs"]
    assert queue.queue_id == 1 and queue.difference is not None
    assert queue.difference.queue_offset == 3
    assert queue.difference.a is not None and queue.difference.b is not None
    assert queue.difference.a[:2] == queue.difference.b[:2]


@pytest.mark.parametrize("lost", ["queue", "file"])
def test_a_queue_that_lacks_messages_of_its_log(pair: tuple[Path, Path], lost: str) -> None:
    a, b = pair
    folder = b / "consumequeue" / "t" / "1"
    if lost == "queue":
        shutil.rmtree(folder)
    else:
        max(folder.iterdir()).unlink()
    found = compared(a, b)
    (queue,) = [queue for queue in found.queues if queue.state == "differs"]
    assert queue.reason.startswith("b lacks entry ")
    assert queue.difference is not None
    assert queue.difference.queue_offset == (0 if lost == "queue" else 60)
    assert queue.difference.b is None


def queue_files(root: Path) -> list[Path]:
    return sorted((root / "consumequeue" / "t" / "0").iterdir())


@pytest.mark.parametrize("starts_later", [False, True])
def test_a_queue_that_lost_its_first_file(pair: tuple[Path, Path], starts_later: bool) -> None:
    a, b = pair
    if starts_later:
        (a / "commitlog" / f"{0:020d}").unlink()
        forget_start(a)
    # Both logs have messages of the second file.
    for file in queue_files(b)[:2]:
        file.unlink()
    found = compared(a, b)
    assert found.verdict == "diverged" and found.divergence is None
    (queue,) = [queue for queue in found.queues if queue.state == "differs"]
    assert queue.queue_id == 0 and queue.difference is not None
    first = next(m for m in places(a) if m.queue_id == 0)
    assert queue.difference.queue_offset == first.queue_offset
    assert queue.difference.a is not None and queue.difference.b is None
    reason = f"entry {first.queue_offset}, but its log has the message at {first.physical_offset}"
    assert queue.reason == f"b lacks {reason}"


def test_a_queue_file_that_expired_in_one_store(pair: tuple[Path, Path]) -> None:
    a, b = pair
    (b / "commitlog" / f"{0:020d}").unlink()
    forget_start(b)
    queue_files(b)[0].unlink()
    found = compared(a, b)
    assert found.verdict == "prefix" and {queue.state for queue in found.queues} == {"equal"}


def test_a_retention_while_the_stores_are_opened(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's first file is deleted after the listing of the log, before that of the queues."""
    a, b = pair
    listed = ConsumeQueue.all_of

    def all_of(layout: StoreLayout, *args: Any, **kwargs: Any) -> list[ConsumeQueue]:
        assert layout.commit_log.start == 0
        if layout.root == str(a):
            (a / "commitlog" / f"{0:020d}").unlink()
            queue_files(a)[0].unlink()
        return listed(layout, *args, **kwargs)

    with opened(a):
        monkeypatch.setattr(ConsumeQueue, "all_of", all_of)
        monkeypatch.setattr(LogDiff, "run", lambda log, progress: log)
        found = compare_stores(StoreLayout.open(a), StoreLayout.open(b))
    assert {queue.state for queue in found.queues} == {"equal"}


def test_beside_a_writer(pair: tuple[Path, Path]) -> None:
    a, b = pair
    with opened(a) as store:
        store.put(lq.Message("t", b"new"))
        found = compared(a, b)
        assert found.verdict == "prefix"
        assert any("a is open in this program" in note for note in found.notes)


def test_config_decides_nothing(pair: tuple[Path, Path]) -> None:
    a, b = pair
    (a / "config").mkdir(exist_ok=True)
    (a / "config" / "consumerOffset.json").write_text("{}")
    found = compared(a, b)
    assert found.verdict == "equal" and found.config["consumerOffset.json"] == "only_a"
