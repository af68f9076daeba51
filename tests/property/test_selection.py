"""Does a read through consume queues and index give what a filter over the whole log gives?"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.files.layout import StoreLayout
from logquarry.message import StoredMessage
from logquarry.scan import batches
from logquarry.scan.columns import Decoding
from logquarry.scan.filters import MessageFilter
from logquarry.scan.walk import LogReader
from logquarry.store import selection
from logquarry.store.log_bound import log_bound
from logquarry.store.selection import Selection, filter_of, plan_read, read_in_order, read_part

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
    """The conditions once more, as one would write them down."""
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
    """Conditions that some of the messages fulfil, mostly."""
    one = st.sampled_from(messages)
    times = one.map(lambda m: m.store_timestamp)
    offsets = one.map(lambda m: m.physical_offset) | st.integers(0, messages[-1].physical_offset)
    keys = st.sampled_from(
        [w for m in messages for w in [m.uniq_key, *(m.keys or "").split(" ")] if w] or ["none"]
    )
    ranges = st.tuples(st.integers(0, 20), st.none() | st.integers(0, 40))
    parts = {
        "topics": st.frozensets(one.map(lambda m: m.topic) | st.just("nowhere"), min_size=1, max_size=2),
        "topic_pattern": st.sampled_from([".*", ".*A", "[A-Z].*[0-9a-z]", "nowhere"]),
        "queue_ids": st.frozensets(st.integers(0, 3), min_size=1, max_size=2),
        "queues": st.frozensets(one.map(lambda m: (m.topic, m.queue_id)), max_size=2),
        "tags": st.frozensets(st.sampled_from(["TagA", "TagB", "标签", "x"]), min_size=1, max_size=2),
        "keys": st.frozensets(keys, min_size=1, max_size=3),
        "since_ms": times,
        "until_ms": times,
        "queue_offsets": st.tuples(st.integers(0, 20), st.integers(0, 60)),
        "queue_ranges": st.dictionaries(one.map(lambda m: (m.topic, m.queue_id)), ranges, max_size=3),
        "grep": st.sampled_from(["abc", "[xyz]{2}", "nowhere to be found"]),
    }
    names = draw(st.lists(st.sampled_from(sorted(parts)), max_size=3, unique=True))
    wanted = MessageFilter(**{name: draw(parts[name]) for name in names})
    return Selection(
        wanted=wanted,
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

    apart = [
        message.physical_offset
        for part in plan.parts
        for message in batches.messages(
            batches.sound_runs(read_part(layout, plan, part), "fail"),
            Decoding(),
            filter_of(plan, part),
        )
    ]
    assert sorted(apart) == expected
