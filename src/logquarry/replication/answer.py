"""Waits until a master answers. ``replicate`` does this before it opens the slave's store, because
opening a store for writing changes files.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

from logquarry.errors import ProtocolViolation
from logquarry.protocol import ha_messages as ha
from logquarry.protocol.ha_connection import SlaveConnection
from logquarry.replication.slave import CONNECT_SECONDS, SlaveOptions
from logquarry.replication.wire import Surroundings, Wire, address_text

_RECEIVE: Final = 4_096


def failed_attempts(host: str, port: int, options: SlaveOptions) -> Iterator[str]:
    """Connect to a master until it answers a report. For each failed attempt, yield the reason.

    The report has the offset 0, so it acknowledges nothing.
    """
    pause = options.first_pause
    while True:
        try:
            _ask(host, port, options)
        except (OSError, ProtocolViolation) as error:
            yield f"{address_text((host, port))}: {error}"
            time.sleep(pause)
            pause = min(2 * pause, options.longest_pause)
        else:
            return


def _ask(host: str, port: int, options: SlaveOptions) -> None:
    """Return when the master has sent a valid answer."""
    surroundings = Surroundings()
    connection = surroundings.connect(host, port, CONNECT_SECONDS)
    with contextlib.ExitStack() as opened:
        opened.callback(connection.close)
        name = None if options.tls is None else options.server_name or host
        wire = Wire(connection, tls=options.tls, server_name=name)
        opened.callback(wire.close)
        machine = SlaveConnection(0, surroundings.now_ms(), times=options.times)
        selector = opened.enter_context(surroundings.selector())
        selector.register(wire, wire.events)
        buffer = memoryview(bytearray(_RECEIVE))
        while True:
            if wire.is_ready or wire.handshake():
                wire.send([machine.data_to_send()])
                count = wire.receive_into(buffer)
                if count is not None and _has_answered(machine, buffer[:count]):
                    return
            _require_open(machine.tick(surroundings.now_ms()))
            wait = max(0, machine.next_tick_ms() - surroundings.now_ms())
            selector.modify(wire, wire.events)
            selector.select(wait / 1_000)


def _has_answered(machine: SlaveConnection, data: memoryview) -> bool:
    events = machine.receive_data(data, Surroundings().now_ms())
    _require_open(events)
    return bool(events)


def _require_open(events: list[ha.SlaveEvent]) -> None:
    for event in events:
        if isinstance(event, ha.ConnectionEnded):
            raise ProtocolViolation(event.reason)
