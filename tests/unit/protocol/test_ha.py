"""The HA connections without sockets: bytes cut anywhere, hostile bytes, and times."""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import ProtocolViolation, UsageError
from logquarry.protocol import ha_messages as ha
from logquarry.protocol.ha_connection import MasterConnection, SlaveConnection
from logquarry.protocol.ha_messages import (
    ConnectionEnded,
    DataReceived,
    HeartbeatReceived,
    LogRange,
    MasterElsewhere,
    MasterState,
    SlaveAcknowledged,
    SlaveRequested,
    SlaveState,
    TransferLimits,
    Transitions,
)

LOG = LogRange(min_offset=1000, max_offset=9000, fresh_start=8000)
DATA = bytes(range(256)) * 40


def reports(*offsets: int) -> bytes:
    return b"".join(struct.pack(">q", offset) for offset in offsets)


def header(offset: int, size: int) -> bytes:
    return struct.pack(">qi", offset, size)


def transferring(offset: int = 2000, **limits: int) -> MasterConnection:
    master = MasterConnection(0, limits=TransferLimits(**limits))
    master.receive_data(reports(offset), LOG, 0)
    return master


def send(master: MasterConnection, now_ms: int = 0) -> bytes:
    """One encoded transfer, with bytes that depend on their offsets."""
    size = master.transferable(LOG, now_ms)
    if size:
        start = master.next_offset % 256
        master.send(memoryview(DATA)[start : start + size], now_ms)
    return b"".join(master.data_to_send())


# ------------------------------------------------------------------------------------- master
def master_events(pieces: list[bytes]) -> tuple[list[ha.MasterEvent], str | None]:
    master = MasterConnection(0)
    events: list[ha.MasterEvent] = []
    try:
        for piece in pieces:
            events += master.receive_data(piece, LOG, 0)
            while send(master):
                pass
    except ProtocolViolation as error:
        return events + error.events, str(error)
    return events, None


@pytest.mark.parametrize(
    "offsets",
    [(2000, 2000, 9000), (0, 0, 8500), (9000,), (1000,), (2000, 2000, -1), (9001,), (999,), (-1,)],
)
def test_every_split_of_a_slaves_bytes_gives_the_same_events(offsets: tuple[int, ...]) -> None:
    data = reports(*offsets)
    # A slave can only acknowledge sent bytes, so the test sends one report at a time.
    whole = master_events([data[at : at + 8] for at in range(0, len(data), 8)])
    for first in range(1, len(data)):
        for second in range(first, len(data)):
            parts = [data[:first], data[first:second], data[second:]]
            pieces = [part for part in parts if part]
            if second // 8 - first // 8 > 1 or len(data) - second > 8 or first > 8:
                continue
            assert master_events(pieces) == whole
    assert master_events([data[at : at + 1] for at in range(len(data))]) == whole


def test_a_master_sends_what_is_asked_for() -> None:
    master = MasterConnection(0, limits=TransferLimits(transfer_size=3000))
    assert master.transferable(LOG, 0) == 0
    events = master.receive_data(reports(2000), LOG, 0)
    assert events == [SlaveRequested(2000, False), SlaveAcknowledged(2000, 2000)]
    sent = b"".join(send(master) for _ in range(4))
    assert sent[:12] == header(2000, 3000)
    assert sent[3012:3024] == header(5000, 3000)
    assert sent[6024:6036] == header(8000, 1000)
    assert master.next_offset == LOG.max_offset and master.transferable(LOG, 0) == 0
    assert master.receive_data(reports(9000), LOG, 0) == [SlaveAcknowledged(9000, 2000)]


def test_a_fresh_slave_begins_where_the_master_says() -> None:
    master = MasterConnection(0)
    events = master.receive_data(reports(0), LOG, 0)
    assert events == [SlaveRequested(8000, True), SlaveAcknowledged(0, 8000)]
    assert send(master)[:12] == header(8000, 1000)


@pytest.mark.parametrize(
    ("offset", "answer"), [(9001, 9000), (999, 1000), (-1, 9000), (1 << 62, 9000)]
)
def test_a_first_report_outside_of_the_log_is_refused_with_its_end(
    offset: int, answer: int
) -> None:
    master = MasterConnection(0)
    with pytest.raises(ProtocolViolation) as caught:
        master.receive_data(reports(offset), LOG, 0)
    assert caught.value.events == [] and str(offset) in str(caught.value)
    assert master.acknowledged is None and master.state is MasterState.CLOSED
    assert b"".join(master.data_to_send()) == header(answer, 0)
    assert master.receive_data(reports(2000), LOG, 0) == []
    assert master.transferable(LOG, 0) == 0


@pytest.mark.parametrize("offset", [-1, 2001, 9000, 1 << 62])
def test_what_was_not_sent_is_not_acknowledged(offset: int) -> None:
    master = transferring(2000)
    with pytest.raises(ProtocolViolation):
        master.receive_data(reports(offset), LOG, 0)
    assert master.acknowledged == 2000


def test_an_acknowledgement_never_falls() -> None:
    master = transferring(2000)
    send(master)
    master.receive_data(reports(9000), LOG, 0)
    assert master.receive_data(reports(2000), LOG, 0) == []
    assert master.acknowledged == 9000


# Include valid reports: with random bytes alone the first eight end the connection.
REPORTS = st.one_of(st.just(0), st.integers(900, 9_100)).map(reports)


@given(st.lists(st.one_of(REPORTS, st.none(), st.binary(min_size=1, max_size=40)), max_size=20))
def test_a_stranger_gets_nothing_acknowledged_that_it_was_not_sent(
    pieces: list[bytes | None],
) -> None:
    """Return None: the master sends data."""
    master = MasterConnection(0, limits=TransferLimits(transfer_size=400))
    for piece in pieces:
        if piece is None:
            send(master)
            continue
        try:
            events = master.receive_data(piece, LOG, 0)
        except ProtocolViolation as error:
            events = error.events
            assert master.state is MasterState.CLOSED
        for event in events:
            if isinstance(event, SlaveAcknowledged):
                assert 0 <= event.offset <= master.next_offset <= LOG.max_offset
                assert LOG.min_offset <= event.since <= master.next_offset
        assert len(master._received) < ha.REPORT.size
    if master.state is MasterState.CLOSED:
        assert master.tick(LOG, 1 << 40) == []


def test_a_master_says_something_now_and_then() -> None:
    master = transferring(9000)
    assert master.tick(LOG, 1) == [] and b"".join(master.data_to_send()) == header(9000, 0)
    assert master.tick(LOG, 5001) == [] and master.data_to_send() == []
    assert master.next_tick_ms() == 5002
    assert master.tick(LOG, 5002) == [] and b"".join(master.data_to_send()) == header(9000, 0)


def test_a_master_does_not_say_that_there_is_no_more_where_there_is() -> None:
    """The slave does not read: a heartbeat would say that the log ends here."""
    master = transferring(2000)
    assert master.tick(LOG, 5_001) == [] and master.data_to_send() == []
    assert master.next_tick_ms() == 10_002
    assert master.transferable(LOG, 5_001)
    # With a low rate, too, there is no heartbeat between two portions.
    slow = transferring(2000, transfer_size=3_000, bytes_per_second=100)
    assert slow.transferable(LOG, 0) == 500
    slow.send(memoryview(DATA)[:500], 0)
    assert slow.next_transfer_ms() <= 5_000


def test_a_silent_slave_is_closed_also_if_it_never_spoke() -> None:
    for master in (MasterConnection(0), transferring()):
        master.receive_data(b"\0\0\0", LOG, 19_000)
        assert master.tick(LOG, 20_000) == []
        (ended,) = master.tick(LOG, 20_001)
        assert isinstance(ended, ConnectionEnded) and "20000" in ended.reason
        assert master.state is MasterState.CLOSED


def test_a_report_keeps_a_slave_alive() -> None:
    master = transferring()
    master.receive_data(reports(2000), LOG, 15_000)
    assert master.tick(LOG, 35_000) == []
    assert master.next_tick_ms() <= 35_001 + 5_000


def test_a_rate_is_kept_over_time() -> None:
    master = transferring(1000, transfer_size=100, bytes_per_second=1000)
    sent = 0
    for now in range(0, 3000, 10):
        while size := master.transferable(LOG, now):
            master.send(memoryview(DATA)[:size], now)
            sent += size
    assert 2900 <= sent <= 3200
    assert master.next_transfer_ms() > 2_900
    # After a pause at most one second's bytes are allowed.
    while size := master.transferable(LOG, 100_000):
        master.send(memoryview(DATA)[:size], 100_000)
        sent += size
    assert sent <= 3200 + 1100


def test_an_end_is_told_once() -> None:
    master = transferring()
    assert isinstance(master.receive_data(b"", LOG, 0)[0], ConnectionEnded)
    assert master.receive_data(b"", LOG, 0) == []


# -------------------------------------------------------------------------------------- slave
class Joined(NamedTuple):
    """Join the data of neighbouring events."""

    offset: int
    data: bytes


def slave_events(
    offset: int, pieces: list[bytes]
) -> tuple[list[ha.SlaveEvent | Joined], str | None]:
    """Join the data of neighbouring events, and keep the other events."""
    slave = SlaveConnection(offset, 0)
    found: list[ha.SlaveEvent | Joined] = []
    reason = None
    for piece in pieces:
        try:
            events = slave.receive_data(piece, 0)
        except ProtocolViolation as error:
            events, reason = error.events, str(error)
        for event in events:
            last = found[-1] if found else None
            if not isinstance(event, DataReceived):
                found.append(event)
            elif isinstance(last, Joined) and last.offset + len(last.data) == event.offset:
                found[-1] = Joined(last.offset, last.data + bytes(event.data))
            else:
                found.append(Joined(event.offset, bytes(event.data)))
    return found, reason


WIRES = {
    "data": (2000, header(2000, 5) + b"abcde" + header(2005, 0) + header(2005, 2) + b"fg"),
    "fresh": (0, header(8000, 0) + header(8000, 3) + b"abc" + header(8003, 0)),
    "elsewhere": (2000, header(2000, 1) + b"x" + header(1500, 0) + b"more"),
    "gap": (2000, header(2000, 1) + b"x" + header(2002, 4) + b"more"),
    "negative size": (2000, header(2000, -1) + b"more"),
    "huge": (2000, header(2000, 0x7FFFFFFF) + b"more"),
    "negative offset": (0, header(-5, 3) + b"more"),
}


@pytest.mark.parametrize("name", WIRES)
def test_every_split_of_a_masters_bytes_gives_the_same_events(name: str) -> None:
    offset, data = WIRES[name]
    whole = slave_events(offset, [data])
    for first in range(1, len(data)):
        for second in range(first + 1, len(data) + 1):
            pieces = [data[:first], data[first:second], data[second:]]
            assert slave_events(offset, [piece for piece in pieces if piece]) == whole
    assert slave_events(offset, [data[at : at + 1] for at in range(len(data))]) == whole


def test_what_those_events_are() -> None:
    assert slave_events(*split("data")) == (
        [(2000, b"abcde"), HeartbeatReceived(2005), (2005, b"fg")],
        None,
    )
    assert slave_events(*split("fresh"))[0][:2] == [HeartbeatReceived(8000), (8000, b"abc")]
    assert slave_events(*split("elsewhere")) == ([(2000, b"x"), MasterElsewhere(1500)], None)
    for name in ("gap", "negative size", "huge", "negative offset"):
        events, reason = slave_events(*split(name))
        assert reason is not None and b"more" not in str(events).encode()


def split(name: str) -> tuple[int, list[bytes]]:
    offset, data = WIRES[name]
    return offset, [data]


# Headers that a master may send to such slaves, and headers that it may not.
TRANSFERS = st.tuples(st.integers(1_998, 2_010), st.integers(0, 5)).map(
    lambda said: header(*said) + bytes(said[1])
)


@given(
    st.one_of(st.just(0), st.integers(1_998, 2_004)),
    st.lists(st.one_of(TRANSFERS, TRANSFERS, st.binary(min_size=1, max_size=60)), max_size=20),
)
def test_a_slave_takes_no_byte_but_the_next_one(offset: int, pieces: list[bytes]) -> None:
    slave = SlaveConnection(offset, 0)
    at: int | None = offset or None
    for piece in pieces:
        try:
            events = slave.receive_data(piece, 0)
        except ProtocolViolation as error:
            events = error.events
            assert slave.state is SlaveState.CLOSED
        for event in events:
            if isinstance(event, DataReceived):
                assert at is None or event.offset == at
                at = event.offset + len(event.data)
            elif isinstance(event, HeartbeatReceived):
                assert at is None or event.offset == at
                at = event.offset
        assert len(slave._header) < ha.HEADER.size


def test_a_slave_reports_what_it_asks_for_and_then_what_is_news() -> None:
    slave = SlaveConnection(2000, 0)
    assert slave.data_to_send() == reports(2000)
    slave.receive_data(header(2000, 100) + bytes(100), 0)
    slave.report(2000, 1)
    assert slave.data_to_send() == b""
    slave.report(2050, 1)
    slave.report(2100, 1)
    assert slave.data_to_send() == reports(2050, 2100)
    with pytest.raises(AssertionError):
        slave.report(2101, 1)
    with pytest.raises(AssertionError):
        slave.report(2099, 1)


def test_a_slave_says_something_now_and_then_and_hears_of_silence() -> None:
    slave = SlaveConnection(2000, 0)
    slave.data_to_send()
    assert slave.tick(5_000) == [] and slave.data_to_send() == b""
    assert slave.next_tick_ms() == 5_001
    assert slave.tick(5_001) == [] and slave.data_to_send() == reports(2000)
    (ended,) = slave.tick(20_001)
    assert isinstance(ended, ConnectionEnded) and slave.state is SlaveState.CLOSED
    assert slave.receive_data(header(2000, 0), 20_002) == []


# ------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize("table", [ha.MASTER, ha.SLAVE], ids=["master", "slave"])
def test_every_state_can_be_come_to_and_ends(table: Transitions[Enum, Enum]) -> None:
    states = set(type(table.start))
    edges = {(state, after) for (state, _), after in table.table.items()}
    reached = {table.start}
    for _ in states:
        reached |= {after for state, after in edges if state in reached}
    assert reached == states
    (closed,) = [state for state in states if state.name == "CLOSED"]
    assert {state for state, _ in edges} == states - {closed}
    inputs = {happened for _, happened in table.table}
    assert inputs == set(type(next(iter(inputs))))


def test_what_a_table_has_not_got_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        ha.MASTER.after(MasterState.CLOSED, ha.MasterInput.SENT)


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(UsageError):
        ha.HaTimes(heartbeat_ms=5000, housekeeping_ms=5000)
    with pytest.raises(UsageError):
        TransferLimits(transfer_size=ha.LARGEST_TRANSFER + 1)
    with pytest.raises(UsageError):
        TransferLimits(bytes_per_second=0)


# ------------------------------------------------------------------------------------ together
@given(st.integers(1, 700), st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_both_together_carry_the_log_whatever_the_pieces(size: int, cuts: list[int]) -> None:
    content = bytes(i * 31 % 251 for i in range(9000))
    master = MasterConnection(0, limits=TransferLimits(transfer_size=size))
    slave = SlaveConnection(8500, 0)
    got = bytearray()
    wire = bytearray()
    for step in range(10_000):
        data = slave.data_to_send()
        if data:
            master.receive_data(data, LOG, step)
        if count := master.transferable(LOG, step):
            at = master.next_offset
            master.send(memoryview(content)[at : at + count], step)
        wire += b"".join(bytes(part) for part in master.data_to_send())
        cut = cuts[step % len(cuts)]
        piece, wire = bytes(wire[:cut]), wire[cut:]
        if piece:
            for event in slave.receive_data(piece, step):
                assert isinstance(event, DataReceived)
                got += event.data
            slave.report(8500 + len(got), step)
        if master.acknowledged == LOG.max_offset:
            break
    assert bytes(got) == content[8500:]
