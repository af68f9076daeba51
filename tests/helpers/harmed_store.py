"""Stores with harmed frames: their queues, the messages in them, and interrupted recoveries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.small_store import config


def log_file(root: Path) -> Path:
    return min((root / "commitlog").iterdir())


def queue_bytes(root: Path, folder: str = "consumequeue") -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }


def served(root: Path, queue_id: int) -> list[int]:
    """The numbers of all messages that a consumer of a queue gets."""
    found, offset = [], 0
    with lq.MessageStore.open(root, config=config()) as made:
        while offset < made.queue_offsets("t", queue_id)[1]:
            answer = made.get("t", queue_id, offset)
            found += [int(message.body) for message in answer.messages]
            offset = answer.next_offset
    return found


def require_any_interruption_is_harmless(
    root: Path, folder: Path, entries: dict[str, bytes]
) -> None:
    """An interrupted recovery of the store, and the recovery after it, keep the queues' entries."""
    whole = StoppedDisk()
    shutil.copytree(root, folder / "whole")
    lq.recover(folder / "whole", apply=True, config=config(), disk=whole)
    assert queue_bytes(folder / "whole") == entries
    for number in whole.stops:
        copy = folder / "copy"
        shutil.copytree(root, copy)
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, config=config(), disk=StoppedDisk(number))
        lq.recover(copy, apply=True, config=config())
        assert queue_bytes(copy) == entries, whole.order[number]
        shutil.rmtree(copy)
