"""A process that consumes is killed: nothing is lost, and what comes twice was not committed."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import broker_config
from logquarry.format.delay import SCHEDULE_TOPIC
from tests.crash.consumer import GROUP, QUEUES, TOPIC, Consuming, consuming, settings
from tests.crash.ladder import IS_BY_HAND, count, seeds, told

EACH = 10
"""Kills of one process' children."""


def read_offsets(root: Path) -> dict[int, int]:
    """What the file says; it can be read at any time, once it is there."""
    path = root / "config/consumerOffset.json"
    if not path.exists():
        return {}
    return broker_config.decode_consumer_offsets(path.read_bytes()).get((TOPIC, GROUP), {})


def one_round(process: Consuming, root: Path, seed: int) -> int:
    """One life of a child: how many messages came."""
    rng = random.Random(seed)
    wanted = rng.choice([1, 5, 50, 500, 1_000])
    before = read_offsets(root)
    got: dict[int, list[int]] = defaultdict(list)
    committed: dict[int, int] = {}
    put: dict[int, int] = {}
    sent = pid = 0
    for word, *numbers in process.order(root, seed):
        values = list(map(int, numbers))
        if word == "pid":
            pid = values[0]
        elif word == "got":
            got[values[0]].append(values[1])
        elif word == "put":
            put[values[0]] = values[1] + 1
        elif word == "sent":
            sent += 1
        elif word == "committed":
            committed[values[0]] = values[1] + 1
        if sum(map(len, got.values())) >= wanted and pid:
            os.kill(pid, signal.SIGKILL)
            pid = 0
    after = read_offsets(root)
    for queue_id, offsets in got.items():
        # It begins where the file says, and leaves nothing out.
        assert offsets == list(range(before.get(queue_id, 0), offsets[-1] + 1)), queue_id
    for queue_id, offset in after.items():
        # What is behind the offset was handled: the next one had been asked for, or committed.
        start = before.get(queue_id, 0)
        handled = got[queue_id][-1] + 1 if queue_id in got else start
        assert start <= offset <= handled
    for queue_id, offset in committed.items():
        assert after[queue_id] >= offset, "a commit is on the disk when it returns"
    config = settings()
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for queue_id, end in put.items():
            assert store.queue_offsets(TOPIC, queue_id).max >= end
        back = sum(
            1
            for topic, queue_id in store.queues()
            if topic == SCHEDULE_TOPIC
            for _ in range(store.queue_offsets(topic, queue_id).max)
        )
    assert back >= sent
    return sum(map(len, got.values()))


@pytest.mark.timeout(0 if IS_BY_HAND else 300)
@pytest.mark.parametrize("seed", seeds(count(20), EACH))
def test_kills(seed: int, shm: Path, tmp_path: Path) -> None:
    root = shm / "store"
    total = 0
    with consuming() as process:
        for number in range(1, EACH + 1):
            with told(seed, f"round {number}", root, tmp_path):
                total += one_round(process, root, number)
    # In the end all of it comes.
    offsets = read_offsets(root)
    with (
        lq.MessageStore.open(root, mode="rw", config=settings()) as store,
        store.consumer(GROUP, TOPIC, timeout=0) as consumer,
    ):
        left = [message for message in consumer if message.topic == TOPIC]
        ends = [store.queue_offsets(TOPIC, queue_id).max for queue_id in range(QUEUES)]
    assert len(left) == sum(ends) - sum(offsets.values())
    assert total
