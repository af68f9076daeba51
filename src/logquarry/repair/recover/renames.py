"""Gives the files of a log their right names, as a plan lists them.

A file is never replaced, so no bytes can be lost. After an interruption at any point the frames of
each file still show its place, and the next plan continues (:mod:`logquarry.log.log_names`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.log.log_names import RENAMING, right_path
from logquarry.repair.recover.plan import Step


def rename_files(disk: Disk, root: Path, steps: Sequence[Step]) -> None:
    """Rename files durably.

    If another file still has a file's new name, that other file is renamed first. In a circle, one
    file gets a temporary name, which contains its new name.

    Args:
        disk: the store's disk.
        root: the store's folder.
        steps: the RENAME steps of a plan.

    Raises:
        StoreUnavailable: if a rename failed, or a file that is not renamed has a new name.
    """
    left: dict[Path, Path] = {}
    for step in steps:
        assert step.offset is not None
        left[root / step.file] = root / right_path(step.offset)
    while left:
        ready = [path for path, target in left.items() if not target.exists()]
        for path in ready:
            disk.move(path, left.pop(path))
        if ready:
            continue
        path, target = next(iter(left.items()))
        if not any(target == other for other in left):
            raise StoreUnavailable(f"{target}: it exists, so {path} cannot get its name")
        number, made = 0, target.with_name(f"{target.name}{RENAMING}")
        while made.exists():
            number += 1
            made = target.with_name(f"{target.name}{RENAMING}.{number}")
        disk.move(path, made)
        left[made] = left.pop(path)
