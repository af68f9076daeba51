"""RocketMQ reads stores that this library wrote, and puts more into them."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import MessageRejected
from logquarry.format import sys_flag
from logquarry.repair.verification import verify_store
from logquarry.write.put_result import PutStatus
from tests.conformance import test_store_facts as read_side
from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import RUN, free_port, master, require_oracle

pytestmark = pytest.mark.java

# The defaults of the oracle's master and slave.
PARAMS: dict[str, Any] = {
    "mappedFileSizeCommitLog": 65536,
    "mappedFileSizeConsumeQueue": 2000,
    "maxHashSlotNum": 500,
    "maxIndexNum": 2000,
}
CONFIG = lq.StoreConfig.from_mapping(PARAMS)
TOPICS = ("orders", "payments", "%RETRY%group", "主题-ü", "x" * 127)
TYPES = (
    sys_flag.TRANSACTION_NOT,
    sys_flag.TRANSACTION_NOT,
    sys_flag.TRANSACTION_PREPARED,
    sys_flag.TRANSACTION_COMMIT,
    sys_flag.TRANSACTION_ROLLBACK,
)


def random_message(rng: random.Random, number: int, **shared: Any) -> lq.Message:
    """A message of any kind that the store takes."""
    properties = {f"p{i}": rng.choice(["", "v", "Zürich", "😀"]) for i in range(rng.randrange(3))}
    if rng.random() < 0.3:
        properties["UNIQ_KEY"] = f"u{number}"
    options: dict[str, Any] = {
        "topic": rng.choice(TOPICS),
        "queue_id": rng.randrange(3),
        "sys_flag": rng.choice(TYPES),
        "delay_level": rng.choice([0] * 9 + [3]),
        "born_host": rng.choice(["10.0.0.1:77", "[2001:db8::1]:88"]),
        "store_host": rng.choice([None, "[2001:db8::2]:10911"]),
        "reconsume_times": rng.randrange(3),
    }
    return lq.Message(
        **(options | shared),
        body=rng.randbytes(rng.choice([0, 1, 50, 300, 3_000])),
        tags=rng.choice([None, "a", "polygenelubricants"]),
        keys=rng.choice([None, f"k{number}", f"k{number % 50} all"]),
        properties=properties,
        flag=rng.getrandbits(31),
        wait_store_ok=rng.random() < 0.8,
    )


def write_random(store: lq.StoreWriter, count: int, seed: int) -> int:
    """Put singles and batches, and return how many messages they had."""
    rng = random.Random(seed)
    put = 0
    while put < count:
        try:
            if rng.random() < 0.1:
                shared = {
                    "topic": rng.choice(TOPICS),
                    "queue_id": rng.randrange(3),
                    "sys_flag": 0,
                    "delay_level": 0,
                    "born_host": "10.0.0.1:77",
                    "born_timestamp": 5,
                    "store_host": None,
                    "reconsume_times": 0,
                }
                batch = [random_message(rng, put + i, **shared) for i in range(rng.randrange(1, 9))]
                put += store.put_batch(batch).message_count
            else:
                put += store.put(random_message(rng, put)).message_count
        except MessageRejected as error:
            # A batch of many large messages.
            assert error.reason == "larger_than_file"
    return put


def run(*arguments: str | Path, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RUN, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def dumped(folder: Path, params: dict[str, Any]) -> Scenario:
    """RocketMQ's answers for a copy of ``folder/store``."""
    (folder / "params.json").write_text(json.dumps(params))
    done = run("dump", folder / "store", "--params", folder / "params.json", "--out", folder)
    assert done.returncode == 0, done.stderr
    return Scenario(folder)


def check_reads_alike(scenario: Scenario, *, ends_with_blank: bool = False) -> None:
    """This library gives all answers that RocketMQ gives for a store.

    If the log's last file is full, our log end is that file's end, and Java's the begin of its
    blank.
    """
    at_the_end = [read_side.test_log_offsets, read_side.test_single_messages]
    with lq.MessageStore.open(scenario.store, config=scenario.config) as store:
        for check in (
            read_side.test_queues,
            read_side.test_get,
            read_side.test_reading_a_queue_through_gives_its_messages,
            *([] if ends_with_blank else at_the_end),
        ):
            check(scenario, store)
        read_side.test_index_headers(scenario)
        if scenario.facts["index"]:
            read_side.test_index_queries(scenario, "stated")
        report = verify_store(store.layout)
        assert not report.has_damage, report.findings


def check_nothing_was_recovered(scenario: Scenario) -> None:
    facts = scenario.facts
    assert facts["abortFileBefore"] is False
    ours = {
        str(path.relative_to(scenario.store)): path.stat().st_size
        for path in scenario.store.rglob("*")
        if path.is_file() and path.relative_to(scenario.store).parts[0] in ("commitlog",)
    }
    before = {name: size for name, size in facts["filesBefore"] if name.startswith("commitlog/")}
    assert before == ours
    last = max(ours.values(), default=0)
    assert facts["commitLog"].get("stop") is None
    assert last == scenario.params["mappedFileSizeCommitLog"]


SETTINGS: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "synchronous": {"flushDiskType": "SYNC_FLUSH"},
    "transient": {"transientStorePoolEnable": True, "transientStorePoolSize": 2},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_real_store_reads_what_we_wrote(kind: str, tmp_path: Path) -> None:
    require_oracle()
    config = lq.StoreConfig.from_mapping(PARAMS | SETTINGS[kind])
    for seed in (1, 2):
        with lq.MessageStore.open(tmp_path / "store", mode="rw", config=config) as store:
            write_random(store, 800, seed)
    scenario = dumped(tmp_path, PARAMS)
    assert len(scenario.expected) >= 1_600
    check_reads_alike(scenario)
    check_nothing_was_recovered(scenario)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_store_reads_100_000_messages(tmp_path: Path) -> None:
    require_oracle()
    params = PARAMS | {
        "mappedFileSizeCommitLog": 16 << 20,
        "mappedFileSizeConsumeQueue": 40_000,
        "maxHashSlotNum": 5_000,
        "maxIndexNum": 20_000,
    }
    config = lq.StoreConfig.from_mapping(params)
    with lq.MessageStore.open(tmp_path / "store", mode="rw", config=config) as store:
        put = write_random(store, 100_000, 7)
    scenario = dumped(tmp_path, params)
    assert len(scenario.expected) == put
    check_reads_alike(scenario)
    check_nothing_was_recovered(scenario)


def test_the_real_store_goes_on_and_we_after_it(tmp_path: Path) -> None:
    require_oracle()
    root = tmp_path / "store"
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        ours = write_random(store, 500, 3)
        own = [store.put(lq.Message("Ha0", b"ours")).queue_offset for _ in range(3)]
        end = store.max_offset
    for round_ in range(2):
        with master(root, free_port()) as running:
            status = running.ask("status")
            assert status["maxPhyOffset"] == end
            running.ask(f"fill 300 900 {round_}")
            end = running.ask("status")["maxPhyOffset"]
        with lq.MessageStore.open(root, config=CONFIG) as reader:
            assert reader.max_offset == end
            assert sum(1 for _ in reader.scan()) == ours + len(own) + 300
            report = verify_store(reader.layout)
            assert not report.has_damage, report.findings
        with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
            next_offset = store.queue_offsets("Ha0", 0).max
            ours += 300 + write_random(store, 100, 50 + round_)
            own.append(store.put(lq.Message("Ha0", b"ours")).queue_offset)
            assert own[-1] == next_offset
            store.wait_dispatched()
            assert store.get("Ha0", 0, next_offset).messages[0].body == b"ours"
            end = store.max_offset
    check_reads_alike(dumped(tmp_path, PARAMS))


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_java_opener_of_our_live_store_costs_no_message(flush: str, tmp_path: Path) -> None:
    """RocketMQ recovers before it checks the lock (reliability.md, fault 3)."""
    require_oracle()
    root = tmp_path / "store"
    config = lq.StoreConfig.from_mapping(PARAMS | {"flushDiskType": flush})
    acked: list[tuple[int, bytes]] = []
    stop = threading.Event()
    failures: list[BaseException] = []
    with lq.MessageStore.open(root, mode="rw", config=config) as store:

        def write(number: int, message_of: Callable[[int], lq.Message]) -> None:
            count = 0
            try:
                while not stop.is_set() and count < 60_000:
                    message = message_of(count)
                    result = store.put(message)
                    assert result.status is PutStatus.PUT_OK
                    acked.append((result.physical_offset, bytes(message.body)))
                    count += 1
                    # Slow enough to be still writing when Java opens the store the third time.
                    time.sleep(0.0002)
            except BaseException as error:
                failures.append(error)

        def message_of(number: int) -> Callable[[int], lq.Message]:
            return lambda count: lq.Message(
                f"t{number}",
                b"%d-%d" % (number, count) + bytes(count % 200),
                queue_id=count % 2,
                keys=f"k{number}-{count}",
            )

        threads = [threading.Thread(target=write, args=(n, message_of(n))) for n in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                refused = run("ha-master", str(free_port()), root, timeout=120)
                assert refused.returncode != 0
                assert "ready" not in refused.stdout
                # load() may also refuse: a file that our writer has just made is empty for a
                # moment, and RocketMQ loads only files of the whole size.
                answer = refused.stderr + refused.stdout
                assert "Lock failed" in answer or "load() refused" in answer
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert failures == []
        assert store.wait_dispatched(timeout=120)
    assert not (root / "abort").exists()
    with lq.MessageStore.open(root, config=CONFIG) as reader:
        found = [(message.physical_offset, message.body) for message in reader.scan()]
        assert found == sorted(acked)
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings[:5]
        queued = sum(reader.queue_offsets(*key).max for key in reader.queues())
        assert queued == len(acked)
        for offset, body in (*acked[:: max(1, len(acked) // 50)], *acked[-50:]):
            key = "k" + body.rstrip(b"\0").decode()
            topic = "t" + key[1]
            messages = reader.query(topic, key, exact=True)
            assert [m.physical_offset for m in messages] == [offset], key
    # And the real store opens it now.
    with master(root, free_port()) as running:
        assert running.ask("fill 10 100 1")
