"""122 append decisions of RocketMQ, which this library must repeat, in the file's order.

Vectors are counted from 1, as in the file. One store serves a group of vectors. A new group begins
if a vector's `before` differs from the `after` of the previous one, and after each vector that this
library refuses on purpose (REFUSED), because RocketMQ wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from logquarry.disk.service import Refusal
from logquarry.errors import MessageRejected, StoreError, StoreUnavailable
from logquarry.format import frame
from logquarry.message import Message
from logquarry.write.encode import MessageEncoder
from logquarry.write.encode_batch import encode_batch
from logquarry.write.log_appender import end_file
from logquarry.write.put_result import PutResult, PutStatus
from tests.conformance.replay import OurLog, append_facts, message_of, wire_of

Vector = dict[str, Any]

REFUSED = {
    # PUT_OK, nothing written, and an exception when it is asked for the id
    22: "count",
    # putMessage throws a NumberFormatException
    30: "delay",
    # PUT_OK, and a frame that cannot be read
    34: "hosts",
    35: "topic",
    # PUT_OK, nothing written, and two files blanked
    36: "larger_than_file",
    38: "larger_than_file",
}
THROWN = {
    **{19: "too_large", 20: "too_large", 21: "properties", 22: "count", 23: "truncated"},
    30: "delay",
}
"""Where putMessage(s) throws, or throws when it is asked for the id, and what we say."""
REASONS = {
    7: "topic",
    8: "too_large",
    9: "properties",
    10: "properties",
    12: "too_large",
    14: "transaction",
    15: "delay",
    17: "topic",
    18: "too_large",
}
"""What we say where RocketMQ has a status and no more."""
GROUPS = [
    1,
    35,
    36,
    37,
    39,
    40,
    41,
    42,
    43,
    44,
    45,
    46,
    47,
    48,
    49,
    50,
    51,
    52,
    53,
    54,
    55,
    56,
    57,
    58,
    59,
    60,
    61,
    62,
    63,
    64,
    65,
    66,
    67,
    94,
    95,
    96,
    97,
    98,
    99,
    100,
    103,
    104,
    105,
    107,
    110,
    111,
    115,
    117,
    120,
    121,
]
"""The first vector of each group."""
RACE = 103
"""FLUSH_DISK_TIMEOUT or PUT_OK, depending on which thread is faster."""
FLAGS = {
    "consume queue error flag": Refusal.LOGICS_QUEUE_ERROR,
    "index error flag": Refusal.INDEX_FILE_ERROR,
    "not writeable": Refusal.NOT_WRITEABLE,
    "disk full": Refusal.DISK_FULL,
    "after shutdown": Refusal.CLOSED,
}
TAKEN_NAMES = {
    "the first log file cannot be made": 0,
    "the second log file was allotted ahead": 8192,
    "the third log file cannot be made (result of the first append kept)": 8192,
}
"""Cases in which a folder has the name of a log file."""


@cache
def vectors(golden: Path) -> list[Vector]:
    lines = (golden / "append-vectors.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def groups(golden: Path) -> Iterator[list[tuple[int, Vector]]]:
    group: list[tuple[int, Vector]] = []
    for number, vector in enumerate(vectors(golden), 1):
        if group:
            last_number, last = group[-1]
            goes_on = vector["before"] == last["after"] and vector["config"] == last["config"]
            written = last_number in REFUSED and last_number not in THROWN
            if not goes_on or written:
                yield group
                group = []
        group.append((number, vector))
    yield group


@pytest.mark.parametrize("first", GROUPS)
def test_decisions_agree(first: int, golden: Path, tmp_path: Path) -> None:
    group = next(group for group in groups(golden) if group[0][0] == first)
    outcomes: list[PutStatus] = []

    def settle(result: PutResult, wait: bool) -> PutResult:
        # Flush and replica waits have their own tests: here they end as recorded.
        status = outcomes.pop()
        return result.settled(replica=status) if wait else result

    log = OurLog(tmp_path, group[0][1]["config"], settle)
    try:
        _bring_to(log, group[0][1], outcomes)
        for number, vector in group:
            recorded = vector.get("result", {}).get("putStatus", "PUT_OK")
            wait = "WAIT=false" not in vector["case"]
            outcomes[:] = [PutStatus(recorded) if wait else PutStatus.FLUSH_SLAVE_TIMEOUT]
            _prepare(log, vector)
            if number in THROWN or number in REFUSED:
                with pytest.raises(MessageRejected) as rejected:
                    log.put(vector["input"])
                assert rejected.value.reason == (THROWN | REFUSED)[number]
                status = "PROPERTIES_SIZE_EXCEEDED" if number == 21 else "MESSAGE_ILLEGAL"
                assert rejected.value.status == status
                assert "exception" in vector["result"] or number in REFUSED
                if number not in THROWN:
                    continue
            elif "append" in vector:
                _check_single_append(log, vector)
            else:
                _check_put(log, number, vector)
            _check_after(log, vector)
    finally:
        log.close()


def _bring_to(log: OurLog, vector: Vector, outcomes: list[PutStatus]) -> None:
    """Make a store in the state in which the group begins; its messages are not recorded."""
    before = vector["before"]
    filled = [(key, count) for key, count in before["topicQueueTable"].items() if count]
    end = before["maxOffset"]
    if end > log.files.file_size or (end and not filled):
        # After a refused vector: an empty store that begins where Java's ended.
        assert end % log.files.file_size == 0
        log.files.writable(end)
        for key, count in before["topicQueueTable"].items():
            topic, _, queue_id = key.rpartition("-")
            log.offsets[topic, int(queue_id)] = count
        return
    for key, count in filled:
        topic, _, queue_id = key.rpartition("-")
        sizes = [end // count] * count
        sizes[-1] += end - sum(sizes)
        for size in sizes:
            outcomes[:] = [PutStatus.PUT_OK]
            body = bytes(size - 91 - len(topic))
            log.writer.put(Message(topic, body, queue_id=int(queue_id)))
    assert log.files.max_offset == end
    if log.config.broker_role == "SLAVE":
        log.flags.set(Refusal.SLAVE)


def _prepare(log: OurLog, vector: Vector) -> None:
    case = vector["case"]
    # The flags are those of separate stores, although they follow each other in one group.
    for refusal in FLAGS.values():
        log.flags.clear(refusal)
    if case in FLAGS:
        log.flags.set(FLAGS[case])
    if case in TAKEN_NAMES:
        (log.root / f"commitlog/{TAKEN_NAMES[case]:020d}").mkdir(parents=True, exist_ok=True)
    append = vector.get("append") or vector["result"].get("append")
    if append:
        log.clock.now = append["storeTimestamp"]


def _check_put(log: OurLog, number: int, vector: Vector) -> None:
    expected = vector["result"]
    try:
        result = log.put(vector["input"])
    except StoreError as error:
        assert isinstance(error, (MessageRejected, StoreUnavailable))
        assert error.status == expected["putStatus"]
        assert not expected["isOk"]
        if isinstance(error, MessageRejected):
            assert error.reason == REASONS[number]
        return
    assert number not in REASONS
    assert result.ok is expected["isOk"]
    facts = expected["append"]
    assert append_facts(result) == facts
    assert number == RACE or result.status.value == expected["putStatus"]


def _check_single_append(log: OurLog, vector: Vector) -> None:
    encoder = MessageEncoder(log.config, log.clock)
    put, message = vector["input"], message_of(vector["input"])
    if put["kind"] == "batch":
        encoded = encode_batch(encoder, log.config, wire_of(put), message)
    else:
        encoded = encoder.encode(message)
    theirs = vector["append"]
    with log.writer.holding() as (now, _):
        file = log.writer.file()
        at = file.wrote
        assert at + encoded.size + frame.BLANK.size > file.size, "it has no room in the file"
        size = end_file(file)
        file.store_timestamp = now
        queue_offset = log.offsets.setdefault(encoded.key, 0)
    # No message is in the log: Java counts one, and makes ids from offsets that were never set.
    assert theirs.pop("msgId") and theirs.pop("msgNum") == 1
    assert theirs == {
        "status": "END_OF_FILE",
        "wroteOffset": file.base + at,
        "wroteBytes": size,
        "storeTimestamp": now,
        "logicsOffset": queue_offset,
    }


def _check_after(log: OurLog, vector: Vector) -> None:
    before, after = vector["before"]["maxOffset"], vector["after"]
    last = log.files.last
    assert log.files.max_offset == after["maxOffset"]
    assert (last and last.base) == after["fileFromOffset"]
    assert (last and last.wrote) == after["wrotePosition"]
    assert (last and last.room) == after["left"]
    assert log.topic_queue_table == after["topicQueueTable"]
    if "wroteHex" not in vector:
        return
    wrote = bytearray()
    while before + len(wrote) < after["maxOffset"]:
        part = log.files.select(before + len(wrote))
        assert part is not None
        wrote += part
    assert vector["wroteHexTotalBytes"] == len(wrote)
    assert vector["wroteHex"] == wrote[: len(vector["wroteHex"]) // 2].hex().upper()


def test_no_vector_is_left_out(golden: Path) -> None:
    assert len(vectors(golden)) == 122
    assert [group[0][0] for group in groups(golden)] == GROUPS
