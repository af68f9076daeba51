"""The power goes at any moment: what was acknowledged as durable is there, and nothing is odd."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.crash.checks import check_image
from tests.crash.ladder import IS_BY_HAND, count, seeds, told
from tests.crash.workload import STORE, recorded

EACH = 125
"""Crashes of one run of a store."""


@pytest.mark.timeout(0 if IS_BY_HAND else 300)
@pytest.mark.parametrize("seed", seeds(count(2_000), EACH))
def test_power_cuts(seed: int, shm: Path, tmp_path: Path) -> None:
    work = recorded(shm / "live", seed)
    rng = random.Random(seed)
    for number in range(EACH):
        point = rng.choice(work.points)
        image = shm / "image"
        with told(seed, f"crash {number} before {point.number} {point.call}", image, tmp_path):
            point.state.crash(rng).write(image)
            wrong = check_image(image / STORE, work.config, work.model, point.mark)
            assert not wrong, "\n".join(wrong)
        shutil.rmtree(image)
