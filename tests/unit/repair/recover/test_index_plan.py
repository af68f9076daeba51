"""Which index files stay, and from where on the index is built (``recover.plan``)."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import index
from logquarry.log.layout import StoreLayout
from logquarry.repair.recover.plan import IndexPlan, plan_index
from tests.helpers.files import overwrite
from tests.helpers.small_store import config, opened

SHAPE = index.IndexShape(50, 200)
END = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two index files, the first one full; the last message has two keys."""
    with opened(tmp_path) as store:
        for number in range(250):
            store.put(lq.Message("t", b"x", keys=f"k{number}"))
        store.put(lq.Message("t", b"x", keys="a b"))
    return tmp_path


def files(root: Path) -> list[Path]:
    return sorted((root / "index").iterdir())


def header(path: Path) -> index.IndexHeader:
    return index.decode_header(path.read_bytes())


def planned(
    root: Path, *, is_closed: bool = True, synced: int = 0, log_end: int = END
) -> IndexPlan:
    layout = StoreLayout.open(root, config())
    return plan_index(
        layout,
        SHAPE,
        log_start=7,
        log_end=log_end,
        is_closed=is_closed,
        synced_timestamp=synced,
    )


def test_of_a_closed_store_all_stay(root: Path) -> None:
    first, last = files(root)
    assert header(first).entry_count == SHAPE.entries
    kept = header(last)
    assert planned(root) == IndexPlan((), kept.end_offset, 2, kept.end_timestamp)


def test_after_a_crash_those_stay_that_were_synced(root: Path) -> None:
    first, last = files(root)
    time = header(first).end_timestamp
    plan = planned(root, is_closed=False, synced=time)
    assert [name for name, _ in plan.set_aside] == [last.name]
    assert (plan.built_from, plan.keys_there) == (header(first).end_offset, 1)
    plan = planned(root, is_closed=False, synced=time - 1)
    assert [name for name, _ in plan.set_aside] == [first.name, last.name]
    assert (plan.built_from, plan.keys_there) == (7, 0)


@pytest.mark.parametrize(
    ("position", "data", "reason"),
    [
        (index.HEADER.offsets["entry_count"], struct.pack(">i", 201), "its header counts 201"),
        (index.HEADER.offsets["entry_count"], struct.pack(">i", 150), "header gives another"),
        (index.HEADER.offsets["begin_offset"], struct.pack(">q", 3), "header gives another"),
        (
            SHAPE.entry_position(9) + index.ENTRY.offsets["physical_offset"],
            struct.pack(">q", 1 << 29),
            "not in the log's order",
        ),
        (
            SHAPE.entry_position(9) + index.ENTRY.offsets["previous"],
            struct.pack(">i", 9),
            "one of its chains leads to a later entry",
        ),
    ],
)
def test_a_harmed_file_goes_with_all_behind_it(
    root: Path, position: int, data: bytes, reason: str
) -> None:
    first, last = files(root)
    overwrite(first, position, data)
    plan = planned(root)
    assert [name for name, _ in plan.set_aside] == [first.name, last.name]
    assert reason in plan.set_aside[0][1]
    assert plan.built_from == 7


def test_a_file_of_another_size_goes(root: Path) -> None:
    _, last = files(root)
    with last.open("ab") as file:
        file.write(b"more")
    assert [name for name, _ in planned(root).set_aside] == [last.name]


def test_keys_of_messages_behind_the_logs_end_go(root: Path) -> None:
    first, last = files(root)
    plan = planned(root, log_end=header(last).end_offset)
    assert [name for name, _ in plan.set_aside] == [last.name]
    assert plan.built_from == header(first).end_offset


@pytest.mark.parametrize("slots", [None, 0])
@pytest.mark.parametrize("count", [-1, 0, 1])
def test_a_header_that_counts_no_entries_of_a_file_with_entries(
    root: Path, count: int, slots: int | None
) -> None:
    """Otherwise queries find no key of the file, and new keys overwrite its entries."""
    last = files(root)[-1]
    sound = last.read_bytes()
    at = index.HEADER.offsets["slots_used"]
    used = header(last).slots_used if slots is None else slots
    overwrite(last, at, struct.pack(">2i", used, count))
    plan = planned(root)
    assert plan.set_aside == ((last.name, "counts no entries, but some follow"),)
    assert lq.recover(root).is_needed
    if slots is None:
        # An opening reads only the header.
        lq.MessageStore.open(root, mode="rw").close()
    else:
        lq.recover(root, apply=True)
    assert not lq.verify(root).findings
    with lq.MessageStore.open(root) as store:
        assert all(store.query("t", key) for key in ("k0", "k249", "a", "b"))
    assert any(
        path.read_bytes() == sound[:32] + struct.pack(">2i", used, count) + sound[40:]
        for path in root.rglob(last.name)
    )
