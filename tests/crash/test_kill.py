"""A writing process is killed: every acknowledged message is there, flushed or not."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.testing.model_store import ModelStore, explain
from tests.crash.checks import check_image, recovered
from tests.crash.ladder import IS_BY_HAND, count, seeds, told
from tests.crash.writer import SETTINGS, Order, writer

EACH = 10
"""Kills of one process' children."""


@pytest.mark.timeout(0 if IS_BY_HAND else 300)
@pytest.mark.parametrize("seed", seeds(count(20), EACH))
def test_kills(seed: int, shm: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = shm / "store"
    model = ModelStore()
    acked = 0
    with writer() as process:
        for number in range(1, EACH + 1):
            settings = {"flush_disk_type": rng.choice(["SYNC_FLUSH", "ASYNC_FLUSH"])}
            config = lq.StoreConfig(**SETTINGS | settings)
            begun, after = time.monotonic(), rng.choice([0.0, 0.01, 0.05, 0.2]) * rng.random()
            wanted = rng.choice([0, 1, 20, 200])

            def stop(order: Order, begun: float = begun, after: float = after) -> bool:
                enough = len(order.acks) >= wanted  # noqa: B023 (used in this round only)
                return order.is_done or (enough and time.monotonic() - begun >= after)

            with told(seed, f"round {number}", root, tmp_path):
                order = process.order(root, number, settings, stop)
                assert not order.errors
                order.tell(model, number, is_durable=True)
                acked += len(order.acks)
                wrong = check_image(root, config, model, model.mark(), is_killed=True)
                assert not wrong, explain(wrong)
                recovered(root, config, model)
    assert acked
