"""Copies of damage that a read skips. Needs no Spark."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from logquarry.errors import StoreUnavailable
from logquarry.log.batches import DamageLog
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan
from logquarry.spark.options import parse_read_options
from logquarry.spark.output import OutputFolder
from logquarry.spark.tasks import Quarantine, plan_tasks, read_batches
from tests.helpers.small_store import facts
from tests.helpers.store_maker import StoreMaker
from tests.spark.golden_rows import harmed_stores, whole_messages


def read(store: Path, folder: Path, **options: str) -> tuple[list[int], DamageLog]:
    given = {
        "path": str(store),
        "onDamage": "quarantine",
        "quarantinePath": str(folder),
        **options,
    }
    damage = DamageLog()
    offsets = [
        offset
        for task in plan_tasks(parse_read_options(given))
        for batch in read_batches(task, damage)
        for offset in batch["physical_offset"].to_pylist()
    ]
    return sorted(offsets), damage


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.rglob("*.json"))]


def test_what_golden_stores_lost_is_there(golden: Path, tmp_path: Path) -> None:
    met = 0
    for scenario, store in harmed_stores(golden).items():
        folder = tmp_path / scenario
        offsets, damage = read(store, folder)
        expected = [m["physical_offset"] for m in whole_messages(golden, scenario)]
        assert offsets == expected, scenario
        documents = kept(folder)
        assert {d["offset"] for d in documents} == {span.offset for span in damage.spans}
        for document in documents:
            met += 1
            file = Path(document["file"])
            at = document["offset"] - int(file.name) if file.is_file() else 0
            bytes_there = file.read_bytes()[at : at + document["length"]] if file.is_file() else b""
            copy = folder / "store" / f"{document['offset']:020d}.bin"
            assert copy.read_bytes() == bytes_there.rstrip(b"\0")
            assert document["bytes"] == copy.stat().st_size
            assert document["broker"] == "store"
            assert document["kind"] and document["reason"]
    assert met > 10


def test_copies_are_on_the_disk_before_they_get_their_names(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    moved: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.add(os.fstat(number).st_ino))
    move = OutputFolder.move

    def moving(folder: OutputFolder, source: str, target: str) -> None:
        assert (tmp_path / "aside" / source).stat().st_ino in synced
        moved.append(Path(target).suffix)
        move(folder, source, target)

    monkeypatch.setattr(OutputFolder, "move", moving)
    read(harmed_stores(golden)["crc-third-last-file"], tmp_path / "aside")
    assert moved == [".bin", ".json"]
    assert (tmp_path / "aside" / "store").stat().st_ino in synced


def test_again_and_in_other_parts_changes_nothing(golden: Path, tmp_path: Path) -> None:
    store = harmed_stores(golden)["crc-third-last-file"]
    folder = tmp_path / "aside"
    first, _ = read(store, folder)
    before = facts(folder)
    assert len(before) == 2
    assert read(store, folder)[0] == first
    assert read(store, folder, splitSize="2k")[0] == first
    assert facts(folder) == before


def test_a_longer_span_takes_the_place_of_a_shorter(golden: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(golden / "single" / "store", store)
    layout = StoreLayout.open(store)
    file = layout.commit_log.files[0]
    folder = tmp_path / "aside"
    quarantine = Quarantine(OutputFolder(folder), "rack/one", layout)
    data = (store / file.path).read_bytes()
    for length in (10, 300, 200):
        quarantine.keep(DamagedSpan(50, length, "kind", "reason", "path"))
    assert [p.name for p in folder.iterdir()] == ["rack%2Fone"]
    assert (folder / "rack%2Fone" / f"{50:020d}.bin").read_bytes() == data[50:350].rstrip(b"\0")
    (document,) = kept(folder)
    assert document["length"] == 300
    assert document["broker"] == "rack/one"


def test_zeros_between_are_kept_and_those_at_the_end_are_not(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    size = 20 << 20
    content = bytearray(size)
    content[5], content[17 << 20] = 1, 2
    (tmp_path / "store" / "commitlog" / f"{0:020d}").write_bytes(content)
    layout = StoreLayout.open(tmp_path / "store")
    quarantine = Quarantine(OutputFolder(tmp_path / "q"), "b", layout)
    quarantine.keep(DamagedSpan(0, size, "kind", "reason", "path"))
    (copy,) = (tmp_path / "q").rglob("*.bin")
    assert copy.read_bytes() == bytes(content).rstrip(b"\0")


def test_a_folder_that_cannot_be_written(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="damage cannot be copied"):
        read(harmed_stores(golden)["crc-third-last-file"], tmp_path / "file")


def test_a_body_that_does_not_decompress_is_noted(tmp_path: Path) -> None:
    maker = StoreMaker()
    maker.put(body=zlib.compress(b"one"), sys_flag=1)
    bad = maker.put(body=b"no zlib", sys_flag=1)
    maker.write(tmp_path / "store")
    offsets, _ = read(tmp_path / "store", tmp_path / "aside", decompress="true")
    assert len(offsets) == 2
    (document,) = kept(tmp_path / "aside")
    assert (document["offset"], document["length"]) == (bad.physical_offset, 0)
    assert document["kind"] == "bad_compression"
