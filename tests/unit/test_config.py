"""Are a broker's settings read in all their spellings, and wrong ones refused?"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from logquarry.config import StoreConfig, broker_names, check_names
from logquarry.errors import UsageError
from logquarry.format import index
from logquarry.layout_config import LayoutConfig
from tests.conformance.golden_facts import SOUND


@pytest.mark.parametrize("name", [*SOUND, "v3-transactions-odd", "v3-delay-unloaded"])
def test_golden_params(golden: Path, name: str) -> None:
    path = golden / name / "params.json"
    params = json.loads(path.read_text("utf-8"))
    config = StoreConfig.from_mapping(params)
    assert config == StoreConfig.from_file(path)
    size = params.get("mappedFileSizeCommitLog") or params["mapedFileSizeCommitLog"]
    assert config.mapped_file_size_commit_log == size
    assert config.index_shape == index.IndexShape(params["maxHashSlotNum"], params["maxIndexNum"])


def test_a_broker_conf(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(
        "# comment\n! another\n\nbrokerName = broker-a\nmapedFileSizeCommitLog=65536\n"
        "  maxIndexNum  =  70 \nmessageDelayLevel=1s 2s\nenableLmq=TRUE\nrocketmqHome=/a=b\n"
    )
    config = StoreConfig.from_file(path)
    assert config == StoreConfig(
        mapped_file_size_commit_log=65536,
        max_index_num=70,
        message_delay_level="1s 2s",
        enable_lmq=True,
    )
    assert config.delay_levels_ms == (1000, 2000)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("mappedFileSizeCommitLog", "mapped_file_size_commit_log"),
        ("mapedFileSizeCommitLog", "mapped_file_size_commit_log"),
        ("mapped_file_size_commit_log", "mapped_file_size_commit_log"),
        ("mapedFileSizeConsumeQueue", "mapped_file_size_consume_queue"),
        ("flushLeastPagesWhenWarmMapedFile", "flush_least_pages_when_warm_mapped_file"),
        ("maxHashSlotNum", "max_hash_slot_num"),
        ("maxMsgsNumBatch", "max_msgs_num_batch"),
        ("maxTransferCountOnMessageInMemory", "max_transfer_count_on_message_in_memory"),
        ("accessMessageInMemoryMaxRatio", "access_message_in_memory_max_ratio"),
    ],
)
def test_spellings(name: str, field: str) -> None:
    assert getattr(StoreConfig.from_mapping({name: 44}), field) == 44
    assert getattr(StoreConfig.from_mapping({name: " 44"}), field) == 44


def test_every_setting_is_known_by_its_name_in_rocketmq() -> None:
    for field in dataclasses.fields(StoreConfig):
        if field.name in ("broker_settings", "batch_topics"):
            continue
        first, *rest = field.name.split("_")
        camel = first + "".join(word.capitalize() for word in rest)
        chosen: dict[str, Any] = {
            "dialect": "3.1",
            "topic_check": "rocketmq-broker",
            "recovery": "rocketmq",
            "broker_role": "SLAVE",
            "flush_disk_type": "SYNC_FLUSH",
        }
        value: Any = chosen.get(
            field.name, {"bool": True, "bool | None": True, "str": "1s"}.get(str(field.type), 44)
        )
        assert getattr(StoreConfig.from_mapping({camel: value}), field.name) == value


def test_settings_that_decide_which_files_a_store_has_are_kept() -> None:
    config = StoreConfig.from_mapping({"storeType": "defaultRocksDB", "brokerName": "a"})
    assert config.broker_settings == (("storeType", "defaultRocksDB"),)


def test_settings_that_are_not_used_are_passed_over() -> None:
    assert StoreConfig.from_mapping({"brokerIP1": "::1", "": 1, "日本": None}) == StoreConfig()


@pytest.mark.parametrize(
    "values",
    [
        {"maxIndexNum": 0},
        {"maxIndexNum": -5},
        {"maxIndexNum": True},
        {"maxIndexNum": 1.5},
        {"maxIndexNum": "many"},
        {"maxIndexNum": ""},
        {"maxIndexNum": []},
        {"maxMsgsNumBatch": None},
        {"enableLmq": 1},
        {"enableLmq": "yes"},
        {"enableLmq": None},
        {"mappedFileSizeCommitLog": "1g"},
        {"syncFlushTimeout": -1},
    ],
    ids=str,
)
def test_values_that_cannot_be_meant(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))[:3]):
        StoreConfig.from_mapping(values)


@pytest.mark.parametrize("value", ["1" * 5_000, 10**5_000], ids=type)
def test_numbers_that_python_refuses_to_convert(value: object) -> None:
    with pytest.raises(UsageError, match=r"a (whole|longer) number"):
        StoreConfig.from_mapping({"syncFlushTimeout": value})


@pytest.mark.parametrize(
    "text", ["{", "[]", "{]", "no separator", '{"a":' * 100_000, "\ud800", '{"maxIndexNum":"x"}']
)
def test_files_that_cannot_be_understood(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError):
        StoreConfig.from_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        StoreConfig.from_file(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be read"):
        StoreConfig.from_file(tmp_path)
    with pytest.raises(UsageError, match="cannot be encoded"):
        StoreConfig.from_file("\ud800")  # a name that no file can have


def test_a_file_name_of_bytes(tmp_path: Path) -> None:
    """Every call that takes a path takes bytes too."""
    path = tmp_path / "sizes.json"
    path.write_text('{"maxIndexNum": 20}')
    config = StoreConfig.from_file(os.fsencode(path))  # type: ignore[arg-type]
    assert config.max_index_num == 20


@pytest.mark.parametrize(("size", "expected"), [(None, None), (20, 20), (21, 40), (1, 20)])
def test_queue_files_hold_whole_units(size: int | None, expected: int | None) -> None:
    assert LayoutConfig(mapped_file_size_consume_queue=size).queue_file_size == expected


def test_one_number_of_an_index_file_is_enough() -> None:
    assert LayoutConfig().index_shape is None
    assert LayoutConfig(max_index_num=9).index_shape == index.IndexShape(5_000_000, 9)
    assert LayoutConfig(max_hash_slot_num=9).index_shape == index.IndexShape(9, 20_000_000)


def test_bad_delay_levels_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="delay level"):
        print(StoreConfig(message_delay_level="1s soon").delay_levels_ms)


# Names in a broker.conf: settings of RocketMQ, typing errors, and unknown names.


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
    """Many names differ in a few letters from a setting that is used."""
    names = [name for name in broker_names() if name[0].islower()]
    assert len(names) > 400
    assert check_names(names, ["mappedFileSizeCommitLog"]) == []


def test_a_json_file_holds_an_object(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"maxIndexNumm": 3}')
    with pytest.raises(UsageError, match=r"c.json: .*Did you mean maxIndexNum\?"):
        StoreConfig.from_file(path)


@pytest.mark.parametrize(
    "name", ["dialect", "enabledAppendPropCRC", "recovery", "warmMappedFileEnable"]
)
@pytest.mark.parametrize("value", [10**5_000, [10**5_000]], ids=type)
def test_a_number_that_python_cannot_write(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{name}"):
        StoreConfig.from_mapping({name: value})


@pytest.mark.parametrize("text", ["flushDiskType=SYNC_FLUSH", '{"flushDiskType":"SYNC_FLUSH"}'])
def test_a_byte_order_mark_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(text, "utf-8-sig")
    with pytest.raises(UsageError, match="byte order mark"):
        StoreConfig.from_file(path)
