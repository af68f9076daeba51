"""Are a store's files found beside any other files?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.config import StoreConfig
from logquarry.errors import StoreNotFound, UnsupportedStore
from logquarry.format import checkpoint, frame, java
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.frame import Frame
from logquarry.log.columns import Decoding, record_batch
from logquarry.log.filesystem import Entry
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import DURABLE, FileSequence, StoreFile
from logquarry.log.walk import LogEnd, LogReader, Run
from tests.conformance.golden_facts import SOUND, Scenario
from tests.helpers.store_maker import StoreMaker


def make(root: Path, *names: str, size: int = 0) -> StoreLayout:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return StoreLayout.open(root)


def log_of(root: Path, **sizes: int) -> StoreLayout:
    (root / "commitlog").mkdir()
    for base, size in sizes.items():
        (root / "commitlog" / f"{int(base[1:]):020d}").write_bytes(bytes(size))
    return StoreLayout.open(root)


# ---------------------------------------------------------------------------------------- golden
@pytest.mark.parametrize("name", SOUND)
def test_golden_stores(golden: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    layout = StoreLayout.open(scenario.store)
    log = scenario.facts["commitLog"]
    assert layout.commit_log.file_size == scenario.config.mapped_file_size_commit_log
    assert layout.commit_log.start == log["minOffset"]
    on_disk = {(q["topic"], q["queueId"]) for q in scenario.facts["queues"] if q["entries"]}
    assert on_disk <= set(layout.queue_names)
    for topic, queue_id in on_disk:
        assert layout.queue(topic, queue_id).file_size == scenario.config.queue_file_size
    assert len(layout.index_files) == len(scenario.facts["index"])
    assert not layout.has_abort
    assert not layout.is_live()
    assert not layout.ignored


def test_golden_store_with_abort(golden: Path) -> None:
    assert StoreLayout.open(golden / "unclean" / "abort-only" / "store").has_abort


# ------------------------------------------------------------------------------------------ names
def test_what_is_no_store(tmp_path: Path) -> None:
    for location in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreNotFound):
            StoreLayout.open(location)
    (tmp_path / "commitlog").write_bytes(b"a file")
    with pytest.raises(StoreNotFound, match="not a store"):
        StoreLayout.open(tmp_path)


def test_a_folder_that_has_only_a_part_of_a_log(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStore, match="files of its log are in data/"):
        make(tmp_path, f"data/{0:020d}", size=100)


def test_a_folder_without_files_is_an_empty_store(tmp_path: Path) -> None:
    layout = make(tmp_path, "consumequeue/t/0/00000000000000000000")
    assert layout.commit_log == FileSequence((), 0)
    assert layout.commit_log.at(0) is None
    assert list(layout.queue_names) == [("t", 0)]
    assert layout.queue("t", 0).file_size == 20
    assert layout.queue("t", 1).files == layout.queue("u", 0).files == ()
    assert list(LogReader(layout).events()) == [LogEnd(0)]


def test_strange_names_are_ignored_and_told(tmp_path: Path) -> None:
    strange = [
        "commitlog/0",
        "commitlog/00000000000000000000.tmp",
        "commitlog/0000000000000000000x",
        "commitlog/٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠",
        "commitlog/-0000000000000000001",
        "commitlog/99999999999999999999",
        "commitlog/00000000000000004096/inside",
        "consumequeue/file",
        "consumequeue/t/00/00000000000000000000",
        "consumequeue/t/x/00000000000000000000",
        "consumequeue/t/-0/00000000000000000000",
        "consumequeue/t/99999999999/00000000000000000000",
        "consumequeue/t/7",
        "index/20261120113933955.tmp",
        "index/٠",
    ]
    good = ["commitlog/00000000000000000000", "consumequeue/t/0/00000000000000000000", "index/20"]
    layout = make(tmp_path, *strange, *good, "consumequeue/t/-3/00000000000000000000", size=20)
    # A folder with the name of a file of the log: that file is lost.
    assert [file.base for file in layout.commit_log.files] == [0, 4096]
    assert list(layout.queue_names) == [("t", -3), ("t", 0)]
    assert [entry.name for entry in layout.index_files] == ["20"]
    told = {path.removesuffix("/inside").removesuffix("/00000000000000000000") for path in strange}
    assert set(layout.ignored) == told
    assert len(layout.ignored) == len(told)


@pytest.mark.parametrize("topic", ["", ".", "..", "../t", "t/../t", "a\0b", "/etc"])
def test_a_topic_is_never_a_path(tmp_path: Path, topic: str) -> None:
    layout = make(tmp_path / "s", "commitlog/x", "consumequeue/t/0/00000000000000000000", size=40)
    make(tmp_path, "t/0/00000000000000000000", "consumequeue/x/y", size=40)
    assert layout.queue(topic, 0).files == ()
    assert len(layout.queue("t", 0).files) == 1


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "consumequeue" / "\udcff\udcfe" / "0").mkdir(parents=True)
    layout = StoreLayout.open(tmp_path)
    assert list(layout.queue_names) == [("\udcff\udcfe", 0)]
    assert layout.queue(*next(iter(layout.queue_names))).files == ()


# ------------------------------------------------------------------------------------------ sizes
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"f0": 4096}, 4096),
        ({"f0": 4096, "f4096": 4096}, 4096),
        ({"f0": 4096, "f4096": 0}, 4096),
        ({"f0": 4096, "f4096": 100}, 4096),
        ({"f0": 100, "f4096": 4096}, 4096),
        ({"f0": 9000, "f4096": 4096}, 4096),
        ({"f0": 4096, "f8192": 4096}, 4096),
        ({"f4096": 4096, "f8192": 4096, "f20480": 4096}, 4096),
        ({"f0": 0}, 0),
    ],
)
def test_the_room_of_a_file_is_told_by_names_and_sizes(
    tmp_path: Path, sizes: dict[str, int], expected: int
) -> None:
    layout = log_of(tmp_path, **sizes)
    assert layout.commit_log.file_size == expected
    stated = StoreConfig(mapped_file_size_commit_log=512)
    assert StoreLayout.open(tmp_path, stated).commit_log.file_size == 512


def test_queue_files_have_room_for_whole_units(tmp_path: Path) -> None:
    layout = make(tmp_path, "commitlog/x", "consumequeue/t/0/00000000000000000000", size=55)
    assert layout.queue("t", 0).file_size == 40
    stated = StoreConfig(mapped_file_size_consume_queue=55)
    assert StoreLayout.open(tmp_path, stated).queue("t", 0).file_size == 60


def test_the_last_file_without_bytes_holds_nothing(tmp_path: Path) -> None:
    """A crash leaves such a file if it comes before the file gets its size."""
    item = Frame(topic=b"t", body=b"b").with_crc()
    layout = log_of(tmp_path, f0=100, f100=0)
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(frame.encode(item) + bytes(100 - item.size))
    events = list(LogReader(layout).events())
    assert [type(event) for event in events] == [Run, LogEnd]
    assert events[-1] == LogEnd(item.size)


@given(
    st.lists(st.integers(0, 40), unique=True, max_size=8).map(sorted),
    st.integers(1, 60),
    st.integers(-5, 120),
)
def test_which_file_holds_an_offset(bases: list[int], size: int, offset: int) -> None:
    files = tuple(StoreFile(base, size, str(base)) for base in bases)
    sequence = FileSequence(files, size)
    holding = [file for file in files if file.base <= offset < file.base + size]
    assert sequence.at(offset) == (holding[-1] if holding else None)
    assert sequence.start == min(bases, default=0)
    assert sequence.end == (max(bases) + size if bases else 0)


def test_no_file_has_room_beyond_what_32_bits_count(tmp_path: Path) -> None:
    """RocketMQ's file size is an int; reads of a larger, sparse file must stay within its map."""
    near, far = 100, 5 << 29
    item = Frame(topic=b"t", body=b"b").with_crc()
    path = tmp_path / "commitlog" / f"{0:020d}"
    path.parent.mkdir()
    with path.open("wb") as file:
        for offset in (near, far):
            file.seek(offset)
            file.write(
                frame.encode(Frame(topic=b"t", body=b"b", physical_offset=offset).with_crc())
            )
        file.truncate(3 << 30)
    layout = StoreLayout.open(tmp_path)
    assert layout.commit_log.file_size == java.INT_MAX
    places = np.array([near, far], np.int64)
    sizes = np.array([item.size, item.size], np.int32)
    run, lost = runs_at(layout, places, sizes)
    assert isinstance(run, Run)
    assert record_batch(run.window, run.rows, Decoding()).num_rows == 1
    assert not isinstance(lost, Run)
    found = [event for event in LogReader(layout).events() if isinstance(event, Run)]
    assert [event.start for event in found] == [near]


# --------------------------------------------------------------------------------------- the rest
def test_the_checkpoint(tmp_path: Path) -> None:
    layout = make(tmp_path, "commitlog/x")
    assert layout.read_checkpoint() is None
    (tmp_path / "checkpoint").write_bytes(bytes(7) + b"\x05" + bytes(20))
    assert layout.read_checkpoint() == Checkpoint(5, 0, 0)
    (tmp_path / "checkpoint").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes"):
        layout.read_checkpoint()
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoint").mkdir()
    assert layout.read_checkpoint() is None


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b'{"topicConfigTable":{"t":{"perm":1e999}}}', b"[" * 99999]
)
def test_topics_that_cannot_be_read_are_none(tmp_path: Path, text: bytes) -> None:
    layout = make(tmp_path, "commitlog/x", "config/topics.json")
    (tmp_path / "config" / "topics.json").write_bytes(text)
    assert layout.read_topics() == {}


def test_topics(golden: Path, tmp_path: Path) -> None:
    topics = StoreLayout.open(golden / "real-broker" / "store").read_topics()
    assert topics["BatchTopic"].write_queues == 4
    assert make(tmp_path, "commitlog/x").read_topics() == {}


def test_files_that_come_are_seen_after_a_refresh(tmp_path: Path) -> None:
    layout = log_of(tmp_path, f0=100)
    assert len(layout.commit_log.files) == 1
    (tmp_path / "commitlog" / f"{100:020d}").write_bytes(bytes(100))
    assert len(layout.commit_log.files) == 1
    layout.refresh()
    assert len(layout.commit_log.files) == 2


@pytest.mark.parametrize("listing", range(1, 5))
def test_a_file_that_a_writer_adds_between_two_listings(tmp_path: Path, listing: int) -> None:
    made = StoreMaker()
    for _ in range(100):
        made.put()
    made.write(tmp_path)
    last = max((tmp_path / "commitlog").iterdir())
    data = last.read_bytes()
    last.unlink()
    layout = StoreLayout.open(tmp_path)
    list_folder, listings = layout.filesystem.list, []

    def listed(path: str) -> list[Entry]:
        found = list_folder(path)
        listings.append(path)
        if listings.count("commitlog") == listing:
            last.write_bytes(data)
        return found

    layout.filesystem.list = listed  # type: ignore[method-assign]
    assert not layout.log_names.renames and not layout.ignored
    layout.require_right_names()


def test_another_configuration_has_its_own_lists(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{0:020d}").write_bytes(bytes(100))
    layout = log_of(tmp_path, f0=100, f100=100)
    settings = StoreConfig.from_mapping({"storePathCommitLog": "elsewhere"})
    levels = StoreConfig(message_delay_level="7s")
    plain = StoreConfig(mapped_file_size_commit_log=100)
    default = layout.delay_levels_ms
    assert layout.with_config(plain).commit_log.file_size == 100
    for _ in range(2):
        # The second time, the lists of the old layout are known.
        sized = layout.with_config(StoreConfig(mapped_file_size_commit_log=200))
        assert sized.commit_log.file_size == 200
        assert layout.with_config(settings).log_folders.missing is not None
        assert layout.with_config(levels).delay_levels_ms == (7_000,)
        assert layout.commit_log.file_size == 100
        assert layout.log_folders.missing is None
        assert layout.delay_levels_ms == default


def test_a_given_log_stays_with_another_configuration(tmp_path: Path) -> None:
    layout = log_of(tmp_path, f0=100, f100=100)
    files = layout.commit_log
    given = FileSequence(files.files[:1], files.file_size)
    layout.use_commit_log(given)
    other = layout.with_config(StoreConfig(mapped_file_size_commit_log=200))
    assert other.commit_log == given
    other.refresh()
    assert len(other.commit_log.files) == 2


def test_a_mark_that_moves_is_seen_after_a_refresh(tmp_path: Path) -> None:
    layout = make(tmp_path, "commitlog/x", DURABLE)
    assert layout.durable_end is None
    times = Checkpoint(1, 2, 3)
    (tmp_path / "checkpoint").write_bytes(checkpoint.encode(times))
    for offset in (700, 900):
        mark = checkpoint.DurableMark(offset, times, times)
        (tmp_path / DURABLE).write_bytes(checkpoint.encode_mark(mark))
        layout.refresh()
        assert layout.durable_end == offset
