"""Builds small stores by RocketMQ's rules, for cases that no golden store has.

It shares no code with the package's writer: simple loops after the format's description.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from logquarry.format import frame, index, java, queue_entry
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry

HOST = bytes([10, 0, 0, 1]) + (10911).to_bytes(4, "big")
FIRST_TIME = 1_700_000_000_000


@dataclass
class StoreMaker:
    """Builder of a store: put messages, then :meth:`write` the files."""

    log_file_size: int = 4096
    queue_file_units: int = 10
    slots: int = 16
    entries: int = 50
    log: bytearray = field(default_factory=bytearray)
    start: int = 0
    frames: list[Frame] = field(default_factory=list)
    units: dict[tuple[str, int], dict[int, QueueEntry]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    index_files: list[IndexMaker] = field(default_factory=list)

    def put(
        self,
        topic: str = "orders",
        queue_id: int = 0,
        body: bytes = b"some text",
        *,
        keys: str = "",
        tags: str = "",
        time: int | None = None,
        born: int = FIRST_TIME,
        sys_flag: int = 0,
        queue_offset: int | None = None,
        properties: bytes | None = None,
    ) -> Frame:
        if properties is None:
            pairs = [("KEYS", keys), ("TAGS", tags)]
            properties = "\x02".join(f"{k}\x01{v}" for k, v in pairs if v).encode()
        queue = self.units[topic, queue_id]
        if queue_offset is None:
            queue_offset = max(queue, default=-1) + 1
        made = Frame(
            topic=topic.encode(),
            body=body,
            properties=properties,
            queue_id=queue_id,
            queue_offset=queue_offset,
            sys_flag=sys_flag,
            born_timestamp=born,
            born_host=HOST,
            store_timestamp=FIRST_TIME + 10 * len(self.frames) if time is None else time,
            store_host=HOST,
            body_crc=zlib.crc32(body) & 0x7FFFFFFF,
        )
        left = self.log_file_size - len(self.log) % self.log_file_size
        if made.size + 8 > left:
            self.log += frame.encode_blank(left) + bytes(left - 8)
        offset = self.start + len(self.log)
        made = Frame(
            **{name: getattr(made, name) for name in Frame.__dataclass_fields__}
            | {"physical_offset": offset}
        )
        self.log += frame.encode(made)
        self.frames.append(made)
        if sys_flag & 0xC in (0, 8):
            code = java.hash_code(tags) if tags else 0
            queue[queue_offset] = QueueEntry(offset, made.size, code)
        for key in keys.split():
            if not self.index_files or self.index_files[-1].is_full:
                before = self.index_files[-1] if self.index_files else None
                self.index_files.append(IndexMaker(self.slots, self.entries, before))
            self.index_files[-1].put(f"{topic}#{key}", offset, made.store_timestamp)
        return made

    def write(self, root: Path) -> Path:
        size = self.log_file_size
        for at in range(0, len(self.log), size):
            self._file(root, f"commitlog/{self.start + at:020d}", self.log[at : at + size], size)
        for (topic, queue_id), units in self.units.items():
            if not units:
                continue
            per_file = self.queue_file_units
            first = min(units) // per_file * per_file
            for start in range(first, max(units) + 1, per_file):
                data = b"".join(
                    queue_entry.encode(self._unit(units, number))
                    for number in range(start, start + per_file)
                )
                name = f"consumequeue/{topic}/{queue_id}/{start * 20:020d}"
                self._file(root, name, data, per_file * 20)
        for number, file in enumerate(self.index_files):
            name = f"index/{20240101000000000 + number}"
            self._file(root, name, file.data(), len(file.data()))
        return root

    @staticmethod
    def _unit(units: dict[int, QueueEntry], number: int) -> QueueEntry:
        if number < min(units):
            return queue_entry.FILLER
        return units.get(number, QueueEntry(0, 0, 0))

    @staticmethod
    def _file(root: Path, name: str, data: bytes | bytearray, size: int) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(data).ljust(size, b"\0"))


class IndexMaker:
    """One index file, filled as ``IndexFile.putKey`` does it."""

    def __init__(self, slots: int, entries: int, before: IndexMaker | None = None) -> None:
        self.slots, self.entries = slots, entries
        self.table = [0] * slots
        self.rows = [(0, 0, 0, 0)]
        self.begin_time: int = before.end_time if before else 0
        self.end_time: int = self.begin_time
        self.begin_offset: int = before.end_offset if before else 0
        self.end_offset: int = self.begin_offset
        self.used = 0

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= self.entries

    def put(self, text: str, offset: int, time: int) -> None:
        hashed = java.positive_hash_code(text)
        slot = hashed % self.slots
        seconds = max(0, (time - self.begin_time) // 1000) if self.begin_time > 0 else 0
        previous = self.table[slot]
        self.table[slot] = len(self.rows)
        self.rows.append((hashed, offset, seconds, previous))
        if len(self.rows) == 2:
            self.begin_offset, self.begin_time = offset, time
        self.used += previous == 0
        self.end_offset, self.end_time = offset, time

    def data(self) -> bytes:
        header = index.IndexHeader(
            self.begin_time,
            self.end_time,
            self.begin_offset,
            self.end_offset,
            self.used,
            len(self.rows),
        )
        parts = [index.encode_header(header), struct.pack(f">{self.slots}i", *self.table)]
        parts += [struct.pack(">iqii", *row) for row in self.rows]
        parts.append(bytes(20 * (self.entries - len(self.rows))))
        return b"".join(parts)
