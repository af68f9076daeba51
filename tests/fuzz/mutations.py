"""Random damage to the files of a store; the same seed gives the same damage."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from logquarry.format import checkpoint, frame, index, queue_entry
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run

BOUNDARIES = (
    *(0, 1, 2, 7, 8, 20, 90, 91, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF),
    *(0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
ODD_JSON = (
    b"[" * 5000,
    b'{"a":' * 200,
    b"1e999",
    b"-1",
    b"99999999999999999999999",
    b"null",
    b"[]",
    b"{}",
    b'"\\ud800"',
    b'"' + b'\\"' * 2000,
    b"NaN",
    b"1.5",
    b"\xff\xfe",
    b"\0" * 64,
    b"true",
)
ODD_NAMES = (
    "0",
    "00000000000000000007",
    "99999999999999999999",
    "x.tmp",
    "-1",
    "٠٠",
    "a\nb",
    "..c",
)


class Bench:
    """A working copy of a store that is put back after each harm.

    Args:
        golden: the store as it should be.
        copy: where the copy goes.
    """

    def __init__(self, golden: Path, copy: Path) -> None:
        shutil.copytree(golden, copy)
        self.root = copy
        self.sound = {
            str(path.relative_to(copy)): path.read_bytes()
            for path in sorted(copy.rglob("*"))
            if path.is_file()
        }
        self.folders = [path for path in copy.rglob("*") if path.is_dir()]
        layout = StoreLayout.open(copy)
        self.frames = [
            (f"commitlog/{Path(event.path).name}", event.window.base + row[0])
            for event in LogReader(layout).events()
            if isinstance(event, Run)
            for row in event.rows.tolist()
        ]
        self.bases = {file.path: file.base for file in layout.commit_log.files}

    @contextmanager
    def harmed(self, rng: random.Random) -> Iterator[list[str]]:
        """Damage the store in one to three ways, and yield them in words; restore it afterwards."""
        told: list[str] = []
        touched: set[str] = set()
        try:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                told.append(self._harm(rng, touched))
            yield told
        finally:
            for name in touched:
                self._restore(name)

    def _restore(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        # A new file: what still has the old one mapped must not see it change.
        path.unlink(missing_ok=True)
        if name in self.sound:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.sound[name])

    def _harm(self, rng: random.Random, touched: set[str]) -> str:
        if rng.random() < 0.08:
            return self._harm_folder(rng, touched)
        name = self._some_file(rng)
        path = self.root / name
        if not path.is_file():
            return f"{name}: gone already"
        data = bytearray(path.read_bytes())
        kind = name.split("/", maxsplit=1)[0]
        harms: list[Callable[[random.Random, str, bytearray], str]] = [
            _flip_bits,
            _overwrite,
            _truncate,
            _extend,
            _duplicate,
            _zero,
        ]
        fields = {
            "commitlog": self._set_frame_field,
            "consumequeue": _set_unit_field,
            "index": _set_index_field,
            "checkpoint": _set_checkpoint_field,
            "config": _set_json,
        }
        if kind in fields:
            harms += 4 * [fields[kind]]
        what = rng.choice(harms)(rng, name, data)
        touched.add(name)
        path.unlink()
        path.write_bytes(bytes(data))
        return f"{name}: {what}"

    def _some_file(self, rng: random.Random) -> str:
        groups: dict[str, list[str]] = {}
        for name in self.sound:
            groups.setdefault(name.split("/", maxsplit=1)[0], []).append(name)
        weights = {"commitlog": 6, "consumequeue": 4, "index": 4, "checkpoint": 1, "config": 2}
        kinds = sorted(groups)
        kind = rng.choices(kinds, [weights.get(kind, 0.3) for kind in kinds])[0]
        return rng.choice(groups[kind])

    def _harm_folder(self, rng: random.Random, touched: set[str]) -> str:
        name = self._some_file(rng)
        path = self.root / name
        what = rng.choice(("delete", "folder", "rename", "stray", "abort", "swap"))
        if what == "abort":
            touched.add("abort")
            (self.root / "abort").write_bytes(b"")
            return "abort: made"
        if what == "stray":
            folder = rng.choice(self.folders)
            stray = folder / rng.choice(ODD_NAMES)
            if stray.exists():
                return "stray: there already"
            touched.add(str(stray.relative_to(self.root)))
            if rng.random() < 0.3:
                stray.mkdir()
            else:
                stray.write_bytes(rng.randbytes(rng.randrange(100)))
            return f"{touched}: made"
        if not path.is_file():
            return f"{name}: gone already"
        touched.add(name)
        if what == "rename":
            other = path.with_name(rng.choice(ODD_NAMES))
            if other.exists():
                return f"{other}: there already"
            touched.add(str(other.relative_to(self.root)))
            path.rename(other)
            return f"{name}: now {other.name!r}"
        if what == "swap":
            data = self.sound[self._some_file(rng)]
            path.unlink()
            path.write_bytes(data)
            return f"{name}: holds another file"
        path.unlink()
        if what == "folder":
            path.mkdir()
        return f"{name}: {what}"

    def _set_frame_field(self, rng: random.Random, name: str, data: bytearray) -> str:
        here = [offset for path, offset in self.frames if path == name]
        if not here:
            return _flip_bits(rng, name, data)
        at = rng.choice(here) - self.bases[name]
        if rng.random() < 0.6:
            field = rng.choice(frame.HEAD.fields)
            at += frame.HEAD.offsets[field.name]
            width, what = field.width, field.name
        else:
            # Body, topic and properties lengths of a frame with IPv4 hosts, and what is near.
            at += rng.choice((84, 88, 89)) if rng.random() < 0.7 else rng.randrange(200)
            width, what = rng.choice((1, 2, 4)), "a length"
        return _put(rng, data, at, width, what)


def _put(rng: random.Random, data: bytearray, at: int, width: int, what: str) -> str:
    if at + width > len(data):
        return _extend(rng, "", data)
    old = int.from_bytes(data[at : at + width], "big")
    value = rng.choice((*BOUNDARIES, old + 1, old - 1, old * 2, old ^ 1, rng.getrandbits(64)))
    value %= 1 << (8 * width)
    data[at : at + width] = value.to_bytes(width, "big")
    return f"{what} at {at} set to {value}"


def _flip_bits(rng: random.Random, name: str, data: bytearray) -> str:
    if not data:
        return _extend(rng, name, data)
    places = [rng.randrange(8 * len(data)) for _ in range(rng.choice((1, 1, 1, 4, 32)))]
    for place in places:
        data[place // 8] ^= 1 << place % 8
    return f"bits {places} flipped"


def _overwrite(rng: random.Random, name: str, data: bytearray) -> str:
    at = rng.randrange(len(data) + 1)
    patch = rng.randbytes(rng.choice((1, 4, 16, 200, 3000)))
    patch = patch[: len(data) - at]
    data[at : at + len(patch)] = patch
    return f"{len(patch)} bytes from {at} overwritten"


def _truncate(rng: random.Random, name: str, data: bytearray) -> str:
    length = rng.choice((0, rng.randrange(len(data) + 1), max(0, len(data) - rng.randrange(64))))
    del data[length:]
    return f"cut to {length}"


def _extend(rng: random.Random, name: str, data: bytearray) -> str:
    more = rng.choice((bytes, rng.randbytes))(rng.choice((1, 20, 4096, 100_000)))
    data += more
    return f"{len(more)} bytes longer"


def _duplicate(rng: random.Random, name: str, data: bytearray) -> str:
    if not data:
        return _extend(rng, name, data)
    start = rng.randrange(len(data))
    block = data[start : start + rng.choice((20, 40, 100, 512, 4096))]
    at = rng.randrange(len(data))
    if rng.random() < 0.3:
        data[at:at] = block
        return f"{len(block)} bytes of {start} put in at {at}"
    block = block[: len(data) - at]
    data[at : at + len(block)] = block
    return f"{len(block)} bytes of {start} copied to {at}"


def _zero(rng: random.Random, name: str, data: bytearray) -> str:
    page = rng.choice((512, 4096))
    at = rng.randrange(len(data) // page + 1) * page
    length = min(page * rng.choice((1, 1, 3)), len(data) - at)
    data[at : at + length] = bytes(length)
    return f"{length} zeros at {at}"


def _set_unit_field(rng: random.Random, name: str, data: bytearray) -> str:
    units = len(data) // queue_entry.UNIT_SIZE
    written = [
        number
        for number in range(units)
        if queue_entry.decode_at(bytes(data), number * queue_entry.UNIT_SIZE).is_written
    ]
    if not written:
        return _overwrite(rng, name, data)
    field = rng.choice(queue_entry.LAYOUT.fields)
    number = rng.choice(
        (written[0], written[-1], rng.choice(written), min(written[-1] + 1, units - 1))
    )
    at = number * queue_entry.UNIT_SIZE + queue_entry.LAYOUT.offsets[field.name]
    return _put(rng, data, at, field.width, field.name)


def _set_index_field(rng: random.Random, name: str, data: bytearray) -> str:
    if rng.random() < 0.4 or len(data) < 200:
        field = rng.choice(index.HEADER.fields)
        at = index.HEADER.offsets[field.name]
        return _put(rng, data, at, field.width, field.name)
    words = [at for at in range(40, len(data) - 4, 4) if any(data[at : at + 4])]
    if not words:
        return _overwrite(rng, name, data)
    return _put(rng, data, rng.choice(words), 4, "a word")


def _set_checkpoint_field(rng: random.Random, name: str, data: bytearray) -> str:
    field = rng.choice(checkpoint.LAYOUT.fields)
    return _put(rng, data, checkpoint.LAYOUT.offsets[field.name], field.width, field.name)


def _set_json(rng: random.Random, name: str, data: bytearray) -> str:
    if rng.random() < 0.3:
        try:
            document = json.loads(data)
        except ValueError:
            document = {"offsetTable": {}}
        inner = next(iter(document)) if isinstance(document, dict) and document else "x"
        odd = rng.choice(ODD_JSON)
        data[:] = b'{"%s":%s}' % (inner.encode(), odd)
        return f"one entry of {odd[:20]!r}"
    at = rng.randrange(len(data) + 1)
    odd = rng.choice((*ODD_JSON, b"{", b"}", b",", b":", b'"', b"\\"))
    end = at + rng.choice((0, 0, 1, 5))
    data[at:end] = odd
    return f"{odd[:20]!r} at {at}"
