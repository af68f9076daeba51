"""Is fastjson's dialect read and written, and nothing but ValueError raised on anything else?"""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import broker_json
from tests.helpers.java_vectors import vectors


def keys_as_numbers(value: Any) -> Any:
    """The document with its number keys, which the decoder turns into text, as numbers again."""
    if isinstance(value, dict):
        return {
            int(key) if key.lstrip("-").isdigit() else key: keys_as_numbers(item)
            for key, item in value.items()
        }
    return [keys_as_numbers(item) for item in value] if isinstance(value, list) else value


def test_golden_files_decode_and_encode_to_themselves(golden: Path) -> None:
    files = [p for p in golden.rglob("config/*") if p.suffix in (".json", ".bak")]
    assert len(files) > 8
    for path in files:
        text = path.read_text("utf-8")
        assert broker_json.encode(keys_as_numbers(broker_json.decode(text))) == text, path


@pytest.mark.parametrize(("text", "expected"), vectors("fastjson"))
def test_strings_are_escaped_as_fastjson_does(text: str, expected: str) -> None:
    assert broker_json.encode({text: 1}) == expected
    assert broker_json.decode(expected) == {text: 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{0:30}", {"0": 30}),
        ("{-1:30,2 :4}", {"-1": 30, "2": 4}),
        ('{"a":{0:1,1:2},"b":[{3:4}]}', {"a": {"0": 1, "1": 2}, "b": [{"3": 4}]}),
        ("{$ref:1,abc_d:2}", {"$ref": 1, "abc_d": 2}),
        ('{"x":"{0:1},2:3"}', {"x": "{0:1},2:3"}),
        ('{"x\\"y{1:2}":",3:"}', {'x"y{1:2}': ",3:"}),
        ('[1,2,{"a":null}]', [1, 2, {"a": None}]),
        ('"text"', "text"),
    ],
)
def test_bare_keys(text: str, expected: object) -> None:
    assert broker_json.decode(text) == expected
    assert broker_json.decode(text.encode()) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_what_was_encoded_comes_back(document: Any) -> None:
    assert broker_json.decode(broker_json.encode(document)) == document
    assert json.loads(broker_json.encode(document)) == document


@given(JSON)
def test_plain_json_is_read(document: Any) -> None:
    assert broker_json.decode(json.dumps(document)) == document


@given(st.dictionaries(st.integers(-(1 << 40), 1 << 40), st.integers(), min_size=1, max_size=5))
def test_integer_keys_come_back_as_text(table: dict[int, int]) -> None:
    text = broker_json.encode(table)
    assert broker_json.decode(text) == {str(key): value for key, value in table.items()}
    assert text.count("\n") == 1


@given(st.text('{}[]":,0a\\ \n\u2028$-', max_size=40) | st.text(max_size=40))
def test_garbage_is_refused_as_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        broker_json.decode(text)


@given(st.binary(max_size=40))
def test_garbage_bytes_too(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        broker_json.decode(data)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "]" * 1000 + "[" * 100_000,
        '{"a":' * 50_000,
        "[" * 65 + "]" * 65,
        '"]]]]]]]]' + "[" * 1000,
        '"\\\n]]]]]]]]"' + "[" * 1000,
        "1" * 5000,
        '{"a":' + "9" * 100_000 + "}",
    ],
    ids=lambda text: text[:6],
)
def test_deep_and_long_documents_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        broker_json.decode(text)


def test_the_deepest_document_that_is_read() -> None:
    deepest = "[" * broker_json.MAX_NESTING + "]" * broker_json.MAX_NESTING
    assert json.dumps(broker_json.decode(deepest)) == deepest
    many = "[" + ",".join(["[[]]"] * 500) + "]"
    assert len(broker_json.decode(many)) == 500


@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 200_000,
        '\\"' * 200_000,
        "{" + " " * 200_000,
        "{" + "a" * 200_000,
        ",a" * 100_000,
        "{ " * 100_000,
        '"' * 200_001,
    ],
    ids=lambda text: text[:3],
)
def test_hostile_text_takes_no_long_time(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"."):
        broker_json.decode(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"t":{1:2}}', '{"t":{0:9}}'),
        ('{t:[1,{"t":2}], "b":3}', '{t:{0:9}, "b":3}'),
        ('{"a":{"t":1},"x":"}\\",{t:","t" : 1 }', '{"a":{"t":1},"x":"}\\",{t:","t" :{0:9}}'),
        ('{"t":{1:2},"b":3,"t":{1:4}}', '{"t":{1:2},"b":3,"t":{0:9}}'),
        (r'{"\u0074":{1:2}}', r'{"\u0074":{0:9}}'),
    ],
)
def test_replacing_a_member(document: str, expected: str) -> None:
    assert broker_json.replace_member(document, "t", '{"t":{0:9}}') == expected
    assert broker_json.decode(expected)["t"] == {"0": 9}


@pytest.mark.parametrize("document", ["{}", '{"a":{"t":1}}', "[]", '"t"', '{"t"', '{"t":1'])
def test_replacing_a_member_that_is_not_there(document: str) -> None:
    with pytest.raises(ValueError, match="no member"):
        broker_json.replace_member(document, "t", '{"t":1}')


def test_numbers_that_json_lacks() -> None:
    # RocketMQ's fastjson reads NaN as null. A document that a broker can read must not become one
    # that a writer cannot write again.
    assert broker_json.decode('{"a":NaN,1:[NaN]}') == {"a": None, "1": [None]}
    assert broker_json.encode(broker_json.decode('{"a":NaN}')) == '{\n\t"a":null\n}'


@pytest.mark.parametrize(
    "text", ["Infinity", "-Infinity", "1e999", "{1:-1e999}", "1" + "0" * 400 + ".0"]
)
def test_infinite_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        broker_json.decode(text)


@pytest.mark.parametrize("text", ['{"x":"%s"}', '{0:1,"x":"%s"}', '"%s'])
def test_a_long_string_needs_little_memory(text: str) -> None:
    document = (text % ("a" * 1_000_000)).encode()
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            broker_json.decode(document)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(document)
    finally:
        tracemalloc.stop()


def nesting(text: str) -> int:
    """How deeply brackets are nested, counted one after the other."""
    depth = deepest = 0
    in_string = escaped = False
    for sign in text:
        if in_string:
            in_string, escaped = escaped or sign != '"', sign == "\\" and not escaped
        elif sign == '"':
            in_string = True
        elif sign in "{[}]":
            depth += 1 if sign in "{[" else -1
            deepest = max(deepest, depth)
    return deepest


@given(st.lists(st.sampled_from(["{", "}", "[", "]", '"', "\\", "a", "é", '{0:"', "}}"])))
def test_the_nesting_of_any_text(parts: list[str]) -> None:
    text = "".join(parts)
    assert broker_json._nesting(text) == nesting(text)


@pytest.mark.parametrize("brackets", ["{}", "[]"])
def test_the_limit_of_nesting(brackets: str) -> None:
    opening, closing = brackets[0], brackets[1]
    for depth in (63, 64, 65, 66, 1_000):
        text = opening * depth + closing * depth
        assert (broker_json._nesting(text) > broker_json.MAX_NESTING) is (depth > 64)


def test_a_document_of_many_small_tables_takes_little_memory() -> None:
    """As the offsets of many groups: of the document nothing is left when the last is converted."""
    table = ",".join(f'"a-topic@a-group-{number}":{{0:{number}}}' for number in range(20_000))
    text = f'{{"offsetTable":{{{table}}}}}'
    tracemalloc.start()
    found = broker_json.decode_consumer_offsets(text)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 20_000 and found["a-topic", "a-group-7"] == {0: 7}
    assert len({id(topic) for topic, _ in found}) == 1
    assert peak < 2 * size
