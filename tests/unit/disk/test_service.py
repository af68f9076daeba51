"""What a service logs about failures, and when it counts as working again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from logquarry.disk.service import Health, Service
from logquarry.errors import StoreUnavailable
from logquarry.store.transaction.checks import TransactionCheckService

Run = Callable[[], bool | None]


class Scripted(Service):
    """A service that makes one call of a list in each run."""

    retried = (StoreUnavailable,)

    def __init__(self, *runs: Run) -> None:
        super().__init__("scripted", Health(), interval_ms=1)
        self._runs = iter(runs)

    def run_once(self) -> bool | None:
        return next(self._runs)()


def fails(text: str) -> Run:
    def call() -> None:
        raise StoreUnavailable(text)

    return call


def works() -> None:
    """A run that succeeds."""


def test_a_service_logs_each_new_failure_and_the_first_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def has_nothing_to_do() -> bool:
        return False

    runs = [works, fails("full"), has_nothing_to_do, fails("full"), fails("read-only")]
    runs += [has_nothing_to_do, works, works, fails("read-only")]
    service = Scripted(*runs)
    for _ in runs:
        service._run_once()
    assert caplog.messages == [
        "scripted failed, and will be retried: full",
        "scripted failed, and will be retried: read-only",
        "scripted works again",
        "scripted failed, and will be retried: read-only",
    ]


def test_a_check_of_transactions_logs_one_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Most of its runs return early, because no check is due."""
    now, checks = 0, 0

    def check() -> None:
        nonlocal checks
        checks += 1
        raise StoreUnavailable("the disk is full")

    long = 1 << 40
    service = TransactionCheckService(check, Health(), interval_ms=long, clock=lambda: now)
    for _ in range(3):
        service._run_once()
        now += long
        service._run_once()
    assert checks == 3
    assert caplog.messages == ["transaction-check failed, and will be retried: the disk is full"]
