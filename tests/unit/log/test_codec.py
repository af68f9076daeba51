"""A process imports the kernels as soon as it has many frames to read, and not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.arrays import BLANK, TABLE_FULL
from logquarry.log import codec
from logquarry.log.codec import Window
from tests.helpers.small_log import small_log
from tests.helpers.small_store import opened
from tests.helpers.twins import walked

pytestmark = pytest.mark.skipif(not codec.kernels_enabled(), reason="numba is not installed")

PROGRAM = """
import sys
from logquarry.__main__ import main
try:
    main()
finally:
    sys.stderr.write(str("numba" in sys.modules))
"""


@pytest.mark.parametrize("worth", [1, 2, 3, 4, 5, 6])
def test_a_walk_goes_on_with_the_kernels(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = small_log()
    window = Window.of(log.files[0], log.start)
    rows, end, code = walked(window, 0, window.length)
    assert (len(rows), code) == (4, BLANK)

    monkeypatch.delitem(sys.modules, codec._KERNELS)
    monkeypatch.setattr(codec._done, "frames", 0)
    monkeypatch.setattr(codec, "_WORTH", worth)
    first, position, first_code = walked(window, 0, window.length)
    assert first == rows[:worth]
    if worth <= 4:
        # The reference has checked as many frames as it may.
        assert first_code == TABLE_FULL
        more, position, first_code = walked(window, position, window.length)
        assert more == rows[worth:]
    assert (position, first_code) == (end, code)
    assert codec._done.frames == min(worth, 5)


@pytest.mark.parametrize(("count", "is_imported"), [(100, False), (5_000, True)])
def test_numba_is_imported_for_many_messages(count: int, is_imported: bool, tmp_path: Path) -> None:
    with opened(tmp_path / "store", mapped_file_size_commit_log=1 << 20) as store:
        for number in range(count):
            store.put(lq.Message("t", b"%d" % number))
    for words in (["verify"], ["messages", "--jsonl"], ["recover"]):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words, str(tmp_path / "store")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stderr.endswith(str(is_imported)), words
