"""Bytes of the log by physical offset, for replication: also across files and at the log's end."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from tests.helpers.small_store import config as small_config


def test_bytes_of_the_log(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=small_config()) as store:
        size = store.roll_next_file(0)
        sent = [store.put(lq.Message("t", bytes(size // 3))) for _ in range(5)]
        assert store.roll_next_file(size - 1) == size < store.roll_next_file(size)
        last, end = sent[-1], store.max_offset
        data = store.get_data(0, end + 1)
        assert len(data) == end > size
        with lq.MessageStore.open(tmp_path / "s") as reader:
            assert reader.get_data(0, end) == data
            for one in sent:
                at = one.physical_offset
                assert reader.message_size_at(at) == store.message_size_at(at) == one.size
                assert reader.get_data(at, one.size) == data[at : at + one.size]
            assert reader.get_data(end, 10) == b""
            for call in (reader.message_size_at, lambda at: reader.get_data(at + 1, 1)):
                with pytest.raises(lq.errors.MessageNotFound):
                    call(end)
            with pytest.raises(lq.errors.MessageNotFound):
                reader.message_size_at(last.physical_offset + 1)
