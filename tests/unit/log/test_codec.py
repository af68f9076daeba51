"""A process imports the kernels as soon as it has many frames to read, and not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import batch
from logquarry.format.arrays import BLANK
from logquarry.format.batch import BatchItem
from logquarry.format.frame import encode
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan
from logquarry.repair.audit.log import framed
from tests.helpers.small_log import small_log
from tests.helpers.small_store import opened
from tests.helpers.store_maker import StoreMaker
from tests.helpers.twins import plain_python, walked

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
    assert walked(window, 0, window.length) == (rows, end, code)
    assert codec._done.frames == min(worth, 5)


@pytest.mark.parametrize("worth", [1, 2, 3, 4, 5, 6])
def test_a_walk_without_numba_ends_at_the_same_place(
    worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = small_log()
    window = Window.of(log.files[0], log.start)
    expected = walked(window, 0, window.length)
    monkeypatch.delitem(sys.modules, codec._KERNELS)
    monkeypatch.setattr(codec._done, "frames", 0)
    monkeypatch.setattr(codec, "_WORTH", worth)
    with plain_python():
        assert walked(window, 0, window.length) == expected


@pytest.mark.parametrize("kind", ["properties", "body", "inner batch"])
def test_large_frames_count_as_several_frames(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoding of such frames without the kernels takes as long as that of many frames."""
    monkeypatch.delitem(sys.modules, codec._KERNELS)
    monkeypatch.setattr(codec._done, "frames", 0)
    maker = StoreMaker(log_file_size=1 << 23)
    if kind == "properties":
        maker.put("t", properties=b"a\x01" + b"b" * 8_192 + b"\x02")
    elif kind == "body":
        maker.put("t", body=bytes(1 << 22))
    else:
        body = batch.encode([BatchItem(b"b" * 1_024)] * 8)
        maker.put("t", body=body, sys_flag=batch.INNER_BATCH)
    frame = maker.frames[0]
    walked(Window.of(encode(frame), frame.physical_offset), 0, frame.size)
    assert codec._done.frames == 17


def test_the_frames_of_a_damaged_range_are_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the process imports the kernels in the middle of the range."""
    maker = StoreMaker(log_file_size=1 << 16)
    for number in range(9):
        maker.put("t", body=b"body", queue_offset=number)
    maker.write(tmp_path)
    path = tmp_path / f"commitlog/{0:020d}"
    data = bytearray(path.read_bytes())
    for frame in maker.frames:
        data[data.index(b"body", frame.physical_offset)] ^= 1
    path.write_bytes(data)
    end = maker.frames[-1].physical_offset + maker.frames[-1].size
    span = DamagedSpan(0, end, "bad_body_crc", "", str(path))
    monkeypatch.delitem(sys.modules, codec._KERNELS)
    monkeypatch.setattr(codec._done, "frames", 0)
    monkeypatch.setattr(codec, "_WORTH", 5)
    assert [len(run.rows) for run in framed(StoreLayout.open(tmp_path), span)] == [9]


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
