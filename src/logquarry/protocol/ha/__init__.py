"""RocketMQ's HA protocol (``HAService``, ``HAConnection``, ``HAClient`` of 4.9.3) without sockets.

::

    slave -> master    [offset 8]                           report: what the slave has; heartbeat
    master -> slave    [offset 8][size 4][data ``size``]    transfer; size 0 is a heartbeat

The slave's first report says where it wants the log from; 0 stands for "I have nothing", and the
master chooses. Later ones acknowledge. Transfers are cut wherever a file ends or the transfer size
is reached, never at frames: offsets may lie anywhere in a frame.

Both machines are fed with bytes and the time, and give events and bytes. Bytes may come in any
pieces: the events are the same, but for the data of a transfer, which is passed on as it comes,
so that nothing is kept. Whatever else a stranger sends ends in
:class:`~logquarry.errors.ProtocolViolation`; what is kept of a peer's bytes is never more than a
part of one header.

Guarantees: the master acknowledges to its waiters no more than what was sent to the slave since its
first report, which lies within the log. The slave takes no byte but the next one.
"""

from logquarry.protocol.ha.master import MasterConnection
from logquarry.protocol.ha.messages import (
    HEADER,
    LARGEST_TRANSFER,
    MASTER,
    REPORT,
    SLAVE,
    Buffer,
    ConnectionEnded,
    DataReceived,
    HaTimes,
    HeartbeatReceived,
    LogRange,
    MasterElsewhere,
    MasterEvent,
    MasterInput,
    MasterState,
    SlaveAcknowledged,
    SlaveEvent,
    SlaveInput,
    SlaveRequested,
    SlaveState,
    TransferLimits,
)
from logquarry.protocol.ha.slave import SlaveConnection

__all__ = [
    "HEADER",
    "LARGEST_TRANSFER",
    "MASTER",
    "REPORT",
    "SLAVE",
    "Buffer",
    "ConnectionEnded",
    "DataReceived",
    "HaTimes",
    "HeartbeatReceived",
    "LogRange",
    "MasterConnection",
    "MasterElsewhere",
    "MasterEvent",
    "MasterInput",
    "MasterState",
    "SlaveAcknowledged",
    "SlaveConnection",
    "SlaveEvent",
    "SlaveInput",
    "SlaveRequested",
    "SlaveState",
    "TransferLimits",
]
