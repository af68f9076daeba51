"""Features of RocketMQ 5: which are found in a store, and what each of them refuses."""

from __future__ import annotations

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
from logquarry.ingest.load import plan_load
from logquarry.ingest.staging import LoadPlan
from logquarry.log.earlier_writers import OFFSET_AT, find_writer, harmed_offset
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.read.features import find_features
from logquarry.repair.rebuild.rebuild import rebuild
from tests.conformance.golden_facts import SOUND, WITH_LOG
from tests.conformance.rocketmq5 import (
    FEATURES,
    INDEX,
    QUEUES,
    RECOVER,
    REFUSED,
    RETAIN,
    WRITE,
    Copied,
    state_of,
)
from tests.helpers.command import run
from tests.helpers.files import overwrite

RULES = lq.RetentionRules(keep_bytes=0)


def test_every_store_is_here(rocketmq5: Path) -> None:
    assert sorted(path.name for path in rocketmq5.iterdir()) == sorted(REFUSED)


def test_a_version_needs_more_than_the_checkpoint(copied: Copied) -> None:
    """No CRC covers the offset in the checkpoint, by which a store counts as one of 5.5."""
    root = copied("5.5.0-plain")
    files = LocalFileSystem(root)
    writer = find_writer(files)
    assert (writer.at_least, harmed_offset(files)) == ("5.5.0", None)
    # The offset is that of a message, so it is believed although a copy lacks the folder.
    shutil.rmtree(root / "rocksdbstore")
    assert find_writer(files) == writer
    root = copied("5.1.4-plain")
    files = LocalFileSystem(root)
    writer = find_writer(files)
    assert (writer.at_least, harmed_offset(files)) == ("5.0.0", None)
    overwrite(root / "checkpoint", OFFSET_AT, (64).to_bytes(8))
    assert (find_writer(files), harmed_offset(files)) == (writer, 64)


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_features(name: str, rocketmq5: Path) -> None:
    root = rocketmq5 / name / "store"
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
def test_info_shows_features(name: str, rocketmq5: Path) -> None:
    store = rocketmq5 / name / "store"
    document = json.loads(run("info", store, "--json").stdout)
    assert {one["name"] for one in document["features"]["found"]} == FEATURES[name]
    shown = run("info", store).stdout
    assert "written by  RocketMQ 5." in shown
    assert all(f"{feature}: " in shown for feature in FEATURES[name])


def test_queues_in_rocksdb_and_in_files(rocketmq5: Path) -> None:
    for name, where in (("rocksdb-double", "RocksDB and in files"), ("rocksdb", "RocksDB")):
        found = find_features(StoreLayout.open(rocketmq5 / f"5.5.0-{name}" / "store"))
        feature = found.get("rocksdb_queues")
        assert feature is not None and feature.detail == f"the queues are in {where}"


def test_kinds_of_queues(rocketmq5: Path) -> None:
    with lq.MessageStore.open(rocketmq5 / "5.5.0-batchcq" / "store") as store:
        assert store.features.queue_kinds == {"BatchCq": "batch", "Plain": "simple"}
        assert store.features.topics_of("batch") == ("BatchCq",)


@pytest.mark.parametrize("name", [*SOUND, *(f"unclean/{name}" for name in WITH_LOG)])
def test_stores_of_4_9_and_3_have_none(name: str, golden: Path) -> None:
    found = find_features(StoreLayout.open(golden / name / "store"))
    assert {feature.name for feature in found.features} <= {"multi_dispatch"}
    assert found.unknown == () and not found.writer.is_5


def test_timers_that_wait(rocketmq5: Path) -> None:
    feature = find_features(StoreLayout.open(rocketmq5 / "5.5.0-timer" / "store")).get("timers")
    assert feature is not None and feature.detail.startswith("15 timer messages")


def test_unknown_files_are_named(copied: Copied) -> None:
    root = copied("5.3.3-plain")
    (root / "backup").mkdir()
    (root / "config" / "ours.json").write_text("{}")
    # A copy of a log file does not count as a second log folder.
    shutil.copy(root / "commitlog" / ("0" * 20), root / "backup" / ("0" * 20))
    found = find_features(StoreLayout.open(root))
    assert found.unknown == ("backup", "config/ours.json")
    lq.MessageStore.open(root, mode="rw").close()
    assert (root / "config" / "ours.json").read_text() == "{}"


# ------------------------------------------------------------------------------------ refusals
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
def test_refusals_change_nothing(name: str, copied: Copied, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_plans_say_that_they_would_be_refused(name: str, rocketmq5: Path) -> None:
    store = rocketmq5 / name / "store"
    plan = lq.recover(store)
    assert (plan.refused is not None) == (RECOVER in REFUSED[name])
    if plan.refused is not None:
        assert not plan.steps
        assert "refused: it cannot be recovered" in run("recover", store, code=4).stdout
    refused = lq.retain(store, RULES).refused or ""
    assert refused.startswith("it cannot have expired files deleted") == (RETAIN in REFUSED[name])


def test_the_error_survives_pickling() -> None:
    error = UnsupportedStore("text", feature="tiered", evidence=("tiered/",))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.feature, again.evidence) == ("text", "tiered", ("tiered/",))


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
    settings: dict[str, object], feature: str, copied: Copied
) -> None:
    root = copied("5.3.3-plain")
    before = state_of(root)
    config = StoreConfig.from_mapping(settings)
    with pytest.raises(UnsupportedStore) as raised:
        lq.MessageStore.open(root, mode="rw", config=config)
    assert raised.value.feature == feature
    assert state_of(root) == before


def test_a_path_that_means_this_store_is_no_other(copied: Copied) -> None:
    root = copied("5.3.3-plain")
    for path in (f"{root}/commitlog", f"{root.name}/commitlog", "/data/rmq/commitlog"):
        settings = {"storePathCommitLog": path, "storePathRootDir": "/data/rmq"}
        config = StoreConfig.from_mapping(settings)
        lq.MessageStore.open(root, mode="rw", config=config).close()


@pytest.mark.parametrize("lost", ["*.sst", "MANIFEST-*"])
def test_lost_files_of_rocksdbstore_are_refused_too(
    lost: str, copied: Copied, tmp_path: Path
) -> None:
    """Without its tables, the folder looks like that of a store that does not use it."""
    root = copied("5.5.0-rocksdb-more")
    for path in (root / "rocksdbstore").glob("*.sst" if lost == "*.sst" else "[M0]*"):
        path.unlink()
    before = state_of(root)
    with pytest.raises(UnsupportedStore) as raised:
        lq.MessageStore.open(root, mode="rw")
    words = str(raised.value)
    namer = "MANIFEST-000005" if lost == "*.sst" else "CURRENT"
    assert raised.value.evidence == (f"rocksdbstore/{namer}",)
    assert f"which {namer} names" in words and "from a backup" in words
    assert ("000013.sst" if lost == "*.sst" else "MANIFEST-000005") in words
    assert state_of(root) == before
    run("recover", root, "--apply", code=4)
    result = run("salvage", root, "--into", tmp_path / "s", code=1)
    assert "left behind: rocksdb_store" in result.stdout
