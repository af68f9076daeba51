"""Does a message have the values that RocketMQ gave it?"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given

from logquarry.errors import DecompressionError
from logquarry.format import sys_flag
from logquarry.format.frame import Frame
from logquarry.log import batches
from logquarry.log.columns import Decoding
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader
from logquarry.read.log_end import log_bound
from logquarry.stored_message import JSON_NAMES, StoredMessage
from logquarry.testing import strategies
from tests.conformance.golden_facts import OUR_NAMES, SOUND, Scenario

SAME = OUR_NAMES | {
    "propertiesString": "properties_string",
    "keys": "keys",
    "uniqKey": "uniq_key",
}


@pytest.mark.parametrize("name", SOUND)
def test_golden_messages(golden: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    layout = StoreLayout.open(scenario.store)
    events = LogReader(layout, bound=log_bound(layout)).events()
    decoding = Decoding(broker="b", delay_levels_ms=scenario.config.delay_levels_ms)
    messages = list(batches.messages(batches.sound_runs(events, "fail"), decoding))
    assert len(messages) == len(scenario.expected)
    for message, expected in zip(messages, scenario.expected, strict=True):
        found = message.to_json()
        assert list(found)[: len(JSON_NAMES)] == list(JSON_NAMES)
        assert json.loads(json.dumps(found)) == found
        for theirs, ours in SAME.items():
            # Java's dispatcher has "" for the keys of a message without any properties.
            wanted = None if theirs == "keys" and not expected[theirs] else expected[theirs]
            assert found[ours] == wanted, ours
        assert found["born_host"].replace("[", "").replace("]", "") == expected["bornHost"].replace(
            "[", ""
        ).replace("]", "")
        assert found["body"] == expected["body"]
        assert found["tags"] == expected["properties"].get("TAGS")
        assert found["broker"] == "b"
        assert message.is_dispatched == (expected["sysFlag"] & 0xC in (0, 8))


@given(strategies.frames())
def test_any_message_as_json(item: Frame) -> None:
    message = StoredMessage(item)
    found = message.to_json(body=b"other")
    assert json.loads(json.dumps(found)) == found
    assert base64.b64decode(found["body"]) == b"other"
    if "properties_base64" in found:
        assert base64.b64decode(found["properties_base64"]) == item.properties
    else:
        assert found["properties_string"].encode() == item.properties
    assert repr(message).startswith("StoredMessage(")


def test_messages_are_equal_by_their_frames() -> None:
    one, same = (StoredMessage(Frame(topic=b"t"), broker=name) for name in "ab")
    other = StoredMessage(Frame(topic=b"t", queue_id=1))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "t"


def test_content() -> None:
    import zlib

    packed = Frame(topic=b"t", body=zlib.compress(b"text"), sys_flag=sys_flag.COMPRESSED)
    assert StoredMessage(packed).content() == b"text"
    assert StoredMessage(Frame(topic=b"t", body=b"text")).content() == b"text"
    with pytest.raises(DecompressionError):
        StoredMessage(Frame(topic=b"t", body=b"text", sys_flag=1)).content()
    with pytest.raises(DecompressionError):
        StoredMessage(packed).content(limit=3)
