"""A body that does not decompress: all readers give the same verdict."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from logquarry.errors import CorruptFrame
from logquarry.log.batches import BAD_COMPRESSION, DamageLog, OnDamage
from logquarry.spark.options import ReadOptions
from logquarry.spark.tasks import plan_tasks, read_batches
from logquarry.store.message_store import MessageStore
from tests.helpers.command import run
from tests.helpers.store_maker import StoreMaker

BODIES = (zlib.compress(b"one"), b"no zlib", zlib.compress(b"three"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    maker = StoreMaker(log_file_size=200)
    for body in BODIES:
        maker.put(body=body, sys_flag=1)
    return maker.write(tmp_path / "store")


def through_arrow(store: Path, on_damage: OnDamage, damage: DamageLog) -> list[bytes]:
    with MessageStore.open(store) as opened:
        reader = opened.to_arrow(decompress=True, on_damage=on_damage, damage=damage)
        return list(reader.read_all()["body"].to_pylist())


def through_tasks(store: Path, on_damage: OnDamage, damage: DamageLog) -> list[bytes]:
    options = ReadOptions(paths=(str(store),), on_damage=on_damage, decompress=True)
    return [
        body
        for task in plan_tasks(options)
        for batch in read_batches(task, damage)
        for body in batch["body"].to_pylist()
    ]


READERS: list[Callable[[Path, OnDamage, DamageLog], list[bytes]]] = [through_arrow, through_tasks]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("on_damage", get_args(OnDamage))
def test_the_readers_agree(
    store: Path, read: Callable[[Path, OnDamage, DamageLog], list[bytes]], on_damage: OnDamage
) -> None:
    file = sorted((store / "commitlog").iterdir())[1]
    damage = DamageLog()
    if on_damage == "skip":
        assert read(store, on_damage, damage) == [b"one", b"no zlib", b"three"]
        (span,) = damage.spans
        assert (span.kind, span.offset, span.length) == (BAD_COMPRESSION, int(file.name), 0)
        assert span.path == str(file)
        return
    with pytest.raises(CorruptFrame) as caught:
        read(store, on_damage, damage)
    assert caught.value.kind == BAD_COMPRESSION
    assert (caught.value.path, caught.value.offset) == (str(file), int(file.name))


def test_on_the_command_line(store: Path) -> None:
    options = ("messages", store, "--jsonl", "--decompress")
    failed = run(*options, code=1)
    assert f"{200:020d}: at offset 200: bad_compression: " in failed.stderr
    skipped = run(*options, "--on-damage", "skip")
    assert "1 body could not be decompressed, and stayed as stored: at 200" in skipped.stderr
    assert "skipped" not in skipped.stderr
    assert len([json.loads(line) for line in skipped.stdout.splitlines()]) == 3
