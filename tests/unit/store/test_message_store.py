"""The store as users open it: beside a writer, closed, empty, without queues, full of garbage."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logquarry.config import StoreConfig
from logquarry.errors import (
    CorruptFile,
    CorruptFrame,
    LogquarryError,
    StoreNotFound,
    StoreUnavailable,
    UsageError,
)
from logquarry.format import frame, queue_entry
from logquarry.read.get_message import GetMessageStatus
from logquarry.store.message_store import MessageStore
from tests.helpers.store_maker import FIRST_TIME, StoreMaker


@pytest.fixture
def maker() -> StoreMaker:
    maker = StoreMaker(log_file_size=3000, slots=8, entries=12)
    for number in range(40):
        maker.put(
            ["orders", "payments"][number % 2],
            number % 3,
            keys=f"key{number % 4} n{number}",
            tags="even" if number % 2 == 0 else "odd",
        )
    return maker


# ------------------------------------------------------------------------------------------ open
def test_modes(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    with pytest.raises(UsageError, match="mode"):
        MessageStore.open(tmp_path, mode="w")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"open a store with MessageStore.open\(path\)"):
        MessageStore(tmp_path)  # type: ignore[abstract]
    for path in (tmp_path / "nothing", tmp_path / "commitlog"):
        with pytest.raises(StoreNotFound):
            MessageStore.open(path)


def test_a_closed_store(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    store = MessageStore.open(str(tmp_path), clock=lambda: 5)
    message = store.message_at(0)
    store.close()
    store.close()
    assert message.frame == maker.frames[0]
    for use in (
        lambda: store.max_offset,
        lambda: store.min_offset,
        lambda: store.get("orders", 0, 0),
        lambda: store.message_at(0),
        lambda: store.query("orders", "key0"),
        store.queues,
        store.refresh,
        lambda: store.offset_by_time("orders", 0, 5),
    ):
        with pytest.raises(StoreUnavailable, match="closed"):
            use()


def test_messages_carry_the_name_of_the_store(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path / "broker-a")
    with MessageStore.open(tmp_path / "broker-a") as store:
        assert store.broker == store.message_at(0).broker == "broker-a"
        assert store.get("orders", 0, 0).messages[0].broker == "broker-a"
        assert store.get("orders", 0) == store.get("orders", 0, 0)
    with MessageStore.open(f"{tmp_path}/broker-a/", broker="b") as store:
        assert store.query("orders", "key0")[0].broker == "b"


def test_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    with MessageStore.open(tmp_path) as store:
        assert (store.min_offset, store.max_offset, store.bound) == (0, 0, None)
        assert store.queues() == ()
        assert store.topics == ()
        assert store.query("orders", "key") == []
        assert store.checkpoint is None
        result = store.get("orders", 0, 5)
        assert result.status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
        assert (result.next_offset, result.min_offset, result.max_offset) == (0, 0, 0)


def test_what_info_shows(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    (tmp_path / "abort").touch()
    (tmp_path / "checkpoint").write_bytes(bytes(4088) + bytes([1] * 8))
    with MessageStore.open(tmp_path) as store:
        assert store.has_abort
        assert not store.is_live
        assert store.root == str(tmp_path)
        assert store.bound is None
        assert store.checkpoint == (0, 0, 0)
        assert store.topics == ("orders", "payments")
        assert len(store.queues()) == 6
    (tmp_path / "checkpoint").write_bytes(bytes(23))
    with MessageStore.open(tmp_path) as store, pytest.raises(CorruptFile, match="23 bytes"):
        assert store.checkpoint


@pytest.mark.parametrize("topic", ["unknown", "..", "../commitlog", "/etc", "", "a\0b"])
def test_unknown_queues(maker: StoreMaker, tmp_path: Path, topic: str) -> None:
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        assert store.queue(topic, 0) is None
        assert store.queue_offsets(topic, 0) == (0, 0)
        assert store.get(topic, 0, 7).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
        assert store.offset_by_time(topic, 0, FIRST_TIME) == 0


def test_opening_needs_neither_numba_nor_pyarrow(maker: StoreMaker, tmp_path: Path) -> None:
    """`logquarry info` has 0.4 seconds; numba alone takes longer than that to be imported."""
    maker.write(tmp_path)
    script = """
import sys
from logquarry.store.message_store import MessageStore
with MessageStore.open(sys.argv[1]) as store:
    assert store.max_offset > 0
    for name in store.queues():
        store.queue_offsets(*name)
    assert store.get(*store.queues()[0], 0).messages
    assert store.message_at(0).topic
    assert store.query("orders", "key0")
for name in ("numba", "pyarrow", "pandas"):
    assert name not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


# --------------------------------------------------------------------------------- live writer
def test_beside_a_live_writer(maker: StoreMaker, tmp_path: Path) -> None:
    def write() -> None:
        """Write as a broker does: into the existing files, never a new file over another."""
        staged = maker.write(tmp_path / "staged")
        for source in sorted(staged.rglob("*")):
            target = tmp_path / "store" / source.relative_to(staged)
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif target.exists():
                with target.open("r+b") as file:
                    file.write(source.read_bytes())
            else:
                target.write_bytes(source.read_bytes())

    write()
    (tmp_path / "store" / "abort").touch()
    with MessageStore.open(tmp_path / "store") as store:
        offset = store.queue_offsets("orders", 0).max
        end = store.max_offset
        overflow = store.get("orders", 0, offset)
        assert overflow.status is GetMessageStatus.OFFSET_OVERFLOW_ONE
        added = [maker.put("orders", 0, keys="fresh") for _ in range(40)]
        fresh = maker.put("new topic", 3, keys="fresh")
        write()
        read = []
        while (result := store.get("orders", 0, offset)).messages:
            read += [message.frame for message in result.messages]
            offset = result.next_offset
        assert read == added
        assert store.max_offset > end
        assert store.message_at(fresh.physical_offset).frame == fresh
        assert store.get("new topic", 3, 0).messages[0].frame == fresh
        assert [m.frame for m in store.query("orders", "fresh")] == added[-32:]


def test_log_files_that_a_broker_deletes(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        kept = store.message_at(0)
        (tmp_path / f"commitlog/{0:020d}").unlink()
        store.refresh()
        assert store.min_offset == 3000
        assert kept.frame == maker.frames[0]
        assert store.queue_offsets("orders", 0).min > 0


# --------------------------------------------------------------------------------------- queries
def test_queries(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    for gone in (False, True):
        if gone:
            shutil.rmtree(tmp_path / "index")
        with MessageStore.open(tmp_path) as store:
            expected = [f for f in maker.frames if f.topic == b"orders" and b"key2" in f.properties]
            assert [m.frame for m in store.query("orders", "key2")] == expected
            assert [m.frame for m in store.query("orders", "key2", max_count=2)] == expected[-2:]
            assert store.query("payments", "key2") == []
            assert store.query("orders", "key") == []
            assert store.query("orders", "") == []
            assert store.query("orders", "key2", max_count=0) == []
            assert store.query("orders", "key2", until=FIRST_TIME - 1) == []
            assert store.query("orders", "key2", since=FIRST_TIME + 10_000) == []


def test_collisions(tmp_path: Path) -> None:
    maker = StoreMaker()
    first, second = maker.put(keys="Aa"), maker.put(keys="BB Aa Aa")
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        # RocketMQ's answer: one message for each entry with that hash.
        found = [message.frame for message in store.query("orders", "Aa")]
        assert found == [first, second, second, second]
        exact = [message.frame for message in store.query("orders", "BB", exact=True)]
        assert exact == [second]


def test_queries_of_what_the_log_no_longer_holds(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    (tmp_path / f"commitlog/{0:020d}").unlink()
    with MessageStore.open(tmp_path) as store:
        found = store.query("orders", "key2")
        assert found
        assert min(message.physical_offset for message in found) >= 3000


def test_an_index_that_cannot_be_read_is_not_used(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    expected = [f for f in maker.frames if b"n6" in f.properties]
    for path in (tmp_path / "index").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:40] + random.Random(1).randbytes(len(data) - 40))
    with MessageStore.open(tmp_path) as store:
        assert [m.frame for m in store.query("orders", "n6")] == expected


# ---------------------------------------------------------------------- queues made from the log
def test_queue_files_without_a_unit_are_none(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    for path in (tmp_path / "consumequeue").rglob("0*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    (tmp_path / "consumequeue" / "empty" / "0").mkdir(parents=True)
    with MessageStore.open(tmp_path) as store:
        assert not store.has_queue_files
        assert ("empty", 0) in store.queues()
        found = store.get("orders", 0, 0).messages
        assert [m.frame for m in found] == [
            f for f in maker.frames if (f.topic, f.queue_id) == (b"orders", 0)
        ]
        assert store.queue_offsets("empty", 0) == (0, 0)


def test_the_newest_epoch_is_the_queue(tmp_path: Path) -> None:
    """The topic was deleted and created again: its offsets began at 0."""
    maker = StoreMaker()
    for offset in (0, 1, 2, 3, 0, 1, 1, 2, 3, 4):
        maker.put(queue_offset=offset, body=b"%d" % offset)
    maker.units.clear()
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        assert store.queue_offsets("orders", 0) == (1, 5)
        found = store.get("orders", 0, 1).messages
        assert [message.frame for message in found] == maker.frames[6:]


def test_frames_that_take_no_place_in_a_queue(tmp_path: Path) -> None:
    maker = StoreMaker()
    kinds = [0, 4, 8, 0xC, 0]
    for flag in kinds:
        maker.put(sys_flag=flag, queue_offset=None if flag in (0, 8) else 0)
    maker.units.clear()
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        found = store.get("orders", 0, 0).messages
        assert [message.sys_flag for message in found] == [0, 8, 0]


def test_a_gap_in_a_queue_made_from_the_log(tmp_path: Path) -> None:
    maker = StoreMaker()
    for _ in range(12):
        maker.put(body=bytes(40))
    maker.units.clear()
    maker.write(tmp_path)
    path = tmp_path / f"commitlog/{0:020d}"
    data = bytearray(path.read_bytes())
    data[maker.frames[4].physical_offset + 95] ^= 1
    path.write_bytes(data)
    config = StoreConfig(mapped_file_size_consume_queue=200)
    with MessageStore.open(tmp_path, config=config) as store:
        assert store.queue_offsets("orders", 0) == (0, 12)
        queue = store.queue("orders", 0)
        assert queue is not None
        assert [offset for offset, _ in queue.entries()] == [n for n in range(12) if n != 4]
        assert [s.count for s in queue.segments()] == [10, 2]
        result = store.get("orders", 0, 0)
        assert [m.queue_offset for m in result.messages] == [0, 1, 2, 3]
        assert result.next_offset == 4
        result = store.get("orders", 0, 4)
        assert [m.queue_offset for m in result.messages] == [5, 6, 7, 8, 9]
        assert result.next_offset == 10
        for number in [n for n in range(12) if n != 4]:
            time = maker.frames[number].store_timestamp
            assert store.offset_by_time("orders", 0, time) == number


def test_further_queues_of_a_message(tmp_path: Path) -> None:
    maker = StoreMaker()
    text = "INNER_MULTI_DISPATCH\x01%LMQ%a,copies\x02INNER_MULTI_QUEUE_OFFSET\x01{0},{0}"
    for number in range(3):
        maker.put(queue_id=2, properties=text.format(number).encode())
    maker.put(queue_id=2, properties=text.replace("{0},{0}", "7").encode())
    maker.put(queue_id=2, properties=text.format("x" * 30).encode())
    maker.put(queue_id=2, properties=text.format("9" * 30).encode())
    maker.units.clear()
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        # The messages show the setting.
        assert store.queues() == (("%LMQ%a", 0), ("copies", 2), ("orders", 2))
    with MessageStore.open(tmp_path, config=StoreConfig(enable_multi_dispatch=False)) as store:
        assert store.queues() == (("orders", 2),)
    config = StoreConfig(enable_multi_dispatch=True)
    with MessageStore.open(tmp_path, config=config) as store:
        assert store.queues() == (("%LMQ%a", 2), ("copies", 2), ("orders", 2))
    config = StoreConfig(enable_multi_dispatch=True, enable_lmq=True)
    with MessageStore.open(tmp_path, config=config) as store:
        assert store.queues() == (("%LMQ%a", 0), ("copies", 2), ("orders", 2))
        assert len(store.get("%LMQ%a", 0, 0).messages) == 3


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_queues_from_the_log_with_and_without_kernels(
    maker: StoreMaker, tmp_path: Path, kernels: str
) -> None:
    maker.write(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue")
    script = """
import sys
from logquarry.store.message_store import MessageStore
with MessageStore.open(sys.argv[1]) as store:
    for name in store.queues():
        print(*name, list(store.queue(*name).entries()))
    print([m.physical_offset for m in store.query("orders", "key2")], store.max_offset)
"""
    environment = {**os.environ, "LOGQUARRY_KERNELS": kernels}
    command = [sys.executable, "-c", script, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, env=environment, text=True)
    expected = ""
    for (topic, queue_id), units in sorted(maker.units.items()):
        expected += f"{topic} {queue_id} {sorted(units.items())}\n"
    assert found.stdout.startswith(expected)


# --------------------------------------------------------------------------------- hostile files
@pytest.mark.parametrize("seed", range(40))
def test_garbage_raises_nothing_but_our_errors(
    maker: StoreMaker, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    maker.write(tmp_path)
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in rng.sample(paths, rng.randint(1, 6)):
        data = bytearray(path.read_bytes())
        kind = rng.randrange(5)
        if kind == 0:
            data = bytearray(rng.randbytes(len(data)))
        elif kind == 1:
            data = data[: rng.randrange(len(data))]
        elif kind == 2:
            data += rng.randbytes(rng.randint(1, 99))
        elif kind == 3:
            data = bytearray()
        else:
            for _ in range(rng.randint(1, 40)):
                data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        path.write_bytes(data)
    if rng.random() < 0.3:
        (tmp_path / "abort").touch()
    if rng.random() < 0.3:
        shutil.rmtree(tmp_path / rng.choice(["consumequeue", "index"]))
    config = StoreConfig(mapped_file_size_commit_log=3000) if rng.random() < 0.5 else None
    with MessageStore.open(tmp_path, config=config) as store:
        _use_everything(store, rng)


def _use_everything(store: MessageStore, rng: random.Random) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.max_offset,
        lambda: store.bound,
        lambda: store.checkpoint,
    ]
    for topic, queue_id in store.queues():
        low, high = store.queue_offsets(topic, queue_id)
        for offset in {-1, 0, low, (low + high) // 2, high - 1, high, high + 1, 1 << 62}:
            tag = rng.choice([None, "even"])
            calls.append(partial(store.get, topic, queue_id, offset, tag=tag))
        for time in (0, FIRST_TIME + 200, 1 << 62):
            calls.append(partial(store.offset_by_time, topic, queue_id, time))
    for number in range(5):
        calls.append(partial(store.query, "orders", f"key{number}", exact=number % 2 == 0))
    calls += [partial(store.message_at, offset) for offset in rng.sample(range(10_000), 10)]
    for call in calls:
        with suppress(LogquarryError):
            call()


def test_a_unit_of_nearly_two_gigabytes(tmp_path: Path) -> None:
    maker = StoreMaker()
    maker.put()
    maker.units["orders", 0][0] = queue_entry.QueueEntry(0, 0x7FFFFFF0, 0)
    maker.write(tmp_path)
    path = tmp_path / f"commitlog/{0:020d}"
    data = path.read_bytes()
    path.write_bytes(frame.BLANK.struct.pack(0x7FFFFFFF, frame.MAGIC_V1) + data[8:])
    with MessageStore.open(tmp_path) as store:
        with pytest.raises(CorruptFrame, match="does not fit into the file"):
            store.get("orders", 0, 0)
        with pytest.raises(LogquarryError):
            store.message_at(0)


def test_bulk_reads_of_nothing_are_refused(maker: StoreMaker, tmp_path: Path) -> None:
    with MessageStore.open(maker.write(tmp_path / "store")) as store:
        refused: list[dict[str, Any]] = [
            {"topics": []},
            {"topics": ""},
            {"tags": "||"},
            {"keys": [""]},
        ]
        for options in refused:
            with pytest.raises(UsageError, match="names nothing"):
                store.to_arrow(**options)
        with pytest.raises(UsageError, match="no column is named"):
            store.to_arrow(columns=[])
        with pytest.raises(UsageError, match="names nothing"):
            store.scan([])
        with pytest.raises(UsageError, match="later than"):
            store.scan(since=2, until=1)
        assert store.to_arrow(columns=["physical_offset"]).read_all().num_rows == 40


# ----------------------------------------------------------------------------------------- close
@pytest.mark.skipif(sys.platform != "linux", reason="reads the maps of the process in /proc")
@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_closed_store_has_no_file_open_after_any_read(
    mode: str, maker: StoreMaker, tmp_path: Path
) -> None:
    """The caller still has the store object, and can unmount the store's disk."""
    maker.write(tmp_path)
    open_store: Callable[..., Any] = MessageStore.open
    store = open_store(tmp_path, mode=mode)
    assert len(store.get("orders", 0).messages) == len(store.get("orders", 0, tag="even").messages)
    assert store.message_at(0).queue_offset == 0
    assert store.query("orders", "key0")
    assert len(list(store.scan())) == store.to_arrow().read_all().num_rows == 40
    assert store.get_data(0, 10)
    assert store.offset_by_time("orders", 0, FIRST_TIME) == 0
    with store.consumer("group", "orders", timeout=0) as consumer:
        assert next(iter(consumer))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    store.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    fds = Path("/proc/self/fd")
    assert not [fd for fd in fds.iterdir() if str(tmp_path) in os.path.realpath(fd)]


WITHOUT_DESCRIPTORS = """
import os, resource, sys
from logquarry.errors import StoreUnavailable
from logquarry.store.message_store import MessageStore

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with MessageStore.open(sys.argv[1]) as store:
    for read in (store.scan, store.to_arrow):
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        try:
            read()
        except StoreUnavailable as error:
            found = str(error)
        for descriptor in taken:
            os.close(descriptor)
        print(found)
    print(len(list(store.scan())))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_scan_without_free_descriptors(maker: StoreMaker, tmp_path: Path) -> None:
    """The first scan imports modules, so Python cannot open their files."""
    maker.write(tmp_path)
    words = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    for line in found[:2]:
        assert re.search(r"\.py: cannot be read: Too many open files: raise .*\(ulimit -n\)$", line)
    assert found[2:] == ["40"]
