"""Stores of real RocketMQ 5 brokers: what is read of them, and that nothing harms them."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.errors import UnsupportedStore
from logquarry.format import property_crc, sys_flag
from logquarry.format.frame import Frame
from logquarry.format.rows import POSITION
from logquarry.ingest.load import plan_load
from logquarry.ingest.staging import LoadPlan
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from logquarry.read.features import find_features
from logquarry.read.timers import timers_of
from logquarry.repair.audit.timer_files import timer_faults
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.salvage import salvage
from logquarry.repair.verify.verify import verify_store
from tests.conformance.golden_facts import SOUND, WITH_LOG
from tests.conformance.rocketmq5 import (
    FEATURES,
    INDEX,
    QUEUES,
    RECOVER,
    REFUSED,
    RETAIN,
    WRITE,
    broker_queues,
    expected_frames,
    rocketmq5_stores,
    state_of,
)
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store
from tests.helpers.twins import plain_python

RULES = lq.RetentionRules(keep_bytes=0)
UNDERSTOOD = sorted(name for name in REFUSED if not REFUSED[name])
NOT_AS_ROCKETMQ = {"batch_queues", "several_log_paths"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rocketmq5_stores(tmp_path_factory)


@pytest.fixture
def copied(stores: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a store that a test may change."""

    def copy(name: str) -> Path:
        return copy_store(stores / name / "store", tmp_path / name)

    return copy


# ----------------------------------------------------------------------------------- features
def test_every_store_is_here(stores: Path) -> None:
    assert sorted(path.name for path in stores.iterdir()) == sorted(REFUSED)


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_features(name: str, stores: Path) -> None:
    root = stores / name / "store"
    found = find_features(StoreLayout.open(root))
    assert {feature.name for feature in found.features} == FEATURES[name]
    assert found.unknown == ()
    assert found.writer.is_5
    expected = {"5.1": ("5.0.0", "5.4.0"), "5.3": ("5.0.0", "5.4.0")}
    if name[:3] in expected:
        assert (found.writer.at_least, found.writer.before) == expected[name[:3]]
    else:
        assert found.writer.at_least in ("5.4.0", "5.5.0") and found.writer.before is None
    for feature in found.features:
        for path in feature.evidence:
            assert (root / path).exists(), (feature.name, path)


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_info_shows_features(name: str, stores: Path) -> None:
    store = stores / name / "store"
    document = json.loads(run("info", store, "--json").stdout)
    assert {one["name"] for one in document["features"]["found"]} == FEATURES[name]
    shown = run("info", store).stdout
    assert "written by  RocketMQ 5." in shown
    assert all(f"{feature}: " in shown for feature in FEATURES[name])


def test_queues_in_rocksdb_and_in_files(stores: Path) -> None:
    for name, where in (("rocksdb-double", "RocksDB and in files"), ("rocksdb", "RocksDB")):
        found = find_features(StoreLayout.open(stores / f"5.5.0-{name}" / "store"))
        feature = found.get("rocksdb_queues")
        assert feature is not None and feature.detail == f"the queues are in {where}"


def test_kinds_of_queues(stores: Path) -> None:
    with lq.MessageStore.open(stores / "5.5.0-batchcq" / "store") as store:
        assert store.features.queue_kinds == {"BatchCq": "batch", "Plain": "simple"}
        assert store.features.topics_of("batch") == ("BatchCq",)


@pytest.mark.parametrize("name", [*SOUND, *(f"unclean/{name}" for name in WITH_LOG)])
def test_stores_of_4_9_and_3_have_none(name: str, golden: Path) -> None:
    found = find_features(StoreLayout.open(golden / name / "store"))
    assert {feature.name for feature in found.features} <= {"multi_dispatch"}
    assert found.unknown == () and not found.writer.is_5


def test_timers_that_wait(stores: Path) -> None:
    feature = find_features(StoreLayout.open(stores / "5.5.0-timer" / "store")).get("timers")
    assert feature is not None and feature.detail.startswith("15 timer messages")


def test_unknown_files_are_named(copied: Callable[[str], Path]) -> None:
    root = copied("5.3.3-plain")
    (root / "backup").mkdir()
    (root / "config" / "ours.json").write_text("{}")
    # A copy of a log file does not count as a second log folder.
    shutil.copy(root / "commitlog" / ("0" * 20), root / "backup" / ("0" * 20))
    found = find_features(StoreLayout.open(root))
    assert found.unknown == ("backup", "config/ours.json")
    lq.MessageStore.open(root, mode="rw").close()
    assert (root / "config" / "ours.json").read_text() == "{}"


# ----------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals_change_nothing(name: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    refused = REFUSED[name]
    root = copied(name)
    before = state_of(root)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"topic": "Orders", "body": "QQ==", "tags": "a"}\n')
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        peer = f"127.0.0.1:{closed.getsockname()[1]}"
        calls: dict[str, list[Callable[[], object]]] = {
            WRITE: [
                lambda: lq.MessageStore.open(root, mode="rw"),
                lambda: plan_load(LoadPlan(path=str(root))),
                lambda: _fails("import", rows, root),
                lambda: _fails("serve-master", root, "--listen", "127.0.0.1:0"),
                lambda: _fails("replicate", peer, "--into", root, "--once"),
            ],
            RECOVER: [
                lambda: lq.recover(root, apply=True),
                lambda: _fails("recover", root, "--apply"),
            ],
            QUEUES: [lambda: rebuild(root, apply=True, index=False)],
            INDEX: [lambda: rebuild(root, apply=True, queues=False)],
            RETAIN: [lambda: lq.retain(root, RULES, apply=True)],
        }
        if refused & {QUEUES, INDEX}:
            calls[QUEUES].append(lambda: _fails("rebuild", root, "--in-place", "--apply"))
        for action in refused:
            for call in calls[action]:
                with pytest.raises(UnsupportedStore) as raised:
                    call()
                assert raised.value.feature in FEATURES[name]
                assert raised.value.evidence and str(root) in str(raised.value)
                assert state_of(root) == before, (action, name)


def _fails(*arguments: object) -> None:
    """Run a command that is refused, and raise what the same call in Python raises."""
    result = run(*arguments, code=4)
    root = next(str(a) for a in arguments[1:] if isinstance(a, Path) and a.is_dir())
    with pytest.raises(UnsupportedStore) as raised:
        lq.recover(root, apply=True) if arguments[0] == "recover" else lq.MessageStore.open(
            root, mode="rw"
        )
    if arguments[0] != "rebuild":
        assert str(raised.value) in result.stderr.replace("\n", " ")
    raise raised.value


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_plans_say_that_they_would_be_refused(name: str, stores: Path) -> None:
    store = stores / name / "store"
    plan = lq.recover(store)
    assert (plan.refused is not None) == (RECOVER in REFUSED[name])
    if plan.refused is not None:
        assert not plan.steps
        assert "refused: it cannot be recovered" in run("recover", store, code=4).stdout
    refused = lq.retain(store, RULES).refused or ""
    assert refused.startswith("it cannot have expired files deleted") == (RETAIN in REFUSED[name])


@pytest.mark.parametrize("name", [n for n in UNDERSTOOD if not FEATURES[n] & NOT_AS_ROCKETMQ])
def test_recovery_as_rocketmq_keeps_all_of_5(name: str, copied: Callable[[str], Path]) -> None:
    root = copied(name)
    with lq.MessageStore.open(root) as store:
        before = [message.physical_offset for message in store.scan()]
    lq.recover(root, mode="rocketmq", apply=True)
    config = StoreConfig(recovery="rocketmq")
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        ours = store.put(lq.Message("Orders", b"new", keys="new"))
        assert [m.physical_offset for m in store.scan()] == [*before, ours.physical_offset]


def test_recovery_as_rocketmq_knows_only_queue_files(copied: Callable[[str], Path]) -> None:
    for name in ("5.5.0-batchcq", "5.5.0-rocksdb-more", "5.5.0-multipath"):
        root = copied(name)
        before = state_of(root)
        with pytest.raises(UnsupportedStore):
            lq.recover(root, mode="rocketmq", apply=True)
        assert state_of(root) == before


def test_the_error_survives_pickling() -> None:
    error = UnsupportedStore("text", feature="tiered", evidence=("tiered/",))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.feature, again.evidence) == ("text", "tiered", ("tiered/",))


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_understood_is_written(name: str, copied: Callable[[str], Path]) -> None:
    root = copied(name)
    there = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with lq.MessageStore.open(root) as store:
        frames = [message.physical_offset for message in store.scan()]
    with lq.MessageStore.open(root, mode="rw") as store:
        put = store.put(lq.Message("Orders", b"new", keys="new", tags="TagNew"))
        assert store.wait_dispatched(timeout=20)
    with lq.MessageStore.open(root) as store:
        assert [m.physical_offset for m in store.scan()] == [*frames, put.physical_offset]
        assert store.get("Orders", 0, put.queue_offset).messages[0].body == b"new"
    report = verify_store(StoreLayout.open(root))
    assert not report.findings
    # The index continues with the same kinds of keys: UNIQ_KEY, KEYS and, since 5.4, the tag.
    has_tags = name >= "5.4"
    assert ("index_tags" in FEATURES[name]) == has_tags
    with lq.MessageStore.open(root) as store:
        assert len(store.query("Orders", "T#TagNew")) == int(has_tags)
    kept = root / ".logquarry" / "quarantine"
    for path, data in there.items():
        aside = kept / path.relative_to(root)
        # A crash leaves files of the log that were made ahead, all zeros.
        assert path.exists() or path.name == "abort" or aside.exists() or not data.strip(b"\0")


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"storeType": "defaultRocksDB"}, "rocksdb_queues"),
        ({"storePathCommitLog": "/a,/b"}, "several_log_paths"),
        ({"storePathCommitLog": "/elsewhere/log"}, "log_path"),
        ({"enableControllerMode": True}, "controller"),
        ({"enableConsumeQueueExt": True}, "queue_ext"),
        ({"messageStorePlugIn": "org.apache.rocketmq.tieredstore.TieredMessageStore"}, "tiered"),
        ({"timerRocksDBEnable": True}, "rocksdb_store"),
    ],
)
def test_what_the_configuration_says(
    settings: dict[str, object], feature: str, copied: Callable[[str], Path]
) -> None:
    root = copied("5.3.3-plain")
    before = state_of(root)
    config = StoreConfig.from_mapping(settings)
    with pytest.raises(UnsupportedStore) as raised:
        lq.MessageStore.open(root, mode="rw", config=config)
    assert raised.value.feature == feature
    assert state_of(root) == before


def test_a_path_that_means_this_store_is_no_other(copied: Callable[[str], Path]) -> None:
    root = copied("5.3.3-plain")
    for path in (f"{root}/commitlog", f"{root.name}/commitlog", "/data/rmq/commitlog"):
        settings = {"storePathCommitLog": path, "storePathRootDir": "/data/rmq"}
        config = StoreConfig.from_mapping(settings)
        lq.MessageStore.open(root, mode="rw", config=config).close()


# ----------------------------------------------------------------------------------- reading
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_log_is_read(name: str, stores: Path) -> None:
    expected = expected_frames(stores / name) if "kill" not in name else None
    with lq.MessageStore.open(stores / name / "store") as store:
        found = list(store.scan())
    if expected is not None and "inner_batches" in FEATURES[name]:
        # test_batch_queues.py compares the messages inside.
        places = dict.fromkeys(m.physical_offset for m in found)
        assert list(places) == [one["physicalOffset"] for one in expected]
    elif expected is not None:
        assert [m.physical_offset for m in found] == [one["physicalOffset"] for one in expected]
        assert [m.topic for m in found] == [one["topic"] for one in expected]
        assert [m.queue_offset for m in found] == [one["queueOffset"] for one in expected]
    rows = run("messages", stores / name / "store", "--jsonl").stdout.splitlines()
    assert len(rows) == len(found) > 0


@pytest.mark.parametrize("name", sorted(n for n in REFUSED if "kill" not in n))
def test_queues_are_read_as_by_the_broker(name: str, stores: Path) -> None:
    with lq.MessageStore.open(stores / name / "store") as store:
        for (topic, queue_id), queue in broker_queues(stores / name).items():
            assert store.queue_offsets(topic, queue_id).max == queue["maxOffset"], topic
            found, offset = [], 0
            while offset < queue["maxOffset"]:
                answer = store.get(topic, queue_id, offset)
                found += [[m.queue_offset, m.physical_offset] for m in answer.messages]
                offset = answer.next_offset
            # LMQ queues name messages of other topics. Of compaction topics some are left.
            units = [[u[0] + i, u[1]] for u in queue["units"] for i in range(u[4])]
            if name == "5.5.0-compaction":
                units = queue["getMessage"]
            if not topic.startswith("%LMQ%"):
                assert found == units
            assert len(found) == len(units)


def test_queues_of_multi_dispatch_in_rocksdb(stores: Path) -> None:
    root = stores / "5.5.0-rocksdb" / "store"
    without = StoreConfig(enable_multi_dispatch=False)
    with lq.MessageStore.open(root, config=without) as store:
        for call in (store.get, store.queue_offsets):
            with pytest.raises(UnsupportedStore, match="enableMultiDispatch"):
                call("%LMQ%any", 0)
    with lq.MessageStore.open(root) as store:
        assert store.queue_offsets("%LMQ%any", 0) == (0, 0)


def test_several_log_folders_are_one_log(copied: Callable[[str], Path], stores: Path) -> None:
    root = copied("5.5.0-multipath")
    stated = StoreConfig.from_mapping({"storePathCommitLog": "store/clA,store/clB"})
    expected = [one["physicalOffset"] for one in expected_frames(stores / "5.5.0-multipath")]
    for config in (None, stated):
        with lq.MessageStore.open(root, config=config) as store:
            assert [m.physical_offset for m in store.scan()] == expected
        assert not verify_store(StoreLayout.open(root, config)).findings
    # The log is in commitlog/ and two other folders, as after a change of the setting.
    (root / "commitlog").mkdir()
    shutil.move(root / "clA" / ("0" * 20), root / "commitlog")
    with lq.MessageStore.open(root) as store:
        assert [m.physical_offset for m in store.scan()] == expected
    # A disk that is not mounted is an error, not a shorter log.
    shutil.rmtree(root / "clB")
    for command in (["messages"], ["info"], ["stats"], ["verify"], ["salvage"]):
        path = root.parent / "broker.conf"
        path.write_text("storePathCommitLog=store/clA,store/clB\n")
        assert "is a disk not mounted?" in run(*command, root, "--config", path, code=4).stderr


def test_log_folders_outside_of_the_store(
    copied: Callable[[str], Path], stores: Path, tmp_path: Path
) -> None:
    root = copied("5.5.0-multipath")
    paths = []
    for name in ("clA", "clB"):
        (root / name).rename(tmp_path / f"disk-{name}")
        paths.append(str(tmp_path / f"disk-{name}"))
    config = StoreConfig.from_mapping({"storePathCommitLog": ",".join(paths)})
    expected = [one["physicalOffset"] for one in expected_frames(stores / "5.5.0-multipath")]
    with lq.MessageStore.open(root, config=config) as store:
        assert [m.physical_offset for m in store.scan()] == expected
    assert not verify_store(StoreLayout.open(root, config)).findings
    with pytest.raises(UnsupportedStore, match="is a disk not mounted"):
        lq.MessageStore.open(root)


def _without_place(message: lq.StoredMessage) -> Frame:
    """The frame of a message without the fields that a new place changes."""
    is_end = message.frame.sys_flag & sys_flag.TRANSACTION_COMMIT
    kept = 0 if is_end else message.frame.prepared_transaction_offset
    return dataclasses.replace(message.frame, physical_offset=0, prepared_transaction_offset=kept)


@pytest.mark.parametrize("name", ["5.5.0-dledger", "5.5.0-multipath"])
def test_convert_makes_a_plain_store(name: str, copied: Callable[[str], Path]) -> None:
    root = copied(name)
    before = state_of(root)
    new = root.parent / "new"
    told = json.loads(run("convert", root, "--into", new, "--json").stdout)
    assert not told["left_behind"] and not told["lost"]
    assert told["uncommitted"] == 0
    assert state_of(root) == before
    assert not verify_store(StoreLayout.open(new)).findings
    with lq.MessageStore.open(root) as old, lq.MessageStore.open(new) as plain:
        assert not {"dledger", "several_log_paths"} & {one.name for one in plain.features.features}
        assert [_without_place(m) for m in plain.scan()] == [_without_place(m) for m in old.scan()]
        assert {key: old.queue_offsets(*key) for key in old.queues()} == {
            key: plain.queue_offsets(*key) for key in plain.queues()
        }
    with lq.MessageStore.open(new, mode="rw") as store:
        assert store.put(lq.Message("Orders", b"more")).queue_offset > 0


def test_damage_in_a_dledger_log(copied: Callable[[str], Path], stores: Path) -> None:
    root = copied("5.5.0-dledger")
    expected = [one["physicalOffset"] for one in expected_frames(stores / "5.5.0-dledger")]
    path = next((root / "dledger-n0" / "data").iterdir())
    data = bytearray(path.read_bytes())
    # The damage: the position in the head of one entry, and the body of another frame.
    harmed = expected[10], expected[20]
    data[harmed[0] - 24 : harmed[0] - 16] = b"\xff" * 8
    data[harmed[1] + 100] ^= 1
    path.write_bytes(data)
    # In a store that was shut down cleanly, damage in the last file ends the log.
    (root / "abort").touch()
    with lq.MessageStore.open(root) as store:
        found = [m.physical_offset for m in store.scan(on_damage="skip")]
    assert found == [one for one in expected if one != harmed[1]]
    report = verify_store(StoreLayout.open(root))
    assert {finding.offset for finding in report.findings} >= {harmed[0] - 48}
    new = root.parent / "new"
    salvaged = salvage(StoreLayout.open(root), new)
    assert salvaged.plan.messages == len(expected) - 1


def test_ranges_of_a_dledger_log(stores: Path) -> None:
    """Two neighbouring ranges give each message once, wherever they meet: also in a head."""
    expected = [one["physicalOffset"] for one in expected_frames(stores / "5.5.0-dledger")]
    reader = LogReader(StoreLayout.open(stores / "5.5.0-dledger" / "store"))

    def frames(start: int | None, stop: int | None) -> list[int]:
        events = reader.events(start, stop, resync=start is not None)
        runs = [event for event in events if isinstance(event, Run)]
        return [run.window.base + at for run in runs for at in run.rows[:, POSITION].tolist()]

    for place in (0, 1, 47, 48, 49, *range(expected[3] - 50, expected[3] + 3), expected[-1]):
        assert frames(None, place) + frames(place, None) == expected, place
    with plain_python():
        for place in (1, 48, expected[3] - 10, expected[3]):
            assert frames(None, place) + frames(place, None) == expected, place


def test_diff_of_a_dledger_store(copied: Callable[[str], Path]) -> None:
    root = copied("5.5.0-dledger")
    new = root.parent / "new"
    run("convert", root, "--into", new)
    assert "diverge" in run("diff", root, new, code=1).stdout


def test_messages_that_a_dledger_group_had_not_committed(copied: Callable[[str], Path]) -> None:
    root = copied("5.5.0-dledger")
    (root / "dledger-n0" / "checkpoint").write_text("committedIndex=95\nendIndex=97\n")
    found = run("convert", root).stdout
    assert "2 messages after the last one that the DLedger group had committed" in found


def test_a_plain_store_needs_no_conversion(stores: Path) -> None:
    found = run("convert", stores / "5.5.0-plain" / "store", code=2)
    assert "its log is in commitlog/ already" in found.stderr


def test_two_ledgers_are_not_read_as_one(copied: Callable[[str], Path]) -> None:
    root = copied("5.5.0-dledger")
    shutil.copytree(root / "dledger-n0", root / "dledger-n1")
    with pytest.raises(UnsupportedStore, match="DLedger") as raised:
        lq.MessageStore.open(root)
    assert raised.value.feature == "dledger"


def test_a_log_on_another_disk(copied: Callable[[str], Path], stores: Path, tmp_path: Path) -> None:
    root = copied("5.3.3-plain")
    (root / "commitlog").rename(tmp_path / "other-disk")
    before = state_of(root)
    config = StoreConfig.from_mapping({"storePathCommitLog": str(tmp_path / "other-disk")})
    with pytest.raises(UnsupportedStore, match="is a disk not mounted") as raised:
        lq.MessageStore.open(root, mode="rw")
    assert raised.value.feature == "log_elsewhere"
    with pytest.raises(UnsupportedStore, match="is a disk not mounted"):
        lq.recover(root, apply=True)
    # Salvage says what is lost, and its exit code is not 0.
    assert not salvage(StoreLayout.open(root)).plan.is_whole
    # With the configuration the log is read and written there.
    with lq.MessageStore.open(root, config=config) as store:
        assert len(list(store.scan())) == len(expected_frames(stores / "5.3.3-plain"))
    assert salvage(StoreLayout.open(root, config)).plan.is_whole
    assert state_of(root) == before
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        put = store.put(lq.Message("Orders", b"new"))
    assert not (root / "commitlog").exists()
    (root / "commitlog").symlink_to(tmp_path / "other-disk")
    with lq.MessageStore.open(root) as store:
        found = [message.physical_offset for message in store.scan()]
    assert len(found) == len(expected_frames(stores / "5.3.3-plain")) + 1
    assert found[-1] == put.physical_offset


def test_a_new_store_has_no_log_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "store"
    lq.MessageStore.open(root, mode="rw").close()
    for path in (root / "commitlog").iterdir():
        path.unlink()
    with lq.MessageStore.open(root) as store:
        assert not list(store.scan())


# ----------------------------------------------------------------------------------- salvage
# The frames of a DLedger log move: test_convert_makes_a_plain_store.
@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"5.5.0-dledger"}))
def test_salvage_carries_what_it_can_and_lists_the_rest(
    name: str, stores: Path, tmp_path: Path
) -> None:
    root, into = stores / name / "store", tmp_path / "new"
    before = state_of(root)
    document = json.loads(run("salvage", root, "--json", code=LEAVES.get(name, 0)).stdout)
    result = run("salvage", root, "--into", into, code=LEAVES.get(name, 0))
    left = {one["feature"] for one in document["left_behind"]}
    assert bool(left) == (name in LEAVES)
    assert left == FEATURES[name] & LEFT_BEHIND
    assert all(f"left behind: {feature} " in result.stdout for feature in left)
    assert state_of(root) == before
    with lq.MessageStore.open(root) as old, lq.MessageStore.open(into) as new:
        assert [m.body for m in new.scan()] == [m.body for m in old.scan()]
    for path in document["carried"]:
        assert _files(into / path) == _files(root / path)
    # Each timer message that waits is in the new wheel.
    waiting = [one._replace(physical_offset=0) for one in timers_of(StoreLayout.open(root)).due()]
    kept = [one._replace(physical_offset=0) for one in timers_of(StoreLayout.open(into)).due()]
    assert kept == waiting and document["timers"] == len(waiting)
    assert not list(timer_faults(StoreLayout.open(into)))
    assert "tags" not in name or not verify_store(StoreLayout.open(into)).has_damage


LEFT_BEHIND = {"rocksdb_queues", "rocksdb_store", "queue_ext", "tiered", "controller"}
LEAVES = dict.fromkeys((name for name in REFUSED if FEATURES[name] & LEFT_BEHIND), 1)


def _files(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_the_bytes_after_the_log_of_a_broker_without_maps(
    stores: Path, copied: Callable[[str], Path]
) -> None:
    root = copied("5.5.0-no-mmap")
    before = state_of(root)
    (stale,) = verify_store(StoreLayout.open(root)).findings
    assert (stale.kind, stale.severity, stale.length) == ("stale_bytes", "note", 382)
    assert not lq.recover(root, apply=True).is_needed
    before.pop("lock", None)
    after = {path: state.data for path, state in state_of(root).items() if path != "lock"}
    assert after == {path: state.data for path, state in before.items()}
    frames = expected_frames(stores / "5.5.0-no-mmap")
    with lq.MessageStore.open(root, mode="rw") as store:
        ours = store.put(lq.Message(topic="Orders", body=b"ours", queue_id=0))
        assert ours.physical_offset == stale.offset
        assert [message.physical_offset for message in store.scan()] == [
            *(found["physicalOffset"] for found in frames),
            stale.offset,
        ]
    assert not verify_store(StoreLayout.open(root)).findings
    assert not (root / ".logquarry" / "quarantine").exists()


def test_property_crcs_of_frames_that_moved_are_renewed(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    root, into = copied("5.5.0-propcrc"), tmp_path / "new"
    assert set(_crcs(root)) == {True}
    log = root / "commitlog" / ("0" * 20)
    data = bytearray(log.read_bytes())
    with lq.MessageStore.open(root) as store:
        second = list(store.scan())[1].physical_offset
    data[:second] = bytes(second)
    log.write_bytes(data)
    salvage(StoreLayout.open(root), into)
    crcs = _crcs(into)
    assert crcs and set(crcs) == {True}


def test_a_rotten_property_crc_is_found_and_stays_visible(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    root, into = copied("5.5.0-propcrc"), tmp_path / "new"
    log = root / "commitlog" / ("0" * 20)
    data = bytearray(log.read_bytes())
    with lq.MessageStore.open(root) as store:
        first, rotten, *_ = [message for message in store.scan() if message.tags]
    # The damage is one letter of the topic: the body and its CRC stay right.
    topic = data.index(rotten.topic.encode(), rotten.physical_offset + len(rotten.body))
    data[topic] ^= 0x01
    log.write_bytes(data)
    report = verify_store(StoreLayout.open(root))
    found = {f.offset: f.severity for f in report.findings if f.kind == "bad_property_crc"}
    assert found == {rotten.physical_offset: "damage"}
    # All frames move. The new store's verify still finds the frame.
    data[: first.physical_offset + first.size] = bytes(first.physical_offset + first.size)
    log.write_bytes(data)
    plan = salvage(StoreLayout.open(root), into).plan
    assert plan.wrong_crcs == [rotten.physical_offset]
    assert _crcs(into).count(False) == 1
    assert [f.kind for f in verify_store(StoreLayout.open(into)).findings].count(
        "bad_property_crc"
    ) == 1


def _crcs(root: Path) -> list[bool | None]:
    """Whether the property CRC of each frame is right."""
    found = []
    layout = StoreLayout.open(root)
    with lq.MessageStore.open(root) as store:
        for message in store.scan():
            file = layout.commit_log.at(message.physical_offset)
            assert file is not None
            at = message.physical_offset - file.base
            frame = (root / file.path).read_bytes()[at : at + message.size]
            found.append(property_crc.is_sound(frame))
    return found


# ----------------------------------------------------------------------------- index with tags
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_sound_stores_verify_clean(name: str, stores: Path) -> None:
    report = verify_store(StoreLayout.open(stores / name / "store"))
    assert not report.has_damage, report.findings


@pytest.mark.parametrize("name", ["5.5.0-plain", "5.5.0-timer", "5.3.3-plain", "5.1.4-plain"])
def test_a_rebuilt_index_has_the_bytes_of_the_broker(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    root = copied(name)
    rebuild(root, into=tmp_path / "built")
    theirs = [path.read_bytes() for path in sorted((root / "index").iterdir())]
    ours = [path.read_bytes() for path in sorted((tmp_path / "built" / "index").iterdir())]
    assert ours == theirs


def test_a_lost_index_is_made_with_tags(copied: Callable[[str], Path], stores: Path) -> None:
    root = copied("5.5.0-plain")
    with lq.MessageStore.open(root) as store:
        count = len(store.query("Orders", "T#TagA"))
    (theirs,) = (root / "index").iterdir()
    data = theirs.read_bytes()
    shutil.rmtree(root / "index")
    # 5.4 and later make rocksdbstore/ in each store.
    rebuild(root, apply=True, queues=False, config=_shape(stores / "5.5.0-plain"))
    (ours,) = (root / "index").iterdir()
    assert ours.read_bytes() == data and count > 0


def test_a_recovered_index_has_tags(copied: Callable[[str], Path]) -> None:
    root = copied("5.5.0-kill")
    lq.recover(root, apply=True)
    assert not verify_store(StoreLayout.open(root)).findings
    assert find_features(StoreLayout.open(root)).get("index_tags") is not None


def test_an_index_of_an_older_version_that_got_tags_later(
    copied: Callable[[str], Path], stores: Path
) -> None:
    root = copied("5.3.3-plain")
    config = dataclasses.replace(_shape(stores / "5.3.3-plain"), index_tags=True)
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for _ in range(3):
            store.put(lq.Message("Orders", b"new", keys="new", tags="TagNew"))
        assert store.wait_dispatched(timeout=20)
    assert find_features(StoreLayout.open(root)).get("index_tags") is not None
    assert not verify_store(StoreLayout.open(root)).findings


def _shape(scenario: Path) -> StoreConfig:
    return StoreConfig.from_file(scenario / "broker.conf")


def test_damage_in_a_store_whose_checkpoint_lags(
    copied: Callable[[str], Path], stores: Path
) -> None:
    """RocketMQ 5.5 closes a store with the time of an old message for the queues."""
    store = copied("5.5.0-propcrc")
    with lq.MessageStore.open(store) as reader:
        messages = list(reader.scan())
    noted = bytearray((store / "checkpoint").read_bytes())
    noted[8:16] = messages[0].frame.store_timestamp.to_bytes(8, "big")
    (store / "checkpoint").write_bytes(noted)
    log = store / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(messages[0].size // 2)
        file.write(b"damaged")
    saved = lq.salvage(store)
    assert saved.plan.lost
    assert sum(topic["messages"] for topic in saved.to_json()["topics"]) == len(messages) - 1
