"""RocketMQ's HA protocol (``HAService``, ``HAConnection``, ``HAClient`` of 4.9.3) without sockets.

::

    slave -> master    [offset 8]                           report, also a heartbeat
    master -> slave    [offset 8][size 4][data ``size``]    transfer; size 0 is a heartbeat

In its first report, the slave requests the log from a physical offset. If the slave reports 0, it
has no bytes, and the master chooses the offset. Later reports acknowledge bytes. A transfer may end
inside a frame.

Invalid bytes of a peer raise :class:`~logquarry.errors.ProtocolViolation`. A master ends replica
waits only for bytes that it has sent over this connection. A slave accepts only bytes that directly
follow its own bytes.
"""
