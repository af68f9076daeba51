"""Each sync is necessary: without it some crash image violates the model."""

from __future__ import annotations

import pytest

from tests.crash.mutations import (
    excuse,
    missed,
    missed_at_work,
    missed_in_recovery,
    recovery_sites,
    sites,
    sites_at_work,
)

NEEDED = [
    "fdatasync commitlog: Disk.sync < MappedFile.flush < MappedFileQueue.flush < GroupCommit",
    "fdatasync consumequeue: Disk.sync < MappedFile.flush < MappedFileQueue.flush < FlushConsume",
    "sync_folder commitlog: Disk.make_file",
    "sync_folder root: Disk.sync_names < AbortFile.make",
]
"""Beginnings of the names of some places, looked at with each commit."""
NEEDED_TO_RECOVER = [
    "fdatasync commitlog: Disk.sync < Disk.writing < _sync_file < sync_files < _Work._mend",
    "fdatasync .logquarry/quarantine/commitlog: Disk.sync < Disk.writing < Disk.copy < _Work._save",
    "sync_folder .logquarry/quarantine/commitlog: Disk.make_file < Disk.writing < Disk.copy",
    "fdatasync index: Disk.sync < Disk.writing < _sync_file < sync_files < apply_rocketmq",
]
"""Likewise of places that recoveries pass."""


def plain(site: str) -> str:
    """A place's name without line numbers."""
    return " ".join(word.partition("+")[0] for word in site.split())


@pytest.mark.parametrize("begin", NEEDED)
def test_a_sync_is_missed(begin: str) -> None:
    site = next(site for site in sites_at_work() if plain(site).startswith(begin))
    assert missed_at_work(site) is not None


@pytest.mark.timeout(300)
def test_a_sync_of_a_recovery_is_missed() -> None:
    for begin in NEEDED_TO_RECOVER:
        site = next(site for site in recovery_sites() if plain(site).startswith(begin))
        assert missed_in_recovery(site) is not None, begin


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_sync_is_missed() -> None:
    unnoticed = [site for site in sites() if missed(site) is None and excuse(site) is None]
    assert unnoticed == []
