"""The put of one message writes what the reference writes, compiled and interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry import compiled
from logquarry.errors import LogquarryError
from logquarry.format import batch
from logquarry.format.batch import BatchItem
from logquarry.message import DEFAULT_BORN_HOST, Message
from logquarry.write import commit_log_writer
from tests.property.test_put_many_twins import Log, fields, hosts, ints, maps, strings, text

SECONDS = 60


def outcomes(messages: list[Message], *, by_reference: bool, **settings: Any) -> Any:
    """The log after single puts, and all that each of them returned or raised."""
    with tempfile.TemporaryDirectory() as root:
        log = Log(root, **settings)
        found: list[object] = []
        for message in messages:
            try:
                if by_reference:
                    result, wait = log.writer.append_reference(message)
                    result = log.settle(result, wait)
                else:
                    result = log.writer.put(message)
                found.append(result._replace(elapsed_ms=0.0, page_cache_ms=0.0))
            except LogquarryError as error:
                found.append((type(error), str(error), getattr(error, "status", None)))
        return log.state(), found, log.waited


@given(
    st.lists(fields(tame=True) | fields(tame=False), max_size=12),
    st.sampled_from([{}, {"topic_check": "rocketmq-broker"}, {"enable_multi_dispatch": True}]),
    st.sampled_from([0, 150]),
)
def test_any_messages(found: list[dict[str, Any]], settings: dict[str, Any], most: int) -> None:
    messages = [Message(**given) for given in found]
    if most:
        settings = settings | {"max_message_size": most}
    put = outcomes(messages, by_reference=False, **settings)
    assert put == outcomes(messages, by_reference=True, **settings)


@given(st.data())
def test_any_properties(data: st.DataObject) -> None:
    """Many messages of one topic: each field at the limits of its width, and beyond them."""
    numbers = st.sampled_from([-(2**63), -(2**31) - 1, -(2**31), 0, 2**31 - 1, 2**31, 2**63 - 1])
    long = text | st.integers(32_700, 32_800).map("k".__mul__) | st.just("\ud800")
    given = [
        Message(
            "t",
            data.draw(st.binary(max_size=20)),
            queue_id=data.draw(numbers),
            keys=data.draw(st.none() | long),
            tags=data.draw(st.none() | long),
            properties=data.draw(st.none() | maps),
            flag=data.draw(numbers),
            born_timestamp=data.draw(st.none() | numbers),
            born_host=data.draw(hosts),  # type: ignore[arg-type]
            reconsume_times=data.draw(numbers),
        )
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    assert outcomes(given, by_reference=False) == outcomes(given, by_reference=True)


def batch_outcomes(batches: list[dict[str, Any]], *, by_reference: bool, **settings: Any) -> Any:
    """The log after puts of batches, and all that each of them returned or raised."""
    with tempfile.TemporaryDirectory() as root:
        log = Log(root, **settings)
        found: list[object] = []
        for given in batches:
            try:
                if by_reference:
                    arguments = {"messages": None, "wire": None, "message": None} | given
                    result, wait = log.writer.append_batch_reference(**arguments)
                    result = log.settle(result, wait)
                else:
                    result = log.writer.put_batch(**given)
                found.append(result._replace(elapsed_ms=0.0, page_cache_ms=0.0))
            except LogquarryError as error:
                found.append((type(error), str(error), getattr(error, "status", None)))
        return log.state(), found, log.waited


alike = fields(tame=True) | st.fixed_dictionaries(
    {"topic": st.just("t")},
    optional={"body": st.binary(max_size=20), "tags": text, "keys": text, "flag": ints},
)
wires = st.lists(
    st.builds(
        BatchItem,
        body=st.binary(max_size=40),
        properties=strings.map(lambda made: made.encode("utf-8", "replace")),
        flag=ints,
    ),
    max_size=70,
).map(batch.encode)
cut = st.tuples(wires, st.integers(0, 100)).map(lambda drawn: drawn[0][: -drawn[1] or None])
batches = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(alike.map(lambda d: Message(**d)), max_size=4)}),
    st.fixed_dictionaries(
        {
            "wire": wires | cut,
            "message": (st.just({"topic": "t"}) | fields(tame=False)).map(lambda d: Message(**d)),
        }
    ),
)


@given(st.lists(batches, max_size=4), st.sampled_from([{}, {"batch_topics": frozenset("t")}]))
def test_any_batches(found: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    put = batch_outcomes(found, by_reference=False, **settings)
    assert put == batch_outcomes(found, by_reference=True, **settings)


def test_common_batches_do_not_need_the_reference(tmp_path: Any) -> None:
    log = Log(str(tmp_path))
    log.writer.put(Message("t"))
    with mock.patch.object(log.writer, "append_batch_reference", side_effect=AssertionError):
        for given in (
            {"messages": [Message("t", b"1", keys="k"), Message("t", b"2", tags="a", keys="k")]},
            {"wire": batch.encode([BatchItem(b"1", b"k\x01v", 3)]), "message": Message("t")},
        ):
            if compiled.is_compiled():
                log.writer.put_batch(**given)
    assert log.offsets == {("t", 0): 4 if compiled.is_compiled() else 1}


def made(make: Any) -> Any:
    try:
        message = make()
    except (LogquarryError, TypeError) as error:
        return type(error), str(error)
    return type(message), tuple(message), [type(value) for value in message]


ANY = st.sampled_from(
    [
        *("t", "", DEFAULT_BORN_HOST, "[fe80::1]:9", b"", b"b", bytearray(b"x"), memoryview(b"y")),
        *(0, 1, 2**70, 1.5, True, False, None, {}, {"a": "b"}, ["k", "l"], ["a b"], object),
    ]
)


@given(st.lists(ANY, max_size=3), st.dictionaries(st.sampled_from((*Message._fields, "x")), ANY))
def test_any_call_of_the_class(values: list[Any], named: dict[str, Any]) -> None:
    assert made(lambda: Message(*values, **named)) == made(
        lambda: Message.__new__(Message, *values, **named)
    )


@given(st.lists(st.tuples(ANY, ANY), max_size=6))
def test_any_values_in_the_same_calls(found: list[tuple[Any, Any]]) -> None:
    # Compiled, a call uses the places of the names of the call before if both calls have the same
    # names. The first two calls have the same names, but another number of values without a name.
    of = partial(Message.__new__, Message)
    for one, other in found:
        for _ in range(2):
            assert made(lambda a=one, b=other: Message("t", queue_id=b, keys=a)) == made(
                lambda a=one, b=other: of("t", queue_id=b, keys=a)
            )
        for _ in range(2):
            assert made(lambda a=one, b=other: Message("t", b"b", queue_id=b, keys=a)) == made(
                lambda a=one, b=other: of("t", b"b", queue_id=b, keys=a)
            )
        for _ in range(2):
            assert made(lambda a=one, b=other: Message(topic=b, body=a)) == made(
                lambda a=one, b=other: of(topic=b, body=a)
            )


def test_a_subclass_is_made_as_one() -> None:
    class Own(Message):
        def __new__(cls, topic: str) -> Own:
            return super().__new__(cls, topic, b"own")

    assert type(Own("t")) is Own and Own("t").body == b"own"


def test_the_log_is_left_open_after_a_refusal(tmp_path: Any) -> None:
    """Another thread can put after a put that was refused in the middle."""
    log = Log(str(tmp_path))
    log.writer.put(Message("t"))
    log.writer.bar = "it is closed"
    with pytest.raises(LogquarryError):
        log.writer.put(Message("t"))
    log.writer.bar = None
    thread = threading.Thread(target=lambda: log.writer.put(Message("t")), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert log.offsets == {("t", 0): 2}


@pytest.mark.skipif(not compiled.is_compiled(), reason="the modules are not compiled")
def test_interpreted() -> None:
    """This file's other tests, and those of the writer, pass with the modules interpreted."""
    assert not str(commit_log_writer.__file__).endswith(".py")
    tests = ["tests/property/test_put_path_twins.py", "tests/unit/write/test_append.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        env={**os.environ, compiled.SWITCH: "off"},
        capture_output=True,
        text=True,
        timeout=5 * SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout, "the modules ran compiled"
