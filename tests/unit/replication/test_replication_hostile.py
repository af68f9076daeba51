"""Hostile peers of master and slave: no false acknowledgement, no memory, no lost place."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import logquarry as lq
from logquarry.errors import ProtocolViolation, ReplicationError, StoreUnavailable, UsageError
from logquarry.protocol.ha_connection import MasterConnection
from logquarry.protocol.ha_messages import LARGEST_TRANSFER, HaTimes
from logquarry.replication import HaMaster, HaSlave, MasterOptions, SlaveOptions
from logquarry.replication import master as master_module
from logquarry.replication.master import _Slave
from logquarry.replication.wire import Wire
from logquarry.store.writer_files import LogFeed
from logquarry.write.put_result import PutStatus
from tests.helpers.replication import QUICK, fill, log_bytes, opened
from tests.helpers.waiting import eventually

SLAVE = SlaveOptions(times=QUICK, first_pause=0.01, longest_pause=0.02)


def report(offset: int) -> bytes:
    return struct.pack(">q", offset)


def header(offset: int, size: int) -> bytes:
    return struct.pack(">qi", offset, size)


def talk(master: HaMaster, *pieces: bytes) -> bytes:
    """The bytes that a master sends before it closes the connection."""
    answer = b""
    with socket.create_connection((master.host, master.port), 20) as wire:
        try:
            for piece in pieces:
                wire.sendall(piece)
            while data := wire.recv(1 << 16):
                answer += data
        except ConnectionError:
            pass
    return answer


# -------------------------------------------------------------------------------- at a master
@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\n", report(-1), report(1 << 62), report(1 << 63 - 1), b"\xff" * 64],
)
def test_a_stranger_gets_nothing_acknowledged(first: bytes, tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m", "SYNC_MASTER", slave_timeout=50) as store,
        HaMaster(store, options=MasterOptions(times=QUICK)) as master,
    ):
        end = fill(store, 5)
        answer = talk(master, first)
        assert answer in (b"", header(end, 0))
        assert master.status().acknowledged == 0
        eventually(lambda: not master.status().slaves)
        assert master.status().refused == 1
        assert store.put(lq.Message("t")).status is PutStatus.SLAVE_NOT_AVAILABLE


def test_what_was_not_sent_is_not_acknowledged(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m") as store,
        HaMaster(store, options=MasterOptions(times=QUICK)) as master,
    ):
        end = fill(store, 5)
        talk(master, report(end), report(end + 1))
        assert master.status().acknowledged == end


def test_connections_are_capped_and_strangers_make_room(tmp_path: Path) -> None:
    options = MasterOptions(times=HaTimes(housekeeping_ms=600_000), max_connections=4)
    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=options) as master,
    ):
        end = fill(store, 20)
        strangers = [socket.create_connection((master.host, master.port)) for _ in range(20)]
        eventually(lambda: master.status().refused >= 16)
        assert len(master.status().slaves) <= 4
        with HaSlave(copy, master.host, master.port, options=SLAVE):
            eventually(lambda: master.status().acknowledged == end)
            more = [socket.create_connection((master.host, master.port)) for _ in range(20)]
            eventually(lambda: master.status().refused >= 37)
            end = fill(store, 20, first=20)
            eventually(lambda: master.status().acknowledged == end)
        for wire in strangers + more:
            wire.close()


def test_a_stranger_does_not_throw_out_those_who_have_spoken(tmp_path: Path) -> None:
    # The first slave says nothing more, and the master does not end the connection for that.
    times = HaTimes(heartbeat_ms=100, housekeeping_ms=600_000)
    options = MasterOptions(times=times, max_connections=1)
    with opened(tmp_path / "m") as store, HaMaster(store, options=options) as master:
        end = fill(store, 5)
        with socket.create_connection((master.host, master.port), 20) as first:
            first.sendall(report(end))
            eventually(lambda: master.status().acknowledged == end)
            assert talk(master) == b""
            assert len(master.status().slaves) == 1


def test_the_silent_have_to_go(tmp_path: Path) -> None:
    options = MasterOptions(times=HaTimes(heartbeat_ms=20, housekeeping_ms=100))
    with opened(tmp_path / "m") as store, HaMaster(store, options=options) as master:
        assert talk(master) == b""
        assert talk(master, b"\0\0\0") == b""


def test_a_silent_stranger_keeps_no_processor_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first report of a slave, the master waits: it may send nothing yet."""
    waits: list[int] = []
    serve = HaMaster._serve

    def noted(master: HaMaster, slave: Any, *arguments: Any) -> int:
        wait = serve(master, slave, *arguments)
        if slave.wire.is_ready:
            waits.append(wait)
        return wait

    monkeypatch.setattr(HaMaster, "_serve", noted)
    options = MasterOptions(times=HaTimes(housekeeping_ms=20_000))
    with opened(tmp_path / "m") as store, HaMaster(store, options=options) as master:
        fill(store, 5)
        with socket.create_connection((master.host, master.port), 20):
            eventually(lambda: waits)
    assert min(waits) > 0


def test_who_may_connect(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:
        allow = MasterOptions(times=QUICK, allow=("10.0.0.0/8", "::1"))
        with HaMaster(store, options=allow) as master:
            assert talk(master, report(0)) == b""
            assert master.status().refused == 1
        allow = MasterOptions(times=QUICK, allow=("127.0.0.0/8",))
        with (
            HaMaster(store, options=allow) as master,
            socket.create_connection((master.host, master.port), 20) as wire,
        ):
            wire.sendall(report(0))
            assert wire.recv(12) == header(0, 0)
    with pytest.raises(UsageError, match="allow"):
        MasterOptions(allow=("everybody",))


def test_a_slave_that_reads_nothing_costs_what_its_socket_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[_Slave] = []

    class Noted(_Slave):
        def __init__(self, wire: Wire, machine: MasterConnection) -> None:
            super().__init__(wire, machine)
            made.append(self)

    monkeypatch.setattr(master_module, "_Slave", Noted)
    with (
        opened(tmp_path / "m", mapped_file_size_commit_log=1 << 22) as store,
        HaMaster(store, options=MasterOptions(times=QUICK, full_history=True)) as master,
    ):
        store.put_many([lq.Message("t", body=bytes(8_000))] * 4_000)
        with socket.create_connection((master.host, master.port), 20) as wire:
            wire.sendall(report(0))
            eventually(lambda: made and made[0].sent and not master.status().slaves)
        # The master gave it at most its socket's buffer and one turn.
        (slave,) = made
        assert 0 < slave.sent < store.max_offset - (1 << 22)
        assert store.put(lq.Message("t")).ok


def test_who_talks_without_a_pause_leaves_others_their_turn(tmp_path: Path) -> None:
    class Endless:
        """A socket that always has as many bytes as the reader asks for."""

        peer, is_ready, turns = "endless", True, 0

        def receive_into(self, buffer: memoryview) -> int:
            self.turns += 1
            assert self.turns == 1, "one turn, and then it is another's"
            buffer[:] = bytes(len(buffer))
            return len(buffer)

    with opened(tmp_path / "m") as store:
        master = HaMaster(store, options=MasterOptions(times=QUICK))
        wire = Endless()
        slave = _Slave(cast(Any, wire), MasterConnection(0))
        master._peers.append(slave)
        master._read(slave)
        assert slave.machine.acknowledged == 0 and wire.turns == 1
        master._peers.clear()
        master.close()


def test_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(7)
    with (
        opened(tmp_path / "m") as store,
        HaMaster(store, options=MasterOptions(times=QUICK)) as master,
    ):
        end = fill(store, 30)
        for _ in range(100):
            with socket.create_connection((master.host, master.port), 20) as wire:
                try:
                    if rng.random() < 0.5:
                        wire.sendall(report(rng.randrange(end)))
                    for _ in range(rng.randrange(4)):
                        wire.sendall(rng.randbytes(rng.randrange(40)))
                except ConnectionError:
                    pass
        assert master.status().acknowledged <= end
        eventually(lambda: not master.status().slaves)
        assert store.log_feed().replicas.connected == 0


# --------------------------------------------------------------------------------- at a slave
@contextmanager
def false_master(*answers: Callable[[bytes], bytes]) -> Iterator[socket.socket]:
    """A server that answers the first report of each connection, and waits for its end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            try:
                wire, _ = listener.accept()
            except OSError:
                return
            with wire:
                try:
                    wire.sendall(answer(wire.recv(8)))
                    while wire.recv(4096):
                        pass
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


@pytest.mark.parametrize(
    "answer",
    [
        header(-1, 10) + bytes(10),
        header(0, -1),
        header(0, LARGEST_TRANSFER + 1),
        header(0, 0x7FFFFFFF),
        header(7, 10) + bytes(10),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff" * 4_096,
    ],
    ids=["offset", "negative", "large", "huge", "elsewhere", "http", "ones"],
)
def test_a_false_masters_headers(answer: bytes, tmp_path: Path) -> None:
    with opened(tmp_path / "s", "SLAVE") as copy:
        copy.append_data(0, b"")
        with false_master(*[lambda _: answer] * 3) as listener:
            host, port = listener.getsockname()
            with HaSlave(copy, host, port, options=SLAVE) as slave:
                eventually(lambda: slave.status().connections >= 3 or slave.error is not None)
                assert slave.error is None or isinstance(slave.error, ReplicationError)
                assert (slave.status().acknowledged or 0) == 0
        assert copy.max_offset == 0


def test_what_is_no_log_is_not_acknowledged_and_gone_when_opened_anew(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 20)
    log = log_bytes(tmp_path / "m", end)
    bad = bytearray(log)
    bad[end // 2] ^= 1
    with (
        opened(tmp_path / "s", "SLAVE") as copy,
        false_master(lambda _: header(0, end) + bytes(bad)) as listener,
        HaSlave(copy, *listener.getsockname(), options=SLAVE) as slave,
    ):
        assert slave.wait(60)
        assert isinstance(slave.error, ProtocolViolation)
        assert "acknowledged none of it" in str(slave.error)
    with opened(tmp_path / "s", "SLAVE") as copy:
        assert copy.max_offset <= end // 2
        assert log.startswith(log_bytes(tmp_path / "s", copy.max_offset))
        with (
            opened(tmp_path / "m") as store,
            HaMaster(store) as master,
            HaSlave(copy, master.host, master.port, options=SLAVE),
        ):
            eventually(lambda: master.status().acknowledged == end)
    assert log_bytes(tmp_path / "s", end) == log


def test_what_is_no_log_may_be_acknowledged_when_received(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 1)
    bad = bytearray(log_bytes(tmp_path / "m", end))
    bad[4] ^= 1
    with (
        opened(tmp_path / "s", "SLAVE") as copy,
        false_master(lambda _: header(0, end) + bytes(bad)) as listener,
        HaSlave(
            copy, *listener.getsockname(), options=replace(SLAVE, acknowledge="received")
        ) as slave,
    ):
        assert slave.wait(60)
        assert "may have acknowledged a part of it" in str(slave.error)
        # A later run finds the bytes in its own log, and does not know how they were acknowledged.
        with HaSlave(copy, *listener.getsockname(), options=SLAVE) as later:
            assert later.wait(60)
            assert "in an earlier run (acknowledge: received)" in str(later.error)


def test_frames_of_another_place_are_no_log(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 5)
    log = log_bytes(tmp_path / "m", end)
    size = int.from_bytes(log[:4], "big")
    data = log[size:]
    with (
        opened(tmp_path / "s", "SLAVE") as copy,
        false_master(lambda _: header(0, len(data)) + data) as listener,
        HaSlave(copy, *listener.getsockname(), options=SLAVE) as slave,
    ):
        assert slave.wait(60) and isinstance(slave.error, ProtocolViolation)


def test_what_the_disk_does_not_take_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(feed: LogFeed) -> int:
        if feed.wrote_offset:
            raise StoreUnavailable("EIO")
        return 0

    with (
        opened(tmp_path / "m") as store,
        opened(tmp_path / "s", "SLAVE") as copy,
        HaMaster(store, options=MasterOptions(times=QUICK)) as master,
    ):
        fill(store, 20)
        monkeypatch.setattr(LogFeed, "sync", failing)
        with HaSlave(copy, master.host, master.port, options=SLAVE) as slave:
            assert slave.wait(60)
            assert isinstance(slave.error, StoreUnavailable)
        assert master.status().acknowledged == 0


def test_a_master_that_says_nothing_is_left(tmp_path: Path) -> None:
    times = HaTimes(heartbeat_ms=20, housekeeping_ms=100)
    options = SlaveOptions(times=times, first_pause=0.01, longest_pause=0.02)
    with (
        opened(tmp_path / "s", "SLAVE") as copy,
        false_master(*[lambda _: b""] * 3) as listener,
        HaSlave(copy, *listener.getsockname(), options=options) as slave,
    ):
        eventually(lambda: slave.status().connections >= 3)
        assert slave.error is None


def test_what_cannot_be_meant() -> None:
    for settings in (
        {"acknowledge": "maybe"},
        {"start": -1},
        {"start": 1 << 63},
        {"overlap": -1},
        {"first_pause": 0},
    ):
        with pytest.raises(UsageError):
            SlaveOptions(**settings)
    with pytest.raises(UsageError):
        MasterOptions(max_connections=0)


def test_what_no_host_is_called(tmp_path: Path) -> None:
    """The slave tries again later, as with an unknown host."""
    with opened(tmp_path / "s", "SLAVE") as copy, HaSlave(copy, "a..b", 1, options=SLAVE) as slave:
        eventually(lambda: "is not a host name" in slave.status().trouble)
        assert slave.error is None
        with pytest.raises(OSError, match="is not a host name"):
            HaMaster(copy, "a..b")
