"""Random damage to the files of a store, for comparisons with RocketMQ."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

from logquarry.format import checkpoint, frame
from logquarry.format.checkpoint import Checkpoint
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from tests.helpers.files import overwrite

_LONGS = (0, -1, 1, 1 << 31, (1 << 63) - 1, -(1 << 63), 0x7FFFFFFF)
_INTS = (0, -1, 1, 91, 0x7FFFFFFF, -(1 << 31), 1 << 16, 0x40000000)
_FIELDS = (
    *("size", "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag"),
    *("store_timestamp", "body_length", "topic_length", "properties", "property_byte"),
)
_LENGTH_BYTES = (0, 1, 20, 127, 128, 255)


class Harm:
    """Harms one store.

    Args:
        root: the store, a copy.
        rng: chooses.

    Attributes:
        done: what was done, in words.
    """

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.rng = rng
        self.done: list[str] = []
        self.frames: list[tuple[Path, int, int]] = []
        layout = StoreLayout.open(root)
        for event in LogReader(layout).events():
            if isinstance(event, Run):
                for row in event.rows.tolist():
                    base = int(Path(event.path).name)
                    at = event.window.base + row[0] - base
                    self.frames.append((Path(event.path), at, row[1]))

    def any(self) -> None:
        """Do one to three kinds of damage."""
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.flip_log_bit, 3),
            (self.change_field, 8),
            (self.zero_log, 3),
            (self.copy_log, 2),
            (self.lose_log_file, 2),
            (self.lose_queue_file, 4),
            (self.change_unit, 4),
            (self.zero_queue_tail, 4),
            (self.cut_file, 1),
            (self.change_checkpoint, 5),
            (self.change_index, 3),
        ]
        if self.rng.random() < 0.5:
            (self.root / "abort").touch()
            self.done.append("abort")
        functions, weights = zip(*kinds, strict=True)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            self.rng.choices(functions, weights)[0]()

    def _write(self, path: Path, at: int, data: bytes, what: str) -> None:
        overwrite(path, at, data)
        name = path.relative_to(self.root)
        self.done.append(f"{what}: {name} at {at}: {data[:16].hex()} ({len(data)})")

    def _files(self, folder: str) -> list[Path]:
        return sorted(path for path in (self.root / folder).rglob("*") if path.is_file())

    def _frame(self) -> tuple[Path, int, int] | None:
        there = [found for found in self.frames if found[0].exists()]
        if not there:
            return None
        # The last files matter most.
        return self.rng.choice(there[-60:] if self.rng.random() < 0.5 else there)

    def flip_log_bit(self) -> None:
        found = self._frame()
        if found is None:
            return
        path, at, size = found
        at += self.rng.randrange(min(size, path.stat().st_size - at))
        byte = path.read_bytes()[at] ^ 1 << self.rng.randrange(8)
        self._write(path, at, bytes([byte]), "bit")

    def change_field(self) -> None:
        """Another value in a field of a frame."""
        found = self._frame()
        if found is None:
            return
        path, at, size = found
        data = path.read_bytes()[at : at + size]
        if len(data) < frame.FIXED_SIZE_V1:
            return
        head = frame.HEAD
        name = self.rng.choice(_FIELDS)
        rng = self.rng
        if name in ("queue_offset", "physical_offset"):
            old = struct.unpack_from(">q", data, head.offsets[name])[0]
            near = old + rng.choice((-20, -3, -1, 1, 2, 40, 100, -old))
            value = struct.pack(">q", rng.choice((near, near, near, rng.choice(_LONGS))))
            self._write(path, at + head.offsets[name], value, name)
        elif name == "size":
            value = struct.pack(">i", rng.choice((*_INTS, size + 1, size - 1, size + 200)))
            self._write(path, at, value, name)
        elif name == "magic":
            magics = (frame.MAGIC_V2, frame.MAGIC_BLANK, 0, frame.MAGIC_V1 + 1)
            self._write(path, at + 4, struct.pack(">I", rng.choice(magics)), name)
        elif name == "queue_id":
            value = struct.pack(">i", rng.choice((0, 1, 2, 7, -1)))
            self._write(path, at + head.offsets[name], value, name)
        elif name == "sys_flag":
            value = struct.pack(">i", rng.choice((0, 1, 2, 4, 8, 12, 16, 32)))
            self._write(path, at + head.offsets[name], value, name)
        else:
            self._change_tail(path, at, data, name)

    def _change_tail(self, path: Path, at: int, data: bytes, name: str) -> None:
        rng = self.rng
        born, store = frame.host_sizes(frame.HEAD.struct.unpack_from(data, 0)[7])
        place = frame.HEAD.size + born
        if name == "store_timestamp":
            value = rng.choice((0, -1, 1, struct.unpack_from(">q", data, place)[0] + 5000))
            self._write(path, at + place, struct.pack(">q", value), name)
            return
        place += frame.STORE_TIME.size + store + frame.TAIL.size - 4
        (body,) = struct.unpack_from(">i", data, place)
        if name == "body_length":
            value = rng.choice((*_INTS, body + 1, body - 1))
            self._write(path, at + place, struct.pack(">i", value), name)
            return
        place += 4 + body
        if name == "topic_length":
            old = data[place] + rng.choice((-1, 1))
            value = rng.choice((*_LENGTH_BYTES, old % 256))
            self._write(path, at + place, bytes([value]), name)
            return
        place += 1 + data[place]
        (length,) = struct.unpack_from(">h", data, place)
        if name == "properties":
            value = rng.choice((0, -1, -(1 << 15), 32767, length - 1, length + 1))
            self._write(path, at + place, struct.pack(">h", value), name)
        elif length:
            where = place + 2 + rng.randrange(length)
            self._write(path, at + where, rng.choice((b"\1", b"\2", b"x", b"9", b"\xff")), name)

    def zero_log(self) -> None:
        found = self._frame()
        if found is None:
            return
        path, at, _ = found
        if self.rng.random() < 0.5:
            at = at // 4096 * 4096
        length = self.rng.choice((1, 8, 91, 512, 4096, 1 << 20))
        self._write(path, at, bytes(min(length, path.stat().st_size - at)), "zeros")

    def copy_log(self) -> None:
        """Bytes of another place, with frames whose physical offset is wrong."""
        one, other = self._frame(), self._frame()
        if one is None or other is None:
            return
        data = one[0].read_bytes()[one[1] : one[1] + self.rng.choice((one[2], 3000))]
        self._write(other[0], other[1], data[: other[0].stat().st_size - other[1]], "copy")

    def _lose(self, files: list[Path]) -> None:
        if files:
            path = self.rng.choice((files[-1], self.rng.choice(files)))
            path.unlink()
            self.done.append(f"lost: {path.relative_to(self.root)}")

    def lose_log_file(self) -> None:
        files = self._files("commitlog")
        if self.rng.random() < 0.1:
            for path in files:
                path.unlink()
            self.done.append("lost: the log")
        else:
            self._lose(files)

    def _queue(self) -> list[Path]:
        files = self._files("consumequeue")
        if not files:
            return []
        folder = self.rng.choice(sorted({path.parent for path in files}))
        return sorted(folder.iterdir())

    def lose_queue_file(self) -> None:
        kind = self.rng.random()
        if kind < 0.15:
            for path in self._files("consumequeue"):
                path.unlink()
            self.done.append("lost: all queues")
        elif kind < 0.4:
            for path in self._queue():
                path.unlink()
                self.done.append(f"lost: {path.relative_to(self.root)}")
        else:
            self._lose(self._queue())

    def change_unit(self) -> None:
        files = self._queue()
        if not files:
            return
        path = self.rng.choice((files[-1], self.rng.choice(files)))
        units = path.stat().st_size // 20
        at = self.rng.choice((0, self.rng.randrange(units))) * 20
        unit = struct.pack(
            ">qiq",
            self.rng.choice((*_LONGS, self.rng.randrange(1 << 18))),
            self.rng.choice((*_INTS, 200)),
            self.rng.randrange(-5, 5),
        )
        kind = self.rng.random()
        data = unit if kind < 0.5 else unit[:8] if kind < 0.7 else path.read_bytes()[:20]
        self._write(path, at, data, "unit")

    def zero_queue_tail(self) -> None:
        """The last entries of some queues never reached the disk."""
        for _ in range(self.rng.choice((1, 2, 20))):
            files = self._queue()
            if not files:
                return
            data = files[-1].read_bytes()
            end = len(data.rstrip(b"\0"))
            lost = self.rng.choice((20, 40, 100, end))
            start = max(0, (end - lost) // 20 * 20)
            self._write(files[-1], start, bytes(len(data) - start), "zeros")

    def cut_file(self) -> None:
        files = self._files("commitlog") + self._files("consumequeue")
        if files:
            path = self.rng.choice(files)
            size = self.rng.choice((0, path.stat().st_size - 1, path.stat().st_size // 2))
            os.truncate(path, size)
            self.done.append(f"cut: {path.relative_to(self.root)} to {size}")

    def change_checkpoint(self) -> None:
        path = self.root / "checkpoint"
        times = [0, 1, -5, 1 << 62]
        for log, at, _ in self.rng.sample(self.frames, min(6, len(self.frames))):
            if log.exists():
                data = log.read_bytes()[at : at + 80]
                if len(data) == 80:
                    time = struct.unpack_from(">q", data, 56)[0]
                    times += [time, time + 3000, time + 3001]
        kind = self.rng.random()
        if kind < 0.15:
            path.unlink(missing_ok=True)
            self.done.append("lost: checkpoint")
            return
        found = Checkpoint(*(self.rng.choice(times) for _ in range(3)))
        if kind < 0.6 and path.exists():
            old = checkpoint.decode(path.read_bytes())
            found = old._replace(**{self.rng.choice(Checkpoint._fields): self.rng.choice(times)})
        data = checkpoint.encode(found)
        path.write_bytes(data[:24] if kind > 0.95 else data)
        self.done.append(f"checkpoint: {found}")

    def change_index(self) -> None:
        files = self._files("index")
        if not files:
            return
        path = self.rng.choice((files[-1], self.rng.choice(files)))
        kind = self.rng.random()
        if kind < 0.3:
            path.unlink()
            self.done.append(f"lost: {path.relative_to(self.root)}")
        elif kind < 0.5:
            size = self.rng.choice((0, 10, 40, path.stat().st_size // 2))
            os.truncate(path, size)
            self.done.append(f"cut: {path.relative_to(self.root)} to {size}")
        elif kind < 0.8:
            at, size = self.rng.choice(((0, 8), (8, 8), (16, 8), (24, 8), (32, 4), (36, 4)))
            value = self.rng.choice(_LONGS) if size == 8 else self.rng.choice((0, 1, 2, 50, 9999))
            self._write(path, at, struct.pack(">q" if size == 8 else ">i", value), "index header")
        else:
            at = 40 + 4 * self.rng.randrange(max(1, (path.stat().st_size - 44) // 4))
            value = self.rng.choice((-1, 0, 1, 5, 99999))
            self._write(path, at, struct.pack(">i", value), "index")
