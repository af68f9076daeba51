"""What a real broker of RocketMQ 5 serves from a store, and comparisons of it with our reads."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.log.batches import OnDamage
from logquarry.read.features import COMPACTION
from tests.conformance.golden_facts import OUR_NAMES
from tests.conformance.rocketmq5 import broker_messages, expected_frames

RUN = Path(__file__).parents[2] / "oracle" / "v5" / "run"
_START_SECONDS = 300
_INNER_BATCH = 0xC0
_OWN_NAMES = {
    theirs: ours
    for theirs, ours in OUR_NAMES.items()
    # A frame of 5.x states no tags code; inner messages have their own sizes and CRCs.
    if theirs != "dispatchTagsCode"
}

Rows = list[list[Any]]


class BrokerFailure(Exception):
    """The broker did not start, or ended."""


@dataclass(frozen=True)
class Truth:
    """The answers of a broker: queue name -> rows.

    Attributes:
        pulled: [queue offset, physical offset, message id, keys, tags, CRC-32 of the body] of each
            message that an ordinary client receives; without queues that clients may not pull from.
        got: [queue offset, physical offset] of each frame that the broker finds by a queue.
        bounds: (min, max) of each queue.
    """

    pulled: dict[str, Rows]
    got: dict[str, Rows]
    bounds: dict[str, tuple[int, int]]

    @classmethod
    def read(cls, folder: Path) -> Truth:
        """The truth that the oracle wrote into a folder."""
        path = folder / "pulled.json"
        # The archive's stores have no such file, nor has a broker that no client may pull from.
        pulled = json.loads(path.read_text("utf-8")) if path.exists() else {}
        queues = json.loads((folder / "queues.json").read_text("utf-8"))
        return cls(
            {name: queue["messages"] for name, queue in pulled.items() if queue["stop"] is None},
            {name: queue["getMessage"] for name, queue in queues.items()},
            {name: (queue["minOffset"], queue["maxOffset"]) for name, queue in queues.items()},
        )


def serve(folder: Path, version: str) -> Truth:
    """Start a broker over ``folder/store`` by ``folder/broker.conf``, and return its answers.

    Raises:
        BrokerFailure: if the broker does not start.
    """
    for name in ("pulled.json", "queues.json", "facts.json", "expected.jsonl"):
        (folder / name).unlink(missing_ok=True)
    environment = {**os.environ, "RMQ": version, "ORACLE_LOG": "ERROR"}
    with (folder / "broker.log").open("wb") as log:
        try:
            code = subprocess.run(
                [RUN, "truth"],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                timeout=_START_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise BrokerFailure("the broker did not answer in time") from error
    if code or not (folder / "queues.json").exists():
        lines = (folder / "broker.log").read_text("utf-8", "replace").splitlines()
        told = [line.strip() for line in lines if "Exception" in line or "should be" in line]
        raise BrokerFailure(f"the broker did not start: {(told or lines or ['no word'])[0][:200]}")
    return Truth.read(folder)


def not_served(
    before: Truth, after: Truth, *, end: int, moved: bool, root: Path, start: int = 0
) -> list[str]:
    """The messages before a physical offset that a broker served and no longer serves.

    Args:
        before: what it served.
        after: what it serves now.
        end: the log's end before the change. The broker itself puts messages after it.
        moved: whether frames have new physical offsets.
        start: the log's start.
        root: the store; a topic with compaction may lose all but the newest message of a key.
    """
    with lq.MessageStore.open(root) as store:
        found = store.features.get(COMPACTION)
        compacted = found.detail if found is not None else ""
    lost = []
    for name, all_rows in before.pulled.items():
        rows = [row for row in all_rows if start <= row[1] < end]
        if name.rpartition("/")[0] in compacted:
            rows = list({row[3]: row for row in rows}.values())
        # In a queue of multi-dispatch, several messages can have the same queue offset.
        served = {_same(row, moved) for row in after.pulled.get(name, [])}
        lost += [f"{name} at {row[0]}" for row in rows if _same(row, moved) not in served]
    for name, rows in before.got.items():
        if name not in before.pulled:
            # The queue offsets are those in the frames, of other queues.
            column = 0 if moved else 1
            there = {row[column] for row in after.got.get(name, [])}
            lost += [
                f"{name}: {r[1]}" for r in rows if start <= r[1] < end and r[column] not in there
            ]
    return lost


def puts_not_served(after: Truth, puts: dict[str, int]) -> list[str]:
    """The messages with the key ``ours`` that a broker does not serve to an ordinary client.

    Args:
        after: what the broker serves.
        puts: queue name -> queue offset.
    """
    lost = []
    for name, offset in puts.items():
        rows = [row for row in after.pulled.get(name, []) if row[0] == offset]
        if [row[3] for row in rows] != ["ours"]:
            lost.append(f"{name} at {offset} (ours)")
    return lost


def _same(row: list[Any], moved: bool) -> tuple[Any, ...]:
    # The message id may contain the physical offset.
    return row[0], *(row[3:] if moved else row[1:])


# -------------------------------------------------------------------------------- our reads
def differences_of_scan(
    store: lq.MessageStore, scenario: Path, *, below: int, on_damage: OnDamage = "default"
) -> Iterator[str]:
    """The fields in which our messages differ from those of the broker's decoder."""
    plain = {frame["physicalOffset"]: frame for frame in expected_frames(scenario)}
    inner = [row for row in broker_messages(scenario) if row["physical_offset"] < below]
    scan = store.scan(on_damage=on_damage)
    ours = [message for message in scan if message.physical_offset < below]
    if len(ours) != len(inner):
        yield f"{len(ours)} messages instead of {len(inner)}"
    for message, row in zip(ours, inner, strict=False):
        wanted = dict(row)
        frame = plain[wanted["physical_offset"]]
        if frame["sysFlag"] & _INNER_BATCH != _INNER_BATCH:
            wanted |= {mine: frame[theirs] for theirs, mine in _OWN_NAMES.items()}
        for name, value in wanted.items():
            found = getattr(message, name)
            found = dict(found) if name == "properties" else found
            if found != value:
                yield f"{name} at {message.physical_offset}: {found!r} instead of {value!r}"


def differences_of_queues(store: lq.MessageStore, truth: Truth, *, below: int) -> Iterator[str]:
    """Where our gets differ from what the broker's queues and an ordinary client give."""
    for name, (least, most) in truth.bounds.items():
        topic, _, number = name.rpartition("/")
        offset = least
        found: list[lq.StoredMessage] = []
        while offset < most:
            answer = store.get(topic, int(number), offset)
            found.extend(answer.messages)
            if answer.next_offset <= offset:
                break
            offset = answer.next_offset
        found = [message for message in found if message.physical_offset < below]
        # Queues of multi-dispatch have no route, and 5.1.4 protects its system topics.
        if name not in truth.pulled:
            # Messages of an inner batch share their frame.
            mine: Rows = [[0, place] for place in dict.fromkeys(m.physical_offset for m in found)]
            wanted = [[0, row[1]] for row in truth.got[name]]
        else:
            mine = [_pulled(message) for message in found]
            wanted = [row[:2] + row[3:] for row in truth.pulled[name]]
        wanted = [row for row in wanted if row[1] < below]
        if mine != wanted:
            yield f"{name}: {len(mine)} messages, the broker gives {len(wanted)}"
        bounds = store.queue_offsets(topic, int(number))
        if below > _WHOLE and tuple(bounds) != (least, most):
            yield f"{name}: offsets {tuple(bounds)} instead of {(least, most)}"


_WHOLE = 1 << 62
"""A physical offset after any log."""


def _pulled(message: lq.StoredMessage) -> list[Any]:
    body = zlib.crc32(message.content())
    return [message.queue_offset, message.physical_offset, message.keys, message.tags, body]


def config_of(folder: Path) -> StoreConfig:
    """The settings of a scenario, with absolute paths: the oracle's are relative."""
    lines = {}
    for line in (folder / "broker.conf").read_text("utf-8").splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not name.startswith("#"):
            lines[name] = value
    if "storePathCommitLog" in lines:
        paths = lines["storePathCommitLog"].split(",")
        lines["storePathCommitLog"] = ",".join(str(folder / path) for path in paths)
    return StoreConfig.from_mapping(lines)
