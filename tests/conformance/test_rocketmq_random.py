"""Recovery mode ``rocketmq`` compared with RocketMQ, on randomly damaged stores.

``LOGQUARRY_SEEDS=1000:1200`` chooses the seeds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from logquarry.config import StoreConfig
from tests.conformance.java_recovery import differences
from tests.conformance.oracle import RUN, require_oracle
from tests.conformance.store_harm import Harm

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(3600)]

STORES = (
    *("rollover", "batch", "ipv6", "sysflags", "multidispatch", "delay", "delay-deliver"),
    *("clean-restart/base", "clean-restart/retention", "clean-restart/prepad", "real-broker"),
    *("unclean/abort-only", "unclean/cq-behind", "unclean/crc-third-last-file"),
    *("unclean/noabort-one-topic-gone", "unclean/garbage-tail"),
)
_SECONDS = 25
_WORKERS = 2


def seeds() -> range:
    """The seeds that the environment chooses."""
    first, _, last = os.environ.get("LOGQUARRY_SEEDS", "0:12").partition(":")
    return range(int(first), int(last))


def java_recovers(folder: Path, params: dict[str, Any]) -> dict[str, Any] | None:
    """RocketMQ's answers for ``folder/harmed``, which it recovers as ``folder/java``.

    If RocketMQ ends with an error or waits for ever, the answers say that it does not load. None if
    it loads, and then cannot read its messages.
    """
    (folder / "params.json").write_text(json.dumps(params))
    command: list[str | Path] = [RUN, "dump", folder / "harmed", "--params", folder / "params.json"]
    command += ["--out", folder, "--keep", folder / "java"]
    # Java may ask for an array of 2 GiB, which a machine of a usual broker has.
    environment = os.environ | {"ORACLE_JVM": "-Xmx6g"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"load": False}
    if done.returncode:
        error = done.stderr.decode()
        return None if "oracle.Dump.of" in error else {"load": False, "error": error[-2000:]}
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))
    return facts


def compared(seed: int, golden: Path, folder: Path) -> list[str]:
    """What differs after one harm."""
    rng = random.Random(seed)
    scenario = golden / rng.choice(STORES)
    params = json.loads((scenario / "params.json").read_text("utf-8"))
    if rng.random() < 0.15:
        params["messageIndexSafe"] = True
    if rng.random() < 0.1:
        params["checkCRCOnRecover"] = False
    if rng.random() < 0.1:
        params["messageIndexEnable"] = False
    shutil.copytree(scenario / "store", folder / "harmed")
    harm = Harm(folder / "harmed", rng)
    harm.any()
    facts = java_recovers(folder, params)
    config = StoreConfig.from_mapping(params)
    error = "" if facts is None else facts.get("error", "")
    if "two index files" in error:
        return []
    found = list(differences(folder / "harmed", folder / "java", facts, config))
    if not found:
        shutil.rmtree(folder)
        return []
    return [f"seed {seed}: {scenario.name} {params}", *harm.done, *found, error]


def test_stores_harmed_at_random(golden: Path, tmp_path: Path) -> None:
    require_oracle()
    with ThreadPoolExecutor(_WORKERS) as pool:
        found = list(pool.map(lambda n: compared(n, golden, tmp_path / str(n)), seeds()))
    failures = ["\n  ".join(lines) for lines in found if lines]
    assert not failures, "\n".join(failures)
