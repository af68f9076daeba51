"""Keeps the warnings about a slow disk out of tests that compare all warnings."""

from __future__ import annotations

import pytest

from logquarry.disk import log_files
from logquarry.write import flush


def log_no_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store log no "creating it took" and no "flushing the log took"."""
    monkeypatch.setattr(log_files, "_SLOW_MS", float("inf"))
    monkeypatch.setattr(flush, "SLOW_FLUSH_MS", float("inf"))
