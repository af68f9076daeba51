"""The log of events that a client can cause as often as it likes."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from logquarry.broker import limits
from logquarry.broker.limits import SparingLog


def test_it_logs_five_lines_and_then_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = SparingLog(logging.getLogger("test"))
    for number in range(12):
        log.warning("line %d", number)
    now[0] = 110.0
    log.warning("later")
    assert caplog.messages == [
        *(f"line {number}" for number in range(5)),
        "7 similar lines were left out",
        "later",
    ]
