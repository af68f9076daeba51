"""Frames that contradict the tags code of a queue entry, or the hash of an index entry.

No CRC covers tags and keys.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import salvage_store
from tests.helpers.files import overwrite
from tests.helpers.small_store import config, opened

COUNT = 120


def store(root: Path) -> list[int]:
    """Fill two queues in several log files and index files; return the physical offsets."""
    with opened(root) as made:
        for number in range(COUNT):
            key = f"key{number:04d}"
            made.put(lq.Message("t", b"b" * 200, tags="red", keys=key, queue_id=number % 2))
        return [message.physical_offset for message in made.scan()]


def change(root: Path, place: int, old: bytes, new: bytes) -> None:
    """Replace bytes in the frame at a physical offset."""
    files = sorted((root / "commitlog").iterdir())
    file = max(file for file in files if int(file.name) <= place)
    start = place - int(file.name)
    overwrite(file, file.read_bytes().index(old, start), new)


def contradicted(root: Path, into: Path | None = None) -> list[int]:
    layout = StoreLayout.open(root, config())
    found = salvage_store(layout, into)
    assert found.is_whole
    assert found.to_json()["contradicted"] == found.plan.contradicted
    return found.plan.contradicted


def test_a_sound_store_has_none(tmp_path: Path) -> None:
    store(tmp_path / "s")
    assert contradicted(tmp_path / "s") == []


@pytest.mark.parametrize(
    ("numbers", "old", "new"),
    [((5,), b"red", b"rad"), ((7, 90), b"key", b"kez"), ((0, COUNT - 1), b"TAGS", b"TAGT")],
    ids=["tags", "keys", "name"],
)
def test_salvage_reports_changed_tags_and_keys(
    tmp_path: Path, numbers: tuple[int, ...], old: bytes, new: bytes
) -> None:
    root = tmp_path / "s"
    places = store(root)
    for number in numbers:
        change(root, places[number], old, new)
    wanted = [places[number] for number in numbers]
    assert contradicted(root) == wanted
    assert contradicted(root, tmp_path / "new") == wanted
    # The new queues and the new index fit the changed properties: only the old ones show them.
    assert contradicted(tmp_path / "new") == []


def test_a_changed_topic_changes_the_hash_of_a_key_too(tmp_path: Path) -> None:
    # The salvage corrects the topic, and reports it elsewhere.
    root = tmp_path / "s"
    with opened(root) as made:
        for number in range(12):
            for topic in ("one", "two"):
                made.put(lq.Message(topic, b"%d" % number, keys=f"{topic}{number}"))
        place = next(m.physical_offset for m in made.scan() if m.body == b"6")
    change(root, place, b"\x03one", b"\x03onx")
    found = salvage_store(StoreLayout.open(root, config()))
    assert list(found.plan.right_queues) == [place]
    assert found.plan.contradicted == []


def test_lost_messages_do_not_count(tmp_path: Path) -> None:
    root = tmp_path / "s"
    places = store(root)
    change(root, places[20], b"bbb", b"bxb")
    change(root, places[40], b"key", b"kez")
    found = salvage_store(StoreLayout.open(root, config()))
    assert [span.offset for span in found.plan.lost] == [places[20]]
    assert found.plan.contradicted == [places[40]]
