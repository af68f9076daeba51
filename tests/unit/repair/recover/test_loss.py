"""What a recovery would lose, and when the user has to accept it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.config import RECOVERIES
from logquarry.format import queue_entry
from logquarry.format.checkpoint import LAYOUT as CHECKPOINT_LAYOUT
from logquarry.log.layout import StoreLayout
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.plan import RecoveryMode
from logquarry.repair.verification import verify_store
from tests.helpers.small_store import NOW, config, forget_start, opened

COUNT = 200
FILE = 16_384
ENTRY = queue_entry.LAYOUT.struct


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store whose log has several files."""
    root = tmp_path_factory.mktemp("sound") / "store"
    with opened(root) as writer:
        for number in range(COUNT):
            writer.put(lq.Message("orders", b"%06d " % number * 30, queue_id=number % 2, keys="k"))
    return root


@pytest.fixture(params=["with durable offset", "of another program"])
def store(request: pytest.FixtureRequest, sound: Path, tmp_path: Path) -> Path:
    root = tmp_path / "store"
    shutil.copytree(sound, root)
    if request.param == "of another program":
        shutil.rmtree(root / ".logquarry")
    return root


def state(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every name below a store, with its modification time and content."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [root, *root.rglob("*")]
    }


def files(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


def frames(root: Path) -> list[lq.StoredMessage]:
    with lq.MessageStore.open(root) as reader:
        return list(reader.scan(on_damage="skip"))


def zeros(path: Path, start: int = 0) -> None:
    path.write_bytes(path.read_bytes()[:start].ljust(FILE, b"\0"))


def empty_folder(root: Path) -> None:
    shutil.rmtree(root / "commitlog")
    (root / "commitlog").mkdir()


def missing_folder(root: Path) -> None:
    shutil.rmtree(root / "commitlog")


def dangling_link(root: Path) -> None:
    shutil.rmtree(root / "commitlog")
    (root / "commitlog").symlink_to(root.parent / "unmounted")


def last_file_with_frames(root: Path) -> Path:
    last = frames(root)[-1].physical_offset
    return root / "commitlog" / f"{last - last % FILE:020d}"


def last_files_missing(root: Path) -> None:
    last = last_file_with_frames(root)
    for path in files(root):
        if path >= last:
            path.unlink()


def middle_file_missing(root: Path) -> None:
    files(root)[1].unlink()


def middle_file_of_zeros(root: Path) -> None:
    zeros(files(root)[1])


def last_file_of_zeros(root: Path) -> None:
    zeros(last_file_with_frames(root))


def second_half_of_zeros(root: Path) -> None:
    for path in files(root)[len(files(root)) // 2 :]:
        zeros(path)


LARGE_LOSSES = [
    empty_folder,
    missing_folder,
    last_files_missing,
    middle_file_missing,
    middle_file_of_zeros,
    last_file_of_zeros,
    second_half_of_zeros,
]


@pytest.mark.parametrize(
    ("mode", "crashed"), [("safe", False), ("safe", True), ("rocketmq", False)]
)
@pytest.mark.parametrize("harm", LARGE_LOSSES, ids=lambda harm: harm.__name__)
def test_a_large_loss_needs_consent(
    store: Path, harm: Callable[[Path], None], mode: RecoveryMode, crashed: bool
) -> None:
    harm(store)
    (store / "lock").unlink()
    if crashed:
        (store / "abort").touch()
    before = state(store)
    plan = lq.recover(store, mode=mode, config=config())
    assert plan.refused is not None
    with pytest.raises(lq.errors.StoreUnavailable, match="accept"):
        lq.recover(store, mode=mode, config=config(), apply=True)
    with pytest.raises(lq.errors.StoreUnavailable, match="accept") as refused:
        lq.MessageStore.open(store, mode="rw", config=config(recovery=mode))
    assert ("--mode rocketmq" in str(refused.value)) is ("--mode rocketmq" in plan.refused)
    assert state(store) == before
    if harm in (empty_folder, missing_folder):
        assert "is a disk not mounted?" in plan.refused and f"({COUNT} messages)" in plan.refused
        with pytest.raises(lq.errors.StoreUnavailable, match="is a disk not mounted"):
            lq.MessageStore.open(store)
        plan = lq.recover(store, mode=mode, config=config(), accept_loss=1 << 40)
        assert plan.refused is None
    else:
        option = " --mode rocketmq" if mode == "rocketmq" else ""
        assert plan.loss is not None and plan.refused is not None
        typed = f"`logquarry recover STORE --apply{option} --accept-loss {plan.loss.bytes}`"
        assert typed in plan.refused
    assert plan.loss is not None and plan.loss.needs_consent
    assert 0 < plan.loss.messages <= COUNT and plan.loss.bytes > 0
    assert next(iter(plan.lines())) == str(plan.loss)
    with pytest.raises(LossRefused) as raised:
        lq.recover(store, mode=mode, config=config(), apply=True, accept_loss=plan.loss.bytes - 1)
    assert raised.value.loss == plan.loss
    opened_too = store.with_name("opened")
    shutil.copytree(store, opened_too)
    done = lq.recover(store, mode=mode, config=config(), apply=True, accept_loss=plan.loss.bytes)
    assert done.loss == plan.loss
    again = lq.recover(store, mode=mode, config=config())
    assert again.refused is None and again.loss is None and not again.is_needed
    with lq.MessageStore.open(
        opened_too,
        mode="rw",
        config=config(recovery=mode),
        accept_loss=plan.loss.bytes,
    ) as writer:
        writer.put(lq.Message("orders", b"goes on"))
    assert frames(opened_too)[-1].body == b"goes on"


@pytest.mark.parametrize("mode", ["safe", "rocketmq"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_without_a_checkpoint_the_index_shows_that_messages_are_lost(
    store: Path, mode: RecoveryMode, is_folder: bool
) -> None:
    shutil.rmtree(store / ".logquarry", ignore_errors=True)
    empty_folder(store)
    shutil.rmtree(store / "consumequeue")
    (store / "checkpoint").unlink()
    (store / "lock").unlink()
    path = min((store / "index").iterdir())
    if is_folder:
        path.unlink()
        path.mkdir()
    before = state(store)
    with pytest.raises(lq.errors.StoreUnavailable, match=f"{path.name} knows of messages"):
        lq.MessageStore.open(store)
    with pytest.raises(lq.errors.StoreUnavailable, match="accept"):
        lq.recover(store, mode=mode, config=config(), apply=True)
    assert state(store) == before
    lq.recover(store, mode=mode, config=config(), apply=True, accept_loss=1 << 40)
    assert frames(store) == []


@pytest.mark.parametrize("has_queues", [True, False])
def test_a_dangling_link_is_named(store: Path, has_queues: bool) -> None:
    dangling_link(store)
    if not has_queues:
        # Without both folders a writer could take this for a new store.
        shutil.rmtree(store / "consumequeue")
    (store / "abort").touch()
    before = state(store)
    for call in (
        lambda: lq.recover(store, apply=True),
        lambda: lq.recover(store, apply=True, accept_loss=1 << 40),
        lambda: lq.MessageStore.open(store, mode="rw"),
        lambda: lq.MessageStore.open(store),
    ):
        with pytest.raises(
            lq.errors.StoreNotFound, match=r"link to .*unmounted, which does not exist"
        ):
            call()
    assert state(store) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_an_unreadable_folder_is_refused(store: Path) -> None:
    (store / "commitlog").chmod(0)
    try:
        with pytest.raises(lq.errors.StoreError, match="cannot be read"):
            lq.recover(store, apply=True)
    finally:
        (store / "commitlog").chmod(0o755)


# --------------------------------------------------------------------------- what needs no consent
def test_one_damaged_message_is_told_and_needs_no_consent(store: Path) -> None:
    messages = frames(store)
    lost = messages[40]
    path = files(store)[lost.physical_offset // FILE]
    data = bytearray(path.read_bytes())
    data[lost.physical_offset % FILE + lost.size - 5] ^= 1
    path.write_bytes(data)
    data[lost.physical_offset % FILE + 5] ^= 1
    path.write_bytes(data)
    plan = lq.recover(store, apply=True)
    assert plan.loss is not None and not plan.loss.needs_consent
    assert (plan.loss.messages, plan.loss.bytes) == (1, lost.size)
    assert lq.recover(store).loss is None
    with lq.MessageStore.open(store) as reader:
        assert len(list(reader.scan(on_damage="skip"))) == COUNT - 1


def test_a_torn_tail_that_nothing_vouches_for_needs_no_consent(store: Path) -> None:
    messages = frames(store)
    path = last_file_with_frames(store)
    kept = [
        m for m in messages if f"{m.physical_offset - m.physical_offset % FILE:020d}" == path.name
    ]
    first = kept[1]
    # The crash came before the sync of these messages.
    shutil.rmtree(store / ".logquarry", ignore_errors=True)
    times = messages[COUNT - len(kept)].store_timestamp
    (store / "checkpoint").write_bytes(
        CHECKPOINT_LAYOUT.struct.pack(times, times, times).ljust(4096, b"\0")
    )
    zeros(path, first.physical_offset % FILE + 20)
    (store / "abort").touch()
    plan = lq.recover(store)
    assert plan.loss is not None and plan.loss.messages == len(kept) - 1
    assert plan.refused is None
    with lq.MessageStore.open(store, mode="rw") as writer:
        assert writer.max_offset == first.physical_offset


def test_a_checkpoint_vouches_for_a_lost_tail(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with lq.MessageStore.open(sound) as reader:
        end = reader.max_offset
    shutil.copytree(sound, root)
    shutil.rmtree(root / ".logquarry")
    (root / "abort").touch()
    middle = files(root)[2]
    zeros(middle, 1_000)
    for path in files(root):
        if path > middle:
            path.write_bytes(bytes(FILE))
    later = NOW * 2
    (root / "checkpoint").write_bytes(
        CHECKPOINT_LAYOUT.struct.pack(later, later, later).ljust(4096, b"\0")
    )
    plan = lq.recover(root)
    assert plan.refused is not None and plan.loss is not None
    assert plan.loss.bytes > end - 3 * FILE


def test_expired_messages_are_not_lost(store: Path) -> None:
    for path in files(store)[:2]:
        path.unlink()
    forget_start(store)
    (store / "abort").touch()
    plan = lq.recover(store, apply=True)
    assert plan.loss is None and plan.log_start == 2 * FILE


@pytest.mark.parametrize("mode", ["safe", "rocketmq"])
def test_lost_first_files_are_no_expired_ones(tmp_path: Path, mode: RecoveryMode) -> None:
    root = tmp_path / "store"
    with opened(root) as writer:
        for number in range(COUNT):
            writer.put(lq.Message("orders", b"%06d " % number * 30, keys="k"))
    for path in files(root)[:2]:
        path.unlink()
    plan = lq.recover(root, mode=mode)
    assert plan.loss is not None and plan.loss.bytes == 2 * FILE and plan.loss.needs_consent
    assert "has no file for 0 to 32768" in plan.loss.reason
    with pytest.raises(LossRefused):
        lq.MessageStore.open(root, mode="rw")
    done = lq.recover(root, mode=mode, apply=True, accept_loss=2 * FILE)
    assert done.log_start == 2 * FILE
    again = lq.recover(root, mode=mode)
    assert again.loss is None and not again.is_needed
    assert not verify_store(StoreLayout.open(root)).has_damage
    lq.MessageStore.open(root, mode="rw").close()


def test_a_queue_whose_messages_all_expired_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root) as writer:
        writer.put(lq.Message("old", b"expires"))
        for number in range(COUNT):
            writer.put(lq.Message("orders", b"%06d " % number * 30, keys="k"))
    files(root)[0].unlink()
    forget_start(root)
    (root / "abort").touch()
    plan = lq.recover(root, apply=True)
    assert plan.loss is None
    assert (root / "consumequeue" / "old" / "0").is_dir()


def test_one_rotten_queue_entry_is_no_loss(store: Path) -> None:
    path = sorted((store / "consumequeue" / "orders" / "0").iterdir())[0]
    data = bytearray(path.read_bytes())
    offset, size, tags = ENTRY.unpack_from(data, 60)
    ENTRY.pack_into(data, 60, offset | 1 << 50, size, tags)
    path.write_bytes(data)
    (store / "abort").touch()
    plan = lq.recover(store, apply=True)
    assert plan.loss is None
    assert not verify_store(StoreLayout.open(store)).has_damage


def test_a_new_store_and_an_empty_one_need_nothing(tmp_path: Path) -> None:
    opened(tmp_path / "store").close()
    assert lq.recover(tmp_path / "store", config=config()).loss is None
    (tmp_path / "store" / "abort").touch()
    assert lq.recover(tmp_path / "store", config=config(), apply=True).loss is None


# ------------------------------------------------------------------------------------- other calls
def test_rebuild_in_place_refuses_to_forget_lost_messages(store: Path) -> None:
    from logquarry.repair.rebuild.rebuild import rebuild

    middle_file_missing(store)
    queues = state(store / "consumequeue")
    with pytest.raises(LossRefused, match="--accept-loss"):
        rebuild(store, apply=True, config=config())
    assert state(store / "consumequeue") == queues
    loss = lq.recover(store).loss
    assert loss is not None
    lq.recover(store, apply=True, accept_loss=loss.bytes)
    rebuild(store, apply=True, config=config())


@pytest.mark.parametrize("mode", RECOVERIES)
@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_short_checkpoint_is_mended(store: Path, content: bytes, mode: RecoveryMode) -> None:
    (store / "checkpoint").write_bytes(content)
    assert verify_store(StoreLayout.open(store)).by_kind["checkpoint_short"]
    plan = lq.recover(store, mode=mode)
    assert [step.file for step in plan.steps] == ["checkpoint"]
    lq.recover(store, mode=mode, apply=True)
    assert not verify_store(StoreLayout.open(store)).has_damage
    assert not lq.recover(store, mode=mode).is_needed
