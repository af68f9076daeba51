"""Builds stores in RocketMQ's layout for tests and benchmarks, without a writer.

The builder does not sync its files, so do not use it for real data.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, Self

from logquarry import arguments
from logquarry.format import checkpoint, frame, java, queue_entry, sys_flag
from logquarry.format import properties as props
from logquarry.log.store_files import COMMIT_LOG, CONSUME_QUEUE, NAME_DIGITS
from logquarry.stored_message import StoredMessage

STORE_HOST = frame.host_bytes("127.0.0.1:10911")
BORN_HOST = frame.host_bytes("127.0.0.1:40000")

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
_FILL_TAG: Final = "TagA"
_FILL_TIME: Final = 1_700_000_000_000
_PARTS_AT_ONCE: Final = 1 << 14
_PREFIX: Final = frame.prefix(frame.HOST_SIZE_V4, frame.HOST_SIZE_V4)


class StoreBuilder:
    """Builds one store directory, message by message.

    Args:
        root: the folder to write; must not hold a store yet.
    """

    def __init__(
        self,
        root: Path,
        *,
        file_size: int = 1 << 16,
        queue_file_size: int = 2_000,
    ) -> None:
        self.root = root = Path(arguments.path(root, "root"))
        self.file_size = file_size
        self.queue_file_size = queue_file_size
        self.offset = 0
        self._queues: dict[tuple[str, int], bytearray] = defaultdict(bytearray)
        self._queue_bases: dict[tuple[str, int], int] = {}
        self._file: BinaryIO | None = None
        self._last_time = 0
        (root / COMMIT_LOG).mkdir(parents=True)

    def append(self, item: frame.Frame) -> frame.Frame:
        """Write one frame; return the frame with its physical offset, queue offset and CRC.

        Raises:
            ValueError: if the frame does not fit into a file.
        """
        if item.size + frame.BLANK.size > self.file_size:
            raise ValueError(
                f"a frame of {item.size} bytes does not fit into a file of {self.file_size}"
            )
        if item.size + frame.BLANK.size > self.file_size - self.offset % self.file_size:
            self.end_file()
        topic = item.topic.decode()
        dispatched = sys_flag.advances_queue(item.sys_flag)
        queue = self._queues[topic, item.queue_id] if dispatched else bytearray()
        item = replace(
            item,
            physical_offset=self.offset,
            queue_offset=(self._queue_bases.get((topic, item.queue_id), 0) + len(queue))
            // queue_entry.UNIT_SIZE,
        ).with_crc()
        self._write(frame.encode(item))
        if dispatched:
            code = 0
            if props.TAGS.encode() in item.properties or topic == props.SCHEDULE_TOPIC:
                code = StoredMessage(item).tags_code
            queue += queue_entry.encode(queue_entry.QueueEntry(self.offset, item.size, code))
        self.offset += item.size
        self._last_time = item.store_timestamp
        return item

    def extend(self, frames: bytes, last_time: int) -> None:
        """Write encoded frames to the log.

        The caller adds their queue entries.
        """
        if frames:
            self._write(frames)
            self.offset += len(frames)
            self._last_time = last_time

    def end_file(self) -> None:
        """Fill the file with a blank; the next frame starts a new file."""
        left = self.file_size - self.offset % self.file_size
        self._write(frame.encode_blank(left))
        self.offset += left
        self._roll()

    def queue_units(self, topic: str, queue_id: int) -> bytearray:
        """Return the bytes of a queue's entries as a bytearray, to which the caller may append."""
        return self._queues[topic, queue_id]

    def queue_start(self, topic: str, queue_id: int, offset: int) -> None:
        """Make a queue whose first message has the queue offset ``offset``. Before this
        message, the queue's first file contains filler entries (``fillPreBlank``).
        """
        position = offset * queue_entry.UNIT_SIZE
        base = position // self.queue_file_size * self.queue_file_size
        fillers = (position - base) // queue_entry.UNIT_SIZE
        self._queue_bases[topic, queue_id] = base
        self._queues[topic, queue_id] = bytearray(queue_entry.encode(queue_entry.FILLER) * fillers)

    def forget_queue(self, topic: str, queue_id: int) -> None:
        """Restart a queue at queue offset 0, as if its topic had been deleted and created again."""
        self._queues[topic, queue_id] = bytearray()
        self._queue_bases.pop((topic, queue_id), None)

    def put(
        self,
        topic: str,
        body: bytes = b"",
        *,
        queue_id: int = 0,
        properties_string: str = "",
        store_timestamp: int = 1_700_000_000_000,
        flags: int = 0,
        flag: int = 0,
    ) -> frame.Frame:
        """Write one message with IPv4 hosts, and return its frame."""
        return self.append(
            frame.Frame(
                topic=topic.encode(),
                body=body,
                properties=properties_string.encode(),
                queue_id=queue_id,
                flag=flag,
                sys_flag=flags,
                born_timestamp=store_timestamp - 3,
                born_host=BORN_HOST,
                store_timestamp=store_timestamp,
                store_host=STORE_HOST,
            )
        )

    def close(self) -> None:
        """Extend the last file to its full size, and write the queues and the checkpoint."""
        self._roll()
        for (topic, queue_id), units in self._queues.items():
            folder = self.root / CONSUME_QUEUE / topic / str(queue_id)
            folder.mkdir(parents=True, exist_ok=True)
            base = self._queue_bases.get((topic, queue_id), 0)
            for start in range(0, max(1, len(units)), self.queue_file_size):
                part = units[start : start + self.queue_file_size]
                path = folder / f"{base + start:0{NAME_DIGITS}d}"
                path.write_bytes(part.ljust(self.queue_file_size, b"\0"))
        page = checkpoint.Checkpoint(self._last_time, self._last_time, 0)
        (self.root / "checkpoint").write_bytes(checkpoint.encode(page))

    def _write(self, data: bytes) -> None:
        if self._file is None:
            base = self.offset // self.file_size * self.file_size
            path = self.root / COMMIT_LOG / f"{base:0{NAME_DIGITS}d}"
            self._file = path.open("wb", buffering=1 << 20)
        self._file.write(data)

    def _roll(self) -> None:
        if self._file is not None:
            self._file.truncate(self.file_size)
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fill(
    root: Path,
    *,
    total_bytes: int | None = None,
    count: int | None = None,
    body: tuple[int, int] = (256, 1024),
    topics: int = 4,
    queues: int = 4,
    keys: int = 1,
    file_size: int = 1 << 30,
    queue_file_size: int = 6_000_000,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Build a store for benchmarks, and return the number of messages.

    The function writes the bytes that calls of :meth:`StoreBuilder.put` would write, but is much
    faster. Calls with the same arguments and seed write equal stores. Compression would make the
    bodies about a quarter smaller. Every message has TAGS, UNIQ_KEY, WAIT and KEYS.

    Args:
        root: the folder to write; must not hold a store yet.
        total_bytes: approximate bytes of the log; None for no limit.
        count: number of messages; None for no limit.
        body: smallest and largest size of a body, in bytes.
        keys: number of words in the KEYS of each message.
        progress: called with (done, total): bytes of log, or messages if only ``count`` is given.
    """
    rng = random.Random(seed)
    pool = rng.randbytes(1 << 22).translate(_ALPHABET * 4)
    names = [f"topic-{number:02d}" for number in range(topics)]
    topic_fields = [frame.TOPIC_LENGTH_V1.struct.pack(len(n)) + n.encode() for n in names]
    code = java.hash_code(_FILL_TAG)
    pack, pack_unit = _PREFIX.pack, queue_entry.LAYOUT.struct.pack
    pack_length = frame.PROPERTIES_LENGTH.struct.pack
    fixed = _PREFIX.size + frame.PROPERTIES_LENGTH.size
    byte_limit = java.LONG_MAX if total_bytes is None else total_bytes
    most = java.LONG_MAX if count is None else count
    number, offset, room, time = 0, 0, file_size, _FILL_TIME
    parts: list[bytes] = []
    with StoreBuilder(root, file_size=file_size, queue_file_size=queue_file_size) as builder:
        while offset < byte_limit and number < most:
            length = rng.randint(*body)
            at = rng.randrange(len(pool) - length)
            topic, queue_id = divmod(rng.randrange(topics * queues), queues)
            content = pool[at : at + length]
            text = fill_properties(number, keys).encode()
            size = fixed + length + len(topic_fields[topic]) + len(text)
            if size + frame.BLANK.size > room:
                builder.extend(b"".join(parts), time)
                builder.end_file()
                offset, room, parts = offset + room, file_size, []
            time = _FILL_TIME + number // 50
            queue = builder.queue_units(names[topic], queue_id)
            crc, queue_offset = (
                java.body_crc(java.crc32(content)),
                len(queue) // queue_entry.UNIT_SIZE,
            )
            parts += (
                pack(
                    *(size, frame.MAGIC_V1, crc, queue_id, 0, queue_offset, offset, 0, time - 3),
                    *(BORN_HOST, time, STORE_HOST, 0, 0, length),
                ),
                content,
                topic_fields[topic],
                pack_length(len(text)),
                text,
            )
            queue += pack_unit(offset, size, code)
            offset, room, number = offset + size, room - size, number + 1
            if len(parts) >= _PARTS_AT_ONCE:
                builder.extend(b"".join(parts), time)
                parts = []
                if progress is not None:
                    done = (number, most) if total_bytes is None else (offset, total_bytes)
                    progress(*done)
        builder.extend(b"".join(parts), time)
    return number


def fill_properties(number: int, keys: int) -> str:
    """Return the property string of message ``number`` of :func:`fill`."""
    words = " ".join(f"key{number}-{k}" if k else f"key{number}" for k in range(keys))
    return (f"KEYS\x01{words}\x02" if keys else "") + (
        f"UNIQ_KEY\x017F0000010000{number:020X}\x02WAIT\x01true\x02TAGS\x01{_FILL_TAG}"
    )
