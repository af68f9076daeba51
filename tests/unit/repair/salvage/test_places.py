"""Salvages of logs in which blocks lie at wrong places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logquarry as lq
from logquarry.format.frame import HEAD, Frame, decode_at
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import Salvaged, salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.command import run
from tests.helpers.files import overwrite
from tests.helpers.hypothesis_profiles import costly
from tests.helpers.small_store import config, opened

SIZE = 16_384
SECTOR = 512
Message = tuple[str, int, int, bytes]
Frames = dict[int, tuple[bytes, Message]]
"""Physical offset -> the bytes of the frame, and the message."""


def messages(root: Path) -> list[Message]:
    with lq.MessageStore.open(root, config=config()) as store:
        return [(m.topic, m.queue_id, m.queue_offset, m.body) for m in store.scan()]


def frames(root: Path) -> Frames:
    data = b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))
    with lq.MessageStore.open(root, config=config()) as store:
        return {
            m.physical_offset: (
                data[m.physical_offset : m.physical_offset + m.frame.size],
                (m.topic, m.queue_id, m.queue_offset, m.body),
            )
            for m in store.scan()
        }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("displaced") / "store"
    with opened(root) as store:
        for number in range(150):
            message = lq.Message(
                f"t{number % 3}",
                b"%03d" % number * (20 + number * 37 % 150),
                queue_id=number % 2,
                tags="a" if number % 5 else "b",
                delay_level=1 if number % 17 == 3 else 0,
            )
            store.put(message)
    return root


def log_bytes(root: Path) -> bytearray:
    return bytearray().join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))


def write_log(root: Path, data: bytes | bytearray) -> None:
    for path in (root / "commitlog").iterdir():
        path.write_bytes(data[int(path.name) : int(path.name) + SIZE])


def require_saved(root: Path, new: Path, known: Frames) -> Salvaged:
    """Salvage saves each message whose bytes are in a log file, with the head of the next frame
    after them, in the order of the log. Salvage saves only messages of the store.
    """
    # A file whose frames are all displaced can count as a misnamed file, or as a copy of a file.
    layout = StoreLayout.open(root, config()).by_content()
    files = {one.base: (root / one.path).read_bytes() for one in layout.commit_log.files}
    # A byte between the files, because no frame can continue in the next file.
    data = b"|".join([*files.values(), b""])
    found = salvage_store(StoreLayout.open(root, config()), new)
    saved = messages(new)
    displaced = {one.offset for one in found.plan.displaced}
    wanted = []
    for at, (frame, message) in known.items():
        base = at - at % SIZE
        file = files.get(base, b"")
        is_there = file.startswith(frame, at - base)
        # No CRC covers the properties of a frame that lies at its place.
        is_sound = isinstance(decode_at(file, at - base, base=base), Frame)
        after, _ = known.get(at + len(frame), (b"", message))
        is_whole = bool(after) and frame + after[: HEAD.size] in data
        if is_there or is_whole:
            assert message in saved
            assert (at in displaced) == (not is_sound)
        if message in saved:
            assert frame in data or at not in displaced
            wanted.append(message)
    assert saved == wanted
    return found


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("case", ["swap", "overwritten", "lost at source", "shift", "shift back"])
def test_frames_at_a_wrong_place_are_saved(
    prepared: Path, tmp_path: Path, case: str, *, is_closed: bool
) -> None:
    known = frames(prepared)
    root = Path(shutil.copytree(prepared, tmp_path / "store"))
    if not is_closed:
        (root / "abort").touch()
    data = log_bytes(root)
    a, b, n = 4_096, SIZE + 8_192, 4_096
    first, second = data[a : a + n], data[b : b + n]
    if case == "swap":
        data[a : a + n], data[b : b + n] = second, first
    elif case == "overwritten":
        data[a : a + n] = second
    elif case == "lost at source":
        data[b : b + n] = bytes(n)
        data[a : a + n] = second
    elif case == "shift":
        data[a:SIZE] = bytes(SECTOR) + data[a : SIZE - SECTOR]
    else:
        data[a:SIZE] = data[a + SECTOR : SIZE] + bytes(SECTOR)
    write_log(root, data)
    found = require_saved(root, tmp_path / "new", known)
    checked = verify_store(StoreLayout.open(tmp_path / "new", config()))
    assert {one.kind for one in checked.findings if one.severity == "damage"} <= {"queue_filler"}
    count = len(found.plan.displaced)
    assert (count > 5) == (case != "overwritten")
    report = json.loads((tmp_path / "new" / ".logquarry" / "salvage.json").read_text())
    assert len(report["displaced"]) == count
    for one in report["displaced"]:
        frame, _ = known[one["offset"]]
        assert data[one["found_at"] : one["found_at"] + one["length"]] == frame
    shown = run("salvage", root, code=1)
    assert (f"{count} messages saved from a wrong place" in shown.stdout) == (count > 0)


def test_a_block_can_begin_in_the_properties_of_a_frame(prepared: Path, tmp_path: Path) -> None:
    """No CRC covers these properties, so the lost part begins after the start of the block."""
    known = frames(prepared)
    root = Path(shutil.copytree(prepared, tmp_path / "store"))
    data = log_bytes(root)
    at = next(
        start - start % SECTOR for start in known if 0 < start % SECTOR < 20 and start % SIZE > 512
    )
    data[:SECTOR], data[at : at + SECTOR] = data[at : at + SECTOR], data[:SECTOR]
    write_log(root, data)
    found = require_saved(root, tmp_path / "new", known)
    assert found.plan.displaced[0] == (0, len(known[0][0]), at)


def test_frames_without_their_entries_are_not_saved(prepared: Path, tmp_path: Path) -> None:
    """Without the entry, the frame can be of an earlier log or of another store."""
    root = Path(shutil.copytree(prepared, tmp_path / "store"))
    data = log_bytes(root)
    data[4_096:8_192], data[20_480:24_576] = data[20_480:24_576], data[4_096:8_192]
    write_log(root, data)
    found = salvage_store(StoreLayout.open(root, config()))
    one = found.plan.displaced[3]
    with lq.MessageStore.open(prepared, config=config()) as store:
        message = store.message_at(one.offset)
    for at, value in ((0, b"\1"), (8, b"\1"), (12, b"\1")):
        copy = Path(shutil.copytree(root, tmp_path / f"copy-{at}"))
        entry = message.queue_offset * 20
        name = f"consumequeue/{message.topic}/{message.queue_id}/{entry - entry % 400:020d}"
        overwrite(copy / name, entry % 400 + at, value)
        again = salvage_store(StoreLayout.open(copy, config()))
        assert [*again.plan.displaced, one] != found.plan.displaced
        assert {*found.plan.displaced} - {*again.plan.displaced} == {one}


@costly()
@given(data=st.data())
def test_any_displaced_blocks(prepared: Path, data: st.DataObject) -> None:
    known = frames(prepared)
    with TemporaryDirectory() as folder:
        root = Path(shutil.copytree(prepared, Path(folder) / "store"))
        log = log_bytes(root)
        end = max(known)
        for _ in range(data.draw(st.integers(1, 3))):
            n = data.draw(st.sampled_from([SECTOR, 4_096, 8_192]))
            places = [at for at in range(0, end - n, SECTOR) if at // SIZE == (at + n - 1) // SIZE]
            a, b = (data.draw(st.sampled_from(places)) for _ in range(2))
            first, second = log[a : a + n], log[b : b + n]
            log[b : b + n] = first
            if data.draw(st.booleans()):
                log[a : a + n] = second
        write_log(root, log)
        if data.draw(st.booleans()):
            (root / "abort").touch()
        require_saved(root, Path(folder) / "new", known)
