"""Records the settings of a store in the store (:mod:`logquarry.log.kept_settings`)."""

from __future__ import annotations

import logging
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.log import kept_settings
from logquarry.log.store_files import SETTINGS

logger = logging.getLogger(__name__)


def keep_settings(disk: Disk, root: Path, config: StoreConfig) -> None:
    """Record the settings of a store, unless the record says the same.

    Args:
        disk: the disk that the store is on.
        root: the store's folder.
        config: the settings, with all sizes.
    """
    path, data = root / SETTINGS, kept_settings.encode(config)
    try:
        if path.read_bytes() == data:
            return
    except OSError:
        pass
    try:
        disk.replace(path, data)
    except StoreUnavailable as error:
        # A full disk, for example. The files show most settings.
        disk.health.require_writable()
        logger.warning("the settings of the store are not recorded: %s", error)
