"""``logquarry.recover``: what it changes, which stores it refuses, and what an interrupt leaves."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.format import frame
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT, DURABLE
from logquarry.read.log_end import known_damage
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.plan import RecoveryMode, StepKind
from logquarry.testing.builder import StoreBuilder
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.files import leaves_nothing_open
from tests.helpers.slow_disk import log_no_slow_disk
from tests.helpers.small_store import bodies, config, facts, held_by_a_broker, opened

COUNT = 60


def crashed(tmp_path: Path, *, torn: bool = True) -> Path:
    """The store of a killed writer, with half a message at the end."""
    with opened(tmp_path / "live") as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"%d" % number * 50, queue_id=number % 2, keys=f"k{number}"))
        store.wait_dispatched()
        end = store.max_offset
        shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    if torn:
        size = config().mapped_file_size_commit_log
        assert size is not None
        path = tmp_path / "crashed" / "commitlog" / f"{end - end % size:020d}"
        with path.open("r+b") as file:
            file.seek(end % size)
            file.write(b"\0\0\1\2\xda\xa3\x20\xa7half a message")
    return tmp_path / "crashed"


def test_a_plan_touches_nothing(tmp_path: Path) -> None:
    root = crashed(tmp_path)
    before = facts(root)
    plan = lq.recover(root)
    assert facts(root) == before
    assert plan.is_needed and plan.refused is None
    kinds = [step.kind for step in plan.steps]
    assert StepKind.ZERO in kinds and kinds[-1] is StepKind.REMOVE
    assert plan.steps[-1].file == "abort"


def test_applied_it_opens_as_a_store_that_was_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_no_slow_disk(monkeypatch)
    root = crashed(tmp_path)
    assert lq.recover(root, apply=True).is_needed
    assert not (root / "abort").exists()
    assert not lq.recover(root).is_needed
    before = facts(root)
    assert not lq.recover(root, apply=True).is_needed
    assert facts(root) == before
    caplog.clear()
    with lq.MessageStore.open(root, mode="rw") as store:
        assert len(bodies(store)) == COUNT
        assert store.query("t", f"k{COUNT - 1}")
        assert [record.message for record in caplog.records] == []
    tails = list((root / ".logquarry" / "quarantine").rglob("*.from-*"))
    assert any(b"half a message" in path.read_bytes() for path in tails)


@pytest.mark.parametrize("before", [0, 1])
def test_a_torn_last_message_is_cut_off_wherever_it_begins(tmp_path: Path, before: int) -> None:
    """Also at physical offset 0."""
    with opened(tmp_path / "live") as store:
        for _ in range(before):
            store.put(lq.Message("t", b"first", properties={"a": "text"}))
        begin = store.max_offset
        store.put(lq.Message("t", b"torn", properties={"a": "text"}))
        end = store.max_offset
    # The power cut came before the last message's entry, and before its sync.
    (tmp_path / "live" / "abort").touch()
    shutil.rmtree(tmp_path / "live" / "consumequeue")
    with (tmp_path / "live" / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(end - 3)
        file.write(bytes(3))
    disk = Disk()
    checkpoint = CheckpointFile(disk, tmp_path / "live" / CHECKPOINT)
    DurableFile(disk, tmp_path / "live" / DURABLE, begin, checkpoint.times).close()
    checkpoint.close()
    plan = lq.recover(tmp_path / "live", config=config())
    assert any("the message there lacks bytes" in line for line in plan.summary())
    assert plan.log_end == begin
    lq.recover(tmp_path / "live", apply=True, config=config())
    with lq.MessageStore.open(tmp_path / "live", config=config()) as reader:
        assert bodies(reader) == [b"first"] * before


def test_a_store_that_is_open_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(lq.Message("t", keys="k"))
        store.wait_dispatched()
        for apply in (False, True):
            with pytest.raises(StoreUnavailable, match=r"this program .* open for writing already"):
                lq.recover(tmp_path, apply=apply)
        assert store.put(lq.Message("t", keys="k")).ok
    assert not lq.recover(tmp_path).is_needed
    with held_by_a_broker(tmp_path), pytest.raises(StoreUnavailable, match="another program"):
        lq.recover(tmp_path)


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for name in ("other", "nothing"):
        with pytest.raises(StoreNotFound):
            lq.recover(tmp_path / name, apply=True)
    assert list((tmp_path / "other").iterdir()) == []
    with pytest.raises(UsageError):
        lq.recover("memory://store", apply=True)


def test_damage_is_noted_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(5):
            store.put(lq.Message("t", b"body %d" % number, keys="k"))
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"body 2", b"rotten"))
    plan = lq.recover(tmp_path)
    assert [step.kind for step in plan.steps] == [StepKind.NOTE_DAMAGE]
    assert len(plan.damage) == 1
    lq.recover(tmp_path, apply=True)
    after = lq.recover(tmp_path)
    assert not after.is_needed and after.damage == plan.damage
    with lq.MessageStore.open(tmp_path, mode="rw") as store:
        assert len(store.get("t", 0).messages) == 4


def test_a_file_that_has_only_its_second_name_comes_back(tmp_path: Path) -> None:
    """A Java broker beside the writer deleted the file; then the writer was killed."""
    root = crashed(tmp_path, torn=False)
    (second,) = (root / ".logquarry" / "names" / "commitlog").iterdir()
    (root / "commitlog" / second.name).unlink()
    plan = lq.recover(root)
    assert plan.refused is None and plan.loss is None
    assert (plan.steps[0].kind, plan.steps[0].file) == (
        StepKind.RESTORE,
        f"commitlog/{second.name}",
    )
    link = f".logquarry/names/commitlog/{second.name}"
    assert plan.steps[0].reason == f"only its hard link is left: {link}"
    assert not (root / "commitlog" / second.name).exists()
    lq.recover(root, apply=True)
    with lq.MessageStore.open(root) as store:
        assert len(bodies(store)) == COUNT


def copied_live(
    tmp_path: Path, count: int, keys: str | None = None, *, is_flushed: bool = False
) -> Path:
    """A copy of a store that a writer has open, after all of its messages are dispatched."""
    root = tmp_path / "s"
    with lq.MessageStore.open(tmp_path / "live", mode="rw", config=config()) as store:
        for number in range(count):
            store.put(lq.Message("t", b"%d" % number, keys=keys))
        assert store.wait_dispatched(timeout=60)
        if is_flushed:
            store.flush()
        shutil.copytree(store.root, root)
    return root


@pytest.mark.parametrize("repair", [lq.recover, lq.rebuild])
def test_a_file_in_the_middle_that_has_only_its_second_name(
    tmp_path: Path, repair: Callable[..., object]
) -> None:
    """The plan does not report that the file's messages would be lost, and no repair is refused."""
    root = copied_live(tmp_path, 500, keys="k")
    files = sorted((root / "commitlog").iterdir())
    assert len(files) > 2
    files[1].unlink()
    plan = lq.recover(root, config=config())
    assert plan.refused is None and plan.loss is None and plan.damage == ()
    assert [step.file for step in plan.steps[:1]] == [f"commitlog/{files[1].name}"]
    if repair is lq.recover:
        assert plan.steps[1:] == lq.recover(root, apply=True, config=config()).steps
    repair(root, apply=True, config=config())
    lq.recover(root, apply=True, config=config())
    with lq.MessageStore.open(root, config=config()) as opened:
        assert bodies(opened) == [b"%d" % number for number in range(500)]


@pytest.mark.parametrize("mode", ["safe", "rocketmq"])
def test_a_plan_without_apply_shows_a_loss_that_stays_after_a_restore(
    tmp_path: Path, mode: RecoveryMode
) -> None:
    root = copied_live(tmp_path, 900, is_flushed=True)
    files = sorted((root / "commitlog").iterdir())
    assert len(files) > 4
    for file in files[1:3]:
        file.unlink()
    (root / ".logquarry" / "names" / "commitlog" / files[2].name).unlink()
    (root / "lock").touch()
    before = facts(root)
    plan = lq.recover(root, mode=mode, config=config())
    assert str(plan.steps[0]).startswith(f"restore: commitlog/{files[1].name}: ")
    assert plan.refused is not None
    assert f"commitlog/{files[2].name} is missing" in plan.refused
    with pytest.raises(LossRefused, match=f"commitlog/{files[2].name} is missing") as refused:
        lq.recover(root, mode=mode, apply=True, config=config())
    assert plan.loss == refused.value.loss
    assert str(refused.value) == f"{root}: {plan.refused}"
    with pytest.raises(LossRefused, match=f"commitlog/{files[2].name} is missing"):
        lq.rebuild(root, config=config())
    assert facts(root) == before
    accepted = refused.value.loss.bytes
    plan = lq.recover(root, mode=mode, config=config(), accept_loss=accepted)
    assert plan.refused is None
    done = lq.recover(root, mode=mode, apply=True, config=config(), accept_loss=accepted)
    assert done.steps == plan.steps[1:]
    assert (done.log_end, done.looked_at) == (plan.log_end, plan.looked_at)


@pytest.mark.parametrize("mode", ["safe", "rocketmq"])
def test_a_refusal_leaves_an_interrupted_rebuild(tmp_path: Path, mode: RecoveryMode) -> None:
    with opened(tmp_path) as store:
        for number in range(120):
            store.put(lq.Message("t", b"%03d" % number * 200, keys=f"k{number}"))
        store.wait_dispatched()
    build = tmp_path / ".logquarry" / "rebuild"
    build.mkdir()
    for name in ("consumequeue", "index"):
        (tmp_path / name).rename(build / name)
    (build / "complete").write_bytes(b"complete\n")
    gone = sorted((tmp_path / "commitlog").iterdir())[2]
    data = gone.read_bytes()
    gone.unlink()
    (tmp_path / "lock").touch()
    before = facts(tmp_path)
    plan = lq.recover(tmp_path, mode=mode, config=config())
    assert [str(step) for step in plan.steps[:2]] == [
        f"restore: {name}: an interrupted rebuild made it: .logquarry/rebuild/{name}"
        for name in ("consumequeue", "index")
    ]
    assert plan.refused is not None and f"commitlog/{gone.name} is missing" in plan.refused
    with pytest.raises(LossRefused, match=f"commitlog/{gone.name} is missing.*Nothing was changed"):
        lq.recover(tmp_path, mode=mode, apply=True, config=config())
    assert facts(tmp_path) == before
    gone.write_bytes(data)
    plan = lq.recover(tmp_path, mode=mode, config=config())
    assert plan.refused is None and len(plan.steps) == 2
    lq.recover(tmp_path, mode=mode, apply=True, config=config())
    assert not build.exists()
    assert not lq.recover(tmp_path, mode=mode, config=config()).is_needed
    with opened(tmp_path) as store:
        assert len(bodies(store)) == 120


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_missing_file_after_the_durable_offset_needs_consent(
    tmp_path: Path, is_flushed: bool, opens: bool
) -> None:
    """The writer syncs a file's name before it uses the file: no crash can lose only this file."""
    root = copied_live(tmp_path, 900, is_flushed=is_flushed)
    shutil.rmtree(root / ".logquarry" / "names")
    files = sorted((root / "commitlog").iterdir())
    assert len(files) > 4
    files[2].unlink()
    before = {path: data for path, data in facts(root).items() if not path.endswith("/lock")}
    words = f"the log has no file for 32768 to 49152: commitlog/{files[2].name} is missing"
    with pytest.raises(LossRefused, match=words) as refused:
        if opens:
            lq.MessageStore.open(root, mode="rw", config=config())
        else:
            lq.recover(root, apply=True, config=config())
    assert {name: facts(root)[name] for name in before} == before
    loss = refused.value.loss
    assert loss.needs_consent
    lq.recover(root, apply=True, config=config(), accept_loss=loss.bytes)
    with lq.MessageStore.open(root, config=config()) as store:
        left = [int(body) for body in bodies(store)]
    assert left == [number for number in range(900) if number in set(left)]
    assert 900 - len(left) == loss.messages


def test_a_rebuild_checks_for_missing_files_after_it_restored_others(tmp_path: Path) -> None:
    """Otherwise the new queues would end before the missing file, without a refusal."""
    root = copied_live(tmp_path, 900)
    files = sorted((root / "commitlog").iterdir())
    assert len(files) > 4
    for file in files[1:3]:
        file.unlink()
    (root / ".logquarry" / "names" / "commitlog" / files[2].name).unlink()
    with pytest.raises(LossRefused, match=f"commitlog/{files[2].name} is missing"):
        lq.rebuild(root, apply=True, config=config())
    assert not files[1].exists()
    assert lq.recover(root, config=config()).steps[0].file == f"commitlog/{files[1].name}"


@pytest.mark.parametrize("recovery", ["safe", "rocketmq"])
def test_opening_restores_a_file_that_has_only_its_second_name(
    tmp_path: Path, recovery: str
) -> None:
    root = crashed(tmp_path, torn=False)
    (second,) = (root / ".logquarry" / "names" / "commitlog").iterdir()
    (root / "commitlog" / second.name).unlink()
    settings = config(recovery=recovery)
    with lq.MessageStore.open(root, mode="rw", config=settings) as store:
        assert len(bodies(store)) == COUNT


def test_whoever_is_interrupted_begins_again(tmp_path: Path) -> None:
    root = crashed(tmp_path)
    log = min((root / "commitlog").iterdir())
    whole = StoppedDisk()
    shutil.copytree(root, tmp_path / "whole")
    lq.recover(tmp_path / "whole", apply=True, disk=whole)
    assert len(whole.order) > 30
    for number in range(0, len(whole.order), 3):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, config=config(), disk=StoppedDisk(number))
        with lq.MessageStore.open(copy, config=config()) as store:
            assert len(bodies(store)) == COUNT
        if (copy / "abort").exists():
            assert lq.recover(copy, config=config()).is_needed
        lq.recover(copy, apply=True, config=config())
        with lq.MessageStore.open(copy, mode="rw") as store:
            assert len(bodies(store)) == COUNT
            for queue_id in range(2):
                assert store.queue_offsets("t", queue_id) == (0, COUNT // 2)
            assert all(store.query("t", f"k{number}") for number in range(COUNT))
            end = store.max_offset
        assert (copy / "commitlog" / log.name).read_bytes()[:end] == log.read_bytes()[:end]
        shutil.rmtree(copy)


@pytest.mark.parametrize("harmed", [None, 0, 2])
def test_delay_levels_are_those_that_the_store_tells(tmp_path: Path, harmed: int | None) -> None:
    """Otherwise right delivery times in the schedule queues would be replaced by wrong ones."""
    with opened(tmp_path, message_delay_level="7s 9s 11m") as store:
        for number in range(12):
            store.put(lq.Message("t", b"later", delay_level=1 + number % 3, keys="k"))
    assert not lq.recover(tmp_path).is_needed
    path = tmp_path / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "2" / f"{0:020d}"
    sound = path.read_bytes()
    if harmed is not None:
        data = bytearray(sound)
        data[20 * harmed + 18] ^= 1
        path.write_bytes(data)
        assert lq.recover(tmp_path, apply=True).is_needed
    with lq.MessageStore.open(tmp_path, mode="rw") as store:
        assert store.config.delay_levels_ms[:3] == (7_000, 9_000, 660_000)
    assert path.read_bytes() == sound


@pytest.mark.parametrize("bit", [0, 1, 3, 33, 47, 62, 63])
@pytest.mark.parametrize("has_queue", [True, False])
def test_a_harmed_queue_offset_costs_nothing(tmp_path: Path, bit: int, has_queue: bool) -> None:
    """The queue has the right offset; fillers up to the wrong offset would fill any disk."""
    with opened(tmp_path) as store:
        for number in range(20):
            store.put(lq.Message("t", b"%d" % number, keys="k"))
        at = [message.physical_offset for message in store.scan()][10]
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[at + frame.HEAD.offsets["queue_offset"] + 7 - bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    if not has_queue:
        shutil.rmtree(tmp_path / "consumequeue" / "t")
    assert lq.recover(tmp_path, apply=True).is_needed is not has_queue
    assert not lq.recover(tmp_path).is_needed
    with lq.MessageStore.open(tmp_path, mode="rw") as store:
        found, offset = [], 0
        while offset < 20:
            answer = store.get("t", 0, offset)
            found += [int(message.body) for message in answer.messages]
            offset = answer.next_offset
        assert found == list(range(20))
        assert store.put(lq.Message("t", b"next")).queue_offset == 20


def test_a_topic_that_names_no_folder_needs_nothing(tmp_path: Path) -> None:
    """A log of another program may have such topics; they get no queue, and lack none."""
    with StoreBuilder(tmp_path, file_size=16_384, queue_file_size=400) as builder:
        for topic in ("t", "x/../y", "t"):
            builder.put(topic, b"body")
    shutil.rmtree(tmp_path / "consumequeue" / "y")
    (tmp_path / "consumequeue" / "x").rmdir()
    with opened(tmp_path) as store:
        assert len(bodies(store)) == 3
    assert not lq.recover(tmp_path, config=config()).is_needed
    assert not (tmp_path / "y").exists() and not (tmp_path / "consumequeue" / "y").exists()


def test_the_end_of_a_cut_by_rocketmq_is_noted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(20):
            store.put(lq.Message("t", b"body %d" % number, keys="k"))
    path = tmp_path / "commitlog" / f"{0:020d}"
    path.write_bytes(path.read_bytes().replace(b"body 10", b"rotten!"))
    lq.recover(tmp_path, apply=True, config=config())
    (tmp_path / "abort").touch()
    plan = lq.recover(tmp_path, mode="rocketmq", apply=True, config=config(), accept_loss=10_000)
    layout = StoreLayout.open(tmp_path, config())
    assert layout.durable_end == layout.cut_end == plan.log_end
    assert not known_damage(layout)


def test_an_index_of_another_store_goes(tmp_path: Path) -> None:
    for name, count in (("other", 13), ("own", 20)):
        with opened(tmp_path / name) as store:
            for number in range(count):
                store.put(lq.Message("t", name.encode() * number, keys=f"k{number}"))
    own = tmp_path / "own"
    shutil.rmtree(own / "index")
    shutil.copytree(tmp_path / "other" / "index", own / "index")
    shutil.rmtree(own / "consumequeue")
    lq.recover(own, apply=True)
    assert not lq.recover(own).is_needed
    with lq.MessageStore.open(own, mode="rw") as store:
        assert len(list(store.scan())) == 20


def test_a_topic_that_must_not_name_a_folder_needs_no_recovery(tmp_path: Path) -> None:
    root = tmp_path / "a" / "store"
    with opened(root) as store:
        store.put(lq.Message("abcdefgh", b"1", keys="k"))
    path = root / "commitlog" / f"{0:020d}"
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"../../xy"))
    shutil.rmtree(root / "consumequeue")
    lq.recover(root, apply=True)
    assert not lq.recover(root).is_needed
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_log_file_with_a_name_far_away_is_not_reached(tmp_path: Path) -> None:
    """The files up to there would fill any disk."""
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"1", keys="k"))
    log = tmp_path / "commitlog"
    shutil.copy(log / f"{0:020d}", log / f"{1 << 61:020d}")
    plan = lq.recover(tmp_path, apply=True)
    assert [step.kind for step in plan.steps] == [StepKind.SET_ASIDE]
    assert len(list(log.iterdir())) == 1


@pytest.mark.parametrize("name", [1, 401, 1 << 60])
def test_a_queue_file_of_another_name_is_seen(tmp_path: Path, name: int) -> None:
    """Also a file whose name is not the offset of an entry; readers ignore it."""
    with opened(tmp_path) as store:
        for number in range(50):
            store.put(lq.Message("t", b"%d" % number, keys="k"))
    folder = tmp_path / "consumequeue" / "t" / "0"
    shutil.copy(folder / f"{0:020d}", folder / f"{name:020d}")
    plan = lq.recover(tmp_path, config=config())
    assert [step.kind for step in plan.steps] == [StepKind.SET_ASIDE, StepKind.BUILD_QUEUE]
    with opened(tmp_path) as store:
        assert store.put(lq.Message("t", b"next")).queue_offset == 50
    assert not lq.recover(tmp_path, config=config()).is_needed


def test_what_stands_behind_zeros_in_its_file_is_read(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(20):
            store.put(lq.Message("t", b"%d" % number, keys="k"))
        found = [(message.physical_offset, message.size) for message in store.scan()]
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(found[5][0])
        file.write(bytes(found[5][1]))
    with lq.MessageStore.open(tmp_path, mode="rw") as store:
        answer = store.get("t", 0, 0)
        assert [int(message.body) for message in answer.messages] == [
            number for number in range(20) if number != 5
        ]


def test_a_topic_of_the_name_of_the_logs_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(COUNT):
            store.put(lq.Message("commitlog", b"%d" % number))
    path = tmp_path / "consumequeue" / "commitlog" / "0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[5 * UNIT_SIZE] ^= 1
    path.write_bytes(data)
    (tmp_path / "abort").touch()
    plan = lq.recover(tmp_path, apply=True, config=config())
    assert StepKind.CUT in [step.kind for step in plan.steps]
    with opened(tmp_path) as store:
        for number in range(COUNT):
            assert store.get("commitlog", 0, number).messages[0].body == b"%d" % number


def test_as_rocketmq_does_abort_comes_first_too(tmp_path: Path) -> None:
    """A cleanly closed store must not count as such while one of its queues may be torn."""
    root = tmp_path / "closed"
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"%d" % number, queue_id=number % 2))
    for queue_id in "01":
        (root / "consumequeue" / "t" / queue_id / f"{400:020d}").unlink()
    before = {name.removeprefix(str(root)): data for name, (data, _) in facts(root).items()}
    whole, changed = StoppedDisk(), 0
    for number in (None, *range(1_000)):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(root, copy)
        if number is None:
            lq.recover(copy, mode="rocketmq", apply=True, disk=whole, config=config())
            continue
        # The last call is the sync after the removal of `abort`.
        if number == len(whole.order) - 1:
            break
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, mode="rocketmq", apply=True, disk=StoppedDisk(number), config=config())
        if not (copy / "abort").exists():
            after = {name.removeprefix(str(copy)): data for name, (data, _) in facts(copy).items()}
            assert after.keys() - before.keys() <= {"/lock"}
            assert all(after[name] == data for name, data in before.items()), f"call {number}"
        else:
            changed += 1
    assert changed > 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("apply", [False, True])
def test_no_file_stays_open(tmp_path: Path, apply: bool) -> None:
    root = crashed(tmp_path)
    with leaves_nothing_open(root):
        lq.recover(root, apply=apply, config=config())
