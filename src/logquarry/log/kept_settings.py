"""The settings that a store keeps: ``.logquarry/settings.json``, which RocketMQ ignores.

A writer of this library records the settings that decide the format of the store's files. Files
that do not show a setting (a new index without keys, for example) are then read and continued with
the settings that made them. Without the record, the files and RocketMQ's defaults decide.

The files win: a recorded setting counts only as long as no file contradicts it
(:mod:`logquarry.read.store_sizes`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from logquarry.config import StoreConfig
from logquarry.errors import UsageError

_NAMES: Final = (
    "dialect",
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "mapper_file_size_batch_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
    "tran_state_table_mapped_file_size",
    "tran_redo_log_mapped_file_size",
    "index_tags",
    "message_index_enable",
    "enable_multi_dispatch",
    "enable_lmq",
    "message_delay_level",
)
_VERSION: Final = 1


def encode(config: StoreConfig) -> bytes:
    """The bytes of the file.

    Args:
        config: settings of an open store, with all sizes.
    """
    settings = {name: getattr(config, name) for name in _NAMES}
    return json.dumps({"version": _VERSION, "settings": settings}, indent=1).encode() + b"\n"


# A store is opened several times for one command, or for one test.
@lru_cache(maxsize=16)
def decode(data: bytes) -> Mapping[str, Any]:
    """The settings by their names; settings that are unknown are left out.

    Raises:
        ValueError: if the bytes are not a record of settings.
    """
    document = json.loads(data)
    settings = document.get("settings") if isinstance(document, dict) else None
    if not isinstance(settings, dict) or document.get("version") != _VERSION:
        raise ValueError(f"no settings of version {_VERSION}")
    found = {name: settings[name] for name in _NAMES if settings.get(name) is not None}
    try:
        config = StoreConfig.from_mapping(found)
        has_levels = bool(config.delay_levels_ms)
    except UsageError as error:
        raise ValueError(str(error)) from error
    if not has_levels:
        raise ValueError("no delay levels")
    return {name: getattr(config, name) for name in found}
