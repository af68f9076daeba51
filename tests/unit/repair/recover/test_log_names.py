"""Files in the log's folder with wrong names: a recovery renames them, or sets strangers aside."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.repair.recover.loss import LossRefused
from tests.helpers.small_store import bodies, config, facts, forget_start, opened

SIZE = 16_384
COUNT = 120


def written(root: Path) -> list[str]:
    """A closed store; the names of the log's files."""
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"%03d" % number * 200, keys=f"k{number}"))
    return sorted(path.name for path in (root / "commitlog").iterdir())


def recovered(root: Path, *, opens: bool = False, accept_loss: int | None = None) -> None:
    """Recover a store, by opening it to write or with the plan."""
    if opens:
        lq.MessageStore.open(root, mode="rw", config=config(), accept_loss=accept_loss).close()
    else:
        lq.recover(root, apply=True, config=config(), accept_loss=accept_loss)
    assert not lq.recover(root, config=config()).is_needed


def log_of(root: Path) -> dict[str, bytes]:
    """The names of the log's files with their bytes."""
    return {path.name: path.read_bytes() for path in (root / "commitlog").iterdir()}


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("name", [1, 1_000, SIZE + 7, 40 * SIZE, 1 << 40, (1 << 62) - SIZE])
@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_renamed_file_gets_its_name_back(
    tmp_path: Path, number: int, name: int, opens: bool
) -> None:
    root = tmp_path / "store"
    names = written(root)
    wanted = log_of(root)
    folder = root / "commitlog"
    (folder / names[number]).rename(folder / f"{name:020d}")
    recovered(root, opens=opens)
    assert log_of(root) == wanted
    with opened(root) as store:
        assert len(bodies(store)) == COUNT


@pytest.mark.parametrize("step", [20, SIZE // 2, SIZE, 3 * SIZE])
def test_all_files_renamed_alike(tmp_path: Path, step: int) -> None:
    """Then the names agree with each other, and only the messages contradict them."""
    root = tmp_path / "store"
    names = written(root)
    wanted = log_of(root)
    folder = root / "commitlog"
    for name in reversed(names):
        (folder / name).rename(folder / f"{int(name) + step:020d}")
    recovered(root)
    assert log_of(root) == wanted


@pytest.mark.parametrize("name", [7, SIZE + 100, 1 << 41, 10**20 - 1])
@pytest.mark.parametrize("content", ["a copy", "zeros", "garbage", "short"])
def test_what_is_none_of_the_log_is_set_aside(tmp_path: Path, content: str, name: int) -> None:
    root = tmp_path / "store"
    names = written(root)
    stranger = root / "commitlog" / f"{name:020d}"
    if content == "a copy":
        shutil.copy(root / "commitlog" / names[1], stranger)
    else:
        stranger.write_bytes(
            {"zeros": bytes(SIZE), "garbage": b"no" * SIZE, "short": b"x"}[content]
        )
    data = stranger.read_bytes()
    plan = lq.recover(root, config=config())
    if name < 10**19:
        assert [step.file for step in plan.steps] == [f"commitlog/{name:020d}"]
    lq.recover(root, apply=True, config=config())
    assert not lq.recover(root, config=config()).is_needed
    with opened(root) as store:
        assert len(bodies(store)) == COUNT
    if name < 10**19:
        kept = root / ".logquarry" / "quarantine" / "commitlog" / stranger.name
        assert kept.read_bytes() == data and not stranger.exists()


def test_one_rotten_offset_is_no_renamed_file(tmp_path: Path) -> None:
    """Also if the offset is that of a missing file's begin."""
    names = written(tmp_path)
    path = tmp_path / "commitlog" / names[1]
    data = bytearray(path.read_bytes())
    data[28:36] = (64 * SIZE).to_bytes(8, "big")
    path.write_bytes(data)
    with opened(tmp_path) as store:
        assert len(list(store.scan(on_damage="skip"))) == COUNT - 1


def test_another_size_than_the_settings_say(tmp_path: Path) -> None:
    """The messages are where the names say, so the size is wrong."""
    written(tmp_path)
    settings = config(mapped_file_size_commit_log=3 * SIZE)
    before = facts(tmp_path)
    with pytest.raises(UsageError, match="mappedFileSizeCommitLog"):
        lq.recover(tmp_path, config=settings)
    assert facts(tmp_path) == before


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("name", ["0", "x", "{}.bak", "old-{}"])
@pytest.mark.parametrize("number", [0, 1, -1, None])
def test_a_name_that_is_no_number(
    tmp_path: Path, number: int | None, name: str, opens: bool
) -> None:
    """Also if the log has no other file: it does not count as lost, and nothing replaces it."""
    root = tmp_path / "store"
    names = written(root)
    # In a closed store without its first file, the oldest messages have expired.
    (root / "abort").touch()
    folder = root / "commitlog"
    loss = None
    if number is None:
        number = 0
        for other in names[1:]:
            (folder / other).unlink()
        # Only the messages of the other files are lost, whatever name the first file gets.
        expected = lq.recover(root, config=config()).loss
        assert expected is not None
        loss = expected.bytes
    renamed = folder / name.format(names[number])
    wanted = log_of(root)
    (folder / names[number]).rename(renamed)
    recovered(root, opens=opens, accept_loss=loss)
    assert log_of(root) == wanted


def test_a_copy_under_another_name_is_let_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    names = written(root)
    copy = root / "commitlog" / f"{names[1]}.bak"
    shutil.copy(root / "commitlog" / names[1], copy)
    (root / "commitlog" / "notes").write_bytes(b"what was done to this store " * 9)
    (root / "abort").touch()
    lq.recover(root, apply=True, config=config())
    assert copy.exists() and not lq.recover(root, config=config()).is_needed


def test_an_old_copy_of_an_expired_file_is_let_alone(tmp_path: Path) -> None:
    """But not a file that continues the log at its start: it may be the first file, renamed."""
    root = tmp_path / "store"
    names = written(root)
    folder = root / "commitlog"
    for name in names[:3]:
        (folder / name).rename(folder / f"{name}.bak")
    (folder / f"{names[2]}.bak").unlink()
    forget_start(root)
    before = log_of(root)
    lq.recover(root, apply=True, config=config())
    assert not lq.recover(root, config=config()).is_needed
    assert log_of(root) == before
    (folder / names[3]).rename(folder / "3.bak")
    forget_start(root)
    recovered(root)
    assert log_of(root) == before


@pytest.mark.parametrize("has_other", [False, True])
def test_a_copy_has_the_name_of_another_file(tmp_path: Path, has_other: bool) -> None:
    """A recovery sets the copy aside, and must not set the file aside that then gets the name."""
    root = tmp_path / "store"
    names = written(root)
    folder = root / "commitlog"
    wanted = log_of(root)
    if has_other:
        (folder / names[2]).rename(folder / f"{40 * SIZE:020d}")
    shutil.copy(folder / names[1], folder / names[2])
    recovered(root, accept_loss=SIZE)
    has = log_of(root)
    assert sorted(has) == names
    assert (has[names[2]] == wanted[names[2]]) is has_other
    aside = list((root / ".logquarry/quarantine/commitlog").iterdir())
    assert [path.read_bytes() for path in aside] == [wanted[names[1]]]


# Two hard links to one log file: a power cut during a rename can leave both names.


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("number", [0, 2, -1])
@pytest.mark.parametrize("name", [7, SIZE + 7, 6 * SIZE, 40 * SIZE])
def test_a_wrong_hard_link_is_removed(
    tmp_path: Path, name: int, number: int, opens: bool, is_clean: bool
) -> None:
    root = tmp_path / "store"
    names = written(root)
    wanted = log_of(root)
    path = root / "commitlog" / f"{name:020d}"
    path.hardlink_to(root / "commitlog" / names[number])
    if not is_clean:
        (root / "abort").touch()
    plan = lq.recover(root, config=config())
    words = f"remove: commitlog/{path.name}: it is a hard link to commitlog/{names[number]}, "
    assert f"{words}where its frames belong" in map(str, plan.steps)
    found = [one for one in lq.verify(root).findings if one.severity == "damage"]
    assert [(one.kind, one.file) for one in found] == [("misnamed_file", f"commitlog/{path.name}")]
    assert found[0].reason.endswith("`logquarry recover` removes this link")
    recovered(root, opens=opens)
    assert log_of(root) == wanted
    assert not (root / ".logquarry" / "quarantine" / "commitlog").exists()
    assert not lq.verify(root).has_damage


def test_both_names_of_a_file_are_wrong(tmp_path: Path) -> None:
    names = written(tmp_path)
    wanted = log_of(tmp_path)
    folder = tmp_path / "commitlog"
    (folder / f"{40 * SIZE:020d}").hardlink_to(folder / names[1])
    (folder / names[1]).rename(folder / f"{41 * SIZE:020d}")
    recovered(tmp_path)
    assert log_of(tmp_path) == wanted


def test_a_hard_link_in_place_of_a_lost_file(tmp_path: Path) -> None:
    names = written(tmp_path)
    (tmp_path / "commitlog" / names[2]).unlink()
    (tmp_path / "commitlog" / names[2]).hardlink_to(tmp_path / "commitlog" / names[1])
    before = facts(tmp_path)
    for opens in (False, True):
        with pytest.raises(LossRefused, match=rf"commitlog/{names[2]} is missing.*was changed"):
            recovered(tmp_path, opens=opens)
    assert facts(tmp_path) == before


@pytest.mark.parametrize("call", ["rocketmq", "rebuild", "retain"])
def test_only_a_safe_recovery_removes_hard_links(tmp_path: Path, call: str) -> None:
    names = written(tmp_path)
    link = tmp_path / "commitlog" / f"{40 * SIZE:020d}"
    link.hardlink_to(tmp_path / "commitlog" / names[1])
    before = facts(tmp_path)
    with pytest.raises(StoreUnavailable, match=f"{link}: it is a hard link to.*mode safe removes"):
        if call == "rocketmq":
            lq.recover(tmp_path, mode="rocketmq", apply=True, config=config())
        elif call == "rebuild":
            lq.rebuild(tmp_path, apply=True, config=config())
        else:
            lq.retain(tmp_path, lq.RetentionRules(keep_bytes=1), apply=True)
    assert facts(tmp_path) == before


def test_frames_do_not_show_which_hard_link_is_right(tmp_path: Path) -> None:
    names = written(tmp_path)
    folder = tmp_path / "commitlog"
    (folder / names[-1]).write_bytes(bytes(SIZE))
    (folder / f"{int(names[-1]) + SIZE:020d}").hardlink_to(folder / names[-1])
    before = facts(tmp_path)
    with pytest.raises(StoreUnavailable, match="the same file as"):
        lq.recover(tmp_path, apply=True, config=config())
    assert facts(tmp_path) == before


@pytest.mark.parametrize("opens", [False, True])
def test_an_empty_file_has_a_name_that_another_file_needs(tmp_path: Path, opens: bool) -> None:
    """A power cut during the swap of the first file's name and the name of the file ahead."""
    names = written(tmp_path)
    wanted = log_of(tmp_path)
    folder = tmp_path / "commitlog"
    ahead = folder / f"{int(names[-1]) + SIZE:020d}"
    ahead.write_bytes(bytes(SIZE))
    (folder / names[0]).rename(folder / f"{names[0]}.renaming")
    (folder / names[0]).hardlink_to(ahead)
    (tmp_path / "abort").touch()
    found = {one.file: one.reason for one in lq.verify(tmp_path).findings}
    words = f"it is a hard link to commitlog/{ahead.name}, and another file needs its name; "
    assert found[f"commitlog/{names[0]}"] == f"{words}`logquarry recover` removes this link"
    recovered(tmp_path, opens=opens)
    assert {name: data for name, data in log_of(tmp_path).items() if any(data)} == wanted
    assert not lq.verify(tmp_path).has_damage


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_second_name_of_an_interrupted_rename_is_removed(
    tmp_path: Path, is_swapped: bool, opens: bool
) -> None:
    """Else the log would seem to have this file again after retention has deleted the file."""
    names = written(tmp_path)
    wanted = log_of(tmp_path)
    folder = tmp_path / "commitlog"
    if is_swapped:
        (folder / names[1]).rename(folder / "other")
        (folder / names[2]).rename(folder / names[1])
        (folder / "other").rename(folder / names[2])
    link = folder / f"{names[1]}.renaming"
    link.hardlink_to(folder / names[1 + is_swapped])
    found = {one.file: one for one in lq.verify(tmp_path).findings if one.severity == "damage"}
    assert found[f"commitlog/{link.name}"].reason == (
        f"it is a hard link to commitlog/{names[1]}, where its frames belong; "
        "`logquarry recover` removes this link"
    )
    if not is_swapped:
        with pytest.raises(StoreUnavailable, match=f"{link}: it is a hard link.*mode safe removes"):
            lq.retain(tmp_path, lq.RetentionRules(keep_bytes=1), apply=True)
    recovered(tmp_path, opens=opens)
    assert log_of(tmp_path) == wanted
    assert not lq.verify(tmp_path).findings


def test_a_copy_with_the_name_of_an_interrupted_rename_is_set_aside(tmp_path: Path) -> None:
    """A copy of a store has two files instead of two hard links to one file."""
    names = written(tmp_path)
    wanted = log_of(tmp_path)
    copy = tmp_path / "commitlog" / f"{names[1]}.renaming.2"
    shutil.copy(tmp_path / "commitlog" / names[1], copy)
    recovered(tmp_path)
    assert log_of(tmp_path) == wanted
    kept = tmp_path / ".logquarry" / "quarantine" / "commitlog" / copy.name
    assert kept.read_bytes() == wanted[names[1]]
