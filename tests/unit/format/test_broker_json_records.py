"""The tables of ``config/`` as records in RocksDB: keys must have their whole names."""

from __future__ import annotations

import pytest

from logquarry.format import broker_json
from logquarry.format.broker_json import CONSUMER_OFFSET_FILE, TOPICS_FILE


@pytest.mark.parametrize("name", [b"", b"\0", b"\0\2", b"\0\6short", b"\0\5short?"])
def test_a_key_in_rocksdb_has_its_whole_name(name: bytes) -> None:
    (prefix,) = broker_json.prefixes(TOPICS_FILE, 2)
    items = [(prefix + b"\0\5whole", b"\1{}")]
    assert b"whole" in broker_json.document(TOPICS_FILE, items, version=2)
    items.append((prefix + name, b"\1{}"))
    with pytest.raises(ValueError, match=r"the key ends in|is not JSON"):
        broker_json.document(TOPICS_FILE, items, version=2)


def test_the_key_of_an_offset_has_its_whole_names() -> None:
    prefix = broker_json.prefixes(CONSUMER_OFFSET_FILE, 2)[0]
    for key in (b"\0\5group", b"\0\5group\1\0\5top", b"\0\7group\1"):
        with pytest.raises(ValueError, match="the key ends in"):
            broker_json.document(CONSUMER_OFFSET_FILE, [(prefix + key, bytes(8))], version=2)
