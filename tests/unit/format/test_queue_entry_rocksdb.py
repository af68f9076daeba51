"""Keys of queues in RocksDB, as a broker writes them."""

from __future__ import annotations

import pytest

from logquarry.format import queue_entry as table


def test_keys_are_those_of_a_broker() -> None:
    assert table.entry_key("Tx", 3, 5) == bytes.fromhex(
        "00000002 01 5478 01 00000003 01 0000000000000005"
    )
    assert table.bound_key("Tx", table.MAX, 3) == bytes.fromhex(
        "00000002 01 5478 01 6d6178 01 00000003"
    )
    assert table.DISPATCHED == b"\0\0\0\x10\x01CHECKPOINT_TOPIC\x01max\x01\0\0\0\0"
    assert (table.ENTRY.size, table.BOUND.size, table.DISPATCHED_END.size) == (28, 16, 8)


@pytest.mark.parametrize("topic", ["", "Tx", "%RETRY%g", "a\x01max\x01", "Größe"])
@pytest.mark.parametrize("which", [table.MIN, table.MAX])
def test_bound_keys_round_trip(topic: str, which: bytes) -> None:
    key = table.bound_key(topic, which, 7)
    assert table.decode_bound_key(key) == (topic, which, 7)
    assert table.decode_bound_key(key[:-1]) is None
    assert table.decode_bound_key(key.replace(which, b"mid")) is None
    assert table.decode_bound_key(b"") is None


def test_keys_of_a_queue_are_in_the_order_of_its_offsets() -> None:
    keys = [table.entry_key("T", 1, offset) for offset in (0, 1, 255, 256, 1 << 40)]
    assert keys == sorted(keys)
    assert all(key.startswith(table.queue_prefix("T", 1)) for key in keys)
