"""Each sync is there for something: without it some crash shows that."""

from __future__ import annotations

import pytest

from tests.crash.mutations import excuse, missed, sites

NEEDED = [
    "fdatasync commitlog: Disk.sync < MappedFile.flush < MappedFileQueue.flush < GroupCommit",
    "fdatasync consumequeue:",
    "sync_folder commitlog: Disk.make_file",
    "sync_folder root: Disk.sync_names < AbortFile.make",
]
"""Beginnings of the names of some places, looked at with each commit."""


def plain(site: str) -> str:
    """A place's name without the lines in it."""
    return " ".join(word.partition("+")[0] for word in site.split())


@pytest.mark.parametrize("begin", NEEDED)
def test_a_sync_is_missed(begin: str) -> None:
    found = [site for site in sites() if plain(site).startswith(begin)]
    assert found
    assert missed(found[0]) is not None


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_sync_is_missed() -> None:
    unnoticed = [site for site in sites() if missed(site) is None and excuse(site) is None]
    assert unnoticed == []
