"""Staged frames reach the log with the bytes that single puts would have written."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import LogquarryError
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.store.load.segment import StagedFrames, StagedWriter, same_frames
from logquarry.write.encode import MessageEncoder
from logquarry.write.log_appender import require_fit
from tests.helpers.twins import both
from tests.property.test_put_many_twins import NOW, Log, fields


def staged(messages: Sequence[Message], log: Log) -> tuple[list[Message], StagedFrames, list[int]]:
    """Frames of the accepted messages, and the byte after each."""
    encoder = MessageEncoder(log.writer.config, lambda: NOW)
    queues: dict[QueueKey, int] = {}
    data, ends, taken = bytearray(), [0], []
    for message in messages:
        try:
            encoded = encoder.encode(message)
            require_fit(encoded, log.writer.file_size)
        except LogquarryError:
            continue
        encoded.place(queues.setdefault(encoded.key, len(queues)), -1, -1)
        data += encoded.data
        ends.append(len(data))
        taken.append(message)
    return taken, StagedFrames(memoryview(bytes(data)), list(queues), "segment"), ends


def put(log: Log, messages: Sequence[Message]) -> None:
    for message in messages:
        log.writer.append(log.writer.encoder.encode(message))


many = st.lists(fields(tame=True), max_size=14).map(
    lambda found: [Message(**given) for given in found]
)


@given(many, many)
def test_they_are_what_single_puts_write(before: list[Message], messages: list[Message]) -> None:
    def appended() -> tuple[Any, Any]:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            log, reference = Log(one), Log(other)
            first, _, _ = staged(before, log)
            taken, frames, _ = staged(messages, log)
            for each in (log, reference):
                put(each, first)
            put(reference, taken)
            counted: list[tuple[str, int, int]] = []
            grown: list[None] = []
            writer = StagedWriter(
                log.writer, lambda: grown.append(None), lambda *told: counted.append(told)
            )
            assert writer.append(frames) == len(taken)
            assert bool(grown) == bool(taken)
            assert sum(messages for _, messages, _ in counted) == len(taken)
            assert sum(size for _, _, size in counted) == len(frames.data)
            # A message without a place also makes its queue known: in one call, not one by one.
            return log.state(), reference.state()

    fast, plain = both(appended)
    assert fast == plain
    assert fast[0] == fast[1]


@given(many, st.integers(0, 14), many)
def test_what_is_there_of_them_is_found(
    messages: list[Message], count: int, others: list[Message]
) -> None:
    """Some staged messages are in the log, and then another program's messages."""

    def found() -> tuple[int, int, int]:
        with tempfile.TemporaryDirectory() as root:
            log = Log(root)
            put(log, [Message("old", b"before")])
            start = log.files.wrote_offset
            taken, frames, ends = staged(messages, log)
            there = min(count, len(taken))
            put(log, taken[:there])
            # With another family of hosts, so that no frame equals one of ours.
            put(log, [Message("foreign", b"%d" % number) for number in range(len(others))])
            position = 0
            while (part := log.files.select(start)) is not None:
                position, behind = same_frames(frames, position, part, 0)
                assert behind == position or position == ends[there]
                start += log.files.file_size - start % log.files.file_size
            return position, ends[there], there

    fast, plain = both(found)
    assert fast == plain
    assert fast[0] == fast[1]


@given(st.lists(st.text(" aé\U0001f600", max_size=8) | st.none(), min_size=1, max_size=8))
def test_hashes_of_first_words(keys: list[str | None]) -> None:
    from logquarry.ingest.staging import first_word_hashes

    for kind in (pa.string(), pa.large_string()):
        column = pa.array(["x", *keys], kind)[1:]

        def hashed(column: pa.Array = column) -> Any:
            return first_word_hashes(column).tolist()

        fast, plain = both(hashed)
        assert fast == plain
