"""A read through queues and index gives the messages that a filter over the whole log gives."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log import batches
from logquarry.log.batches import MessageFilter
from logquarry.log.columns import Decoding
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader
from logquarry.read import selection
from logquarry.read.log_end import log_bound
from logquarry.read.selection import Selection, filter_of, plan_read, read_in_order, read_part
from logquarry.stored_message import StoredMessage
from tests.helpers.files import bytes_of
from tests.helpers.memory_stores import MemoryFileSystem

STORES = [
    "batch/store",
    "clean-restart/base/store",
    "clean-restart/retention/store",
    "delay/store",
    "delay-deliver/store",
    "multidispatch/store",
    "real-broker/store",
    "sysflags/store",
]


@cache
def layout_of(path: Path) -> StoreLayout:
    return StoreLayout.open(path)


@cache
def all_messages(path: Path) -> tuple[StoredMessage, ...]:
    layout = layout_of(path)
    events = LogReader(layout, bound=log_bound(layout)).events()
    return tuple(batches.messages(batches.sound_runs(events, "fail"), Decoding()))


def passes(message: StoredMessage, wanted: Selection) -> bool:
    """The same conditions, written in the simplest way."""
    f = wanted.wanted
    queue = (message.topic, message.queue_id)
    first, stop = (f.queue_ranges or {}).get(queue, (0, None))
    words = {message.uniq_key, *(message.keys or "").split(" ")}
    return all(
        (
            wanted.start_offset is None or message.physical_offset >= wanted.start_offset,
            wanted.stop_offset is None or message.physical_offset < wanted.stop_offset,
            f.topics is None or message.topic in f.topics,
            f.topic_pattern is None or re.fullmatch(f.topic_pattern, message.topic),
            f.queue_ids is None or message.queue_id in f.queue_ids,
            f.queues is None or queue in f.queues,
            f.tags is None or message.tags in f.tags,
            f.keys is None or words & f.keys,
            f.since_ms is None or message.store_timestamp >= f.since_ms,
            f.until_ms is None or message.store_timestamp < f.until_ms,
            f.queue_offsets is None
            or f.queue_offsets[0] <= message.queue_offset < f.queue_offsets[1],
            f.queue_ranges is None
            or queue not in f.queue_ranges
            or (message.queue_offset >= first and (stop is None or message.queue_offset < stop)),
            f.grep is None or re.search(f.grep.encode(), message.body),
        )
    )


@st.composite
def selections(draw: st.DrawFn, messages: tuple[StoredMessage, ...]) -> Selection:
    """Conditions; most match some of the messages."""
    one = st.sampled_from(messages)
    times = one.map(lambda m: m.store_timestamp)
    offsets = one.map(lambda m: m.physical_offset) | st.integers(0, messages[-1].physical_offset)
    keys = st.sampled_from(
        [w for m in messages for w in [m.uniq_key, *(m.keys or "").split(" ")] if w] or ["none"]
    )
    ranges = st.tuples(st.integers(0, 20), st.none() | st.integers(0, 40))
    parts: dict[str, st.SearchStrategy[Any]] = {
        "topics": st.frozensets(
            one.map(lambda m: m.topic) | st.just("nowhere"), min_size=1, max_size=2
        ),
        "topic_pattern": st.sampled_from([".*", ".*A", "[A-Z].*[0-9a-z]", "nowhere"]),
        "queue_ids": st.frozensets(st.integers(0, 3), min_size=1, max_size=2),
        "queues": st.frozensets(one.map(lambda m: (m.topic, m.queue_id)), max_size=2),
        "tags": st.frozensets(
            st.sampled_from(["TagA", "TagB", "标签", "x"]), min_size=1, max_size=2
        ),
        "keys": st.frozensets(keys, min_size=1, max_size=3),
        "since_ms": times,
        "until_ms": times,
        "queue_offsets": st.tuples(st.integers(0, 20), st.integers(0, 60)),
        "queue_ranges": st.dictionaries(
            one.map(lambda m: (m.topic, m.queue_id)), ranges, max_size=3
        ),
        "grep": st.sampled_from(["abc", "[xyz]{2}", "nowhere to be found"]),
    }
    names = draw(st.lists(st.sampled_from(sorted(parts)), max_size=3, unique=True))
    values = {name: draw(parts[name]) for name in names}
    if values.keys() >= {"since_ms", "until_ms"}:
        values["since_ms"], values["until_ms"] = sorted((values["since_ms"], values["until_ms"]))
    return Selection(
        wanted=MessageFilter(**values),
        start_offset=draw(st.none() | offsets),
        stop_offset=draw(st.none() | offsets),
    )


@pytest.mark.parametrize("worthwhile", [0.0, 1e9], ids=["by the log", "by queues and index"])
@given(st.sampled_from(STORES), st.data())
def test_the_same_messages_in_order(
    golden: Path, worthwhile: float, store: str, data: st.DataObject
) -> None:
    path = golden / store
    layout, messages = layout_of(path), all_messages(path)
    wanted = data.draw(selections(messages))
    split_size = data.draw(st.integers(100, 100_000))
    least = data.draw(st.integers(1, 5))
    expected = [m.physical_offset for m in messages if passes(m, wanted)]
    with mock.patch.object(selection, "WORTHWHILE", worthwhile):
        plan = plan_read(layout, wanted, split_size=split_size, min_parts=least)
    if worthwhile > 1:
        assert plan.uses_queues or not wanted.wanted.names_queues or not expected
    runs = batches.sound_runs(read_in_order(layout, plan), "fail")
    found = [m.physical_offset for m in batches.messages(runs, Decoding(), wanted.wanted)]
    assert found == expected

    with mock.patch.object(selection, "WORTHWHILE", worthwhile):
        assert sorted(read_apart(layout, wanted, split_size)) == expected


# ------------------------------------------------------------------------------- damaged stores
RECOVERED = [f"unclean/{path}/store-recovered" for path in (
    *("abort-only", "blank-lost", "body-length-middle", "cq-ahead", "crc-middle"),
    *("crc-third-last-file", "garbage-tail", "half-frame", "last-log-gone", "magic-middle"),
    *("noabort-cq-behind", "noabort-crc-middle", "noabort-one-topic-gone", "total-size-middle"),
)]  # fmt: skip


def read_apart(layout: StoreLayout, wanted: Selection, split_size: int) -> list[int]:
    plan = plan_read(layout, wanted, split_size=split_size, skip_damage=True)
    return [
        message.physical_offset
        for part in plan.parts
        for message in batches.messages(
            batches.sound_runs(read_part(layout, plan, part), "skip"),
            Decoding(),
            filter_of(plan, part),
        )
    ]


@pytest.mark.parametrize("name", RECOVERED)
def test_what_recovery_left_behind_is_no_message_in_any_part(golden: Path, name: str) -> None:
    layout = StoreLayout.open(golden / name)
    lines = (golden / name).parent.joinpath("expected.jsonl").read_text("utf-8").splitlines()
    expected = [json.loads(line) for line in lines]
    for split_size in (1_500, 20_000, 1 << 28):
        found = read_apart(layout, Selection(), split_size)
        assert found == [message["physicalOffset"] for message in expected]
    with mock.patch.object(selection, "WORTHWHILE", 1e9):
        for topic in {message["topic"] for message in expected}:
            wanted = Selection(wanted=MessageFilter(topics=frozenset({topic})))
            assert sorted(read_apart(layout, wanted, 5_000)) == [
                message["physicalOffset"] for message in expected if message["topic"] == topic
            ]


@cache
def files_of(path: Path) -> dict[str, bytes]:
    return bytes_of(path)


@given(st.data())
def test_a_wrong_unit_hides_no_message(golden: Path, data: st.DataObject) -> None:
    """A read that skips damage gives every message of the log, even if the queues are wrong."""
    files = files_of(golden / "batch" / "store")
    name = data.draw(st.sampled_from(sorted(f for f in files if f.startswith("consumequeue"))))
    broken = bytearray(files[name])
    units = [at for at in range(0, len(broken), UNIT_SIZE) if any(broken[at : at + UNIT_SIZE])]
    at = data.draw(st.sampled_from(units)) + data.draw(st.integers(0, 11))
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    layout = StoreLayout(MemoryFileSystem({**files, name: bytes(broken)}))
    wanted = MessageFilter(topics=frozenset({name.split("/")[1]}))
    with mock.patch.object(selection, "WORTHWHILE", 1e9):
        found = read_apart(layout, Selection(wanted=wanted), 20_000)
    events = LogReader(layout, bound=log_bound(layout)).events()
    runs = batches.sound_runs(events, "skip")
    walked = [m.physical_offset for m in batches.messages(runs, Decoding(), wanted)]
    assert sorted(found) == walked


@pytest.mark.parametrize("bit", [0, 4])
def test_a_wrong_last_unit_of_all_hides_no_message(golden: Path, bit: int) -> None:
    """The entry of the last message points into another message before it."""
    files = files_of(golden / "batch" / "store")
    name = "consumequeue/Batch1/0/00000000000000001000"
    broken = bytearray(files[name])
    broken[8 * UNIT_SIZE + 6] ^= 1 << bit
    layout = StoreLayout(MemoryFileSystem({**files, name: bytes(broken)}))
    sound = StoreLayout(MemoryFileSystem(files))
    wanted = MessageFilter(topics=frozenset({"Batch1"}))
    with mock.patch.object(selection, "WORTHWHILE", 1e9):
        found = read_apart(layout, Selection(wanted=wanted), 20_000)
        every = read_apart(sound, Selection(wanted=wanted), 20_000)
    assert sorted(found) == sorted(every)
    assert max(found) == 143_794
