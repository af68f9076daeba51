"""Counts of many threads, and rates over windows."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from logquarry.store.single_calls import BUCKETS
from logquarry.store.stats import StatsRecorder
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus


def result(messages: int = 1, size: int = 100, elapsed_ms: float = 0.5) -> PutResult:
    return PutResult(
        PutStatus.PUT_OK, AppendStatus.PUT_OK, b"", 0, 0, size, messages, 0, elapsed_ms
    )


class FakeClock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "label"),
    [(0.0, "<1ms"), (0.002, "1-10ms"), (0.6, "500ms-1s"), (7.0, "5-10s"), (99.0, ">10s")],
)
def test_puts_by_how_long_they_took(seconds: float, label: str) -> None:
    recorder = StatsRecorder()
    recorder.put("t", result(), seconds)
    stats = recorder.snapshot()
    assert {name: count for name, count in stats.put_times.items() if count} == {label: 1}
    assert list(stats.put_times) == [name for name, _ in BUCKETS]
    assert stats.put_longest_ms == seconds * 1_000


def test_rates() -> None:
    clock = FakeClock()
    recorder = StatsRecorder(clock)
    assert recorder.snapshot().put_rates == (0.0, 0.0, 0.0)
    # 100 messages a second for 100 seconds, then none for 20.
    for _ in range(100):
        clock.now += 1
        recorder.put("t", result(messages=100), 0.001)
        recorder.sample()
    stats = recorder.snapshot()
    assert stats.put_rates == pytest.approx((100, 100, 100))
    for _ in range(20):
        clock.now += 1
        recorder.sample()
    stats = recorder.snapshot()
    assert stats.put_rates == pytest.approx((0, 40 * 100 / 60, 100 * 100 / 120))
    assert stats.seconds == 120
    for _ in range(2_000):
        clock.now += 1
        recorder.sample()
    assert recorder.snapshot().put_rates == (0, 0, 0)
    assert len(recorder._samples) < 620


def test_asking_often_takes_no_room() -> None:
    clock = FakeClock()
    recorder = StatsRecorder(clock)
    for _ in range(2_000):
        clock.now += 1 / 64
        recorder.put("t", result(messages=1), 0.001)
        assert recorder.snapshot().put_rates == pytest.approx((64, 64, 64))
    assert len(recorder._samples) < 10


def test_threads_that_ended_still_count() -> None:
    clock = FakeClock()
    recorder = StatsRecorder(clock)

    def work() -> None:
        for _ in range(100):
            recorder.put("t", result(elapsed_ms=7), 0.02)
        recorder.put_failed()
        recorder.got(0)

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    clock.now += 1
    stats = recorder.snapshot()
    assert (stats.put_messages, stats.put_bytes, stats.put_failed) == (2_000, 200_000, 20)
    assert (stats.get_missed, stats.put_times["10-50ms"]) == (20, 2_000)
    assert (stats.lock_longest_ms, stats.topics["t"]) == (7, (2_000, 200_000))
    assert len(recorder._threads) <= 2, "those that ended take no room"
    document: dict[str, Any] = stats.to_json()
    assert document["put_rates"]["last_10_s"] > 0
