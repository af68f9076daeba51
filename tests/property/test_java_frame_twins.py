"""The kernel that follows the log agrees with RocketMQ's check of each message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import frame, index, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import ASK_JAVA
from logquarry.format.frame import Frame
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower
from logquarry.repair.recover.java_dispatch import JavaMemoryError, JavaRequest, check_message
from logquarry.testing import strategies
from tests.helpers.damage import damaged
from tests.helpers.twins import plain_python

LEVELS = (1_000, 5_000)
DELAYS = ("0", "1", "2", "3", "-1", "+1", "\u0661", "x", "9" * 9, "9" * 10, "1" * 20, " 1")

Told = tuple[object, ...]


def told(request: JavaRequest) -> Told:
    """The dispatch requests, as values that compare."""
    kind = request.sys_flag & sys_flag.TRANSACTION_MASK
    keys: list[str] = []
    if kind != sys_flag.TRANSACTION_ROLLBACK and request.properties is not None:
        unique = request.properties.get(props.UNIQ_KEY)
        keys = [] if unique is None else [unique]
        keys += props.split_keys(request.properties.get(props.KEYS, ""))
    return (
        request.topic,
        request.queue_id,
        request.physical_offset,
        request.size,
        request.tags_code,
        request.store_timestamp,
        request.queue_offset,
        kind in (sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_COMMIT),
        [index.key_hash(request.topic, key) for key in keys],
    )


def told_by(run: Followed) -> list[Told]:
    requests = run.requests
    hashes: list[list[int]] = [[] for _ in requests.size]
    for key, number in zip(run.key_hashes.tolist(), run.key_numbers.tolist(), strict=True):
        hashes[number].append(key)
    return [
        (
            requests.topics[requests.topic_ids[row]],
            int(requests.queue_id[row]),
            int(requests.physical_offset[row]),
            int(requests.size[row]),
            int(requests.tags_code[row]),
            int(requests.store_timestamp[row]),
            int(requests.queue_offset[row]),
            bool(requests.is_dispatched[row]),
            hashes[row],
        )
        for row in range(len(requests.size))
    ]


def plainly(data: bytes, *, check_crc: bool) -> list[Told]:
    """Check each message as Java does; returns the requests and the end."""
    view, at = memoryview(data), 0
    found: list[Told] = []
    while True:
        verdict = check_message(view, at, levels_ms=LEVELS, check_crc=check_crc)
        if verdict.request is None:
            return [*found, (at, verdict.size, verdict.is_success)]
        assert verdict.end == at + verdict.size
        found.append(told(verdict.request))
        at += verdict.size


def quickly(data: bytes, base: int, *, check_crc: bool) -> list[Told]:
    """Check with the kernels, which use Java's check only where they stop."""
    follower = Follower(LEVELS, most_frames=3, check_crc=check_crc, as_java=True)
    view, at = memoryview(data), 0
    found: list[Told] = []
    while True:
        run, count, _ = follower.follow(Window.of(view[at:], base + at), len(data) - at)
        if run is not None:
            found += told_by(run)
            at += count
            continue
        verdict = check_message(view, at, levels_ms=LEVELS, check_crc=check_crc)
        if verdict.request is None:
            return [*found, (at, verdict.size, verdict.is_success)]
        found.append(told(verdict.request))
        at += verdict.size


def outcome(way: Callable[[], object]) -> object:
    """The result of one way; Java stops if it allocates more memory than an array can have."""
    try:
        return way()
    except JavaMemoryError as error:
        return str(error)


def assert_same(data: bytes, base: int) -> None:
    for check_crc in (True, False):
        expected = outcome(partial(plainly, data, check_crc=check_crc))
        quick = partial(quickly, data, base, check_crc=check_crc)
        assert outcome(quick) == expected
        with plain_python():
            assert outcome(quick) == expected


@st.composite
def delayed(draw: st.DrawFn) -> Frame:
    """A message of the schedule topic or of another, with a DELAY of any kind."""
    made = draw(strategies.frames())
    topic = draw(st.sampled_from((props.SCHEDULE_TOPIC.encode(), b"t")))
    pairs = {"TAGS": "a", "DELAY": draw(st.sampled_from(DELAYS)), "KEYS": "k l"}
    chosen = draw(st.lists(st.sampled_from(sorted(pairs)), unique=True))
    text = props.encode({name: pairs[name] for name in chosen})
    return replace(made, topic=topic, properties=text.encode(), magic=frame.MAGIC_V1).with_crc()


@given(strategies.logs())
def test_sound_logs(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        assert_same(data, base)


@given(strategies.logs(items=delayed(), min_frames=1))
def test_delays(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        assert_same(data, base)


@given(strategies.logs(items=delayed() | strategies.frames(), min_frames=1), st.data())
def test_harmed_logs(log: strategies.Log, data: st.DataObject) -> None:
    files = {str(base): bytes(one) for base, one in zip(log.bases(), log.files, strict=True)}
    for name, harmed in data.draw(damaged(files, whole_files=False)).items():
        assert_same(harmed, int(name))


@pytest.mark.parametrize("count", [0, 2])
def test_a_size_that_no_memory_holds(count: int) -> None:
    sound = b"".join(
        frame.encode(Frame(b"t", body=b"x" * 9, physical_offset=at).with_crc())
        for at in range(0, count * 101, 101)
    )
    assert len(sound) == count * 101
    absurd = bytearray(frame.encode(Frame(b"t", physical_offset=len(sound))))
    absurd[:4] = b"\x7f\xff\xff\xff"
    assert_same(sound + bytes(absurd), 0)


def test_java_does_not_check_the_crc_of_an_empty_body() -> None:
    first = frame.encode(Frame(b"t", body_crc=77))
    data = first + frame.encode(Frame(b"t", physical_offset=len(first)).with_crc())
    assert_same(data, 0)
    assert len(plainly(data, check_crc=True)) == 3


def test_what_java_does_not_take() -> None:
    """Sound frames that 4.9.3 does not accept, or accepts only sometimes."""
    for made, is_taken in (
        (Frame(b"t", magic=frame.MAGIC_V2), False),
        (Frame(props.SCHEDULE_TOPIC.encode(), properties=b"DELAY\x01x"), False),
        (Frame(props.SCHEDULE_TOPIC.encode(), properties=b"DELAY\x01+1"), True),
    ):
        data = frame.encode(made)
        run, _, code = Follower((), as_java=True).follow(Window.of(data, 0), len(data))
        assert (run, code) == (None, ASK_JAVA)
        verdict = check_message(memoryview(data), 0, levels_ms=(), check_crc=True)
        assert verdict.is_success is is_taken
