"""The next step of ``verify`` for stores of RocketMQ 5 that ``recover`` or ``rebuild`` refuses."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.rocketmq5 import Copied
from tests.helpers.command import run
from tests.helpers.files import overwrite


def next_of(*words: object, code: int) -> str:
    result = run(*words, code=code)
    return (result.stdout or result.stderr).splitlines()[-1]


def test_a_store_with_compaction_topics(tmp_path: Path, copied: Copied) -> None:
    store = copied("5.5.0-compaction")
    (store / "abort").touch()
    step = next_of("verify", store, code=0)
    assert step.startswith("next: start the broker on the store") and "recover " not in step
    refused = run("recover", store, code=4).stdout
    assert "start the broker" in refused and "plain store" not in refused
    overwrite(store / "commitlog" / f"{0:020d}", 100, b"harm")
    step = next_of("verify", store, code=1)
    assert step == f"next: logquarry salvage {store} --into DIR"
    run("salvage", store, "--into", tmp_path / "new", code=1)
    assert "no damage" in run("verify", tmp_path / "new").stdout
