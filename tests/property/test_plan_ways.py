"""The plan of a recovery does not depend on the number of threads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.config import StoreConfig
from logquarry.errors import StoreUnavailable
from logquarry.repair.recover.safe import SafePlan, plan_safe
from tests.conformance.golden_facts import SOUND, UNCLEAN, Scenario
from tests.helpers.damage import damaged
from tests.property.test_rebuild_ways import CONFIG, STORES

_ALONE = 1 << 40


def plan(root: Path, config: StoreConfig, stretch_bytes: int) -> tuple[SafePlan, object]:
    """The plan, with the fields that == ignores; pieces are cut at the ends of runs."""
    found = plan_safe(root, config, stretch_bytes=stretch_bytes)
    return dataclasses.replace(found, pieces=()), joined(found.pieces)


def joined(pieces: tuple[tuple[int, int], ...]) -> list[list[int]]:
    found: list[list[int]] = []
    for start, stop in pieces:
        if found and found[-1][1] == start:
            found[-1][1] = stop
        else:
            found.append([start, stop])
    return found


@pytest.mark.parametrize("name", [*SOUND, *(f"unclean/{name}" for name in UNCLEAN)])
def test_golden_stores(golden: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    alone = plan(scenario.store, scenario.config, _ALONE)
    for size in (5_000, 70_000):
        assert plan(scenario.store, scenario.config, size) == alone


@given(
    st.sampled_from(sorted(STORES)).flatmap(lambda which: damaged(STORES[which], most=3)),
    st.booleans(),
)
def test_stores_with_damage(files: dict[str, bytes], crashed: bool) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "commitlog").mkdir()
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        if crashed:
            (root / "abort").touch()
        try:
            alone = plan(root, CONFIG, _ALONE)
        except StoreUnavailable as error:
            with pytest.raises(type(error)):
                plan(root, CONFIG, 600)
            return
        for size in (150, 600):
            assert plan(root, CONFIG, size) == alone
