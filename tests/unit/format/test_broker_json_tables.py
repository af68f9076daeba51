"""Are the tables in config/ read and written as a broker's, and odd ones refused?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import broker_json
from logquarry.format.broker_json import TopicConfig

DECODERS = [
    broker_json.decode_delay_offsets,
    broker_json.decode_consumer_offsets,
    broker_json.decode_topics,
]
Decoder = Callable[[bytes | str], object]


@pytest.fixture
def config(golden: Path) -> Path:
    return golden / "real-broker" / "store" / "config"


def test_golden_consumer_offsets(config: Path) -> None:
    text = (config / broker_json.CONSUMER_OFFSET_FILE).read_text("utf-8")
    offsets = broker_json.decode_consumer_offsets(text)
    assert offsets["MainTopic", "cg_main"] == {0: 43, 1: 43, 2: 44, 3: 43}
    assert offsets["%RETRY%cg_main", "cg_main"] == {0: 18}
    assert broker_json.encode_consumer_offsets(offsets) == text


@pytest.mark.parametrize("name", ["real-broker", "delay-deliver"])
def test_golden_delay_offsets(golden: Path, name: str) -> None:
    path = golden / name / "store" / "config" / broker_json.DELAY_OFFSET_FILE
    offsets = broker_json.decode_delay_offsets(path.read_bytes())
    assert offsets
    assert all(1 <= level <= 18 for level in offsets)
    assert broker_json.encode_delay_offsets(offsets) == path.read_text("utf-8")


def test_golden_topics(config: Path) -> None:
    text = (config / broker_json.TOPICS_FILE).read_text("utf-8")
    topics = broker_json.decode_topics(text)
    assert topics["SCHEDULE_TOPIC_XXXX"] == TopicConfig("SCHEDULE_TOPIC_XXXX", 18, 18, 6, 0, False)
    assert broker_json.encode_topics(topics, counter=7, timestamp_ms=1795175848502) == text


WHOLE = st.integers(0, 1 << 62)
NAMES = st.text(min_size=1, max_size=8)


@given(st.dictionaries(st.integers(1, 18), WHOLE))
def test_delay_offsets_come_back(offsets: dict[int, int]) -> None:
    text = broker_json.encode_delay_offsets(offsets)
    assert broker_json.decode_delay_offsets(text) == offsets


@given(
    st.dictionaries(
        st.tuples(NAMES.filter(lambda name: "@" not in name), NAMES),
        st.dictionaries(st.integers(0, 20), WHOLE, max_size=3),
        max_size=4,
    )
)
def test_consumer_offsets_come_back(offsets: dict[tuple[str, str], dict[int, int]]) -> None:
    text = broker_json.encode_consumer_offsets(offsets)
    assert broker_json.decode_consumer_offsets(text) == offsets


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"offsetTable":null,"topicConfigTable":[]}',
        '{"offsetTable":{"a":1},"topicConfigTable":{"a":1}}',
        '{"offsetTable":{"a@b":{"x":1}},"topicConfigTable":{"a":{"perm":"x"}}}',
        '{"offsetTable":{"a@b":{0:1e999}},"topicConfigTable":{"a":{"perm":1e999}}}',
        '{"offsetTable":{"a@b":{0:1.5}},"topicConfigTable":{"a":{"perm":1.5}}}',
        '{"offsetTable":{"a@b":{0:NaN}},"topicConfigTable":{"a":{"perm":NaN}}}',
        '{"offsetTable":{"a@b":{0:[]}},"topicConfigTable":{"a":{"perm":[]}}}',
        '{"offsetTable":{"a@b":{0:null}},"topicConfigTable":{"a":{"perm":null}}}',
        '{"offsetTable":{"a@b":{0:true}},"topicConfigTable":{"a":{"perm":true}}}',
        '{"offsetTable":{"a@b":[]},"topicConfigTable":{"a":[]}}',
        '{"offsetTable":{1:{}},"topicConfigTable":{1:1}}',
        "\x00",
        "[" * 1000,
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else value.__name__,
)
def test_what_is_no_such_table_is_a_value_error(decode: Decoder, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


@pytest.mark.parametrize("decode", DECODERS)
@given(
    st.recursive(
        st.sampled_from(["0", "1", "-1", "1e999", "null", '"a"', "true", '"@"', "NaN", "{}"]),
        lambda inner: (
            st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
            | st.dictionaries(
                st.sampled_from(["0", "-1", '"a@b"', '"a"', '"perm"']), inner, max_size=3
            ).map(lambda table: "{" + ",".join(f"{k}:{v}" for k, v in table.items()) + "}")
        ),
        max_leaves=8,
    )
)
def test_any_document_is_read_or_a_value_error(decode: Decoder, table: str) -> None:
    with contextlib.suppress(ValueError):
        decode(f'{{"offsetTable":{table},"topicConfigTable":{table}}}')


def test_a_topic_without_some_entries() -> None:
    found = broker_json.decode_topics('{"topicConfigTable":{"t":{"perm":6}}}')
    assert found == {"t": TopicConfig("t", 0, 0, 6, 0, False)}


@pytest.mark.parametrize(
    ("value", "order"),
    [("true", True), ("false", False), ('"true"', True), ('"false"', False), ("null", False)],
)
def test_order_as_fastjson_reads_it(value: str, order: bool) -> None:
    found = broker_json.decode_topics(f'{{"topicConfigTable":{{"t":{{"order":{value}}}}}}}')
    assert found["t"].order is order


@pytest.mark.parametrize("value", ['"maybe"', "[]", "1.5"])
def test_an_order_that_is_no_flag_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="instead of true or false"):
        broker_json.decode_topics(f'{{"topicConfigTable":{{"t":{{"order":{value}}}}}}}')
