"""RocketMQ's HA protocol (``HAService``, ``HAConnection``, ``HAClient`` of 4.9.3) without sockets.

::

    slave -> master    [offset 8]                           report, also a heartbeat
    master -> slave    [offset 8][size 4][data ``size``]    transfer; size 0 is a heartbeat

The slave's first report is the physical offset from which it wants the log. 0 means "I have
nothing": then the master chooses the offset. Later reports acknowledge bytes. A transfer ends at
the end of a log file, or when it has the maximum size. So it may end inside a frame.

The two connection classes take bytes and the time, and return events and bytes to send. The events
do not depend on how the network cuts the bytes into packets, with one exception: the data of a
transfer is passed on piece by piece, as it arrives. A connection buffers at most a part of one
header. If a peer sends invalid bytes, the connection raises
:class:`~logquarry.errors.ProtocolViolation`.

Guarantees: a master ends replica waits only for bytes that it has sent over this connection. A
slave accepts only bytes that directly follow the bytes that it has.
"""
