"""Texts that are objects of a subclass of str, such as the members of an enumeration."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from tests.helpers.broker_client import SMALL


class Name(str, enum.Enum):  # noqa: UP042 - StrEnum has another str()
    TOPIC = "orders"
    GROUP = "billing"
    TAG = "paid"
    KEY = "o-1"
    BROKER = "broker-a"


def message(**changes: Any) -> lq.Message:
    fields = {"tags": Name.TAG, "keys": Name.KEY, "properties": {Name.KEY: Name.TAG}}
    return lq.Message(Name.TOPIC, b"x", **fields | changes)


@pytest.mark.parametrize(
    "put",
    [
        lambda store: store.put(message()),
        lambda store: store.put(message(properties=None)),
        lambda store: store.put(message(keys=[Name.KEY])),
        lambda store: store.put_async(message()).result(),
        lambda store: store.put_batch([message()]),
        lambda store: store.put_many([message()]),
        lambda store: store.put(lq.Message(Name.TOPIC, b"x", properties_string=Name.KEY)),
    ],
)
def test_messages(tmp_path: Path, put: Any) -> None:
    path = tmp_path / "store"
    with lq.MessageStore.open(path, mode="rw", config=SMALL, broker=Name.BROKER) as store:
        put(store)
        assert store.wait_dispatched(timeout=20)
        (found,) = store.get(Name.TOPIC, 0, 0).messages
        assert list(store.scan(Name.TOPIC)) == [found]
        assert f"{found.topic} {found.broker}" == "orders broker-a"
        assert "Name." not in str(found.properties)
        if found.properties:
            assert found.keys == "o-1"
            assert store.get(Name.TOPIC, 0, 0, tag=Name.TAG).messages == (found,)
            assert store.query(Name.TOPIC, Name.KEY) == [found]


def test_consumers(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        store.put(message())
        assert store.wait_dispatched(timeout=20)
        with store.consumer(Name.GROUP, Name.TOPIC, tags=Name.TAG) as consumer:
            (found,) = consumer.poll(timeout=20)
            assert consumer.group == "billing" and type(consumer.group) is str
            consumer.retry(found)
            consumer.commit()
        with store.transaction(message(keys=None), group=Name.GROUP) as transaction:
            transaction.commit()
        assert ("orders", "billing") in store.consumer_offsets.groups()
        assert [topic for topic in store.topics if "Name" in topic] == []
        assert [m.properties.get("PGROUP") for m in store.scan("orders")][1] == "billing"
    text = (path / "config/consumerOffset.json").read_text()
    assert "orders@billing" in text and "Name" not in text
