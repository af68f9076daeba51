"""The quick way through sound queues and indexes finds what the thorough one finds."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logquarry.files.layout import StoreLayout
from logquarry.verify import verify as module
from logquarry.verify import verify_store
from logquarry.verify.ahead import ahead
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
        patch.setattr(module, "ahead", lambda events: events)
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


def test_who_stops_early_has_the_thread_end() -> None:
    before = threading.active_count()
    walk = ahead(range(1_000))
    assert [next(walk), next(walk)] == [0, 1]
    walk.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_what_ends_the_walk_ends_who_waits_for_it() -> None:
    def broken() -> Iterable[int]:
        yield 1
        raise OSError("gone")

    found = []
    with pytest.raises(OSError, match="gone"):
        for number in ahead(broken()):
            found.append(number)
    assert found == [1]
