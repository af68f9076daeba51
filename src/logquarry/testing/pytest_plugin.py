"""Fixtures for pytest. Pytest finds them through the entry point of the package.

Pytest imports this module at each start. So each fixture imports what it needs when it is used.
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
    """The clock of ``logquarry_broker``: ``advance(milliseconds)`` makes delayed messages due."""
    from logquarry.testing.clock import ShiftedClock

    return ShiftedClock()


@pytest.fixture
def logquarry_broker(logquarry_clock: ShiftedClock) -> Iterator[Broker]:
    """A broker for RocketMQ's clients on a temporary store, for one test.

    Give ``logquarry_broker.name_server`` to a client as the address of its name server. The broker
    listens on free ports of loopback, and creates a topic or group when a client first uses it.
    """
    from logquarry.broker import background

    with background(clock=logquarry_clock) as broker:
        yield broker
