"""Whose queues and index stand in a folder, so that nobody takes another store's for them.

A note beside the folder says it of each of the two: the store, and the settings that its files
depend on. It is written before the first of them is in place, by whoever has the folder locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.files.layout import CONSUME_QUEUE, INDEX
from logquarry.store.disk.disk import Disk

_WRITTEN_BY: Final = "logquarry"


def made_of(store: str, names: Iterable[str], config: StoreConfig) -> dict[str, Any]:
    """What is to be said of the folders that a rebuild makes.

    Args:
        store: absolute.
        names: of the folders.
        config: its settings, with all sizes.
    """
    shape = config.index_shape
    settings: dict[str, dict[str, Any]] = {
        CONSUME_QUEUE: {
            "file_size": config.queue_file_size,
            "message_delay_level": config.message_delay_level,
            "enable_multi_dispatch": config.enable_multi_dispatch,
            "enable_lmq": config.enable_lmq,
        },
        INDEX: {
            "slots": None if shape is None else shape.slots,
            "entries": None if shape is None else shape.entries,
        },
    }
    return {
        name: {"store": store, "settings": {"dialect": config.dialect, **settings[name]}}
        for name in names
    }


def read_note(note: Path) -> dict[str, Any]:
    """What a note says, folder by folder; nothing if it is not there, or a power cut emptied it.

    Raises:
        UsageError: if no rebuild wrote it.
    """
    try:
        document = json.loads(note.read_bytes() or b"{}")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{note}: not the note of a rebuild: {error}") from error
    folders = document.get("folders", {}) if isinstance(document, dict) else None
    if not isinstance(folders, dict) or document.get("written_by", _WRITTEN_BY) != _WRITTEN_BY:
        raise UsageError(f"{note}: not the note of a rebuild")
    return folders


def write_note(note: Path, folders: dict[str, Any], disk: Disk) -> None:
    """Say it of these folders, besides what is said of others; durable.

    Raises:
        StoreUnavailable: if it cannot be written.
        UsageError: if something else stands there.
    """
    document = {"written_by": _WRITTEN_BY, "folders": {**read_note(note), **folders}}
    disk.make_folders(note.parent)
    text = json.dumps(document, indent=1)
    disk.replace(note, text.encode(errors="backslashreplace") + b"\n")


def check_made_of(target: Path, note: Path, wanted: dict[str, Any]) -> None:
    """That the folders which are there are those that are wanted.

    Args:
        target: holds them.
        note: what is known of them.
        wanted: what :func:`made_of` says.

    Raises:
        UsageError: if not; nothing is changed.
    """
    known = read_note(note)
    # As a note has it: what JSON makes of it.
    wanted = json.loads(json.dumps(wanted))
    for name, told in wanted.items():
        place = target / name
        if not place.exists() or known.get(name) == told:
            continue
        found = known.get(name)
        if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
            why = "nothing tells which store it is of"
        elif found.get("store") != told["store"]:
            why = f"it is of the store {found.get('store')}, not of {told['store']}"
        else:
            differs = [
                f"{key} {found['settings'].get(key)!r}, not {value!r}"
                for key, value in told["settings"].items()
                if found["settings"].get(key) != value
            ]
            why = f"it was made with other settings: {'; '.join(differs)}"
        raise UsageError(f"{place}: {why}: say another folder, or remove it")
