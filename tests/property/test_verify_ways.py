"""The fast check of sound queues and indexes gives the findings of the full check."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logquarry.config import StoreConfig
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import stretches_ahead, tiles
from logquarry.repair import verification
from logquarry.repair.audit.index import IndexAudit
from logquarry.repair.audit.index_entries import EntryStream
from logquarry.repair.audit.queues import QueuesAudit
from logquarry.repair.audit.runs import FrameFacts, SoundParts, SoundReader
from logquarry.repair.findings import VerifyReport
from logquarry.repair.verification import verify_store
from tests.helpers.damage import damaged
from tests.helpers.hypothesis_profiles import costly
from tests.helpers.store_maker import StoreMaker
from tests.helpers.twins import both


def made() -> dict[str, bytes]:
    """The files of a store, by path."""
    maker = StoreMaker()
    for number in range(40):
        keys = f"k{number} all" if number % 4 else ""
        maker.put(f"t{number % 2}", number % 3, b"body %d" % number * 9, keys=keys, tags="T")
    with TemporaryDirectory() as folder:
        root = maker.write(Path(folder))
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def thorough(root: Path) -> VerifyReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueuesAudit, "_is_next_part", lambda *_: False)
        patch.setattr(EntryStream, "is_through", False)
        return verify_store(StoreLayout.open(root))


def sound_parts(layout: StoreLayout, size: int) -> SoundParts:
    """The sound runs that tasks find: Spark's processes keep their readers for the next task."""
    reader = SoundReader(layout, max(1, size // 3))
    runs = [run for start, stop in tiles(layout, size) for run in reader.read(start, stop)]
    paths = [f"index/{entry.name}" for entry in layout.index_files]
    index = IndexAudit(layout)
    return SoundParts(
        tuple(runs), frozenset(path for path in paths if index.has_right_chains(path))
    )


@settings(costly(), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged(made(), most=2), st.booleans(), st.sampled_from([64, 700, 5_000]))
def test_both_ways_find_the_same(
    tmp_path: Path, files: dict[str, bytes], crashed: bool, size: int
) -> None:
    root = tmp_path / "store"
    shutil.rmtree(root, ignore_errors=True)
    (root / "commitlog").mkdir(parents=True)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    if crashed:
        (root / "abort").touch()
    quick, plain = both(lambda: verify_store(StoreLayout.open(root)).to_json())
    assert quick == plain == thorough(root).to_json()
    # Frames have 100 to 400 bytes: a part has less than one frame, some frames, or many.
    layout = StoreLayout.open(root)
    assert verify_store(layout, stretch_bytes=size).to_json() == quick
    assert verify_store(layout, sound=sound_parts(layout, size)).to_json() == quick


def test_who_stops_early_has_the_threads_end(tmp_path: Path) -> None:
    before = threading.active_count()
    runs = stretches_ahead(written(tmp_path), 500, lambda: FrameFacts(StoreConfig()))
    next(runs)
    assert threading.active_count() > before
    runs.close()
    assert threading.active_count() == before


def test_of_a_sound_log_nothing_is_left_to_the_walk(tmp_path: Path) -> None:
    layout = written(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        walked: list[object] = []
        patch.setattr(verification, "audited", lambda _, run, facts: walked.append(run))
        assert verify_store(layout, stretch_bytes=500).counts["messages"] == 40
        report = verify_store(layout, sound=sound_parts(layout, 900))
    assert (report.counts["messages"], report.counts["queue_entries"]) == (40, 40)
    assert not walked


def written(root: Path) -> StoreLayout:
    for name, content in made().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return StoreLayout.open(root)
