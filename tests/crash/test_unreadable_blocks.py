"""Stores on a disk that does not deliver some blocks, and files truncated under a reader.

Most tests simulate the disk by a probe. The tests marked ``root`` mount a real file system whose
image ends before the blocks do.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import CorruptStore
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import BLOCK, UNREADABLE, probed_by
from logquarry.log.walk import LogReader, Run
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from logquarry.testing.disk_state import BadBlocks

FILE = 1 << 20
CONFIG = lq.StoreConfig(
    mapped_file_size_commit_log=FILE,
    mapped_file_size_consume_queue=20_000,
    max_hash_slot_num=500,
    max_index_num=2_000,
)
COUNT = 6_000
Frames = dict[int, tuple[int, bytes]]
"""Physical offset -> size and bytes of each frame."""
Blocks = list[tuple[str, int]]
"""Ends of paths, and the numbers of blocks of 4,096 bytes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Frames]:
    """A store that was shut down cleanly, and its frames."""
    root = tmp_path_factory.mktemp("made") / "store"
    choice = random.Random(4)
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        for number in range(COUNT):
            body = choice.randbytes(choice.choice([10, 200, 700, 3_000]))
            store.put(lq.Message(f"topic{number % 3}", body, tags="t", keys=f"k{number}"))
    return root, frames_of(root)


def frames_of(root: Path) -> Frames:
    found: Frames = {}
    for event in LogReader(StoreLayout.open(root, CONFIG)).events():
        if isinstance(event, Run):
            for position, size, *_ in event.rows.tolist():
                data = event.window.data[position : position + size].tobytes()
                found[event.window.base + position] = size, data
    return found


def log_blocks(frames: Frames, count: int, seed: int) -> Blocks:
    """Random blocks of the log's files, as path ends and numbers."""
    end = max(offset + size for offset, (size, _) in frames.items())
    numbers = random.Random(seed).sample(range(end // BLOCK), count)
    return [
        (f"store/commitlog/{at * BLOCK // FILE * FILE:020d}", at * BLOCK % FILE // BLOCK)
        for at in numbers
    ]


def untouched(frames: Frames, blocks: Blocks) -> dict[int, bytes]:
    """The frames that lie in none of the blocks."""
    bad = {int(name.rpartition("/")[2]) // BLOCK + number for name, number in blocks}
    return {
        offset: data
        for offset, (size, data) in frames.items()
        if not any(at in bad for at in range(offset // BLOCK, (offset + size - 1) // BLOCK + 1))
    }


@pytest.mark.parametrize("has_populate", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_salvage_saves_every_message_that_touches_no_unreadable_block(
    made: tuple[Path, Frames], tmp_path: Path, seed: int, has_populate: bool
) -> None:
    root, frames = made
    blocks = log_blocks(frames, 100, seed)
    wanted = untouched(frames, blocks)
    assert len(frames) * 0.5 < len(wanted) < len(frames)
    with probed_by(BadBlocks(blocks, has_populate=has_populate)):
        found = salvage_store(StoreLayout.open(root, CONFIG), tmp_path / "saved")
    assert found.plan.messages == len(wanted)
    assert {span.kind for span in found.plan.lost} == {UNREADABLE}
    lost = sum(
        stop - start
        for span in found.plan.lost
        for r in span.messages.values()
        for start, stop in r
    )
    assert lost == len(frames) - len(wanted)
    with (
        lq.MessageStore.open(tmp_path / "saved", config=CONFIG) as saved,
        lq.MessageStore.open(root, config=CONFIG) as whole,
    ):
        there = {m.keys: m.body for m in saved.scan()}
        assert there == {m.keys: m.body for m in whole.scan() if m.physical_offset in wanted}
    assert not verify_store(StoreLayout.open(tmp_path / "saved", CONFIG)).has_damage


@pytest.mark.parametrize("seed", range(2))
def test_verify_and_readers_go_on_after_unreadable_blocks(
    made: tuple[Path, Frames], seed: int
) -> None:
    root, frames = made
    blocks = log_blocks(frames, 30, seed)
    wanted = untouched(frames, blocks)
    with probed_by(BadBlocks(blocks)):
        report = verify_store(StoreLayout.open(root, CONFIG))
        assert report.by_kind[UNREADABLE] > 0
        damage = {f.kind for f in report.findings if f.severity == "damage"}
        assert damage <= {UNREADABLE, "index_entry", "index_entry_wrong"}, report.findings
        assert report.counts["messages"] == len(wanted)
        assert "errno 5" in next(f.reason for f in report.findings if f.kind == UNREADABLE)
        with lq.MessageStore.open(root, config=CONFIG) as store:
            for topics in (None, "topic1"):
                seen = {m.physical_offset for m in store.scan(topics, on_damage="skip")}
                there = {
                    m.physical_offset for m in whole(root, topics) if m.physical_offset in wanted
                }
                assert seen == there
            with pytest.raises(lq.errors.CorruptFrame, match="errno 5") as caught:
                list(store.scan())
            assert caught.value.kind == UNREADABLE
            table = store.to_arrow(on_damage="skip").read_all()
            assert set(table["physical_offset"].to_pylist()) == set(wanted)
            assert gets(store) == (set(wanted), set(frames) - set(wanted))


def whole(root: Path, topics: str | None) -> list[lq.StoredMessage]:
    from logquarry.log.readable import Probe

    with probed_by(Probe()), lq.MessageStore.open(root, config=CONFIG) as store:
        return list(store.scan(topics))


def gets(store: lq.MessageStore) -> tuple[set[int], set[int]]:
    """Physical offsets of the messages that gets return, and of those that they refuse."""
    found: set[int] = set()
    refused: set[int] = set()
    for topic, queue_id in store.queues():
        offset = (
            store.min_queue_offset(topic, queue_id) if hasattr(store, "min_queue_offset") else 0
        )
        while True:
            try:
                result = store.get(topic, queue_id, offset)
            except lq.errors.CorruptFrame as error:
                assert error.kind == UNREADABLE
                refused.add(error.offset)
                offset += 1
                continue
            if not result.messages:
                break
            found |= {message.physical_offset for message in result.messages}
            offset = result.next_offset
    return found, refused


@pytest.mark.parametrize(
    "name", ["rocksdbstore/CURRENT", "compaction/position-checkpoint", "config/rocksdb/OPTIONS-7"]
)
def test_verify_reads_files_that_it_does_not_interpret(
    made: tuple[Path, Frames], tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(made[0], copy)
    path = copy / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"MANIFEST-000005\n")
    assert UNREADABLE not in {f.kind for f in verify_store(StoreLayout.open(copy, CONFIG)).findings}
    with probed_by(BadBlocks([(f"store/{name}", 0)])):
        report = verify_store(StoreLayout.open(copy, CONFIG))
    assert [(f.file, f.offset) for f in report.findings if f.kind == UNREADABLE] == [(name, 0)]
    assert report.has_damage


@pytest.mark.parametrize("part", ["consumequeue/topic1/0", "index", "config", "checkpoint"])
def test_unreadable_blocks_of_other_files_are_findings(
    made: tuple[Path, Frames], tmp_path: Path, part: str
) -> None:
    root, frames = made
    copy = tmp_path / "store"
    shutil.copytree(root, copy)
    (copy / "config").mkdir(exist_ok=True)
    (copy / "config" / "topics.json").write_text("{}")
    folder = copy / part
    path = folder if folder.is_file() else sorted(folder.iterdir())[0]
    name = str(path.relative_to(copy))
    with probed_by(BadBlocks([(f"store/{name}", 0)])):
        report = verify_store(StoreLayout.open(copy, CONFIG))
        found = [f for f in report.findings if f.kind == UNREADABLE]
        assert [(f.file, f.offset) for f in found] == [(name, 0)]
        assert report.has_damage
        assert report.counts["messages"] == len(frames)
        with lq.MessageStore.open(copy, config=CONFIG) as store:
            assert len(list(store.scan())) == len(frames)
            assert len(list(store.scan("topic1"))) == len(frames) // 3
            if part.startswith("consumequeue"):
                with pytest.raises(CorruptStore, match="errno 5"):
                    store.get("topic1", 0, 0)
        saved = salvage_store(StoreLayout.open(copy, CONFIG), tmp_path / "saved")
        assert saved.plan.messages == len(frames)
        if part == "config":
            assert UNREADABLE in {one.feature for one in saved.left_behind}
        with lq.MessageStore.open(copy, mode="rw", config=CONFIG) as writer:
            assert writer.put(lq.Message("topic1", b"more")).ok
            assert writer.wait_dispatched()
            if part == "index":
                with pytest.raises(CorruptStore, match="errno 5"):
                    writer.query("topic1", "k1")
            else:
                assert len(writer.query("topic1", "k1")) == 1


def test_files_truncated_under_a_reader_are_errors(
    made: tuple[Path, Frames], tmp_path: Path
) -> None:
    root, _ = made
    copy = tmp_path / "store"
    shutil.copytree(root, copy)
    code = """
import os, sys, time
import logquarry as lq
from logquarry.errors import StoreError
root, kind = sys.argv[1:]
config = lq.StoreConfig(**eval(sys.stdin.read()))
store = lq.MessageStore.open(root, config=config)
for _ in range(100):
    for topic, queue_id in store.queues():
        store.get(topic, queue_id, 0, 4)
scan = iter(store.scan())
first = next(scan)
folders = [os.path.join(root, "commitlog")] if kind == "log" else []
if kind == "queue":
    folders = [os.path.join(root, "consumequeue", *map(str, key)) for key in store.queues()]
if kind == "index":
    store.query("topic1", "k1")
    folders = [os.path.join(root, "index")]
for folder in folders:
    for name in os.listdir(folder):
        os.truncate(os.path.join(folder, name), 100)
start = time.monotonic()
while time.monotonic() < start + 0.002:  # gets check the size once a millisecond
    pass
errors = 0
for topic, queue_id in store.queues():
    for offset in (0, 1, 50):
        try:
            store.get(topic, queue_id, offset, 4)
        except StoreError:
            errors += 1
for what in (lambda: list(scan), lambda: list(store.scan()), lambda: store.query("topic1", "k1"),
             lambda: store.max_offset, store.stats, lambda: store.get_by_offset(5)):
    try:
        what()
    except (StoreError, AttributeError, lq.errors.UsageError) as error:
        errors += 1
print(errors)
"""
    settings = {
        "mapped_file_size_commit_log": FILE,
        "mapped_file_size_consume_queue": 20_000,
        "max_hash_slot_num": 500,
        "max_index_num": 2_000,
    }
    for kind in ("log", "queue", "index"):
        target = tmp_path / kind
        shutil.copytree(root, target)
        done = subprocess.run(
            [sys.executable, "-c", code, str(target), kind],
            input=repr(settings),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (kind, done.returncode, done.stderr)
        assert int(done.stdout) >= (1 if kind != "index" else 0)


# ------------------------------------------------------------------------------ a real file system
IMAGE = 48 << 20
MORE = 16 << 20


def call(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def bad_disk(
    made: tuple[Path, Frames], tmp_path: Path
) -> Iterator[tuple[Path, list[tuple[str, int]]]]:
    """The store on a mounted ext4 image of which 100 random blocks of the log are unreadable.

    The image is filled up, grown, and the blocks are written again: they lie in the new part. Then
    the image loses that part while it is mounted.
    """
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    root, frames = made
    blocks = log_blocks(frames, 100, seed=11)
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.touch()
    os.truncate(image, IMAGE)
    try:
        features = "^has_journal,^resize_inode,^flex_bg"
        call("mkfs.ext4", "-q", "-b", BLOCK, "-m", 0, "-O", features, "-N", 2_000, image)
        call("mount", "-o", "loop", image, mount)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no loop mounts here")
    try:
        call("cp", "-a", "--sparse=always", root, mount / "store")
        os.sync()
        contents = {}
        for name, number in blocks:
            path = mount / name
            with path.open("rb") as file:
                contents[name, number] = os.pread(file.fileno(), BLOCK, number * BLOCK)
            call("fallocate", "-p", "-o", number * BLOCK, "-l", BLOCK, path)
        os.sync()
        _fill(mount)
        call("umount", mount)
        os.truncate(image, IMAGE + MORE)
        subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True, check=False)
        call("resize2fs", image)
        call("mount", "-o", "loop", image, mount)
        for (name, number), data in contents.items():
            with (mount / name).open("r+b") as file:
                os.pwrite(file.fileno(), data, number * BLOCK)
        call("umount", mount)
        call("mount", "-o", "loop,ro", image, mount)
        os.truncate(image, IMAGE)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        yield mount / "store", blocks
    finally:
        subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)


def _fill(mount: Path) -> None:
    device = next(
        line.split()[0]
        for line in Path("/proc/mounts").read_text().splitlines()
        if str(mount) in line
    )
    Path(f"/sys/fs/ext4/{Path(device).name}/reserved_clusters").write_text("0")
    with (mount / "filler").open("wb") as file:
        for step in (1 << 20, BLOCK):
            while True:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, step)
                except OSError:
                    break


COMMANDS = (
    ("info", "STORE"),
    ("messages", "STORE", "--limit", 50),
    ("messages", "STORE", "--on-damage", "skip", "--jsonl"),
    ("messages", "STORE", "--topic", "topic1", "--on-damage", "skip", "--jsonl"),
    ("verify", "STORE"),
    ("recover", "STORE"),
    ("recover", "STORE", "--mode", "rocketmq"),
    ("recover", "STORE", "--apply"),
    ("rebuild", "STORE"),
    ("rebuild", "STORE", "--into", "INTO"),
    ("salvage", "STORE", "--into", "INTO"),
    ("diff", "STORE", "STORE"),
    ("stats", "STORE"),
    ("report", "STORE", "--html", "INTO"),
    ("retain", "STORE", "--keep-bytes", "1m"),
)


@pytest.mark.root
def test_no_command_ends_by_a_signal_on_a_real_bad_disk(
    bad_disk: tuple[Path, Blocks], made: tuple[Path, Frames], tmp_path: Path
) -> None:
    store, blocks = bad_disk
    wanted = untouched(made[1], blocks)
    start = "import sys; from logquarry.cli.main import main; sys.exit(main())"
    for number, words in enumerate(COMMANDS):
        into = tmp_path / f"into{number}"
        names = {"STORE": str(store), "INTO": str(into)}
        arguments = [names.get(str(word), str(word)) for word in words]
        done = subprocess.run(
            [sys.executable, "-c", start, *arguments], capture_output=True, text=True, check=False
        )
        assert 0 <= done.returncode < 128, (words, done.returncode, done.stderr[-500:])
        assert "Traceback" not in done.stderr, (words, done.stderr[-500:])
        if words[0] == "salvage":
            with lq.MessageStore.open(into, config=CONFIG) as saved:
                assert len(list(saved.scan())) == len(wanted)
        if words[:3] == ("messages", "STORE", "--on-damage"):
            assert len(done.stdout.splitlines()) == len(wanted)
        if words[0] == "verify":
            assert done.returncode == 1
            assert "errno 5" in done.stdout
