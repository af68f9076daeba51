"""Log files with wrong names: each reader, verify, salvage and recover go by the frames in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logquarry as lq
from logquarry.errors import CorruptStore, MisnamedFile, StoreUnavailable
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.command import run
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.files import overwrite
from tests.helpers.hypothesis_profiles import costly
from tests.helpers.small_store import bodies, config, opened

SIZE = 16_384
COUNT = 110
Names = dict[str, str]
"""Name of a log file -> the name that it gets."""


def name_of(number: int) -> str:
    return f"{number * SIZE:020d}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names") / "store"
    with opened(root) as store:
        for number in range(COUNT):
            message = lq.Message(
                f"t{number % 3}", b"%03d" % number * 200, queue_id=number % 2, keys=f"k{number}"
            )
            store.put(message)
    return root


@pytest.fixture
def store(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "store"))


def log_of(root: Path) -> dict[str, bytes]:
    files = (root / "commitlog").rglob("*")
    return {str(f.relative_to(root / "commitlog")): f.read_bytes() for f in files if f.is_file()}


def rename(root: Path, names: Names) -> None:
    folder = root / "commitlog"
    for number, name in enumerate(names):
        (folder / name).rename(folder / f"between-{number}")
    for number, name in enumerate(names.values()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"between-{number}").rename(folder / name)


def swapped(first: int, second: int) -> Names:
    return {name_of(first): name_of(second), name_of(second): name_of(first)}


LAST = 4
CASES: dict[str, Names] = {
    "two in the middle swapped": swapped(1, 2),
    "first and last swapped": swapped(0, LAST),
    "first two swapped": swapped(0, 1),
    "three rotated": {name_of(n): name_of(1 + n % 3) for n in (1, 2, 3)},
    "all rotated": {name_of(n): name_of((n + 1) % (LAST + 1)) for n in range(LAST + 1)},
    "first beyond the end": {name_of(0): name_of(LAST + 1)},
    "middle beyond the end": {name_of(2): name_of(LAST + 3)},
    "last further beyond the end": {name_of(LAST): name_of(LAST + 2)},
    "all shifted": {name_of(n): name_of(n + 1) for n in range(LAST + 1)},
    "all shifted off the grid": {name_of(n): f"{n * SIZE + 20:020d}" for n in range(LAST + 1)},
    "a digit too few": {name_of(2): name_of(2)[1:]},
    "not padded": {name_of(n): str(n * SIZE) for n in range(LAST + 1)},
    "shifted by a digit": {name_of(2): f"{20 * SIZE:020d}"},
    "copy (1)": {name_of(0): f"{name_of(0)} (1)"},
    "backup of one": {name_of(3): f"{name_of(3)}.1"},
    "all .bak": {name_of(n): f"{name_of(n)}.bak" for n in range(LAST + 1)},
    "in a subfolder": {name_of(1): f"lost+found/{name_of(1)}"},
}


def test_the_store_has_the_files_of_the_cases(prepared: Path) -> None:
    assert sorted(log_of(prepared)) == [name_of(number) for number in range(LAST + 1)]


@pytest.mark.parametrize("case", CASES)
def test_verify_names_each_file(store: Path, case: str) -> None:
    rename(store, CASES[case])
    report = verify_store(StoreLayout.open(store))
    found = {f.file.removeprefix("commitlog/"): f for f in report.findings}
    assert report.by_kind["misnamed_file"] == len(CASES[case])
    for right, name in CASES[case].items():
        assert found[name].kind == "misnamed_file" and found[name].severity == "damage"
        assert found[name].offset == int(right) and "recover" in found[name].reason
    # The rest of the store is sound: nothing else is reported, except for a folder.
    assert {f.kind for f in report.findings} - {"unknown_file"} == {"misnamed_file"}
    assert report.counts["messages"] == COUNT
    if "swapped" in case:
        assert all("look swapped" in found[name].reason for name in CASES[case])


READERS: dict[str, Callable[[Path], object]] = {
    "scan": lambda root: bodies(lq.MessageStore.open(root)),
    "skip": lambda root: list(lq.MessageStore.open(root).scan(on_damage="skip")),
    "queues": lambda root: [
        m.body
        for topic in range(3)
        for queue in range(2)
        for m in lq.MessageStore.open(root).get(f"t{topic}", queue, 0, 64).messages
    ],
    "arrow": lambda root: lq.MessageStore.open(root).to_arrow().read_all(),
    "rebuild": lambda root: rebuild(root, apply=True),
    "retain": lambda root: lq.retain(
        root, lq.RetentionRules(keep_bytes=SIZE), config=config(), apply=True
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", CASES)
def test_a_reader_names_the_file(store: Path, case: str, reader: str) -> None:
    rename(store, CASES[case])
    before = log_of(store)
    with pytest.raises(MisnamedFile, match=r"frames start at physical offset.*recover") as error:
        READERS[reader](store)
    assert error.value.kind == "misnamed_file"
    assert log_of(store) == before


def test_info_checks_every_name(store: Path) -> None:
    rename(store, CASES["two in the middle swapped"])
    result = run("info", store, code=1)
    assert "look swapped" in result.stderr and "logquarry recover" in result.stderr


@pytest.mark.parametrize("case", CASES)
def test_salvage_saves_all(store: Path, tmp_path: Path, case: str) -> None:
    rename(store, CASES[case])
    found = salvage_store(StoreLayout.open(store), tmp_path / "new")
    assert found.is_whole and found.plan.messages == COUNT
    with lq.MessageStore.open(tmp_path / "new") as new:
        assert [body[:3] for body in bodies(new)] == [b"%03d" % n for n in range(COUNT)]


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_recover_gives_the_names_back(store: Path, prepared: Path, case: str, opens: bool) -> None:
    rename(store, CASES[case])
    plan = lq.recover(store, config=config())
    renames = {s.file.removeprefix("commitlog/"): s.offset for s in plan.steps}
    assert renames == {name: int(right) for right, name in CASES[case].items()}
    assert {step.kind.value for step in plan.steps} == {"rename"}
    if opens:
        opened(store).close()
    else:
        lq.recover(store, apply=True, config=config())
    assert log_of(store) == log_of(prepared)
    assert not lq.recover(store, config=config()).is_needed
    assert not verify_store(StoreLayout.open(store)).has_damage


@pytest.mark.parametrize("case", ["two in the middle swapped", "all rotated", "all .bak"])
def test_mode_rocketmq_refuses(store: Path, case: str) -> None:
    rename(store, CASES[case])
    before = log_of(store)
    for apply in (False, True):
        with pytest.raises(StoreUnavailable, match=r"RocketMQ uses the names.*mode safe first"):
            lq.recover(store, mode="rocketmq", apply=apply, config=config())
    with pytest.raises(StoreUnavailable, match="RocketMQ uses the names"):
        opened(store, recovery="rocketmq")
    assert log_of(store) == before and not (store / "abort").exists()


@costly()
@given(st.data())
def test_any_permutation(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("any") / "store"
    shutil.copytree(prepared, root)
    names = [name_of(number) for number in range(LAST + 1)]
    others = [name_of(LAST + 1), name_of(9), "x.bak", f"{SIZE + 3:020d}", "lost+found/5"]
    given_names = data.draw(st.permutations(names + others))
    rename(root, dict(zip(names, given_names, strict=False)))
    found = salvage_store(StoreLayout.open(root))
    assert found.is_whole and found.plan.messages == COUNT
    lq.recover(root, apply=True, config=config())
    assert log_of(root) == log_of(prepared)
    assert not verify_store(StoreLayout.open(root)).has_damage
    shutil.rmtree(root)


@pytest.mark.parametrize("case", ["three rotated", "all shifted", "all .bak", "in a subfolder"])
def test_a_recovery_that_stops_anywhere_is_continued(
    prepared: Path, tmp_path: Path, case: str
) -> None:
    counting = StoppedDisk()
    root = tmp_path / "whole"
    shutil.copytree(prepared, root)
    rename(root, CASES[case])
    lq.recover(root, apply=True, config=config(), disk=counting)
    # Up to the last rename of a log file: each rename, and one in seven of the other calls.
    shift = list(CASES).index(case)
    last = max(n for n, call in enumerate(counting.order) if call == "rename")
    assert counting.counts["rename"] >= len(CASES[case])
    for number in range(last + 2):
        if (number + shift) % 7 and counting.order[number] != "rename":
            continue
        root = tmp_path / f"stopped-{number}"
        shutil.copytree(prepared, root)
        rename(root, CASES[case])
        with pytest.raises(KeyboardInterrupt):
            lq.recover(root, apply=True, config=config(), disk=StoppedDisk(number))
        assert sorted(log_of(root).values()) == sorted(log_of(prepared).values())
        assert salvage_store(StoreLayout.open(root)).plan.messages == COUNT
        lq.recover(root, apply=True, config=config())
        assert log_of(root) == log_of(prepared)
        shutil.rmtree(root)


# ------------------------------------------------------------------------ what is not a wrong name
@pytest.mark.parametrize("name", ["{}.bak", "{} (1)", "old/{}"])
def test_a_copy_beside_its_file_is_ignored(store: Path, name: str) -> None:
    copy = store / "commitlog" / name.format(name_of(1))
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(store / "commitlog" / name_of(1), copy)
    assert len(bodies(lq.MessageStore.open(store))) == COUNT
    assert not verify_store(StoreLayout.open(store)).has_damage
    assert not lq.recover(store, config=config()).is_needed


def test_a_copy_under_the_next_name_is_set_aside(store: Path) -> None:
    shutil.copy(store / "commitlog" / name_of(1), store / "commitlog" / name_of(LAST + 1))
    report = verify_store(StoreLayout.open(store))
    assert report.by_kind == {"misnamed_file": 1}
    assert salvage_store(StoreLayout.open(store)).plan.messages == COUNT
    plan = lq.recover(store, apply=True, config=config())
    assert [(s.kind.value, s.file) for s in plan.steps] == [
        ("set_aside", f"commitlog/{name_of(LAST + 1)}")
    ]
    assert not verify_store(StoreLayout.open(store)).has_damage


def test_empty_files_move_out_of_the_way(store: Path, prepared: Path) -> None:
    """A file that was made ahead has no frame. A recovery deletes it after the log's end."""
    folder = store / "commitlog"
    (folder / name_of(LAST + 1)).write_bytes(bytes(SIZE))
    assert len(bodies(lq.MessageStore.open(store))) == COUNT
    rename(store, swapped(2, LAST + 1))
    assert salvage_store(StoreLayout.open(store)).plan.messages == COUNT
    plan = lq.recover(store, apply=True, config=config())
    assert [(s.kind.value, s.offset) for s in plan.steps] == [
        ("rename", 2 * SIZE),
        ("rename", (LAST + 1) * SIZE),
    ]
    assert log_of(store) == log_of(prepared)
    (folder / name_of(LAST + 1)).write_bytes(bytes(SIZE))
    rename(store, {name_of(n): name_of(n + 1) for n in range(LAST + 2)})
    plan = lq.recover(store, apply=True, config=config())
    assert [(s.kind.value, s.offset) for s in plan.steps] == [
        ("rename", number * SIZE) for number in range(LAST + 2)
    ]
    assert log_of(store) == log_of(prepared)


def test_two_different_files_for_one_place_are_left_alone(store: Path) -> None:
    folder = store / "commitlog"
    data = bytearray((folder / name_of(1)).read_bytes())
    data[-300] ^= 1
    (folder / f"{name_of(1)}.new").write_bytes(data)
    (folder / name_of(1)).rename(folder / f"{name_of(1)}.old")
    before = log_of(store)
    with pytest.raises(StoreUnavailable, match="two files differ"):
        lq.recover(store, apply=True, config=config())
    with pytest.raises(MisnamedFile, match="frames start at"):
        bodies(lq.MessageStore.open(store))
    assert log_of(store) == before
    report = verify_store(StoreLayout.open(store))
    assert report.by_kind["misnamed_file"] == 2
    first, doubt = (one for one in report.findings if one.kind == "misnamed_file")
    words = f"; `logquarry recover` refuses the store until you do what the finding of {doubt.file}"
    assert first.reason.endswith(f"{words} says")


def test_verify_does_not_recommend_a_recovery_that_the_store_does_not_allow(store: Path) -> None:
    rename(store, CASES["first two swapped"])
    (store / "epochFileCheckpoint").write_bytes(b"")
    assert "controller" in str(lq.recover(store, config=config()).refused)
    report = verify_store(StoreLayout.open(store))
    found = [one.reason for one in report.findings if one.kind == "misnamed_file"]
    words = "; `logquarry recover` does not support this store; `logquarry salvage` reads"
    assert len(found) == 2 and all(words in reason for reason in found)


def test_a_file_of_another_store_gets_no_place(store: Path, tmp_path: Path) -> None:
    """Its offsets fit into the gap; only the queues show that its messages are different."""
    other = tmp_path / "other"
    with opened(other) as writer:
        for number in range(COUNT):
            message = lq.Message(f"t{number % 3}", b"%03d" % number * 171, queue_id=number % 2)
            writer.put(message)
    (store / "commitlog" / name_of(2)).unlink()
    shutil.copy(other / "commitlog" / name_of(2), store / "commitlog" / "found")
    before = log_of(store)
    with pytest.raises(StoreUnavailable, match="queues have other messages there"):
        lq.recover(store, apply=True, config=config())
    assert log_of(store) == before


@pytest.mark.parametrize("places", [[0], [0, 3], [0, 1, 2]])
def test_rotten_offsets_are_damage_not_a_name(store: Path, places: list[int]) -> None:
    path = store / "commitlog" / name_of(1)
    data = bytearray(path.read_bytes())
    frames = [m.physical_offset for m in lq.MessageStore.open(store).scan()]
    inside = [at - SIZE for at in frames if SIZE <= at < 2 * SIZE]
    for place in places:
        data[inside[place] + 28 : inside[place] + 36] = (64 * SIZE).to_bytes(8, "big")
    path.write_bytes(data)
    assert "misnamed_file" not in verify_store(StoreLayout.open(store)).by_kind
    with pytest.raises(CorruptStore) as error:
        bodies(lq.MessageStore.open(store))
    assert not isinstance(error.value, MisnamedFile)


@pytest.mark.parametrize("case", ["three rotated", "first beyond the end", "all .bak"])
def test_after_a_crash_the_second_names_restore_no_renamed_file(
    store: Path, prepared: Path, case: str
) -> None:
    second = store / ".logquarry" / "names" / "commitlog"
    second.mkdir(parents=True, exist_ok=True)
    for path in sorted((store / "commitlog").iterdir()):
        (second / path.name).hardlink_to(path)
    (store / "abort").touch()
    rename(store, CASES[case])
    lq.recover(store, apply=True, config=config())
    assert log_of(store) == log_of(prepared)


@pytest.mark.parametrize("size", [12_288, 40_960])
@pytest.mark.parametrize("states_size", [True, False])
def test_a_file_that_overlaps_the_log_hides_no_message(
    store: Path, tmp_path: Path, size: int, *, states_size: bool
) -> None:
    """The frames of the other store's file agree with its name."""
    other = tmp_path / "other"
    with opened(other, mapped_file_size_commit_log=size) as writer:
        for number in range(COUNT):
            writer.put(lq.Message("t0", b"%03d" % number * 171))
    with lq.MessageStore.open(store) as reader:
        wanted = bodies(reader)
    names = sorted(path.name for path in (other / "commitlog").iterdir())
    name = next(name for name in names if int(name) % SIZE)
    shutil.copy(other / "commitlog" / name, store / "commitlog")
    before = log_of(store)
    settings = config() if states_size else lq.StoreConfig()
    found = salvage_store(StoreLayout.open(store, settings), tmp_path / "new")
    assert found.plan.is_whole
    assert [(one.feature, one.paths) for one in found.left_behind] == [
        ("misnamed_file", (f"commitlog/{name}",))
    ]
    with lq.MessageStore.open(tmp_path / "new") as reader:
        assert bodies(reader) == wanted
    assert "it overlaps" in verify_store(StoreLayout.open(store)).findings[0].reason
    with pytest.raises(StoreUnavailable, match="it overlaps"):
        lq.recover(store, apply=True, config=settings)
    with pytest.raises(MisnamedFile, match="it overlaps"):
        bodies(lq.MessageStore.open(store))
    assert log_of(store) == before


def test_bytes_without_frames_over_the_log_hide_no_message(store: Path, tmp_path: Path) -> None:
    (store / "commitlog" / f"{SIZE + 4_096:020d}").write_bytes(b"no" * SIZE)
    found = salvage_store(StoreLayout.open(store), tmp_path / "new")
    assert found.is_whole
    assert found.plan.messages == COUNT


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("size", [4_096, 12_288])
def test_a_displaced_block_at_the_start_of_a_file_shows_no_wrong_name(
    tmp_path: Path, size: int, *, is_swapped: bool
) -> None:
    """All the first frames of the file can be those of another file."""
    root = tmp_path / "store"
    with opened(root) as store:
        for number in range(500):
            store.put(lq.Message("t", b"%03d" % number))
    with lq.MessageStore.open(root, config=config()) as store:
        known = {one.physical_offset: one.body for one in store.scan()}
    assert max(known) > 2 * SIZE
    first, second = (root / "commitlog" / name_of(number) for number in (0, 1))
    blocks = [path.read_bytes()[:size] for path in (first, second)]
    overwrite(second, 0, blocks[0])
    if is_swapped:
        overwrite(first, 0, blocks[1])
    names = StoreLayout.open(root, config()).by_content().log_names
    assert names.are_right
    assert not names.strangers
    salvage_store(StoreLayout.open(root, config()), tmp_path / "new")
    with lq.MessageStore.open(tmp_path / "new", config=config()) as store:
        saved = bodies(store)
    assert saved == sorted(saved)
    # No frame that the block's end cuts can be saved.
    lost = range(SIZE, SIZE) if is_swapped else range(SIZE, SIZE + size)
    cut = [SIZE + size, *([size] if is_swapped else [])]
    for at, body in known.items():
        if at not in lost and not any(at < end <= at + 300 for end in cut):
            assert body in saved
