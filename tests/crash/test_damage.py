"""Bits that flip and files that end early: readers give the rest, and no wrong message."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import LogquarryError, StoreError
from logquarry.repair.verification import verify_store
from logquarry.testing.clock import FakeClock
from logquarry.testing.model_store import ModelStore, Seen
from tests.crash.ladder import IS_BY_HAND, SEED, count, seeds, told
from tests.crash.workload import START

SMALL = lq.StoreConfig(
    mapped_file_size_commit_log=1_024,
    mapped_file_size_consume_queue=100,
    max_hash_slot_num=3,
    max_index_num=6,
)
PARTS = 8
EACH = 125
"""Flips of one larger store."""


class Victim:
    """A closed store, and the right bytes of its files.

    Args:
        root: where it is made.
        messages: how many are put.
        settings: of the store.
        rng: chooses the messages.
    """

    def __init__(
        self, root: Path, messages: int, settings: lq.StoreConfig, rng: random.Random
    ) -> None:
        self.root = root
        self.config = settings
        self.model = ModelStore()
        clock = FakeClock(START, step=1)
        with lq.MessageStore.open(root, mode="rw", config=settings, clock=clock) as store:
            for number in range(messages):
                message = lq.Message(
                    rng.choice(["orders", "payments"]) if messages > 3 else "orders",
                    b"body %d" % number + bytes(rng.randrange(40)),
                    keys=f"k{number}",
                    tags="paid",
                )
                put = self.model.attempt(message)
                self.model.acked(put, store.put(message), is_durable=True)
        self.files = {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.stat().st_size
        }
        with lq.MessageStore.open(root, config=settings) as reader:
            assert self.model.check(Seen.of(reader, keys=True)) == []

    def look(self) -> list[lq.StoredMessage]:
        """What a reader gets from the log; queues and index give it right messages or none."""
        with lq.MessageStore.open(self.root, config=self.config) as store:
            messages = list(store.scan(on_damage="skip"))
            for topic, queue_id in store.queues():
                self._read_queue(store, topic, queue_id)
            with contextlib.suppress(StoreError):
                store.query("orders", "k1")
        return messages

    def recover(self, hit: set[bytes]) -> None:
        """A recovery of a copy loses only the hit messages, and a second one has nothing to do."""
        copy = self.root.with_name("recovered")
        shutil.copytree(self.root, copy)
        try:
            lq.recover(copy, apply=True, config=self.config)
        except LogquarryError:
            # A refusal with a reason loses nothing, as after a log file was cut to another size.
            assert log_of(copy) == log_of(self.root)
        else:
            assert not lq.recover(copy, config=self.config).steps
            with lq.MessageStore.open(copy, config=self.config) as store:
                bodies = {bytes(message.body or b"") for message in store.scan(on_damage="skip")}
            assert bodies >= {put.body for put in self.model.puts} - hit, "lost"
        finally:
            shutil.rmtree(copy)

    def hit_at(self, name: str, position: int) -> set[bytes]:
        """The messages that lie at a place of a file."""
        if not name.startswith("commitlog/"):
            return set()
        puts = self.model.puts
        return {p.body for p in puts if self._lies_in(p.physical_offset or 0, name, position)}

    def damage(self) -> list[str]:
        """The kinds of damage that a check finds."""
        with lq.MessageStore.open(self.root, config=self.config) as store:
            found = verify_store(store.layout).findings
        return [finding.kind for finding in found if finding.severity == "damage"]

    def _read_queue(self, store: lq.MessageStore, topic: str, queue_id: int) -> None:
        """A read of a queue gives its messages, or an error."""
        bodies = {put.body for put in self.model.puts}
        with contextlib.suppress(StoreError):
            low, high = store.queue_offsets(topic, queue_id)
            while low < high:
                answer = store.get(topic, queue_id, low)
                assert all(bytes(message.body or b"") in bodies for message in answer.messages)
                low = max(low + 1, min(answer.next_offset, low + 32))
                if low > 200:
                    # An entry far after the others makes the queue very long.
                    return

    def check(self, name: str, position: int) -> None:
        """One place of one file is bad: all messages elsewhere are as they were."""
        messages = self.look()
        if position % 5 == 0:
            self.damage()
        by_offset = {message.physical_offset: message for message in messages}
        for put in self.model.puts:
            assert put.physical_offset is not None
            found = by_offset.pop(put.physical_offset, None)
            in_log = name.startswith("commitlog/")
            if not (in_log and self._lies_in(put.physical_offset, name, position)):
                assert found is not None, f"lost: {put}"
                assert bytes(found.body or b"") == put.body
                assert (found.topic, found.keys) == (put.message.topic, put.message.keys)
                assert found.queue_offset == put.queue_offset
            elif found is None:
                assert self.damage(), "a message is gone, and nothing is found"
            else:
                # The CRC covers the body only.
                assert bytes(found.body or b"") == put.body
        assert not by_offset, "messages that were never put"

    def _lies_in(self, offset: int, name: str, position: int) -> bool:
        later = [put.physical_offset or 0 for put in self.model.puts]
        end = min((at for at in later if at > offset), default=1 << 62)
        return offset <= int(Path(name).name) + position < end

    def flip(self, name: str, bit: int, *, and_recover: bool = False) -> None:
        """Flip one bit of a file, look, and flip it back."""
        path = self.root / name
        data = bytearray(self.files[name])
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            self.check(name, bit // 8)
            if and_recover:
                self.recover(self.hit_at(name, bit // 8))
        finally:
            path.write_bytes(self.files[name])


def is_edge(victim: Victim, base: int, length: int) -> bool:
    """Whether a file of this length ends at most one byte from a frame's or an entry's end."""
    if base == 1 << 62:
        return length % 20 in (0, 1, 19)
    return any(abs(base + length - (put.physical_offset or 0)) < 2 for put in victim.model.puts)


def log_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "commitlog").iterdir()}


def used_size(data: bytes) -> int:
    """Bytes of a file without most of the zeros at its end."""
    return min(len(data), len(data.rstrip(b"\0")) + 24)


def bits(victim: Victim) -> Iterator[tuple[str, int]]:
    """One bit of each byte (by hand all bits), without most of the zeros at the end of files."""
    for name, data in victim.files.items():
        used = used_size(data)
        for byte in range(used):
            # Another bit than in the seven bytes before.
            for bit in range(8) if IS_BY_HAND else [(byte * 3 + SEED) % 8]:
                yield name, byte * 8 + bit
        for position in range(used, len(data), 61):
            yield name, position * 8 + position % 8


@pytest.mark.parametrize("part", range(PARTS))
def test_every_bit_of_a_small_store(part: int, shm: Path, tmp_path: Path) -> None:
    victim = Victim(shm / "store", 3, SMALL, random.Random(SEED))
    for number, (name, bit) in enumerate(bits(victim)):
        if number % PARTS == part:
            with told(SEED, f"bit {bit} of {name}"):
                # One byte of seventeen.
                chosen = IS_BY_HAND or (bit // 8 + SEED) % 17 == 0
                victim.flip(name, bit, and_recover=chosen)


@pytest.mark.parametrize("seed", seeds(count(250), EACH))
def test_bits_of_a_larger_store(seed: int, shm: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    settings = lq.StoreConfig(
        mapped_file_size_commit_log=rng.choice([2_048, 4_096]),
        mapped_file_size_consume_queue=rng.choice([100, 400]),
        max_hash_slot_num=7,
        max_index_num=rng.choice([10, 60]),
    )
    victim = Victim(shm / "store", 40, settings, rng)
    places = [name for name, data in victim.files.items() for _ in range(1 + len(data) // 512)]
    for number in range(EACH):
        name = rng.choice(places)
        bit = rng.randrange(len(victim.files[name]) * 8)
        with told(seed, f"flip {number}: bit {bit} of {name}"):
            victim.flip(name, bit)


@pytest.mark.parametrize("part", range(PARTS))
def test_each_kind_of_file_ends_at_each_length(part: int, shm: Path) -> None:
    victim = Victim(shm / "store", 12, SMALL, random.Random(SEED))
    kinds: dict[str, str] = {}
    for name in victim.files:
        # The last file of each kind, which a crash may leave short.
        kinds[name.partition("/")[0] if "durable" not in name else name] = name
    assert {"commitlog", "consumequeue", "index", "checkpoint"} <= kinds.keys()
    for name in kinds.values():
        data = victim.files[name]
        path = victim.root / name
        base = int(path.name) if name.startswith("commitlog/") else 1 << 62
        used = len(data) if IS_BY_HAND else used_size(data)
        for length in sorted({*range(used), *range(used, len(data), 97)})[part::PARTS]:
            # One length of three, and all lengths near the ends of frames and entries; by hand all.
            if not (IS_BY_HAND or length % 3 == 0 or is_edge(victim, base, length)):
                continue
            path.write_bytes(data[:length])
            with told(SEED, f"{name} ends at {length}"):
                messages = victim.look()
                if length % 7 == 0:
                    victim.damage()
                bodies = {bytes(message.body or b"") for message in messages}
                whole = {
                    put.body
                    for put, after in zip(
                        victim.model.puts, [*victim.model.puts[1:], None], strict=True
                    )
                    if (end := after.physical_offset if after else 1 << 61) is not None
                    and (end <= base + length)
                }
                assert bodies >= whole, "lost"
                assert bodies <= {put.body for put in victim.model.puts}
                is_log = name.startswith("commitlog/")
                chosen = is_edge(victim, base, length) if is_log else length % 23 == 0
                if IS_BY_HAND or length % 31 == 0 or chosen:
                    victim.recover({put.body for put in victim.model.puts} - whole)
        path.write_bytes(data)
