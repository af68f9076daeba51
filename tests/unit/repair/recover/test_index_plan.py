"""Which index files stay, and from where on the index is built (``recover.plan``)."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import index
from logquarry.log.filesystem import FileView
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import INDEX
from logquarry.read.commit_log import CommitLog
from logquarry.repair.audit.index import index_fault
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


def changed(path: Path, field: str, value: int) -> None:
    overwrite(path, index.HEADER.offsets[field], struct.pack(">q", value))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        ("begin_offset", 3, "its header gives another first or last message"),
        ("begin_timestamp", -1, "its first message"),
        ("begin_timestamp", -100_000, "its first and its last message"),
        ("begin_timestamp", 10**9, "its first message"),
        ("end_timestamp", 1, "its last message"),
    ],
)
def test_an_opening_and_verify_find_a_wrong_header(
    root: Path, number: int, field: str, change: int, reason: str
) -> None:
    """Otherwise a query by key skips the file, or finds its messages at wrong times."""
    path = files(root)[number]
    sound = path.read_bytes()
    changed(path, field, getattr(header(path), field) + change)
    (finding,) = lq.verify(root).findings
    assert finding.kind == "index_header"
    assert reason in finding.reason
    layout = StoreLayout.open(root, config())
    fault = index_fault(layout, SHAPE, log_end=END)
    assert fault is not None
    assert str(path) in fault
    lq.MessageStore.open(root, mode="rw").close()
    assert not lq.verify(root).findings
    assert any((root / ".logquarry" / "quarantine").rglob(path.name))
    found = files(root)[number].read_bytes()
    assert found[: index.HEADER.size] == sound[: index.HEADER.size]


def test_a_wrong_end_offset_that_names_a_message_of_the_same_time(root: Path) -> None:
    """The log has a message there, so only the file's last entry shows that the header is wrong."""
    first, _ = files(root)
    before = index.decode_entry(first.read_bytes(), SHAPE.entry_position(SHAPE.entries - 2))
    sound = header(first)
    changed(first, "end_offset", before.physical_offset)
    same = StoreLayout.open(root, config())
    stored = CommitLog(same).sound_frame_at(before.physical_offset)
    assert stored is not None
    changed(first, "end_timestamp", stored.store_timestamp)
    fault = index_fault(StoreLayout.open(root, config()), SHAPE, log_end=END)
    assert fault is not None
    assert f"0 and {before.physical_offset}, and the entries give 0 and {sound.end_offset}" in fault


def test_a_wrong_time_of_a_message_that_has_expired(root: Path) -> None:
    """The entries then show the time in seconds."""
    first, _ = files(root)
    begin = header(first).begin_timestamp
    (root / "commitlog" / f"{0:020d}").unlink()
    changed(first, "begin_timestamp", begin - 100_000)
    fault = index_fault(StoreLayout.open(root, config()), SHAPE, log_end=END)
    assert fault is not None
    assert "gives 100 seconds between its first and its last message" in fault
    assert "its last entry gives 0" in fault
    assert "100 seconds" in planned(root).set_aside[0][1]


def test_the_check_of_an_opening_reads_a_few_bytes_of_each_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = StoreLayout.open(root, config())
    sizes: list[int] = []

    class Counted(FileView):
        def __init__(self, file: FileView) -> None:
            self.path, self.size, self._file = file.path, file.size, file

        def window(self, start: int, length: int) -> memoryview:
            if f"/{INDEX}/" in self.path:
                sizes.append(length)
            return self._file.window(start, length)

    open_file = layout.open_file
    monkeypatch.setattr(layout, "open_file", lambda path: Counted(open_file(path)))
    assert index_fault(layout, SHAPE, log_end=END) is None
    assert len(sizes) == 6
    assert sum(sizes) == 2 * (index.HEADER.size + 2 * index.ENTRY.size)
