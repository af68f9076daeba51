"""Stores of real brokers of RocketMQ 5.5.0 after random crashes: recovered, whole, and served.

The sources are the stores of ``tests/data/rocketmq5.tar.xz``; with ``LOGQUARRY_STORES5``, they are
the oracle's stores in that folder. ``make crash RUNG=rocketmq5 N=1000`` makes 1,000 crash states.
The seed chooses the crash and the way of recovery.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import UnsupportedStore
from logquarry.log.layout import StoreLayout
from logquarry.read.timers import timers_of
from logquarry.repair.audit.timer_files import timer_faults
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.plan import RecoveryMode
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from tests.conformance import broker_truth
from tests.conformance.rocketmq5 import rocketmq5_stores, state_of, stores5
from tests.crash.broker_crashes import Crash, Ours, Source, crash, problems
from tests.crash.ladder import count, seeds, told

VERSION = "5.5.0"
NAMES = (
    "plain",
    "batchcq",
    "timer",
    "multipath",
    "propcrc",
    "no-mmap",
    "pop-kv",
    "rocksdb",
    "rocksdb-config-v2",
)
"""Scenarios that the archive has."""
MORE = ("rocksdb-separate", "kill/after", "kill-transient/after", "kill-rocksdb/after")
"""Further ones of the oracle; after a kill, the broker had shut its store down."""
WAYS = ("recover", "rw", "rw as rocketmq", "recover as rocketmq")
EACH = 5
SERVED = 20
ALL = 1 << 40


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rocketmq5_stores(tmp_path_factory)


@pytest.fixture(scope="module")
def sources(archive: Path) -> list[Source]:
    pytest.importorskip("rocksdict")
    made = [Source(name, stores5() / VERSION / name) for name in (*NAMES, *MORE)]
    if all((source.folder / "pulled.json").exists() for source in made):
        return made
    return [Source(name, archive / f"{VERSION}-{name}") for name in NAMES]


def recovered(store: Path, way: str, settings: lq.StoreConfig, *, consent: bool) -> Ours:
    """Recover a store in one way; a writer also puts a message into each queue of a topic."""
    accept = ALL if consent else None
    mode: RecoveryMode = "rocketmq" if way.endswith("as rocketmq") else "safe"
    if way.startswith("recover"):
        lq.recover(store, mode=mode, apply=True, accept_loss=accept, config=settings)
        return {}
    config = dataclasses.replace(settings, recovery=mode)
    with lq.MessageStore.open(store, mode="rw", config=config, accept_loss=accept) as writer:
        return put_ours(writer)


def put_ours(writer: StoreWriter) -> Ours:
    """Put a message into two queues of each topic that clients may use."""
    ours: Ours = {}
    for topic, queue_id in writer.queues():
        if topic in ("Orders", "Plain", "BatchCq") and queue_id < 2:
            body = b"ours"
            put = writer.put(lq.Message(topic, body, queue_id=queue_id, keys="ours"))
            ours[topic, queue_id] = [(put.queue_offset, put.physical_offset, body)]
    return ours


def crashed_and_recovered(
    source: Source, folder: Path, rng: random.Random, way: str
) -> tuple[Crash, Ours, str]:
    """A copy of a source after a crash and a recovery, and how it was recovered."""
    store = source.copy(folder)
    harm = crash(source, store, rng, is_gentle=way.endswith("as rocketmq"))
    print(source.name, way, *harm.harm, f"whole to {harm.end}", sep="; ")
    # RocketMQ ends at the first damage, and refuses files of a wrong size.
    consent = way.endswith("as rocketmq")
    settings = broker_truth.config_of(folder) if harm.is_short else lq.StoreConfig()
    before = state_of(store)
    for _ in range(3):
        try:
            return harm, recovered(store, way, settings, consent=consent), way
        except LossRefused:
            assert harm.may_ask and not consent
            consent = True
        except UnsupportedStore:
            assert way != "recover"
            way, consent = "recover", False
        except lq.errors.StoreUnavailable:
            assert way.endswith("as rocketmq")
            way, consent = "recover", False
        assert state_of(store) == before
    raise AssertionError("refused in each way")


@pytest.mark.parametrize("seed", seeds(count(20), EACH))
def test_random_crashes(seed: int, sources: list[Source], tmp_path: Path) -> None:
    for number in range(EACH):
        rng = random.Random(seed * EACH + number)
        source = sources[(seed * EACH + number) % len(sources)]
        folder = tmp_path / "work"
        with told(seed, f"number {number}, {source.name}", folder, tmp_path):
            harm, ours, way = crashed_and_recovered(source, folder, rng, rng.choice(WAYS))
            wrong = list(
                problems(folder / "store", source, harm, ours, is_rocketmq=way in WAYS[2:])
            )
            assert not wrong, wrong[:5]
            if way in WAYS[:2]:
                assert not lq.recover(folder / "store").is_needed
        shutil.rmtree(folder)


@pytest.mark.parametrize("way", WAYS[:2])
def test_the_timer_wheel_names_no_lost_message(way: str, archive: Path, tmp_path: Path) -> None:
    source = Source("timer", archive / f"{VERSION}-timer")
    store = source.copy(tmp_path)
    waiting = timers_of(StoreLayout.open(store)).due()
    place = sorted(one.physical_offset for one in waiting)[len(waiting) // 2]
    log = store / "commitlog" / f"{0:020d}"
    data = log.read_bytes()
    log.write_bytes(data[:place] + bytes(len(data) - place))
    (store / "checkpoint").unlink()
    (store / "abort").touch()
    recovered(store, way, lq.StoreConfig(), consent=False)
    layout = StoreLayout.open(store)
    # Messages whose delivered copies were lost wait again.
    kept = timers_of(layout).due()
    assert {one for one in waiting if one.physical_offset < place} <= {*kept}
    assert all(one.physical_offset < place for one in kept)
    assert not list(timer_faults(layout))
    assert not verify_store(layout).has_damage
    assert (store / ".logquarry" / "quarantine" / "timerwheel").exists()


def test_a_short_index_contradicts_no_setting(archive: Path, tmp_path: Path) -> None:
    store = Source("timer", archive / f"{VERSION}-timer").copy(tmp_path)
    (index,) = (store / "index").iterdir()
    index.write_bytes(index.read_bytes()[:36_000])
    settings = broker_truth.config_of(tmp_path)
    with pytest.raises(lq.errors.UsageError, match="leave both settings out"):
        lq.recover(store, config=settings)
    (store / "abort").touch()
    other = dataclasses.replace(settings, max_hash_slot_num=400)
    with pytest.raises(lq.errors.UsageError, match="leave both settings out"):
        lq.recover(store, config=other)
    lq.recover(store, apply=True, config=settings)
    assert not verify_store(StoreLayout.open(store, settings)).has_damage


@pytest.mark.parametrize("way", WAYS[:2])
def test_no_queue_file_without_bytes_stays(way: str, archive: Path, tmp_path: Path) -> None:
    store = Source("plain", archive / f"{VERSION}-plain").copy(tmp_path)
    queue = store / "consumequeue" / "Lost" / "0"
    queue.mkdir(parents=True)
    (queue / f"{0:020d}").touch()
    (store / "abort").touch()
    recovered(store, way, lq.StoreConfig(), consent=False)
    assert not list(queue.iterdir())
    assert not verify_store(StoreLayout.open(store)).has_damage


@pytest.mark.slow
@pytest.mark.java
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("seed", seeds(SERVED, 1))
def test_a_broker_serves_them(seed: int, sources: list[Source], tmp_path: Path) -> None:
    source = sources[seed % len(sources)]
    if not (source.folder / "pulled.json").exists():
        pytest.skip("no stores of the oracle with what clients received (LOGQUARRY_STORES5)")
    rng = random.Random(seed)
    way = WAYS[seed // len(sources) % len(WAYS)]
    harm, ours, way = crashed_and_recovered(source, tmp_path, rng, way)
    assert not list(problems(tmp_path / "store", source, harm, ours, is_rocketmq=way in WAYS[2:]))
    after = broker_truth.serve(tmp_path, VERSION)
    root = source.folder / "store"
    lost = broker_truth.not_served(source.truth, after, end=harm.end, moved=False, root=root)
    puts = {f"{topic}/{queue}": rows[0][0] for (topic, queue), rows in ours.items()}
    lost += broker_truth.puts_not_served(after, puts)
    assert not lost
