"""Not a file in a file's place, or one file with two names: refused before any change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.repair.findings import Next, next_step
from tests.helpers.small_store import bodies, config, facts, opened

COUNT = 60
QUEUE = "consumequeue/t/0"
FILE = f"{0:020d}"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that was not closed, of several files of the log, with two queues."""
    root = tmp_path / "store"
    with opened(root) as writer:
        for number in range(COUNT):
            message = lq.Message(
                "t", b"%03d" % number * 200, keys=f"k{number}", queue_id=number % 2
            )
            writer.put(message)
    (root / "abort").touch()
    return root


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def pipe(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_to_nothing(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent / "nowhere" / "file")


def circle(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("harm", [pipe, link_to_nothing, circle])
@pytest.mark.parametrize("new", [False, True])
def test_it_is_no_index_file(
    store: Path, harm: Callable[[Path], None], *, new: bool, is_clean: bool
) -> None:
    path = next((store / "index").iterdir())
    path = path.with_name("2" * 17) if new else path
    harm(path)
    if is_clean:
        (store / "abort").unlink()
    before = facts(store)
    with pytest.raises(StoreUnavailable, match=rf"/index/{path.name}: it is .*Nothing was changed"):
        opened(store)
    assert facts(store) == before
    path.unlink()
    with opened(store) as writer:
        assert len(bodies(writer)) == COUNT


@pytest.mark.timeout(60)
@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize("harm", [folder, pipe, link_to_nothing, circle])
def test_a_rebuild_in_place_needs_the_log(
    store: Path, harm: Callable[[Path], None], *, apply: bool
) -> None:
    path = store / "commitlog" / f"{16_384:020d}"
    harm(path)
    before = facts(store)
    for queues in (True, False):
        with pytest.raises(StoreUnavailable, match=rf"/{path.name}: it is .*Nothing was changed"):
            lq.rebuild(store, apply=apply, config=config(), queues=queues)
    assert facts(store) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("harm", [folder, pipe, link_to_nothing, circle])
@pytest.mark.parametrize("name", [f"{QUEUE}/{FILE}", f"index/{'2' * 17}"])
def test_a_rebuild_in_place_moves_wrong_entries(
    store: Path, name: str, harm: Callable[[Path], None]
) -> None:
    harm(store / name)
    report = lq.rebuild(store, apply=True, config=config())
    assert report.quarantine is not None
    assert os.path.lexists(Path(report.quarantine) / name)
    assert not lq.verify(store).has_damage
    with opened(store) as writer:
        assert len(bodies(writer)) == COUNT


@pytest.mark.timeout(60)
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("harm", [folder, pipe, link_to_nothing, circle])
@pytest.mark.parametrize(
    "name",
    [
        f"commitlog/{16_384:020d}",
        f"commitlog/{1 << 30:020d}",
        f"{QUEUE}/{FILE}",
        "checkpoint",
        "abort",
        ".logquarry/durable",
        ".logquarry/quarantine/recovery.json",
        ".logquarry/quarantine/kept_units.json",
    ],
)
def test_it_is_no_file(store: Path, name: str, harm: Callable[[Path], None], opens: bool) -> None:
    kept = store.parent / "kept"
    if (store / name).exists():
        shutil.copy(store / name, kept)
    harm(store / name)
    before = facts(store)
    # A link to nothing does not count as `abort`, so there is nothing to recover; nor can one be
    # made.
    says = "" if opens and not (store / "abort").exists() else "it is .*Nothing was changed"
    with pytest.raises(StoreUnavailable, match=rf"/{name}: {says}"):
        if opens:
            opened(store)
        else:
            lq.recover(store, apply=True, config=config())
    assert facts(store) == before
    report = lq.verify(store)
    (found,) = (finding for finding in report.findings if finding.kind == "wrong_entry")
    assert (found.severity, found.file, found.reason[:5]) == ("damage", name, "it is")
    assert next_step(report) == Next(("verify",), "do what the finding wrong_entry says")
    assert facts(store) == before
    (store / name).rmdir() if harm is folder else (store / name).unlink()
    if kept.exists():
        shutil.copy(kept, store / name)
    with opened(store) as writer:
        assert len(bodies(writer)) == COUNT


@pytest.mark.parametrize("name", ["commitlog", "consumequeue", "index", ".logquarry/quarantine"])
def test_it_is_no_folder(store: Path, name: str) -> None:
    shutil.rmtree(store / name, ignore_errors=True)
    (store / name).write_bytes(b"something")
    before = facts(store)
    text = rf"/{name}: it is not a folder.*Nothing was changed"
    with pytest.raises(StoreUnavailable, match=text):
        lq.recover(store, config=config())
    assert facts(store) == before


@pytest.mark.parametrize("name", ["consumequeue/t", QUEUE])
def test_a_queue_is_a_link_to_nothing(store: Path, name: str) -> None:
    shutil.rmtree(store / name)
    (store / name).symlink_to(store / "not mounted")
    with pytest.raises(StoreUnavailable, match=f"/{name}: it is a link"):
        lq.recover(store, apply=True, config=config())
    assert (store / name).is_symlink()


def hard(path: Path, to: Path) -> None:
    path.hardlink_to(to)


def soft(path: Path, to: Path) -> None:
    path.symlink_to(to)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize(
    ("name", "other", "link"),
    [
        (f"commitlog/{16_384:020d}", f"commitlog/{FILE}", soft),
        (f"{QUEUE}/{FILE}", f"{QUEUE}/{400:020d}", hard),
        (f"{QUEUE}/{FILE}", f"{QUEUE}/{400:020d}", soft),
        (f"{QUEUE}/{FILE}", f"consumequeue/t/1/{FILE}", hard),
        (f"{QUEUE}/{FILE}", f"consumequeue/t/1/{FILE}", soft),
        (f"{QUEUE}/{FILE}", f"commitlog/{FILE}", hard),
        (f"{QUEUE}/{FILE}", f"commitlog/{FILE}", soft),
    ],
)
def test_one_file_has_two_names(
    store: Path, name: str, other: str, link: Callable[[Path, Path], None], opens: bool
) -> None:
    """Bytes that are cut off from one name's file would be gone from the other, too."""
    kept = (store / name).read_bytes()
    (store / name).unlink()
    link(store / name, store / other)
    before = facts(store)
    with pytest.raises(StoreUnavailable, match=r"the same file as.*Nothing was changed"):
        if opens:
            opened(store)
        else:
            lq.recover(store, apply=True, config=config())
    assert facts(store) == before
    (store / name).unlink()
    (store / name).write_bytes(kept)
    with opened(store) as writer:
        assert len(bodies(writer)) == COUNT


@pytest.mark.parametrize(("name", "other"), [(QUEUE, "consumequeue/t/1")])
def test_one_queue_has_two_names(store: Path, name: str, other: str) -> None:
    """Each recovery would mend one of them: the entries of one queue are wrong for the other."""
    shutil.rmtree(store / name)
    (store / name).symlink_to(store / other)
    with pytest.raises(StoreUnavailable, match="the same file as"):
        lq.recover(store, apply=True, config=config())
    (store / name).unlink()
    with opened(store) as writer:
        assert len(bodies(writer)) == COUNT


def test_links_to_elsewhere_are_followed(store: Path, tmp_path: Path) -> None:
    for name in ("commitlog", "consumequeue/t/0", "index"):
        target = tmp_path / name.replace("/", "-")
        (store / name).rename(target)
        (store / name).symlink_to(target)
    lq.recover(store, apply=True, config=config())
    assert not lq.recover(store, config=config()).is_needed
