"""What each side of an HA connection is doing: tables that run the machines, and draw the docs."""

from __future__ import annotations

from enum import Enum
from typing import Final

from logquarry.protocol.machine import Transitions


class MasterState(Enum):
    """What a master's connection is doing."""

    AWAITING_REQUEST = "nothing is known of the slave; it counts as connected"
    TRANSFERRING = "the log is sent"
    CLOSED = "nothing more is read or sent"


class MasterInput(Enum):
    """What may happen to it; the values are the diagram's labels."""

    REPORT = "report within the log"
    SENT = "transfer or heartbeat"
    VIOLATION = "report outside of it"
    SILENCE = "20 s without a report"
    END = "connection ended"


MASTER: Final = Transitions(
    MasterState.AWAITING_REQUEST,
    {
        (MasterState.AWAITING_REQUEST, MasterInput.REPORT): MasterState.TRANSFERRING,
        (MasterState.TRANSFERRING, MasterInput.REPORT): MasterState.TRANSFERRING,
        (MasterState.TRANSFERRING, MasterInput.SENT): MasterState.TRANSFERRING,
        (MasterState.AWAITING_REQUEST, MasterInput.VIOLATION): MasterState.CLOSED,
        (MasterState.TRANSFERRING, MasterInput.VIOLATION): MasterState.CLOSED,
        (MasterState.AWAITING_REQUEST, MasterInput.SILENCE): MasterState.CLOSED,
        (MasterState.TRANSFERRING, MasterInput.SILENCE): MasterState.CLOSED,
        (MasterState.AWAITING_REQUEST, MasterInput.END): MasterState.CLOSED,
        (MasterState.TRANSFERRING, MasterInput.END): MasterState.CLOSED,
    },
)


class SlaveState(Enum):
    """What a slave's connection is doing."""

    AWAITING_HEADER = "the next transfer's header is to come, or the rest of it"
    AWAITING_DATA = "the data of a transfer is to come, or the rest of it"
    CLOSED = "nothing more is read or sent"


class SlaveInput(Enum):
    """What may happen to it; the values are the diagram's labels."""

    HEARTBEAT = "heartbeat at the next byte"
    HEADER = "header of the next bytes"
    DATA = "the last of the data"
    ELSEWHERE = "heartbeat at another byte"
    VIOLATION = "a header that cannot be"
    SILENCE = "20 s without a word"
    END = "connection ended"


SLAVE: Final = Transitions(
    SlaveState.AWAITING_HEADER,
    {
        (SlaveState.AWAITING_HEADER, SlaveInput.HEARTBEAT): SlaveState.AWAITING_HEADER,
        (SlaveState.AWAITING_HEADER, SlaveInput.HEADER): SlaveState.AWAITING_DATA,
        (SlaveState.AWAITING_DATA, SlaveInput.DATA): SlaveState.AWAITING_HEADER,
        (SlaveState.AWAITING_HEADER, SlaveInput.ELSEWHERE): SlaveState.CLOSED,
        (SlaveState.AWAITING_HEADER, SlaveInput.VIOLATION): SlaveState.CLOSED,
        (SlaveState.AWAITING_HEADER, SlaveInput.SILENCE): SlaveState.CLOSED,
        (SlaveState.AWAITING_DATA, SlaveInput.SILENCE): SlaveState.CLOSED,
        (SlaveState.AWAITING_HEADER, SlaveInput.END): SlaveState.CLOSED,
        (SlaveState.AWAITING_DATA, SlaveInput.END): SlaveState.CLOSED,
    },
)
