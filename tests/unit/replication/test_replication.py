"""HaMaster and HaSlave: the slave's log equals its master's after every kind of interruption."""

from __future__ import annotations

import selectors
import shutil
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.cli import replication
from logquarry.errors import LogsDiverged, ReplicationError, UsageError
from logquarry.protocol.ha_messages import TransferLimits
from logquarry.replication import HaMaster, HaSlave, MasterOptions, SlaveOptions
from logquarry.replication.replica import Replica
from logquarry.replication.wire import Surroundings
from logquarry.store.writer_files import LogFeed
from logquarry.write.put_result import PutStatus
from tests.helpers.replication import QUICK, SIZES, fill, log_bytes, make_certificate, opened
from tests.helpers.waiting import eventually

# A machine that stops this process for seconds must not end a connection.
TIMES = replace(QUICK, housekeeping_ms=60_000)
MASTER = MasterOptions(times=TIMES)
SLAVE = SlaveOptions(times=TIMES, first_pause=0.01, longest_pause=0.05)
PATIENT = {"slave_timeout": 60_000, "sync_flush_timeout": 60_000}
FULL = MasterOptions(times=TIMES, full_history=True)


def follow(store: lq.StoreWriter, master: HaMaster, options: SlaveOptions = SLAVE) -> HaSlave:
    return HaSlave(store, master.host, master.port, options=options)


def caught_up(master: HaMaster, end: int) -> None:
    eventually(lambda: master.status().acknowledged >= end)


def test_a_slave_gets_all_of_it_and_reads_it(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=FULL) as master,
        follow(copy, master) as slave,
    ):
        end = fill(store, 400)
        caught_up(master, end)
        assert copy.wait_dispatched(end, 20)
        status = slave.status()
        assert status.is_connected and status.acknowledged == end == copy.max_offset
        assert status.received_bytes == end and status.trouble == ""
        (view,) = master.status().slaves
        assert (view.next_offset, view.acknowledged, view.sent_bytes) == (end, end, end)
        wanted = [m.body for m in store.get("topic-1", 0).messages]
        assert [m.body for m in copy.get("topic-1", 0).messages] == wanted
        with pytest.raises(lq.errors.StoreUnavailable, match="slave"):
            copy.put(lq.Message("t"))
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)


def test_rocketmqs_way_is_the_last_file(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=MASTER) as master,
    ):
        end = fill(store, 400)
        with follow(copy, master):
            caught_up(master, end)
            first = end - end % (1 << 16)
            assert first > 0 and copy.min_offset == first
            assert copy.wait_dispatched(end, 20)
    assert log_bytes(tmp_path / "m", end, first) == log_bytes(tmp_path / "s", end)
    with lq.MessageStore.open(tmp_path / "s") as copy:
        assert copy.max_offset == end


@pytest.mark.parametrize("options", [MASTER, FULL])
def test_a_slave_may_ask_for_the_whole_log(options: MasterOptions, tmp_path: Path) -> None:
    """The slave requests byte 1, so a RocketMQ master sends the whole log too."""
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=options) as master,
        follow(copy, master, SlaveOptions(times=TIMES, start=0)),
    ):
        end = fill(store, 400)
        caught_up(master, end)
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)


def test_both_come_and_go(tmp_path: Path) -> None:
    end = 0
    for turn in range(4):
        with (
            opened(tmp_path / "m") as store,
            HaMaster(store, options=FULL) as master,
        ):
            fill(store, 40, first=100 * turn)
            for part in range(3):
                with opened(tmp_path / "s", "SLAVE") as copy, follow(copy, master):
                    end = fill(store, 30, first=100 * turn + 30 * part)
                    if part != 1:
                        caught_up(master, end)
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)


def test_transfers_of_any_size_end_anywhere_in_a_frame(tmp_path: Path) -> None:
    limits = TransferLimits(transfer_size=77)
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=MasterOptions(times=TIMES, limits=limits)) as master,
        follow(copy, master),
    ):
        end = fill(store, 40)
        caught_up(master, end)
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)


def test_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    server = replication.ServerTls(str(certificate), str(key), str(certificate)).context()
    client = replication.client_tls(True, str(certificate), str(certificate), str(key))
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=replace(FULL, tls=server)) as master,
    ):
        fill(store, 300)
        # A peer without TLS and a peer without certificate do not count as slaves.
        bare = replication.client_tls(True, str(certificate), None, None)
        for options in (SLAVE, replace(SLAVE, tls=bare, server_name="localhost")):
            with follow(copy, master, options) as slave:
                before = slave.status().connections
                eventually(lambda: slave.status().connections >= before + 2)  # noqa: B023
                assert copy.max_offset == 0
        with follow(copy, master, replace(SLAVE, tls=client, server_name="localhost")):
            end = fill(store, 100, first=300)
            caught_up(master, end)
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)


def test_several_slaves(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    with opened(tmp_path / "m") as store, HaMaster(store, options=FULL) as master:
        copies = [opened(tmp_path / name, "SLAVE") for name in names]
        slaves = [follow(copy, master) for copy in copies]
        for slave in slaves:
            slave.start()
        end = fill(store, 300)
        eventually(lambda: all(copy.max_offset == end for copy in copies))
        eventually(lambda: [s.acknowledged for s in master.status().slaves] == [end] * 3)
        for slave, copy in zip(slaves, copies, strict=True):
            slave.close()
            copy.close()
    for name in names:
        assert log_bytes(tmp_path / name, end) == log_bytes(tmp_path / "m", end)


def test_a_master_that_comes_back_elsewhere_is_found_no_more_and_then_again(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "m") as store, opened(tmp_path / "s", "SLAVE") as copy:
        with HaMaster(store, options=FULL) as master:
            port = master.port
            slave = follow(copy, master)
            slave.start()
            end = fill(store, 50)
            caught_up(master, end)
        eventually(lambda: not slave.status().is_connected and slave.status().trouble != "")
        with HaMaster(store, port=port, options=FULL) as master:
            end = fill(store, 50, first=50)
            caught_up(master, end)
        slave.close()
        assert slave.error is None
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)


def test_a_master_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "m") as store, HaMaster(store, options=FULL) as master:
        assert master.error is None and not master.status().has_ended

        def failing(_: LogFeed) -> int:
            raise RuntimeError("a bug")

        monkeypatch.setattr(LogFeed, "min_offset", property(failing))
        store.put(lq.Message("t"))
        eventually(lambda: master.error is not None)
        assert "a bug" in str(master.error) and master.status().has_ended


def test_what_cannot_be_made_keeps_no_port(tmp_path: Path) -> None:
    class Few(Surroundings):
        def selector(self) -> selectors.BaseSelector:
            raise OSError("too many open files")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with opened(tmp_path / "m") as store:
        with pytest.raises(OSError, match="too many"):
            HaMaster(store, port=port, surroundings=Few())
        with HaMaster(store, port=port) as master:
            assert master.port == port


def test_nobody_waits_for_a_slave_that_was_closed(tmp_path: Path) -> None:
    with opened(tmp_path / "s", "SLAVE") as copy:
        slave = HaSlave(copy, "127.0.0.1", 1, options=SLAVE)
        assert not slave.wait(0)
        slave.close()
        assert slave.wait() and slave.error is None


# ----------------------------------------------------------------------------------- SYNC_MASTER
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_put_is_on_the_slaves_disk_when_it_is_done(flush: str, tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m", "SYNC_MASTER", flush_disk_type=flush, **PATIENT) as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=FULL) as master,
        follow(copy, master),
    ):
        eventually(lambda: len(master.status().slaves) == 1)
        disk = copy.log_feed()
        for number in range(20):
            result = store.put(lq.Message("t", body=bytes(number * 100)))
            assert result.status is PutStatus.PUT_OK
            assert disk._log.flushed_offset >= result.end_offset
        futures = [store.put_async(lq.Message("t", body=bytes(50))) for _ in range(500)]
        assert {future.result(60).status for future in futures} == {PutStatus.PUT_OK}
        batch = store.put_batch([lq.Message("t"), lq.Message("t")])
        assert batch.status is PutStatus.PUT_OK
        assert store.put_many([lq.Message("t")] * 100).status is PutStatus.PUT_OK


def test_the_statuses_as_slaves_come_fall_silent_and_go(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m", "SYNC_MASTER", slave_timeout=100) as store,
        # The stranger says little: it must not be dropped while this thread waits for a core.
        HaMaster(store, options=MasterOptions()) as master,
    ):
        assert store.put(lq.Message("t")).status is PutStatus.SLAVE_NOT_AVAILABLE
        with socket.create_connection((master.host, master.port)) as stranger:
            eventually(lambda: len(master.status().slaves) == 1)
            # As in RocketMQ, a connection counts as a slave before its first report.
            assert store.put(lq.Message("t")).status is PutStatus.FLUSH_SLAVE_TIMEOUT
            assert store.put(lq.Message("t", wait_store_ok=False)).status is PutStatus.PUT_OK
            stranger.sendall(struct.pack(">q", store.max_offset))
            eventually(lambda: master.status().acknowledged == store.max_offset)
            future = store.put_async(lq.Message("t"))
        assert future.result(60).status is PutStatus.FLUSH_SLAVE_TIMEOUT
        eventually(lambda: not master.status().slaves)
        assert store.put(lq.Message("t")).status is PutStatus.SLAVE_NOT_AVAILABLE


# ------------------------------------------------------------------------------------ divergence
def ended(slave: HaSlave) -> ReplicationError:
    assert slave.wait(60)
    assert isinstance(slave.error, ReplicationError)
    assert slave.status().has_ended and slave.status().trouble
    return slave.error


@pytest.mark.parametrize("behind", [1, 300])
def test_a_slave_that_is_ahead_of_its_master_is_told_so(behind: int, tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store, opened(tmp_path / "s") as other:
        ends = []
        for _ in range(400):
            message = lq.Message("t", body=bytes(300), born_timestamp=1)
            other.append_data(other.max_offset, _frame(store, message))
            ends.append(store.max_offset)
    end = ends[-1 - behind]
    _cut(tmp_path / "m", end)
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=MASTER) as master,
        follow(copy, master) as slave,
    ):
        assert store.max_offset == end
        error = ended(slave)
        assert isinstance(error, LogsDiverged)
        assert "ahead of its master" in str(error) and "logquarry diff" in str(error)
        assert master.status().acknowledged <= end


def _frame(store: lq.StoreWriter, message: lq.Message) -> bytes:
    """Put a message, and return its bytes in the log."""
    start = store.max_offset
    store.put(message)
    found = b""
    while start + len(found) < store.max_offset:
        part = store.log_feed().select(start + len(found))
        assert part is not None
        found += bytes(part)
    return found


def _cut(path: Path, end: int) -> None:
    """Cut a closed store after an offset, as a crash may."""
    for name in ("consumequeue", "index", ".logquarry"):
        shutil.rmtree(path / name)
    (path / "checkpoint").unlink()
    for file in (path / "commitlog").iterdir():
        if int(file.name) >= end:
            file.unlink()
        elif int(file.name) + (1 << 16) > end:
            at = end - int(file.name)
            file.write_bytes(file.read_bytes()[:at] + bytes((1 << 16) - at))


def test_a_slave_with_other_bytes_is_told_where(tmp_path: Path) -> None:
    for name, text in (("m", b"one"), ("s", b"two")):
        with opened(tmp_path / name) as store:
            for number in range(30):
                store.put(lq.Message("t", body=text if number >= 10 else b"the same"))
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=MASTER) as master,
        follow(copy, master) as slave,
    ):
        end = copy.max_offset
        error = ended(slave)
        assert isinstance(error, LogsDiverged) and "logquarry diff" in str(error)
        mine, its = log_bytes(tmp_path / "s", end), log_bytes(tmp_path / "m", end)
        assert mine[: error.offset] == its[: error.offset]
        assert mine[error.offset] != its[error.offset]
        assert copy.max_offset == end


@pytest.mark.parametrize(
    ("options", "size"), [(MASTER, 3 << 15), (FULL, 1 << 15), (FULL, 3 << 15), (FULL, 1 << 17)]
)
def test_a_log_of_other_file_sizes_is_refused(
    options: MasterOptions, size: int, tmp_path: Path
) -> None:
    sizes = {"mapped_file_size_commit_log": size}
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE", **sizes) as copy,
        HaMaster(store, options=options) as master,
    ):
        store.put_many([lq.Message("t", body=bytes(700))] * 200)
        assert 2 << 16 < store.max_offset < 3 << 16
        with follow(copy, master) as slave:
            assert "mappedFileSizeCommitLog" in str(ended(slave))


def test_only_a_slave_follows(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store, pytest.raises(UsageError, match="SLAVE"):
        HaSlave(store, "127.0.0.1", 1)


def test_a_slave_of_a_slave_gets_what_was_judged(tmp_path: Path) -> None:
    """The first slave cuts an incomplete message when it opens again; the second must lack it."""
    with opened(tmp_path / "m") as store:
        first, end = fill(store, 20), fill(store, 1, first=20)
    log = log_bytes(tmp_path / "m", end)
    with opened(tmp_path / "low", "SLAVE") as low:
        with opened(tmp_path / "mid", "SLAVE") as mid:
            feed = mid.log_feed()
            feed.append_data(0, log[: end - 10])
            feed.vouch(first)
            with HaMaster(mid, options=FULL) as master, follow(low, master):
                caught_up(master, first)
                assert master.status().max_offset == low.log_feed().wrote_offset == first
        with (
            opened(tmp_path / "mid", "SLAVE") as mid,
            HaMaster(mid, options=FULL) as master,
            follow(low, master) as slave,
        ):
            eventually(lambda: slave.status().has_all)
            assert mid.log_feed().append_data(first, log[first:])
            mid.log_feed().vouch(end)
            caught_up(master, end)
    assert log_bytes(tmp_path / "low", end) == log


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("start", [0, SIZES.mapped_file_size_commit_log])
def test_zeros_are_no_end_of_a_message(start: int, is_closed: bool, tmp_path: Path) -> None:
    """The received part of the message ends inside its properties, which no CRC covers."""
    with opened(tmp_path / "m") as store:
        fill(store, 160 if start else 2)
        first = store.max_offset
        store.put(lq.Message("topic", body=b"last", keys="one-key"))
        end = store.max_offset
    log = log_bytes(tmp_path / "m", end)
    assert start < first
    for cut in (1, 7, 14, end - first - 1):
        path = tmp_path / str(cut)
        with opened(path, "SLAVE") as copy:
            replica = Replica(copy.log_feed(), "s", start=start)
            replica.request()
            replica.take(start, memoryview(log[start:-cut]))
            replica.check()
            assert replica.sync() == first
            if not is_closed:
                path = shutil.copytree(path, tmp_path / f"{cut}-crashed")
        with opened(path, "SLAVE") as copy:
            assert copy.max_offset == first
            replica = Replica(copy.log_feed(), "s")
            asked = replica.request()
            replica.take(asked, memoryview(log[asked:]))
            replica.check()
            assert replica.sync() == end


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_log_that_begins_with_a_part_of_a_message(is_closed: bool, tmp_path: Path) -> None:
    start = SIZES.mapped_file_size_commit_log or 0
    with opened(tmp_path / "m") as store:
        end = fill(store, 160)
    log = log_bytes(tmp_path / "m", end)
    path = tmp_path / "s"
    with opened(path, "SLAVE") as copy:
        replica = Replica(copy.log_feed(), "s", start=start)
        replica.request()
        replica.take(start, memoryview(log[start : start + 60]))
        replica.check()
        assert replica.sync() <= start
        if not is_closed:
            path = shutil.copytree(path, tmp_path / "crashed")
    with opened(path, "SLAVE") as copy:
        replica = Replica(copy.log_feed(), "s", start=start)
        asked = replica.request()
        assert asked == start
        replica.take(asked, memoryview(log[asked:]))
        replica.check()
        assert replica.sync() == end


def test_a_body_unlike_its_crc_stays_once_it_was_acknowledged(tmp_path: Path) -> None:
    """A crash right after the acknowledgement: the body looks like a torn one."""
    with opened(tmp_path / "m") as store:
        at = store.put(lq.Message("topic", body=bytes(50))).physical_offset
        end = fill(store, 10)
    log = bytearray(log_bytes(tmp_path / "m", end))
    log[at + 100] ^= 1
    with opened(tmp_path / "s", "SLAVE") as copy:
        replica = Replica(copy.log_feed(), "s", start=0, check_crc=False)
        replica.request()
        replica.take(0, memoryview(bytes(log)))
        replica.check()
        assert replica.sync() == end
        shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    with opened(tmp_path / "crashed", "SLAVE") as copy:
        assert copy.max_offset == end


def test_a_slave_becomes_a_master_by_reopening(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=FULL) as master,
        follow(copy, master),
    ):
        end = fill(store, 60)
        caught_up(master, end)
        assert copy.wait_dispatched(end, 20)
        offsets = store.queue_offsets("topic-0", 0)
    with opened(tmp_path / "s") as store:
        assert store.max_offset == end
        result = store.put(lq.Message("topic-0"))
        assert result.queue_offset == offsets.max


def test_a_lock_is_not_needed_to_read_beside_them(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=FULL) as master,
        follow(copy, master),
    ):
        end = fill(store, 60)
        caught_up(master, end)
        threads = threading.active_count()
        with lq.MessageStore.open(tmp_path / "s") as reader:
            assert sum(1 for _ in reader.scan()) == sum(1 for _ in store.scan())
        assert threading.active_count() == threads
