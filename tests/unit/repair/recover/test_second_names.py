"""A recovery first lists the second names of the log's files and of the index files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify
from tests.helpers.small_store import config, facts, opened

HARMS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_bytes(b"x"),
    "a broken link": lambda path: path.symlink_to("/missing/folder"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", ["names", "names/commitlog", "names/index"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_plan_refuses_what_is_not_a_folder_of_names(tmp_path: Path, name: str, harm: str) -> None:
    with opened(tmp_path) as made:
        made.put(lq.Message("t", b"body", keys="k"))
    path = tmp_path / ".logquarry" / name
    path.parent.mkdir(exist_ok=True)
    for folder in (*path.glob("*"), path):
        if folder.is_dir():
            folder.rmdir()
    HARMS[harm](path)
    before = facts(tmp_path)
    for apply in (False, True):
        with pytest.raises(StoreUnavailable, match=r"it is .*Nothing was changed") as raised:
            recover(tmp_path, apply=apply, config=config())
        assert str(path) in str(raised.value)
    assert [found.file for found in verify(tmp_path, config=config()).findings] == [
        f".logquarry/{name}"
    ]
    assert facts(tmp_path) == before
