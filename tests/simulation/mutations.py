"""Bugs put into master and slave on purpose: the simulator must find each of them.

Each is a plausible omission. ``python -m tests.simulation.mutations`` prints which of 100 seeds
find each bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

from logquarry.protocol.ha_connection import MasterConnection, SlaveConnection
from logquarry.protocol.ha_messages import LogRange, MasterEvent, MasterInput, SlaveRequested
from logquarry.replication import HaMaster
from logquarry.replication.replica import Replica
from logquarry.write.put_result import ReplicaWait
from tests.simulation.simulation import run, silence
from tests.simulation.world import Violation

Mutation = Callable[[], AbstractContextManager[Any]]


def _ack_what_is_written() -> AbstractContextManager[Any]:
    """The slave acknowledges what it wrote, even if it is not on the disk."""
    return mock.patch.object(Replica, "sync", lambda self: self.feed.wrote_offset)


def _ack_unjudged() -> AbstractContextManager[Any]:
    """The slave acknowledges what is on the disk, even if it has not checked the frames."""
    return mock.patch.object(Replica, "sync", lambda self: self._feed.sync())


def _ack_from_before() -> AbstractContextManager[Any]:
    """The master takes a slave's first report as an acknowledgement, as RocketMQ does."""
    real = ReplicaWait.acknowledge
    return mock.patch.object(
        ReplicaWait, "acknowledge", lambda self, offset, _: real(self, offset, 0)
    )


def _any_request() -> AbstractContextManager[Any]:
    """The master does not check whether it has the bytes that a slave asks for."""

    def request(self: MasterConnection, offset: int, log: LogRange, events: list[Any]) -> None:
        self._next = self._since = log.fresh_start if offset == 0 else offset
        events.append(SlaveRequested(self._next, offset == 0))
        self._move(MasterInput.REPORT)

    return mock.patch.object(MasterConnection, "_request", request)


def _any_offset() -> AbstractContextManager[Any]:
    """The slave does not check the offsets of the master's transfers and heartbeats."""
    real = SlaveConnection._take_header

    def take_header(self: SlaveConnection, offset: int, size: int, events: list[Any]) -> None:
        real(self, offset if self.received is None else self.received, size, events)

    return mock.patch.object(SlaveConnection, "_take_header", take_header)


def _no_comparing() -> AbstractContextManager[Any]:
    """The slave does not compare bytes that it already has."""
    return mock.patch.object(Replica, "_compare", lambda *_: None)


def _no_reset() -> AbstractContextManager[Any]:
    """A new connection continues where the last one was."""
    real = Replica.request
    return mock.patch.object(
        Replica, "request", lambda self: min(self.position, self.checked) or real(self)
    )


def _few_bytes() -> AbstractContextManager[Any]:
    """The slave compares this many bytes instead of a whole frame."""
    return mock.patch.object(
        Replica, "_last_frame", lambda self: max(self._feed.min_offset, self.checked)
    )


def _still_there() -> AbstractContextManager[Any]:
    """A slave that has disconnected still counts."""
    return mock.patch.object(ReplicaWait, "slave_went", lambda self: None)


def _the_silent_stay() -> AbstractContextManager[Any]:
    """The master does not disconnect a silent slave."""
    real = MasterConnection.tick

    def tick(self: MasterConnection, log: LogRange, now_ms: int) -> list[MasterEvent]:
        self._heard_ms = now_ms
        return real(self, log, now_ms)

    return mock.patch.object(MasterConnection, "tick", tick)


def _skips() -> AbstractContextManager[Any]:
    """The master forgets a byte when its slave's socket was full."""
    real = HaMaster._send

    def send(self: HaMaster, slave: Any, log: LogRange, now: int) -> bool:
        before = slave.wire.wants_write
        going = real(self, slave, log, now)
        if slave.wire.wants_write and not before:
            slave.machine._next += 1
        return going

    return mock.patch.object(HaMaster, "_send", send)


def _never_ahead() -> AbstractContextManager[Any]:
    """The slave accepts that its master is at another offset."""
    return mock.patch.object(Replica, "_ahead", lambda *_: None)


MUTATIONS: Final[tuple[Mutation, ...]] = (
    _ack_what_is_written,
    _ack_unjudged,
    _ack_from_before,
    _any_request,
    _any_offset,
    _no_comparing,
    _no_reset,
    _few_bytes,
    _still_there,
    _the_silent_stay,
    _skips,
    _never_ahead,
)


def first_found(mutation: Mutation, seeds: Iterable[int]) -> tuple[int, Violation] | None:
    """The first seed that finds a bug, and the violation."""
    with mutation():
        for seed in seeds:
            try:
                run(seed)
            except Violation as violation:
                return seed, violation
    return None


def main() -> int:
    """Print which seeds find each bug, and return how many bugs no seed found."""
    silence()
    missed = 0
    for mutation in MUTATIONS:
        found = []
        first = ""
        with mutation():
            for seed in range(1, 101):
                try:
                    run(seed)
                except Violation as violation:
                    found.append(seed)
                    first = first or str(violation).partition("\n")[0]
        missed += not found
        print(f"{mutation.__name__[1:]}: {len(found)} of 100: {found[:8]}: {first}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(bool(main()))
