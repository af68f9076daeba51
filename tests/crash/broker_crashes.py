"""Crash states of stores that real brokers of RocketMQ 5.5.0 wrote, and what a recovery must keep.

A broker that is killed, or whose machine loses its power, has synced its log up to some physical
offset, and its queues and index up to another. :func:`crash` makes such a state from a store that
was shut down cleanly: it chooses these offsets and damages only what lies after them.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import logquarry as lq
from logquarry.format import checkpoint
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from tests.conformance import broker_truth
from tests.conformance.broker_truth import Truth
from tests.conformance.rocketmq5 import expected_frames

_PAGE: Final = 4_096
_SECTOR: Final = 512
_QUEUES: Final = {"consumequeue": 20, "batchconsumequeue": 46}
"""Folder of queues -> bytes of an entry, which starts with a physical offset."""
_ROCKSDB: Final = ("consumequeue", "consumequeue_rocksdb")


Span = tuple[int, int]


@dataclass(frozen=True)
class Source:
    """A store that a broker shut down cleanly, with the broker's truth.

    Attributes:
        name: for messages.
        folder: has ``store/``, ``broker.conf``, ``expected.jsonl`` and ``queues.json``.
    """

    name: str
    folder: Path

    @cached_property
    def frames(self) -> list[dict[str, Any]]:
        """The frames of the log."""
        return expected_frames(self.folder)

    @cached_property
    def truth(self) -> Truth:
        """What the broker serves."""
        return Truth.read(self.folder)

    @property
    def has_rocksdb_queues(self) -> bool:
        """Whether the queues are in RocksDB."""
        store = self.folder / "store"
        return any((store / name / "CURRENT").exists() for name in _ROCKSDB)

    def copy(self, folder: Path) -> Path:
        """Copy the store and its ``broker.conf`` into a new folder, and return the store."""
        folder.mkdir(parents=True, exist_ok=True)
        command = ["cp", "-a", "--sparse=always", str(self.folder / "store"), str(folder / "store")]
        subprocess.run(command, check=True)
        shutil.copy(self.folder / "broker.conf", folder)
        return folder / "store"


@dataclass(frozen=True)
class Crash:
    """What a crash left of a store.

    Attributes:
        end: physical offset of the first frame that lost a byte.
        lost: the physical offsets, from and to, that lost their bytes.
        synced: physical offset up to which the broker had synced the log; never above ``end``.
        is_short: whether the log's last file has lost its end, so that no file may show their size.
        harm: what happened to log, queues, index and checkpoint, in words.
        is_patchy: whether sound frames may follow lost frames. A recovery keeps them.
        may_ask: whether a recovery may ask before it drops messages that queues name: they were in
            whole files that are gone, or sound frames follow them.
    """

    end: int
    lost: tuple[Span, ...]
    synced: int
    is_short: bool
    harm: tuple[str, ...]
    is_patchy: bool
    may_ask: bool


def crash(source: Source, store: Path, rng: random.Random, *, is_gentle: bool) -> Crash:
    """Make a crash state of a copy of the source's store.

    Args:
        source: the source.
        store: the copy.
        rng: chooses.
        is_gentle: whether each entry of a queue is whole or zeros, no queue reaches further than
            the log, and the index has its times. A broker trusts a torn entry that has a physical
            offset and a size, and an index whose times are 0. It leaves the bytes of an entry that
            it cuts, so that the entry counts again once the log has grown past its message.
    """
    frames = source.frames
    last = frames[-1]
    log_end = last["physicalOffset"] + last["size"]
    number = rng.randrange(len(frames))
    synced = frames[number]["physicalOffset"]
    queued = frames[rng.randrange(number + 1)]["physicalOffset"]
    indexed = frames[rng.randrange(number + 1)]["physicalOffset"]
    (store / "abort").touch()
    (store / "abort.bak").unlink(missing_ok=True)
    cut = rng.randrange(synced, log_end + 1)
    words = [f"log synced to {synced}, queues to {queued}, index to {indexed}"]
    hows_of_log = ["zeros", "zeros", "short", "whole"]
    if not source.has_rocksdb_queues:
        # Recovery refuses RocksDB with lost messages between others.
        hows_of_log.append("pages")
    how = rng.choice(hows_of_log)
    words.append(f"log: {how} from {cut}")
    bases = [int(path.name) for path in _log_files(store)]
    lost = _harm_log(_log_files(store), cut, how, rng)
    torn = [f["physicalOffset"] for f in frames if _lost_bytes(f, lost)]
    end = min(torn, default=log_end)
    hows = ("whole", "entries", "short", "gone", *(() if is_gentle else ("torn",)))
    for folder, size in _QUEUES.items():
        for queue in sorted((store / folder).glob("*/*")):
            if queue.is_dir():
                if is_gentle:
                    words += _harm_queue(queue, size, end, "entries", rng, at_once=True)
                words += _harm_queue(queue, size, queued, rng.choice(hows), rng)
    words += _harm_wal(store, rng)
    words += _harm_index(store / "index", rng, is_gentle=is_gentle)
    words.append(_harm_checkpoint(store / "checkpoint", frames, (synced, queued, indexed), rng))
    return Crash(
        end=end,
        lost=tuple(lost),
        synced=synced,
        is_short=how == "short",
        harm=tuple(words),
        is_patchy=how == "pages",
        may_ask=how == "pages" or (bool(lost) and end <= bases[-1]),
    )


def _lost_bytes(frame: dict[str, Any], lost: list[Span]) -> bool:
    start, stop = frame["physicalOffset"], frame["physicalOffset"] + frame["size"]
    return any(low < stop and start < high for low, high in lost)


def _log_files(store: Path) -> list[Path]:
    folders = [store / name for name in ("commitlog", "clA", "clB")]
    found = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return sorted(found, key=lambda path: path.name)


def _harm_log(files: list[Path], cut: int, how: str, rng: random.Random) -> list[Span]:
    """Lose bytes from a physical offset on; returns the lost spans."""
    lost: list[Span] = []
    for path in files if how != "whole" else ():
        base, size = int(path.name), path.stat().st_size
        at = max(0, cut - base)
        if at >= size:
            continue
        data = bytearray(path.read_bytes())
        spans = list(_lost_pages(at, size, rng)) if how == "pages" else [(at, size)]
        for low, high in spans:
            data[low:high] = bytes(high - low)
            lost.append((base + low, base + high))
        # A folder of several that has no file may be a disk that is not mounted.
        if how != "pages" and base > cut and path.parent.name == "commitlog":
            path.unlink()
        else:
            path.write_bytes(data[:at] if how == "short" and at else data)
    return lost


def _lost_pages(at: int, size: int, rng: random.Random) -> Iterator[Span]:
    """Some of the pages after a place; the first may be torn at a sector."""
    while at < size:
        stop = at // _PAGE * _PAGE + _PAGE
        if rng.random() < 0.3:
            low = at if rng.random() < 0.5 else -(-at // _SECTOR) * _SECTOR
            yield min(low, stop), stop
        at = stop


def _harm_queue(
    queue: Path, size: int, queued: int, how: str, rng: random.Random, *, at_once: bool = False
) -> Iterator[str]:
    """Lose entries of messages from a physical offset on: all of them, or from a random one on."""
    if how == "whole":
        return
    for path in sorted(queue.iterdir()):
        data = path.read_bytes()
        first = next(
            (
                at
                for at in range(0, len(data) - size + 1, size)
                if int.from_bytes(data[at : at + 8], "big") >= queued
                or not any(data[at : at + size])
            ),
            len(data),
        )
        used = len(data.rstrip(b"\0"))
        if first >= used:
            continue
        name = f"{queue.parent.name}/{queue.name}/{path.name}"
        if first == 0 and how == "gone":
            path.unlink()
            yield f"{name} gone"
            continue
        at = first if at_once else rng.randrange(first, used + 1)
        if how != "torn":
            at = at // size * size
        path.write_bytes(data[:at] + (b"" if how == "short" else bytes(len(data) - at)))
        yield f"{name} {how} at {at}"
        # Pages that follow may be lost or not; a queue without them is the hardest case.
        how = "gone" if how == "gone" else "entries"


def _harm_wal(store: Path, rng: random.Random) -> Iterator[str]:
    """Cut the write-ahead log of RocksDB, which no broker syncs with the log."""
    for name in _ROCKSDB:
        for path in sorted((store / name).glob("*.log")):
            data = path.read_bytes()
            if data and rng.random() < 0.5:
                at = rng.randrange(len(data))
                path.write_bytes(data[:at])
                yield f"{name}/{path.name} cut at {at}"


def _harm_index(index: Path, rng: random.Random, *, is_gentle: bool) -> Iterator[str]:
    """Lose parts of the index. Its last file is the one that a broker had not synced."""
    paths = sorted(index.iterdir()) if index.is_dir() else []
    if not paths:
        return
    path = paths[-1]
    how = rng.choice(["whole", "gone", "short", "pages", *([] if is_gentle else ["head"])])
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "head":
        data[:40] = bytes(40)
        path.write_bytes(data)
    elif how == "pages":
        for at in range(0, len(data), _PAGE):
            if rng.random() < 0.3:
                data[at : at + _PAGE] = bytes(len(data[at : at + _PAGE]))
        path.write_bytes(data)
    if how != "whole":
        yield f"index/{path.name} {how}"


def _harm_checkpoint(
    path: Path, frames: list[dict[str, Any]], ends: tuple[int, int, int], rng: random.Random
) -> str:
    """The checkpoint as it was when log, queues and index were synced up to some offsets."""
    how = rng.choice(["of then", "of then", "gone", "zeros"])
    if how == "gone":
        path.unlink(missing_ok=True)
    elif how == "zeros":
        path.write_bytes(bytes(_PAGE))
    else:
        before = checkpoint.decode_offsets(path.read_bytes())
        times = [
            max((f["storeTimestamp"] for f in frames if f["physicalOffset"] < end), default=0)
            for end in ends
        ]
        offsets = before.limited(min(ends))._replace(
            master_flushed=min(before.master_flushed, ends[0])
        )
        page = bytearray(checkpoint.encode(checkpoint.Checkpoint(*times)))
        checkpoint.OFFSETS.struct.pack_into(page, checkpoint.LAYOUT.size, *offsets)
        path.write_bytes(page)
    return f"checkpoint {how}"


# ------------------------------------------------------------------------------- after a recovery
Ours = dict[tuple[str, int], list[tuple[int, int, bytes]]]
"""(topic, queue id) -> queue offset, physical offset and body of messages that a test put."""


def problems(
    store: Path, source: Source, harm: Crash, ours: Ours, *, is_rocketmq: bool
) -> Iterator[str]:
    """What a recovered store lacks, or has but should not.

    Args:
        store: the recovered store, closed.
        source: the store before the crash.
        harm: the crash. Each message before its end must be there, with equal fields.
        ours: messages that were acknowledged after the crash.
        is_rocketmq: whether the store was recovered as RocketMQ does, which leaves entries of the
            timer wheel that name lost messages, and the tags code of a torn message.
    """
    with lq.MessageStore.open(store) as found:
        # A recovery keeps the frames after lost pages; a scan would end at these.
        yield from broker_truth.differences_of_scan(
            found, source.folder, below=harm.end, on_damage="skip"
        )
        yield from broker_truth.differences_of_queues(found, source.truth, below=harm.end)
        known = {(f["topic"], f["queueId"], f["physicalOffset"]) for f in source.frames}
        mine = {(*key, physical) for key, rows in ours.items() for _, physical, _ in rows}
        for message in found.scan(on_damage="skip"):
            place = (message.topic, message.queue_id, message.physical_offset)
            if message.physical_offset > harm.end and place not in known | mine:
                yield f"a message that was never put: {place}"
        for key, rows in ours.items():
            for queued, physical, body in rows:
                got = found.get(*key, queued, 1).messages
                if [(m.queue_offset, m.physical_offset, m.content()) for m in got] != [
                    (queued, physical, body)
                ]:
                    yield f"{key} offset {queued}, which was acknowledged: {got}"
    logs = tuple(path.parent.name for path in _log_files(store))
    for finding in verify_store(StoreLayout.open(store)).findings:
        # BODYCRC does not cover topic and properties: a recovery keeps a frame whose text is torn,
        # as the broker does. It also keeps the frames after lost pages.
        stays = finding.file.startswith(logs) and any(
            low < finding.offset + finding.length and finding.offset < high
            for low, high in harm.lost
        )
        is_known = stays and (
            harm.is_patchy or finding.kind in ("suspect_text", "bad_property_crc")
        )
        is_known |= is_rocketmq and finding.kind.startswith(("timer_", "queue_entry_wrong"))
        if finding.severity == "damage" and not is_known:
            yield f"verify: {finding}"
