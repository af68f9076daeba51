"""Replication of a store: copies the log with RocketMQ's HA protocol, and the files of ``config/``.

::

    master's store -> LogFeed -> HaMaster ==wire==> HaSlave -> Replica -> LogFeed -> slave's store
                         ^           |                 ^          |
                    acknowledged  <--+      wire       +-- durable offset

    master's config/ -> ConfigServer ==remoting==> ConfigSync -> ConfigTables -> slave's config/
"""

from logquarry.replication.config_server import (
    ConfigServer,
    ConfigServerOptions,
    ConfigServerStatus,
)
from logquarry.replication.config_sync import (
    ConfigSync,
    ConfigSynced,
    ConfigSyncOptions,
    ConfigSyncStatus,
    sync_config,
)
from logquarry.replication.master import HaMaster, MasterOptions, MasterStatus
from logquarry.replication.slave import HaSlave, SlaveOptions, SlaveStatus

__all__ = [
    "ConfigServer",
    "ConfigServerOptions",
    "ConfigServerStatus",
    "ConfigSync",
    "ConfigSyncOptions",
    "ConfigSyncStatus",
    "ConfigSynced",
    "HaMaster",
    "HaSlave",
    "MasterOptions",
    "MasterStatus",
    "SlaveOptions",
    "SlaveStatus",
    "sync_config",
]
