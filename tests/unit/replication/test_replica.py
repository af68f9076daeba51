"""Replica: requested offsets, comparisons with the master, and refusals."""

from __future__ import annotations

from typing import Any, cast

import pytest

from logquarry.errors import LogsDiverged, ReplicationError
from logquarry.format import frame
from logquarry.replication.replica import OVERLAP, Replica
from tests.simulation.model_log import ModelLog

FILE = 1 << 20


def message(offset: int, *, time: int = 1, body: int = 100) -> bytes:
    item = frame.Frame(topic=b"t", body=bytes(body), physical_offset=offset, store_timestamp=time)
    return frame.encode(item.with_crc())


def log_of(*sizes: int, time: int = 1) -> bytes:
    """Messages with bodies of these sizes; two such logs differ only in their times."""
    data = b""
    for size in sizes:
        data += message(len(data), time=time, body=size)
    return data


def slave_with(data: bytes, *, file_size: int = FILE, overlap: int = OVERLAP) -> Replica:
    """A replica as a new process opens it."""
    log = ModelLog("slave", file_size)
    log.append_data(0, data)
    return Replica(cast(Any, log.reopened()), "slave", overlap=overlap)


def send(replica: Replica, data: bytes, start: int, stop: int) -> None:
    replica.take(start, memoryview(data)[start:stop])
    replica.check()


def test_a_slow_master_is_not_behind() -> None:
    """After five seconds of silence RocketMQ sends a heartbeat, and then more data."""
    data = log_of(30_000, 30_000, 30_000)
    replica = slave_with(data)
    start = replica.request()
    send(replica, data, start, start + 10_000)
    replica.heartbeat(start + 10_000)
    send(replica, data, start + 10_000, start + 20_000)
    replica.heartbeat(start + 20_000)
    with pytest.raises(LogsDiverged, match="ahead of its master"):
        replica.heartbeat(start + 20_000)
    # A new connection starts again.
    replica.request()
    replica.heartbeat(start)
    send(replica, data, start, len(data))
    replica.heartbeat(len(data))
    assert replica.has_all


def test_one_that_is_to_begin_where_the_log_ends_has_all_of_it() -> None:
    replica = Replica(cast(Any, ModelLog("slave", FILE)), "slave")
    assert replica.request() == 0
    had_all = []
    replica.heartbeat(FILE)  # RocketMQ says so first, whether or not more follows
    had_all.append(replica.has_all)
    replica.heartbeat(FILE)
    had_all.append(replica.has_all)
    replica.take(FILE, memoryview(message(FILE)))
    replica.check()
    had_all.append(replica.has_all)
    assert had_all == [False, True, False]


@pytest.mark.parametrize("overlap", [0, 100, OVERLAP])
@pytest.mark.parametrize("knows", ["as it came", "opened anew"])
@pytest.mark.parametrize("sizes", [(10, 500_000), (500_000, 10), (10, 10, 10)])
def test_a_whole_message_is_compared_however_large(
    sizes: tuple[int, ...], knows: str, overlap: int
) -> None:
    """The same bodies with other times: a producer sent them again after an error."""
    data = log_of(*sizes)
    if knows == "as it came":
        replica = Replica(cast(Any, ModelLog("slave", FILE)), "slave", overlap=overlap)
        replica.request()
        send(replica, data, 0, len(data))
    else:
        replica = slave_with(data, overlap=overlap)
    start = replica.request()
    assert 0 < start <= len(log_of(*sizes[:-1])) or start == 1
    other = log_of(*sizes, time=2)
    with pytest.raises(LogsDiverged):
        send(replica, other, start, len(other))


def test_a_blank_is_the_same_in_all_logs() -> None:
    size = 1 << 18
    logs = [log_of(1_000, time=time) for time in (1, 2)]
    logs = [(data + frame.encode_blank(size - len(data))).ljust(size, b"\0") for data in logs]
    replica = slave_with(logs[0], file_size=size)
    start = replica.request()
    assert start == 1
    with pytest.raises(LogsDiverged):
        send(replica, logs[1], start, size)


def test_what_was_not_judged_is_not_claimed() -> None:
    data = log_of(10, 200_000)
    replica = Replica(cast(Any, ModelLog("slave", FILE)), "slave", overlap=0)
    replica.request()
    send(replica, data, 0, 150_000)
    assert replica.checked == len(log_of(10))
    assert replica.request() <= replica.checked


def test_what_never_came_whole_is_no_reason_to_compare_stores() -> None:
    """After a power cut inside a message, the master has other bytes there, or ends before it."""
    data = log_of(10, 10, 200)
    whole = len(log_of(10, 10))
    for other in (log_of(10, 10, 100), None):
        replica = Replica(cast(Any, ModelLog("slave", FILE)), "slave")
        replica.request()
        send(replica, data, 0, len(data) - 50)
        start = replica.request()
        with pytest.raises(LogsDiverged, match=f"incomplete message at {whole}.*again") as caught:
            if other is None:
                send(replica, data, start, whole)
                replica.heartbeat(whole)
                replica.heartbeat(whole)
            else:
                send(replica, other, start, len(other))
        assert "logquarry diff" not in str(caught.value)


def test_what_is_asked_from_is_on_the_disk() -> None:
    """The first report is an acknowledgement, so the bytes before it must be synced first."""
    data = log_of(10, 10, 10)
    log = ModelLog("slave", FILE)
    replica = Replica(cast(Any, log), "slave", overlap=0)
    replica.request()
    send(replica, data, 0, len(data))
    assert log.flushed_offset == 0
    assert 0 < replica.request() <= log.flushed_offset


def test_what_was_there_before_waits_for_no_master() -> None:
    """A slave may start before its store is completely dispatched."""
    data = log_of(10, 10)
    log = ModelLog("slave", FILE)
    log.append_data(0, data)
    replica = Replica(cast(Any, log), "slave")
    assert log.dispatched_offset == 0
    replica.request()
    assert log.dispatched_offset == len(data)


def test_another_connection_has_heard_nothing_yet() -> None:
    data = log_of(10, 10)
    replica = slave_with(data)
    replica.request()
    replica.heartbeat(len(data))
    had_all = [replica.has_all]
    replica.request()
    had_all.append(replica.has_all)
    assert had_all == [True, False]


def test_logs_without_a_message_in_common_are_not_joined() -> None:
    size = 1 << 16
    data = log_of(1_000)
    data = (data + frame.encode_blank(size - len(data))).ljust(size, b"\0")
    replica = slave_with(data, file_size=size)
    replica.request()
    with pytest.raises(ReplicationError, match="empty folder"):
        replica.elsewhere(size)
