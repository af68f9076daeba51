"""Names in a broker.conf: settings of RocketMQ, typing errors, and unknown names."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.config_names import broker_names
from logquarry.errors import UsageError


def of_file(folder: Path, *lines: str) -> StoreConfig:
    path = folder / "broker.conf"
    path.write_text("\n".join(lines))
    return StoreConfig.from_file(path)


def test_settings_of_a_broker_are_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = of_file(
        tmp_path,
        *("brokerClusterName=DefaultCluster", "brokerName=a", "brokerId=0", "listenPort=10911"),
        *(
            "namesrvAddr=127.0.0.1:9876",
            "autoCreateTopicEnable=true",
            "mapedFileSizeCommitLog=4096",
        ),
        *("mappedFileSizeConsumeQueueExt=1", "storeType=default", "deleteWhen=04"),
    )
    assert found.mapped_file_size_commit_log == 4096
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mappedFileSizeComitLog", "mappedFileSizeCommitLog"),
        ("mappedFileSizeConsumQueue", "mappedFileSizeConsumeQueue"),
        ("maxHashSlotNumm", "maxHashSlotNum"),
        ("fileReservdTime", "fileReservedTime"),
        ("storePathComitLog", "storePathCommitLog"),
    ],
)
def test_a_typing_error_of_a_used_setting_is_an_error(
    tmp_path: Path, name: str, meant: str
) -> None:
    with pytest.raises(UsageError, match=f"broker.conf: .* {name}. Did you mean {meant}"):
        of_file(tmp_path, "brokerName=a", f"{name}=1")


def test_unknown_names_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        of_file(tmp_path, "brokerNme=a", "ourOwnThing=1")
    first, second = (record.getMessage() for record in caplog.records)
    assert "brokerNme" in first and "the nearest is brokerName" in first
    assert second == "neither RocketMQ nor logquarry has a setting ourOwnThing"


def test_no_setting_of_a_broker_is_a_typing_error(caplog: pytest.LogCaptureFixture) -> None:
    """Many differ in a few letters from one that is used."""
    names = [name for name in broker_names() if name[0].islower()]
    assert len(names) > 400
    from logquarry.config_names import check_names

    assert check_names(names, ["mappedFileSizeCommitLog"]) == []


def test_a_json_file_holds_an_object(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"maxIndexNumm": 3}')
    with pytest.raises(UsageError, match=r"c.json: .*Did you mean maxIndexNum\?"):
        StoreConfig.from_file(path)
