"""Files of logquarry that the disk does not open: a recovery must not fail after it has begun."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.log.store_files import DAMAGE, DURABLE
from tests.helpers.operator_faults import make_store

CONFIG = lq.StoreConfig(mapped_file_size_commit_log=1 << 14, mapped_file_size_consume_queue=200)


@pytest.mark.parametrize("name", [DURABLE, DAMAGE])
@pytest.mark.parametrize("is_opened", [False, True])
def test_nothing_changes_if_a_file_cannot_be_opened(
    name: str, is_opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        for number in range(20):
            store.put(lq.Message("orders", b"x" * 300, keys=f"k{number}"))
    log = root / "commitlog" / ("0" * 20)
    log.write_bytes(log.read_bytes()[:100] + b"harm" + log.read_bytes()[104:])
    lq.recover(root, apply=True)
    (root / "abort").touch()
    (root / name).stat()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    real = os.open

    def failing(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StoreUnavailable, match="cannot be opened: Input/output error") as raised:
        if is_opened:
            lq.MessageStore.open(root, mode="rw")
        else:
            lq.recover(root, apply=True)
    assert name in str(raised.value)
    assert "wrong_entry" in {finding.kind for finding in lq.verify(root).findings}
    monkeypatch.undo()
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert after == before
    lq.recover(root, apply=True)
    assert not (root / "abort").exists()


@pytest.mark.parametrize("name", [".logquarry/durable", ".logquarry/names/commitlog"])
def test_a_limit_of_the_process_is_no_reason_to_move_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = make_store(tmp_path / "store")
    (root / "abort").touch()
    call = "open" if name.endswith("durable") else "scandir"
    real = getattr(os, call)

    def failing(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, call, failing)
    match = f"{name}: cannot be read: Too many open files: raise the process's limit"
    with pytest.raises(StoreUnavailable, match=match):
        lq.recover(root, apply=True)
    with pytest.raises(StoreUnavailable, match=match):
        lq.verify(root)
