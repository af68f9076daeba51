"""The demo store in the package is a golden store, and its archive is reproducible."""

from __future__ import annotations

import lzma
from pathlib import Path

from tests.helpers.golden_data import unpack
from tools.bundle_demo import TARGET, bundle


def contents(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def test_bundled_store_is_the_golden_one(golden: Path, tmp_path: Path) -> None:
    unpack(TARGET, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["real-broker"]
    assert contents(tmp_path / "real-broker") == contents(golden / "real-broker")


def test_bundle_is_deterministic(tmp_path: Path) -> None:
    again = tmp_path / "again.tar.xz"
    bundle(target=again)
    # The compressed bytes are liblzma's, and may differ between its versions.
    assert lzma.decompress(again.read_bytes()) == lzma.decompress(TARGET.read_bytes())
