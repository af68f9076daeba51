"""Fixtures for pytest, which finds them through an entry point of the package.

Pytest imports this module at each start, so each fixture imports logquarry's modules only when a
test uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from logquarry.broker import Broker
    from logquarry.testing.clock import ShiftedClock


@pytest.fixture
def logquarry_clock() -> ShiftedClock:
    """The clock of ``logquarry_broker``.

    Call ``advance(milliseconds)`` to make the broker deliver delayed messages earlier.
    """
    from logquarry.testing.clock import ShiftedClock

    return ShiftedClock()


@pytest.fixture
def logquarry_broker(logquarry_clock: ShiftedClock) -> Iterator[Broker]:
    """A broker for RocketMQ's clients on a temporary store, for one test.

    ``logquarry_broker.name_server`` is the name server's address for a client. The broker listens
    on free ports of loopback, and creates a topic or group at its first use.
    """
    from logquarry.broker import background

    with background(clock=logquarry_clock) as broker:
        yield broker
