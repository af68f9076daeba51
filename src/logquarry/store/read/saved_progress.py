"""How far consumers and deliveries are, as the files in ``config/`` of any store say.

Read by whoever tells of it; who consumes or delivers keeps these files
(:mod:`logquarry.store.disk.config_file`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from logquarry.errors import StoreNotFound
from logquarry.files.layout import CONFIG, StoreLayout
from logquarry.format import broker_config
from logquarry.store.disk.config_file import BACKUP

logger = logging.getLogger(__name__)

T = TypeVar("T")


def consumer_offsets(
    layout: StoreLayout, level: int = logging.WARNING
) -> dict[tuple[str, str], dict[int, int]]:
    """(topic, group) -> queue id -> next queue offset; empty where no file tells.

    Args:
        layout: the store's files.
        level: at which it is logged that a file cannot be understood.
    """
    decode = broker_config.decode_consumer_offsets
    return _read(layout, broker_config.CONSUMER_OFFSET_FILE, decode, level) or {}


def delay_offsets(layout: StoreLayout, level: int = logging.WARNING) -> dict[int, int] | None:
    """Delay level -> next queue offset of its queue; None where no file tells.

    Args:
        layout: the store's files.
        level: at which it is logged that the file cannot be understood.
    """
    decode = broker_config.decode_delay_offsets
    return _read(layout, broker_config.DELAY_OFFSET_FILE, decode, level)


def _read(layout: StoreLayout, name: str, decode: Callable[[bytes], T], level: int) -> T | None:
    # The one before it is read where it cannot be, as by those who keep them.
    for path in (f"{CONFIG}/{name}", f"{CONFIG}/{name}{BACKUP}"):
        try:
            return decode(layout.filesystem.read(path))
        except (FileNotFoundError, StoreNotFound):
            continue
        except (ValueError, TypeError) as error:
            logger.log(level, "%s: %s", layout.filesystem.full_path(path), error)
    return None
