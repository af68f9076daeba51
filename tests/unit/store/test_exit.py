"""A program that ends without closing its store leaves a store that was shut down cleanly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.python_process import run

PROGRAM = """
    import atexit, sys
    import logquarry as lq
    from logquarry.config import StoreConfig
    small = StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000,
                        max_hash_slot_num=100, max_index_num=400)
    store = lq.MessageStore.open(sys.argv[1], mode="rw", config=small)
    messages = [lq.Message(f"t{i % 50}", bytes(300), keys=f"k{i}") for i in range(5_000)]
    # At the exit, much of the log has no queue entries yet.
    atexit.register(store.put_many, messages)
"""


@pytest.mark.parametrize("switch", ["LOGQUARRY_SIGBUS", "LOGQUARRY_COMPILED", None])
def test_the_exit_closes_the_store_before_it_closes_files(
    switch: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a handler of SIGBUS, the store reads its files with descriptors."""
    if switch is not None:
        monkeypatch.setenv(switch, "off")
    done = run(PROGRAM, tmp_path / "store")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "store" / "abort").exists()
