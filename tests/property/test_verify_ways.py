"""The quick way through sound queues and indexes finds what the thorough one finds."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logquarry.files.layout import StoreLayout
from logquarry.store.read.log_bound import log_bound
from logquarry.verify import verify_store
from logquarry.verify.checked_runs import CheckedRun, CheckedRuns, _Judge
from logquarry.verify.findings import VerifyReport
from logquarry.verify.index import _Stream
from logquarry.verify.queues import QueueChecker
from tests.damage import damaged
from tests.store_maker import StoreMaker
from tests.twins import both


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
        patch.setattr(QueueChecker, "_is_as_it_should", lambda *_: False)
        patch.setattr(_Stream, "is_through", False)
        return verify_store(StoreLayout.open(root))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged(made(), most=2), st.booleans())
def test_both_ways_find_the_same(tmp_path: Path, files: dict[str, bytes], crashed: bool) -> None:
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
    # Frames have 100 to 400 bytes.
    for size in (64, 700, 5_000):
        assert verify_store(StoreLayout.open(root), stretch_bytes=size).to_json() == quick


def test_who_stops_early_has_the_threads_end(tmp_path: Path) -> None:
    before = threading.active_count()
    for name, content in made().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    layout = StoreLayout.open(tmp_path)
    runs = CheckedRuns(layout, bound=None, live=False, stretch_bytes=500).events()
    next(runs)
    assert threading.active_count() > before
    runs.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_stretches_are_what_is_looked_at(tmp_path: Path) -> None:
    """Where nothing is wrong, the walk itself has nothing to do but for the log's end."""
    for name, content in made().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    layout = StoreLayout.open(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        walked: list[object] = []
        patch.setattr(_Judge, "run", lambda _, run: walked.append(run))
        runs = CheckedRuns(layout, bound=log_bound(layout), live=False, stretch_bytes=500)
        count = sum(run.count for run in runs.events() if isinstance(run, CheckedRun))
    assert count == 40 and not walked
