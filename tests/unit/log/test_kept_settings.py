from __future__ import annotations

import json

import pytest

from logquarry.config import StoreConfig
from logquarry.log import kept_settings

CONFIG = StoreConfig(
    dialect="4.9",
    mapped_file_size_commit_log=4_096,
    mapped_file_size_consume_queue=400,
    max_hash_slot_num=50,
    max_index_num=200,
    enable_multi_dispatch=True,
    message_delay_level="1s 7s",
    flush_disk_type="SYNC_FLUSH",
)


def test_what_is_recorded_comes_back() -> None:
    found = kept_settings.decode(kept_settings.encode(CONFIG))
    assert found == {
        "dialect": "4.9",
        "mapped_file_size_commit_log": 4_096,
        "mapped_file_size_consume_queue": 400,
        "max_hash_slot_num": 50,
        "max_index_num": 200,
        "enable_multi_dispatch": True,
        "message_delay_level": "1s 7s",
    }


def test_a_later_version_may_know_more_settings() -> None:
    document = json.loads(kept_settings.encode(CONFIG))
    document["settings"]["another"] = 1
    assert "another" not in kept_settings.decode(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_index_num", "many"),
        ("max_index_num", -1),
        ("enable_lmq", 1),
        ("dialect", "5"),
        ("message_delay_level", "x"),
    ],
)
def test_values_that_no_writer_records(name: str, value: object) -> None:
    document = {"version": 1, "settings": {name: value}}
    with pytest.raises(ValueError, match=r"\w"):
        kept_settings.decode(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"version": 2, "settings": {}}', b"\xff"])
def test_bytes_that_are_no_record(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w|^$"):
        kept_settings.decode(data)
