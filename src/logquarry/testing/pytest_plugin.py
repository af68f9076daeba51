"""Fixtures for pytest. Pytest finds them through the entry point of the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from logquarry.broker import Broker


@pytest.fixture
def logquarry_broker() -> Iterator[Broker]:
    """A broker for RocketMQ's clients on a temporary store, for one test.

    ``logquarry_broker.name_server`` is what a client takes as its name server. Ports are free ones
    of loopback. Consumer groups and topics are created when a client uses them.
    """
    # pytest imports this module at each start: it must be quick.
    from logquarry.broker import background

    with background() as broker:
        yield broker
