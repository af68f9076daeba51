"""Messages and results of puts release all that they hold, also when a C function made them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logquarry.message import Message
from logquarry.store.message_store import StoreWriter
from logquarry.write.put_result import PutResult

COUNT = 1_000


class Properties(UserDict[str, str]):
    """A mapping that can have a weak reference."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreWriter]:
    with StoreWriter.start(tmp_path / "store") as opened:
        yield opened


def test_a_message_releases_its_fields() -> None:
    body, properties = bytes(1_000), Properties(a="b")
    held, gone = sys.getrefcount(body), weakref.ref(properties)
    messages = [Message("t", body, properties=properties) for _ in range(COUNT)]
    assert sys.getrefcount(body) == held + COUNT
    del messages, properties
    gc.collect()
    assert sys.getrefcount(body) == held and gone() is None


def test_messages_and_results_have_the_hash_of_their_fields(store: StoreWriter) -> None:
    """Since Python 3.14, a tuple stores its hash, and a C function that makes one must say that the
    hash is not computed yet.
    """
    message, same = Message("t", b"x", tags="a"), Message(topic="t", body=b"x", tags="a")
    assert hash(message) == hash(same) == hash(tuple(message))
    result = store.put(message)
    assert hash(result) == hash(tuple(result))
    assert len({message, same, result, PutResult(*result)}) == 2


def test_a_result_releases_its_fields(store: StoreWriter) -> None:
    host = next(field for field in store.put(Message("t")) if isinstance(field, bytes))
    held = sys.getrefcount(host)
    results = [store.put(Message("t")) for _ in range(COUNT)]
    assert sys.getrefcount(host) == held + COUNT
    del results
    assert sys.getrefcount(host) == held


def test_released_objects_keep_no_reference_to_their_class(store: StoreWriter) -> None:
    before = sys.getrefcount(Message), sys.getrefcount(PutResult)
    for _ in range(COUNT):
        store.put(Message("t"))._replace(size=1)
    assert (sys.getrefcount(Message), sys.getrefcount(PutResult)) == before


def test_a_subclass_has_attributes_a_finalizer_and_cycles() -> None:
    ended: list[Any] = []

    class Own(Message):
        def __del__(self) -> None:
            ended.append(self.topic)

    held = sys.getrefcount(Own)
    for number in range(COUNT):
        made = Own(f"t{number}")
        if number % 2:
            made.own = made  # type: ignore[attr-defined]
        del made
    gc.collect()
    assert sorted(ended) == sorted(f"t{number}" for number in range(COUNT))
    assert sys.getrefcount(Own) == held


def test_a_cycle_through_a_message_is_collected() -> None:
    properties = Properties(a="b")
    properties.message = Message("t", properties=properties)  # type: ignore[attr-defined]
    gone = weakref.ref(properties)
    del properties
    gc.collect()
    assert gone() is None
