"""A second recovery finds nothing to do, and the store opens: randomly damaged golden stores.

``LOGQUARRY_SEEDS=1000:1200`` chooses the seeds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from tests.conformance.store_harm import Harm
from tests.helpers.small_store import facts

STORES = (
    *(
        "single",
        "rollover",
        "batch",
        "ipv6",
        "sysflags",
        "multidispatch",
        "delay",
        "v3-blank/rollover",
    ),
    *("clean-restart/base", "clean-restart/retention", "real-broker", "v3-transactions"),
    *("unclean/abort-only", "unclean/crc-middle", "unclean/garbage-tail", "v3-blank/reopened"),
)
FOLDERS = ("commitlog", "consumequeue", "index")


def seeds() -> range:
    """The seeds that the environment chooses."""
    first, _, last = os.environ.get("LOGQUARRY_SEEDS", "0:24").partition(":")
    return range(int(first), int(last))


def settings(params: dict[str, Any], scenario: str) -> lq.StoreConfig:
    """The file sizes of a golden store, from RocketMQ's settings."""
    sizes = {
        "mapped_file_size_commit_log": ("mappedFileSizeCommitLog", "mapedFileSizeCommitLog"),
        "mapped_file_size_consume_queue": (
            "mappedFileSizeConsumeQueue",
            "mapedFileSizeConsumeQueue",
        ),
        "max_hash_slot_num": ("maxHashSlotNum",),
        "max_index_num": ("maxIndexNum",),
    }
    told: dict[str, Any] = {
        ours: next((params[name] for name in theirs if name in params), None)
        for ours, theirs in sizes.items()
    }
    is_multi = scenario == "multidispatch"
    return lq.StoreConfig(**told, enable_multi_dispatch=is_multi, enable_lmq=is_multi)


def files_of(root: Path, folder: str) -> list[Path]:
    return sorted(path for path in (root / folder).rglob("*") if path.is_file())


def mix_up(root: Path, rng: random.Random) -> str:
    """Files renamed, lost, cut, swapped, copied over one another; ``abort`` is added or removed."""
    here = files_of(root, rng.choice(FOLDERS))
    others = files_of(root, rng.choice(FOLDERS))
    if not here or not others:
        return "nothing"
    one, two = rng.choice(here), rng.choice(others)
    kind = rng.choice(("rename", "lose", "cut", "swap", "copy", "add", "abort"))
    if kind == "rename":
        step = rng.choice(
            (1, 20, -20, one.stat().st_size, 7 * one.stat().st_size, 1 << 40, 1 << 60)
        )
        number = max(0, int(one.name) + step) % 10**20
        if not (target := one.with_name(f"{number:0{len(one.name)}d}")).exists():
            one.rename(target)
    elif kind == "lose":
        one.unlink()
    elif kind == "cut":
        data = one.read_bytes()
        # Usually within the written part.
        used = len(data.rstrip(b"\0")) if rng.random() < 0.8 else len(data)
        one.write_bytes(data[: rng.randrange(used + 1)])
    elif kind == "swap":
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
    elif kind == "copy" and one != two:
        shutil.copyfile(two, one)
    elif kind == "add":
        (one.parent / f"{int(one.name) + 1:0{len(one.name)}d}").write_bytes(
            rng.choice((b"", two.read_bytes()))
        )
    elif kind == "abort":
        path = root / "abort"
        path.unlink() if path.exists() else path.touch()
    return f"{kind} {one.relative_to(root)} {two.relative_to(root)}"


def read_all(store: lq.MessageStore) -> None:
    """Every queue from its start to its end: nothing stops a consumer."""
    for topic, queue_id in store.queues():
        offsets = store.queue_offsets(topic, queue_id)
        at = offsets.min
        while at < offsets.max:
            after = store.get(topic, queue_id, at, max_count=32).next_offset
            assert after > at, (topic, queue_id, at)
            at = after


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", seeds())
def test_a_second_plan_has_no_steps(golden: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    scenario = rng.choice(STORES)
    params = json.loads((golden / scenario / "params.json").read_text("utf-8"))
    root = tmp_path / "store"
    shutil.copytree(golden / scenario / "store", root)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    config = settings(params, scenario)
    harm = Harm(root, rng)
    if rng.random() < 0.7:
        harm.any()
    harm.done += [mix_up(root, rng) for _ in range(rng.choice((0, 1, 1, 2, 4)))]
    told = f"{scenario}: {harm.done}"
    before = facts(root)
    try:
        lq.recover(root, apply=True, config=config, accept_loss=1 << 40)
    except StoreUnavailable as error:
        # A file of the log that was renamed.
        assert "Nothing was changed" in str(error), told
        assert before.items() <= facts(root).items(), told
        return
    again = lq.recover(root, config=config)
    assert not again.steps, (told, [str(step) for step in again.steps])
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        read_all(store)
        put = store.put(lq.Message("new", b"new", keys="new"))
        assert store.wait_dispatched(timeout=60)
        got = store.get("new", 0, put.queue_offset).messages
        assert [message.body for message in got] == [b"new"], told
    assert not lq.recover(root, config=config).steps, told
