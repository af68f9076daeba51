"""Master and slave over RocketMQ's HA protocol: sockets and threads about :mod:`..protocol.ha`.

::

    master's store -> LogFeed -> HaMaster ==wire==> HaSlave -> Replica -> LogFeed -> slave's store
                         ^           |                 ^          |
                    acknowledged  <--+      wire       +-- what is on the disk
"""

from logquarry.replication.master import HaMaster, MasterOptions, MasterStatus
from logquarry.replication.slave import HaSlave, SlaveOptions, SlaveStatus

__all__ = [
    "HaMaster",
    "HaSlave",
    "MasterOptions",
    "MasterStatus",
    "SlaveOptions",
    "SlaveStatus",
]
