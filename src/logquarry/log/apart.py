"""Checks that a place to which a command or a job writes is outside of the stores.

Inside a store, the written files would count as files of the store, or would be reported as
strange.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.log.log_place import configured_folders
from logquarry.log.store_files import (
    BATCH_QUEUE,
    COMMIT_LOG,
    CONFIG,
    CONSUME_QUEUE,
    INDEX,
    SIDECAR,
)

_LINKED: Final = (COMMIT_LOG, CONSUME_QUEUE, BATCH_QUEUE, INDEX, CONFIG, SIDECAR)
"""Folders of a store that are often links to another disk."""


def lies_in_store(
    place: str | os.PathLike[str], store: str | os.PathLike[str], config: StoreConfig | None = None
) -> bool:
    """Return whether a place is a store's folder or inside it.

    The function follows symbolic links and ``..`` in both paths. Folders of the store on another
    disk also count, if a link in the store or the configuration names them.
    """
    return any(_is_below(place, folder) for folder in _folders(store, config))


def overlaps_store(
    place: str | os.PathLike[str], store: str | os.PathLike[str], config: StoreConfig | None = None
) -> bool:
    """Return whether a place is inside a store, or contains the store or a part of it."""
    folders = list(_folders(store, config))
    return any(_is_below(place, folder) or _is_below(folder, place) for folder in folders)


def _folders(store: str | os.PathLike[str], config: StoreConfig | None) -> Iterator[str]:
    root = os.fsdecode(store)
    yield root
    if "://" not in root:
        yield from (f"{root}/{name}" for name in _LINKED)
        # A relative path in a broker's configuration is relative to the broker's folder, which is
        # unknown here.
        yield from filter(os.path.isabs, configured_folders(config or StoreConfig()))


def _is_below(place: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    inner, outer = map(os.fsdecode, (place, folder))
    if "://" in inner or "://" in outer:
        return f"{inner}/".startswith(f"{outer}/")
    # Unlike Path.resolve, realpath raises no error for a loop of links.
    return Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(outer))
