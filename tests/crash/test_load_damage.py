"""An interrupted load is completed once, although the part of it that is in the log was damaged."""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.format import put_frames
from logquarry.ingest.staging import LoadPlan, Staged, Stager
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from logquarry.store.load.ledger import LoadId
from logquarry.store.load.segment import StagedFrames, StagedWriter
from logquarry.store.message_store import StoreWriter
from tests.crash.ladder import count, seeds, told
from tests.crash.test_load import LOAD, SETTINGS, planned

FOREIGN = b"foreign"


def task(plan: LoadPlan, partition: int, rng: random.Random) -> Staged:
    """Some rows are equal, and many have the same size or the same body."""
    kinds = [(b"%d" % rng.randrange(4), f"k{rng.randrange(3)}", rng.choice("ab")) for _ in range(9)]
    rows = [rng.choice(kinds) for _ in range(rng.randint(1, 12))]
    bodies = [body * rng.choice([1, 1, 40, 400]) for body, _, _ in rows]
    stager = Stager(plan, LOAD, partition)
    stager.add(
        pa.record_batch(
            {
                "topic": [f"topic-{topic}" for _, _, topic in rows],
                "body": pa.array(bodies, pa.binary()),
                "keys": [keys for _, keys, _ in rows],
                "born_timestamp": pa.array([1_700_000_000_000] * len(rows)),
            }
        )
    )
    return stager.finish()


Span = tuple[int, int]


def interrupted(plan: LoadPlan, tasks: list[Staged], rng: random.Random) -> int:
    """Append the first frames of a load, between messages of another thread. Return the log's end
    before the load.
    """
    segments = [segment for each in tasks for _, segment in each.segments]
    left = rng.randint(0, sum(segment.rows for segment in segments))
    append = StagedWriter.append
    with StoreWriter.start(plan.store(0), config=SETTINGS) as store:
        store.put_many([lq.Message("topic-a", b"before %d" % n) for n in range(3)])
        start = store.flush()

        def append_some(self: StagedWriter, frames: StagedFrames, start: int = 0) -> int:
            nonlocal left
            for size in put_frames.sizes_of(frames.data, start):
                if not left:
                    raise StoreUnavailable("the process was stopped")
                part = StagedFrames(frames.data[start : start + size], frames.queues, frames.path)
                append(self, part)
                start, left = start + size, left - 1
                if rng.random() < 0.2:
                    store.put(lq.Message("topic-a", FOREIGN * rng.choice([1, 1, 30])))
            return 0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagedWriter, "append", append_some)
            with contextlib.suppress(StoreUnavailable):
                store.load_staged(LOAD, segments)
    return start


def spans(root: Path, start: int) -> list[Span]:
    """Physical offset and size of each frame after an offset."""
    found = []
    for event in LogReader(StoreLayout.open(root, SETTINGS)).events(start):
        if isinstance(event, Run):
            base = event.window.base
            found += [(base + row[0], row[1]) for row in event.rows.tolist()]
    return found


def harm(root: Path, frames: list[Span], rng: random.Random) -> None:
    first = rng.randrange(len(frames))
    offset, size = frames[first]
    kind = rng.choice(["body", "text", "head", "zeros", "many"])
    if kind == "many":
        size = sum(size for _, size in frames[first : first + rng.randint(1, 4)])
    base = offset - offset % 4_096
    path = root / f"commitlog/{base:020d}"
    data = bytearray(path.read_bytes())
    at, stop = offset - base, min(offset - base + size, 4_096)
    if kind in ("zeros", "many"):
        data[at:stop] = bytes(stop - at)
    else:
        position = {"body": at + 88, "text": stop - 1 - rng.randrange(12), "head": at + 18}[kind]
        data[position] ^= rng.randrange(1, 256) if rng.random() < 0.5 else data[position] or 1
    path.write_bytes(data)


def facts(root: Path) -> Counter[tuple[str, str | None, bytes]]:
    """The readable messages of the load."""
    with lq.MessageStore.open(root, config=SETTINGS) as store:
        found = [
            m for m in store.scan(on_damage="skip") if not m.body.startswith((FOREIGN, b"bef"))
        ]
        return Counter((m.topic, m.keys, m.body) for m in found)


@pytest.mark.parametrize("seed", seeds(count(20), 1))
def test_damage_in_an_interrupted_load(seed: int, shm: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    plan = planned(shm / "live", 1)
    tasks = [task(plan, partition, rng) for partition in range(rng.randint(1, 3))]
    shutil.copytree(shm / "live", shm / "other")
    start = interrupted(plan, tasks, rng)
    frames = spans(shm / "live", start)
    with told(seed, "damage in the load", shm / "live", tmp_path):
        whole = planned(shm / "other", 1)
        with StoreWriter.start(whole.store(0), config=SETTINGS) as store:
            store.load_staged(LOAD, [segment for each in tasks for _, segment in each.segments])
        wanted = facts(shm / "other")
        lost = 0
        if frames:
            for _ in range(rng.randint(1, 2)):
                harm(shm / "live", frames, rng)
            lost = len(frames) - len(spans(shm / "live", start))
        # A writer that was killed leaves `abort`.
        if rng.random() < 0.5:
            (shm / "live/abort").touch()
        with StoreWriter.start(shm / "live", config=SETTINGS, accept_loss=1 << 20):
            pass
        found = facts(shm / "live")
        repeated = found - wanted
        # A message with damage in its topic or properties is another message.
        assert sum(repeated.values()) <= 2, repeated
        missing = wanted - found
        assert sum(missing.values()) <= lost + 2
        assert not list((shm / "live").rglob("intent.json"))


def stopped(
    plan: LoadPlan, tasks: list[Staged], rows: int, others: tuple[lq.Message, ...] = ()
) -> int:
    """Append the first frames of a load, and then messages; return the log's end before."""
    segments = [segment for each in tasks for _, segment in each.segments]
    append = StagedWriter.append
    with StoreWriter.start(plan.store(0), config=SETTINGS) as store:
        start = store.flush()

        def append_some(self: StagedWriter, frames: StagedFrames, start: int = 0) -> int:
            end = sum(put_frames.sizes_of(frames.data)[:rows])
            append(self, StagedFrames(frames.data[:end], frames.queues, frames.path))
            raise StoreUnavailable("the process was stopped")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagedWriter, "append", append_some)
            with pytest.raises(StoreUnavailable, match="stopped"):
                store.load_staged(LOAD, segments)
        for message in others:
            store.put(message)
        # The same writer does not begin another load, which would forget the first.
        with pytest.raises(StoreUnavailable, match="an earlier load was interrupted"):
            store.load_staged(LOAD, segments)
        with pytest.raises(StoreUnavailable, match="an earlier load was interrupted"):
            store.load_staged(LoadId("other", 1), segments)
    return start


def some_rows(plan: LoadPlan, number: int, bodies: Sequence[bytes] = (b"equal",)) -> list[Staged]:
    stager = Stager(plan, LOAD, 0)
    stager.add(
        pa.record_batch(
            {
                "topic": ["topic-a"] * number,
                "body": pa.array(list(bodies) * (number // len(bodies)), pa.binary()),
                "keys": ["key"] * number,
                "queue_id": pa.array([0] * number, pa.int32()),
                "born_timestamp": pa.array([1_700_000_000_000] * number),
            }
        )
    )
    return [stager.finish()]


def bodies(root: Path) -> Counter[bytes]:
    with lq.MessageStore.open(root, config=SETTINGS) as store:
        return Counter(message.body for message in store.scan())


def test_a_message_of_another_thread_with_an_equal_body(shm: Path) -> None:
    """It is no damaged frame of the load: all messages of the load are there in the end."""
    plan = planned(shm / "live", 1)
    tasks = some_rows(plan, 5)
    other = lq.Message("topic-a", b"equal", keys="key", queue_id=0)
    stopped(plan, tasks, 2, (other,))
    sizes = {size for _, size in spans(shm / "live", 0)}
    assert len(sizes) == 1
    for _ in range(2):
        with StoreWriter.start(shm / "live", config=SETTINGS):
            pass
        assert bodies(shm / "live") == {b"equal": 6}


def broker_ran(root: Path) -> None:
    """A broker has written the store since then: it has changed the times of the checkpoint."""
    path = root / "checkpoint"
    times = struct.unpack(">qqq", path.read_bytes()[:24])
    path.write_bytes(struct.pack(">qqq", *(time + 1 for time in times)) + path.read_bytes()[24:])


def test_messages_of_a_broker_after_a_torn_frame(shm: Path) -> None:
    """They stay, and the load is completed after them."""
    plan = planned(shm / "live", 1)
    tasks = some_rows(plan, 5)
    start = stopped(plan, tasks, 3, tuple(lq.Message("topic-a", b"%d" % n) for n in range(4)))
    offset, size = spans(shm / "live", start)[1]
    path = shm / "live/commitlog/00000000000000000000"
    data = bytearray(path.read_bytes())
    data[offset + size - 4 : offset + size] = bytes(4)
    path.write_bytes(data)
    broker_ran(shm / "live")
    (shm / "live/abort").touch()
    with StoreWriter.start(shm / "live", config=SETTINGS):
        pass
    assert bodies(shm / "live") == {b"equal": 5, b"0": 1, b"1": 1, b"2": 1, b"3": 1}


def test_a_rollback_does_not_remove_messages_of_a_broker(shm: Path) -> None:
    plan = planned(shm / "live", 1)
    tasks = some_rows(plan, 5)
    stopped(plan, tasks, 3, (lq.Message("topic-a", b"later"),))
    broker_ran(shm / "live")
    for path in shm.rglob("*.frames"):
        path.unlink()
    with pytest.raises(StoreUnavailable, match=r"may have added messages.*move .*intent\.json out"):
        StoreWriter.start(shm / "live", config=SETTINGS)
    (shm / "live/.logquarry/loads/intent.json").unlink()
    with StoreWriter.start(shm / "live", config=SETTINGS):
        pass
    assert bodies(shm / "live") == {b"equal": 3, b"later": 1}


def test_the_start_of_the_log_has_expired(shm: Path) -> None:
    """A broker has deleted the first file. The next frames show how much of the load was there."""
    for rows, is_found in ((70, True), (10, False)):
        root = shm / f"{rows}"
        plan = planned(root, 1)
        loaded = [b"%03d" % number for number in range(100)]
        others = tuple(lq.Message("topic-a", b"other") for _ in range(50))
        assert stopped(plan, some_rows(plan, 100, loaded), rows, others) == 0
        broker_ran(root)
        (root / "commitlog/00000000000000000000").unlink()
        if is_found:
            with StoreWriter.start(root, config=SETTINGS):
                pass
            found = bodies(root)
            assert found.pop(b"other") == 50
            assert 30 < len(found) < 70
            assert found == Counter(loaded[-len(found) :])
        else:
            with pytest.raises(StoreUnavailable, match=r"the log begins at 4096 now, .* move "):
                StoreWriter.start(root, config=SETTINGS)
