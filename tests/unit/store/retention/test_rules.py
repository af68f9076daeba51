"""Which files may be deleted, and when: times, ratios, hours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.store.retention.rules import (
    DiskUse,
    RetentionRules,
    delete_hours,
    disk_ratio,
    duration_ms,
    is_delete_hour,
    rules_due,
)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("72h", 259_200_000),
        ("72", 259_200_000),
        ("3d", 259_200_000),
        ("1.5m", 90_000),
        ("30 s", 30_000),
        ("500ms", 500),
        ("0", 0),
    ],
)
def test_durations(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "h", "-1h", "1w", "1h2m", "٣h", "1e3h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="takes a time"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("text", "ratio"), [("0.75", 0.75), ("75%", 0.75), ("75", 0.75), ("1", 1.0), ("0.5%", 0.005)]
)
def test_ratios(text: str, ratio: float) -> None:
    assert disk_ratio(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["0", "101", "-1", "x", "", "0%", "1.5.5"])
def test_what_is_no_ratio(text: str) -> None:
    with pytest.raises(UsageError, match="part of the disk"):
        disk_ratio(text)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"most_files": 3},
        {"older_than_ms": -1},
        {"max_disk_ratio": 0.0},
        {"max_disk_ratio": 1.1},
        {"keep_bytes": -1},
        {"keep_bytes": 1, "most_files": 0},
    ],
)
def test_rules_that_cannot_be_meant(rules: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RetentionRules(**rules)


def test_hours() -> None:
    at = int(datetime(2026, 11, 21, 4, 59, 59, tzinfo=UTC).timestamp() * 1_000)
    assert is_delete_hour("04", at, UTC)
    assert is_delete_hour("16;4", at, UTC)
    assert not is_delete_hour("04", at + 1_000, UTC)
    assert is_delete_hour("06", at, timezone(timedelta(hours=2)))
    assert delete_hours("04; 16") == {4, 16}
    for when in ("", "24", "4;", "x", "-1", "004"):
        with pytest.raises(UsageError, match="hours"):
            delete_hours(when)


def due(used: float, hour: int, *, forcibly: bool = False) -> RetentionRules | None:
    config = StoreConfig(
        delete_when="04",
        file_reserved_time=1,
        disk_max_used_space_ratio=75,
        clean_file_forcibly_enable=forcibly,
        delete_files_batch_max=10,
    )
    now = datetime(2026, 11, 21, hour, tzinfo=UTC)
    return rules_due(config, int(now.timestamp() * 1_000), used, UTC)


def test_what_is_due() -> None:
    assert due(0.5, 3) is None
    assert due(0.5, 4) == RetentionRules(older_than_ms=3_600_000, most_files=10)
    assert due(0.8, 3) == RetentionRules(
        older_than_ms=3_600_000, max_disk_ratio=0.75, most_files=10
    )
    # Unexpired files are deleted only by force, and only from a really full disk.
    assert due(0.9, 3) == due(0.8, 3)
    assert due(0.84, 3, forcibly=True) == due(0.8, 3)
    assert due(0.9, 3, forcibly=True) == RetentionRules(max_disk_ratio=0.85, most_files=10)


def test_a_disk() -> None:
    use = DiskUse(used=60, usable=40)
    assert use.ratio == 0.6
    assert use.without(10) == DiskUse(50, 50)
    assert use.without(100) == DiskUse(0, 100)
    assert DiskUse(0, 0).ratio == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"disk_max_used_space_ratio": 0},
        {"disk_max_used_space_ratio": 101},
        {"file_reserved_time": -1},
        {"delete_files_batch_max": 0},
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        StoreConfig(**settings)


def test_nothing_is_deleted_unasked() -> None:
    """A broker.conf with a time to keep files does not ask us to delete them."""
    config = StoreConfig.from_mapping({"fileReservedTime": "48", "deleteWhen": "05"})
    assert (config.file_reserved_time, config.delete_when) == (48, "05")
    assert not config.clean_expired_files
    assert not config.clean_file_forcibly_enable


@pytest.mark.parametrize("name", ["older_than_ms", "max_disk_ratio", "keep_bytes"])
def test_what_is_no_number_lets_nothing_go(name: str) -> None:
    given: dict[str, Any] = {name: float("nan")}
    with pytest.raises(UsageError):
        RetentionRules(**given)
