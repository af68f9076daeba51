"""Reference and kernel find the same keys in the same frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import frame, index, java
from logquarry.format.frame import Frame
from logquarry.log.codec import Window
from logquarry.log.follow import index_keys
from logquarry.testing import strategies
from tests.helpers.twins import both, sound_rows


def found(window: Window) -> list[list[int]]:
    rows = sound_rows(window)
    fast, plain = both(lambda: [part.tolist() for part in index_keys(window, rows)])
    assert fast == plain
    signed, plain = both(lambda: [part.tolist() for part in index_keys(window, rows, raw=True)])
    assert signed == plain
    assert signed[1] == fast[1]
    assert [0 if value == java.INT_MIN else abs(value) for value in signed[0]] == fast[0]
    tagged, plain = both(lambda: [part.tolist() for part in index_keys(window, rows, tags=True)])
    assert tagged == plain
    assert len(tagged[0]) >= len(fast[0])
    return fast


@given(strategies.logs())
def test_keys_of_any_log(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        found(Window.of(data, base))


words = st.text("ab \u00e9\u4e3b\U0001f600#", max_size=9)


@given(st.lists(st.tuples(words, words, words), max_size=5))
def test_the_tag_follows_the_keys(messages: list[tuple[str, str, str]]) -> None:
    data, expected = b"", []
    for number, (uniq, keys, tag) in enumerate(messages):
        properties = f"TAGS\x01{tag}\x02KEYS\x01{keys}\x02UNIQ_KEY\x01{uniq}\x02".encode()
        made = Frame(b"t", properties=properties, physical_offset=len(data))
        data += frame.encode(made.with_crc())
        all_keys = [uniq] * bool(uniq) + [key for key in keys.split(" ") if key]
        all_keys += [f"T#{tag}"] * bool(tag)
        expected += [(index.key_hash("t", key), number) for key in all_keys]
    window = Window.of(data, 0)
    rows = sound_rows(window)
    hashes, numbers = index_keys(window, rows, tags=True)
    assert list(zip(hashes.tolist(), numbers.tolist(), strict=True)) == expected


@given(st.lists(st.tuples(st.sampled_from(["t", "\u4e3b\u9898"]), words, words), max_size=5))
def test_keys_that_are_words(messages: list[tuple[str, str, str]]) -> None:
    data, expected = b"", []
    for number, (topic, uniq, keys) in enumerate(messages):
        properties = f"KEYS\x01{keys}\x02UNIQ_KEY\x01{uniq}".encode()
        made = Frame(topic.encode(), properties=properties, physical_offset=len(data))
        data += frame.encode(made.with_crc())
        all_keys = [uniq] * bool(uniq) + [key for key in keys.split(" ") if key]
        expected += [(index.key_hash(topic, key), number) for key in all_keys]
    hashes, numbers = found(Window.of(data, 0))
    assert list(zip(hashes, numbers, strict=True)) == expected


@pytest.mark.parametrize("topic", [b"\xff", b"t"])
def test_bytes_that_are_no_text(topic: bytes) -> None:
    properties = b"KEYS\x01a\xffb c" if topic == b"t" else b"KEYS\x01a b"
    data = frame.encode(Frame(topic, properties=properties).with_crc())
    assert len(found(Window.of(data, 0))[0]) == 2


def test_a_hash_that_has_no_absolute_value() -> None:
    # The hash is -2^31, which RocketMQ replaces by 0.
    key = _key_behind("t#", java.INT_MIN)
    assert java.hash_code(f"t#{key}") == java.INT_MIN
    assert index.key_hash("t", key) == 0
    data = frame.encode(Frame(b"t", properties=f"KEYS\x01{key}".encode()).with_crc())
    assert found(Window.of(data, 0)) == [[0], [0]]


def _key_behind(prefix: str, wanted: int) -> str:
    """Five characters after which a text has a wanted hash: its digits in base 31."""
    least = ord("@")
    rest = wanted - java.hash_code(prefix) * 31**5 - sum(least * 31**n for n in range(4))
    rest = rest % (1 << 32) + (1 << 32)
    digits = [rest // 31**4, *(rest // 31**n % 31 + least for n in (3, 2, 1, 0))]
    return "".join(map(chr, digits))
