"""Writable stores: opened and closed, the state in which one is found, what prevents an opening."""

from __future__ import annotations

import dataclasses
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import logquarry as lq
from logquarry import paths
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock
from logquarry.disk.service import Service
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.format import sys_flag
from logquarry.log import codec
from logquarry.repair.verification import verify_store
from logquarry.store import services
from tests.helpers.failing_disk import FaultyDisk
from tests.helpers.python_process import run
from tests.helpers.small_store import NOW, SMALL, bodies, config, facts, message_files, opened

# ------------------------------------------------------------------------------ open and close
_KERNELS_OF_A_PUT = """
import sys
import logquarry as lq
from logquarry.log import codec

def loaded():
    kernels = vars(codec.require_kernels()).items()
    return {name for name, kernel in kernels if getattr(kernel, "signatures", None)}

small = lq.StoreConfig(mapped_file_size_commit_log=1 << 20)
store = lq.MessageStore.open(sys.argv[1], mode="rw", config=small)
before = loaded()
store.put(lq.Message("t", b"x", keys="k"))
store.close()
assert {"follow", "group_units", "put_index_keys"} <= before, before
assert loaded() == before, loaded() - before
"""


@pytest.mark.skipif(not codec.kernels_enabled(), reason="without kernels")
def test_opening_loads_the_kernels_that_dispatch(tmp_path: Path) -> None:
    done = run(_KERNELS_OF_A_PUT, tmp_path / "store")
    assert done.returncode == 0, done.stderr


def test_opened_again(tmp_path: Path) -> None:
    expected = []
    for round_ in range(4):
        with opened(tmp_path) as store:
            for number in range(37 + round_):
                expected.append(body := b"%d %d" % (round_, number))
                store.put(lq.Message("t", body, queue_id=number % 3, keys="k"))
            assert bodies(store) == expected
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == expected
        assert sum(reader.queue_offsets("t", q).max for q in range(3)) == len(expected)
        assert not reader.has_abort and not reader.is_live
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings
        # No message is indexed twice.
        assert len(reader.query("t", "k", max_count=64)) == 64
        counts = Counter(m.physical_offset for m in reader.query("t", "k", max_count=64))
        assert set(counts.values()) == {1}


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(lq.Message("t", keys="k"))
    with lq.MessageStore.open(tmp_path, mode="rw") as store:
        # The writer takes the kinds of queues and index from the files too.
        assert store.config == dataclasses.replace(
            lq.StoreConfig(**SMALL),
            dialect="4.9",
            index_tags=False,
            mapper_file_size_batch_consume_queue=13_800_000,
            message_index_enable=True,
            enable_multi_dispatch=False,
            enable_lmq=False,
        )
        store.put(lq.Message("t"))
    with pytest.raises(lq.errors.CorruptStore):
        opened(tmp_path, mapped_file_size_commit_log=8192)
    assert not (tmp_path / "abort").exists(), "it can be opened again"
    with opened(tmp_path) as store:
        assert len(bodies(store)) == 2


def test_an_empty_store_is_opened_again(tmp_path: Path) -> None:
    for _ in range(3):
        opened(tmp_path / "a" / "b").close()
    with lq.MessageStore.open(tmp_path / "a" / "b") as reader:
        assert bodies(reader) == []


def test_a_full_file_at_the_end(tmp_path: Path) -> None:
    """The log ends exactly where its last file does."""
    with opened(tmp_path) as store:
        while store.max_offset < 16_384:
            store.put(lq.Message("t", bytes(1_000)))
    (tmp_path / "commitlog" / f"{16_384:020d}").unlink()
    shutil.rmtree(tmp_path / "consumequeue")
    with opened(tmp_path) as store:
        assert store.put(lq.Message("t")).physical_offset == 16_384


def test_a_folder_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("private")
    with pytest.raises(StoreNotFound, match=r"diary\.txt"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]
    with pytest.raises(StoreNotFound, match="not a folder"):
        opened(tmp_path / "diary.txt")
    with pytest.raises(UsageError, match="local"):
        lq.MessageStore.open("s3://bucket/store", mode="rw")


def test_queues_are_made_from_the_log(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(100):
            store.put(lq.Message("t", keys=f"k{number}"))
    shutil.rmtree(tmp_path / "consumequeue")
    shutil.rmtree(tmp_path / "index")
    with opened(tmp_path) as store:
        assert store.queue_offsets("t", 0) == (0, 100)
        assert store.put(lq.Message("t")).queue_offset == 100
        assert len(store.query("t", "k7")) == 1


def test_a_log_that_ends_before_its_queues(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        results = [store.put(lq.Message("t", b"x" * 50)) for _ in range(20)]
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[results[12].physical_offset + 90] ^= 1
    data[results[19].physical_offset + 90] ^= 1
    log.write_bytes(data)
    with opened(tmp_path) as store:
        assert store.max_offset == results[19].end_offset, "nothing was cut"
        assert store.put(lq.Message("t")).queue_offset == 20
        assert store.wait_dispatched()
        got = store.get("t", 0, 12)
        assert [m.queue_offset for m in got.messages] == [13, 14, 15, 16, 17, 18]
        got = store.get("t", 0, got.next_offset)
        assert [m.queue_offset for m in got.messages] == [20]
    assert log.read_bytes()[: results[19].end_offset] == data[: results[19].end_offset]


def test_messages_behind_the_end(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first = store.put(lq.Message("t", b"x" * 50))
        half = [
            store.put(lq.Message("t", b"half", sys_flag=sys_flag.TRANSACTION_PREPARED))
            for _ in range(2)
        ]
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[half[0].physical_offset + 90] ^= 1
    log.write_bytes(data)
    with opened(tmp_path) as store:
        assert store.max_offset == half[1].end_offset, "the durable mark knows"
        assert [m.physical_offset for m in store.scan(on_damage="skip")] == [
            first.physical_offset,
            half[1].physical_offset,
        ]
    # Without a durable offset and a message after it, the damage is what a crash left.
    data[half[1].physical_offset :] = bytes(len(data) - half[1].physical_offset)
    log.write_bytes(data)
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / ".logquarry")
    with opened(tmp_path) as store:
        assert store.max_offset == first.end_offset
        assert bytes(log.read_bytes()[first.end_offset :]).strip(b"\0") == b""
    saved = tmp_path / ".logquarry" / "quarantine" / "commitlog"
    assert [path.name for path in saved.iterdir()] == [f"{0:020d}.from-{first.end_offset}"]


def test_closed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(lq.Message("t"))
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.put(lq.Message("t")),
        lambda: store.put_batch([lq.Message("t")]),
        lambda: store.put_async(lq.Message("t")).result(),
        lambda: store.put_batch_async([lq.Message("t")]).result(),
        lambda: store.append_data(0, b""),
        store.flush,
        store.wait_dispatched,
        lambda: store.get("t", 0),
        lambda: store.query("t", "k"),
        lambda: store.max_offset,
        store.scan,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="closed") as refused:
            call()
        assert refused.value.status == "SERVICE_NOT_AVAILABLE"
    assert store.stats().put_messages == 1


def test_open_for_reading(tmp_path: Path) -> None:
    opened(tmp_path).close()
    before = facts(tmp_path)
    with lq.MessageStore.open(tmp_path, config=config()) as store:
        reader: Any = store
        calls: tuple[Callable[[], object], ...] = (
            lambda: reader.put(lq.Message("t")),
            lambda: reader.put_async(lq.Message("t")),
            lambda: reader.put_batch([]),
            lambda: reader.append_data(0, b""),
            lambda: reader.flush,
            lambda: reader.wait_dispatched,
            lambda: reader.start_delivery,
            lambda: reader.deliver_due,
            lambda: reader.transaction(lq.Message("t")),
            lambda: reader.check_transactions(lambda found: "unknown"),
            lambda: reader.add_arrival_listener(print),
            lambda: reader.remove_arrival_listener(print),
            lambda: reader.prepared_transactions,
            lambda: reader.retain(lq.RetentionRules(keep_bytes=0), apply=True),
        )
        for call in calls:
            with pytest.raises(StoreUnavailable, match="open for reading") as refused:
                call()
            assert refused.value.status == "SERVICE_NOT_AVAILABLE"
    assert facts(tmp_path) == before


def test_a_reader_has_no_method_of_a_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, lq.MessageStore.open(tmp_path) as store:
        reader: Any = store
        kinds = [
            [isinstance(one, kind) for kind in (lq.MessageStore, lq.StoreReader, lq.StoreWriter)]
            for one in (reader, writer)
        ]
        assert kinds == [[True, True, False], [True, False, True]]
        # The error is that of a typing error and of a closed store, so hasattr() works, too.
        assert hasattr(writer, "put") and not hasattr(reader, "put")
        with pytest.raises(AttributeError, match='open it with mode="rw"'):
            _ = reader.put
        with pytest.raises(AttributeError, match="has no attribute 'putt'") as unknown:
            _ = reader.putt
        assert not isinstance(unknown.value, StoreUnavailable)


def test_a_slave(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        for number in range(100):
            master.put(lq.Message("t", b"%d" % number, keys=f"k{number}"))
        log = b"".join(
            (tmp_path / f"master/commitlog/{base:020d}").read_bytes()
            for base in range(0, 16_384, 16_384)
        )[: master.max_offset]
    with opened(tmp_path / "slave", broker_role="SLAVE") as slave:
        with pytest.raises(StoreUnavailable, match="slave") as refused:
            slave.put(lq.Message("t"))
        assert refused.value.status == "SERVICE_NOT_AVAILABLE"
        for at in range(0, len(log), 1_000):
            assert slave.append_data(at, log[at : at + 1_000])
        assert not slave.append_data(5, b"no")
        assert slave.wait_dispatched(timeout=60)
        assert slave.get("t", 0, 99).messages[0].body == b"99"
    # The store goes on as a master.
    with opened(tmp_path / "slave") as store:
        assert store.put(lq.Message("t")).queue_offset == 100


def test_own_messages_behind_those_of_a_master(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        ends = [master.put(lq.Message("t", b"%d" % number)).end_offset for number in range(10)]
        log = (tmp_path / f"master/commitlog/{0:020d}").read_bytes()
    with opened(tmp_path / "copy") as store:
        assert store.append_data(0, log[: ends[8] + 5])
        with pytest.raises(StoreUnavailable, match="inside a message") as refused:
            store.put(lq.Message("t"))
        assert refused.value.status == "SERVICE_NOT_AVAILABLE"
        assert store.append_data(ends[8] + 5, log[ends[8] + 5 : ends[9]])
        assert store.put(lq.Message("t")).queue_offset == 10
        assert store.append_data(store.max_offset, log[:5])
    with opened(tmp_path / "copy") as store:
        assert len(bodies(store)) == 11, "the beginning of a message is not a message"


# ------------------------------------------------------------------------------------- others
def test_a_second_opener_is_refused_before_it_reads(tmp_path: Path) -> None:
    # The disk shall note only the opener's calls, not the flushes of the store itself.
    with opened(tmp_path, flush_interval_consume_queue=10**6) as store:
        store.put(lq.Message("t", keys="k"))
        store.wait_dispatched()
        store.flush()
        before = message_files(tmp_path)
        with pytest.raises(StoreUnavailable, match=f"process {os.getpid()}"):
            lq.MessageStore.open(tmp_path, mode="rw")
        done = run(
            """
            import sys, logquarry as lq
            try:
                lq.MessageStore.open(sys.argv[1], mode="rw")
            except lq.errors.StoreUnavailable as error:
                print(error)
            """,
            tmp_path,
            timeout=120,
        )
        assert f"process {os.getpid()}" in done.stdout, done.stderr
        assert message_files(tmp_path) == before
        assert store.put(lq.Message("t")).queue_offset == 1


def test_the_clock_gives_store_times(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path, mode="rw", config=config(), clock=lambda: NOW) as store:
        assert store.put(lq.Message("t")).store_timestamp == NOW
        assert store.message_at(0).born_timestamp == NOW
        assert store.broker == tmp_path.name


def test_opening_that_fails_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New index entries are on the disk before `abort` is removed."""
    with opened(tmp_path) as store:
        store.put(lq.Message("t", keys="k"))
    shutil.rmtree(tmp_path / "index")
    shutil.rmtree(tmp_path / "consumequeue")

    def no_thread(self: object) -> None:
        raise RuntimeError("can't start new thread")

    synced: list[Path] = []

    class Disk(FaultyDisk):
        def sync(self, descriptor: int, path: Path) -> None:
            synced.append(path)
            super().sync(descriptor, path)

        def unlink(self, path: Path) -> None:
            if path.name == "abort":
                assert {"index", "0"} <= {synced_path.parent.name for synced_path in synced}
            super().unlink(path)

    monkeypatch.setattr(Service, "start", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        opened(tmp_path, Disk())
    assert not (tmp_path / "abort").exists()


def test_opening_that_fails_behind_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(services, "Services", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path / "s")
    # The lock is free, and nothing has to be recovered.
    assert not (tmp_path / "s" / "abort").exists()
    with opened(tmp_path / "s") as store:
        assert store.put(lq.Message("t")).ok


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_program_may_change_its_folder(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    expected = []
    with opened(Path("store")) as store:
        store.put(lq.Message("t", b"0", keys="k"))
    with lq.MessageStore.open("store", mode=mode) as store:
        monkeypatch.chdir(tmp_path / "elsewhere")
        if mode == "rw":
            for number in range(300):
                expected.append(b"%d" % number)
                store.put(lq.Message(f"t{number % 3}", expected[-1], keys="k"))
            store.wait_dispatched()
        assert bodies(store) == [b"0", *expected]
        assert len(store.query("t", "k")) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with lq.MessageStore.open(tmp_path / "store") as reader:
        assert bodies(reader) == [b"0", *expected]
        assert not reader.has_abort


def test_a_reader_of_a_relative_path_still_sees_that_the_store_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it takes the files that it has not listed yet for lost ones."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with opened(Path("store")) as store:
        store.put(lq.Message("t", b"0"))
        store.wait_dispatched()
        with store.consumer("g", ["t"]) as consumer:
            assert len(consumer.poll(timeout=20)) == 1
            consumer.commit()
        with lq.MessageStore.open("store") as reader:
            monkeypatch.chdir(tmp_path / "elsewhere")
            for number in range(300):
                store.put(lq.Message("t", b"%d" % number * 10))
            store.wait_dispatched()
            assert set(bodies(reader)) <= set(bodies(store))
            assert reader.is_live
            with reader.consumer("g", ["t"]) as consumer:
                assert consumer.poll(timeout=20)[0].queue_offset == 1


def test_a_folder_that_cannot_be_opened_names_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreUnavailable, match=r"link to .*nowhere, which does not exist: create"):
        opened(link)
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="file: it is not a folder: move it away"):
        opened(tmp_path / "file" / "store")
    with opened(tmp_path / "store"), pytest.raises(StoreUnavailable, match="close it first"):
        opened(tmp_path / "store")
    with (
        mock.patch.object(paths, "mode_of", side_effect=PermissionError(13, "Permission denied")),
        pytest.raises(StoreUnavailable, match="lock: Permission denied"),
    ):
        StoreLock(Disk(), tmp_path / "store")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StoreNotFound, match="give an absolute path"):
        lq.MessageStore.open("store", mode="rw")
    monkeypatch.chdir(tmp_path)


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StoreNotFound, match="cannot be read: Permission denied"):
        opened(tmp_path)


def test_a_clock_of_fractions_is_refused(tmp_path: Path) -> None:
    clock: Any = lambda: 1.5  # noqa: E731
    with lq.MessageStore.open(tmp_path, mode="rw", config=config(), clock=clock) as store:
        for properties in (None, ""):
            message = lq.Message("t", born_timestamp=1, properties_string=properties)
            for put in (store.put, lambda message: store.put_many([message])):
                with pytest.raises((UsageError, TypeError, struct.error)):
                    put(message)
        assert store.max_offset == 0
    assert not (tmp_path / "abort").exists()


def test_paths_of_bytes(tmp_path: Path) -> None:
    path: Any = os.fsencode(tmp_path / "st\u00f6re")
    with lq.MessageStore.open(path, mode="rw", config=config()) as store:
        store.put(lq.Message("t"))
        assert store.broker == "st\u00f6re"
    with lq.MessageStore.open(path) as reader:
        assert len(bodies(reader)) == 1


@pytest.mark.parametrize("name", ["commitlog", "consumequeue", "index", ".logquarry"])
def test_a_file_where_a_folder_belongs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreUnavailable, match=name):
        opened(tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue/t/0"])
def test_a_short_first_file_after_a_crash(folder: str, tmp_path: Path) -> None:
    """It is the only log file: only the settings show how large it should be."""
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"x"))
    (path,) = (tmp_path / folder).iterdir()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(lq.errors.CorruptStore):
        opened(tmp_path)
    (tmp_path / "abort").touch()
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"y"))
        assert store.wait_dispatched(timeout=60)
        assert [message.body for message in store.get("t", 0).messages] == [b"x", b"y"]
    assert path.stat().st_size == len(data)


@pytest.mark.parametrize("inside", ["new", "commitlog/new", "consumequeue/t/new", "link"])
def test_a_new_store_in_another_store_is_refused(inside: str, tmp_path: Path) -> None:
    """A broker may refuse to start while an unknown folder is in its store."""
    root = tmp_path / "store"
    with opened(root) as store:
        store.put(lq.Message("t", b"x"))
    path = root / inside
    if inside == "link":
        path = tmp_path / "link" / "new"
        path.parent.symlink_to(root)
    before = sorted(root.rglob("*"))
    with pytest.raises(UsageError, match="a new store cannot lie in the store"):
        lq.MessageStore.open(path, mode="rw")
    assert sorted(root.rglob("*")) == before
    with opened(tmp_path / "beside"):
        pass


def test_a_new_store_beside_the_log_of_a_broker_is_made(tmp_path: Path) -> None:
    """The broker may have storePathRootDir=DIR/store and storePathCommitLog=DIR/commitlog."""
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "store").mkdir()
    with opened(tmp_path / "new") as store:
        store.put(lq.Message("t", b"x"))


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_lost_index_is_made_again(tmp_path: Path, is_emptied: bool) -> None:
    """Otherwise queries would no longer find the old keys as soon as the index has a new file."""
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"old", keys="k"))
    shutil.rmtree(tmp_path / "index")
    if is_emptied:
        (tmp_path / "index").mkdir()
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"new", keys="other"))
    with lq.MessageStore.open(tmp_path, config=config()) as reader:
        assert [message.body for message in reader.query("t", "k")] == [b"old"]
        assert [message.body for message in reader.query("t", "other")] == [b"new"]
