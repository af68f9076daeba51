"""Pages of a map that are lost between their probe and their read: no reader dies or makes up rows.

Each program truncates a log file at a chosen call.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.name_guard import NameGuard
from tests.crash.lost_pages import COUNT, FILE, MODES, START, handled, make_store, run, use
from tests.helpers import python_process


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("lost") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", "--sparse=always", made, tmp_path / "store"], check=True)
    return tmp_path / "store"


SCAN = """
def scan(form, place, policy):
    unhook = hook(place)
    with lq.MessageStore.open(root, config=config) as store:
        damage = lq.DamageLog()
        options = {"tags": "a", "on_damage": policy, "damage": damage}
        found = []
        try:
            if form == "objects":
                found.extend(message.body for message in store.scan(**options))
            for batch in store.to_arrow(**options) if form == "arrow" else ():
                found.extend(batch["body"].to_pylist())
        except lq.errors.CorruptFrame as error:
            assert policy == "default" and error.path == log(), error
        assert done and set(found) <= TRUTH and len(set(found)) == len(found)
        assert {span.kind for span in damage.spans} <= {"unreadable", "truncated"}, damage.spans
        first = min(span.offset for span in damage.spans)
        # Without the handler the reader has a copy of what it read before.
        is_copy = lost_pages.watch(mmap.mmap(-1, 10), True) < 0
        assert 299_000 < first <= (1 << 20 if is_copy else 300_003), first
        # With skip: all messages before the cut, and those of the second file.
        assert policy == "default" or len(found) > 800, len(found)
    unhook()
made, copies = sys.argv[1:3]
for number, case in enumerate(sys.argv[3:]):
    print(case, flush=True)
    root = shutil.copytree(made, os.path.join(copies, str(number)))
    scan(*case.split())
    shutil.rmtree(root)
"""
PLACES = [
    "objects codec.walk",
    "objects codec.walk+",
    "objects columns.messages",
    "arrow columns.record_batch",
    "arrow frames.unwrap_rows",
    "arrow frames.unwrap_rows+",
    "arrow batches.MessageFilter.select",
    "objects batches.MessageFilter.select+",
]


# The places share a process: to start one costs twenty times what a scan costs.
@pytest.mark.parametrize("policy", ["default", "skip"])
@pytest.mark.parametrize("switch", ["on", "off"])
def test_a_file_truncated_in_a_scan_is_damage(
    made: Path, tmp_path: Path, policy: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGQUARRY_SIGBUS", switch)
    run(SCAN, made, tmp_path, *(f"{place} {policy}" for place in PLACES))


@handled
def test_a_get_never_returns_lost_bytes(store: Path) -> None:
    run(
        """
with lq.MessageStore.open(root, config=config) as store:
    for _ in range(100):
        store.get("orders", 0, 0, 32)
    # No check of the file's size: the kernel reads pages that are gone.
    get_kernel._CHECK_EVERY = 1e9
    get_kernel.monotonic = lambda: 0.0
    lose()
    errors = 0
    for offset in range(0, 2_900, 5):
        try:
            answer = store.get("orders", 0, offset, 32)
        except lq.errors.CorruptFrame as error:
            assert error.kind == "unreadable"
            errors += 1
            continue
        assert {one.body for one in answer.messages} <= TRUTH
    assert errors > 200, (errors, store.max_offset)
    assert lost_pages.lost()
""",
        store,
    )


@handled
def test_views_that_a_reader_keeps_do_not_end_the_process(store: Path) -> None:
    run(
        """
from logquarry.log.layout import StoreLayout
view = StoreLayout.open(root, config).open_file("commitlog/00000000000000000000")
kept = view.window(0, view.size)
lose()
assert bytes(kept[400_000:400_010]) == bytes([255] * 10)
assert lost_pages.lost() == 1
assert [(one.offset, one.length) for one in view.unreadable if "SIGBUS" in one.reason or 1]
del view
assert len(bytes(kept)) == 1 << 20 and lost_pages.lost() > 100
""",
        store,
    )


def test_commands_read_again(made: Path, tmp_path: Path) -> None:
    run(
        """
def check(name, call):
    unhook = hook("codec.walk+")
    try:
        found = call()
    except lq.errors.LogquarryError as error:
        assert name not in ("verify", "salvage"), error
        assert "cannot" in str(error) or "SIGBUS" in str(error) or "lost" in str(error), error
    else:
        if name == "verify":
            assert found.has_damage
        if name == "salvage":
            with lq.MessageStore.open(into, config=config) as store:
                bodies = {message.body for message in store.scan()}
            assert bodies <= TRUTH and len(bodies) > 800, len(bodies)
    assert done
    unhook()
made, copies = sys.argv[1:]
calls = {
    "verify": lambda: lq.verify(root, config=config),
    "salvage": lambda: lq.salvage(root, into, config=config),
    "recover": lambda: lq.recover(root, config=config),
    "rebuild": lambda: lq.rebuild(root, into=into, config=config),
}
for name, call in calls.items():
    print(name, flush=True)
    root = shutil.copytree(made, os.path.join(copies, name))
    into = root + ".new"
    check(name, call)
""",
        made,
        tmp_path,
    )


@MODES
def test_a_window_of_a_large_file_does_not_end_the_process(
    tmp_path: Path, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(mode, monkeypatch)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(80 << 20)
    code = """
from pathlib import Path
from logquarry.log.filesystem import whole_file
path = Path(root) / "large"
view = whole_file(path)
kept = view.window(0, view.size)
os.truncate(path, 1_000)
assert kept[-1] in (0, 255) and len(kept) == 80 << 20
"""
    run(code, tmp_path)


def test_a_signal_outside_of_our_maps_is_not_swallowed(store: Path) -> None:
    done = python_process.run(
        START
        + """
with lq.MessageStore.open(root, config=config) as store:
    assert len(list(store.scan(on_damage="skip")))
    with open(log(), "rb") as file:
        foreign = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    lose()
    print(foreign[500_000])
""",
        store,
    )
    assert done.returncode == -7, (done.returncode, done.stderr)


# The earlier handler still gets the signals of other accesses, and each process ends.
@handled
@pytest.mark.parametrize("end", ["foreign[500_000]", "os.kill(os.getpid(), signal.SIGBUS)"])
@pytest.mark.parametrize("replace", ["faulthandler.enable()", "faulthandler.disable()"])
def test_a_handler_that_replaced_ours_loses_its_place_at_the_next_map(
    store: Path, replace: str, end: str
) -> None:
    is_enabled = "enable" in replace
    done = python_process.run(
        START
        + f"""
import faulthandler, signal
from logquarry.log.layout import StoreLayout
if not {is_enabled}:
    faulthandler.enable()
with lq.MessageStore.open(root, config=config) as store:
    list(store.scan())
    {replace}
view = StoreLayout.open(root, config).open_file("commitlog/00000000000000000000")
kept = view.window(0, view.size)
foreign = mmap.mmap(os.open(log(), os.O_RDONLY), 0, access=mmap.ACCESS_READ)
lose()
assert bytes(kept[400_000:400_010]) == bytes([255] * 10)
print("next", flush=True)
{end}
""",
        store,
    )
    assert (done.returncode, done.stdout) == (-7, "next\n"), done.stderr[-1500:]
    assert done.stderr.count("Fatal Python error: Bus error") == is_enabled


def test_the_handler_can_be_switched_off(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGQUARRY_SIGBUS", "off")
    code = """
import signal
with lq.MessageStore.open(root, config=config) as store:
    list(store.scan())
view = mmap.mmap(-1, 10)
assert lost_pages.watch(view, True) == -1
"""
    run(code, store)


# -------------------------------------------------------------------------- beside a writer


@pytest.mark.parametrize("size", [5_001, 300_003])
@pytest.mark.parametrize("read", ["scan", "to_arrow"])
def test_a_writer_never_ends_a_scan_at_a_file_that_was_cut(
    tmp_path: Path, size: int, read: str
) -> None:
    """Another program cuts the log's last file: that is damage, not a torn tail."""
    root = tmp_path / "store"
    config = lq.StoreConfig(mapped_file_size_commit_log=FILE, max_hash_slot_num=100)
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for _ in range(COUNT // 3):
            store.put(lq.Message("orders", b"x" * 300))
        os.truncate(root / "commitlog" / ("0" * 20), size)
        with pytest.raises(lq.errors.CorruptFrame, match="truncated"):
            list(getattr(store, read)())
        damage = lq.DamageLog()
        list(getattr(store, read)(on_damage="skip", damage=damage))
        assert sum(span.length for span in damage.spans) > 1_000 * 300 - size


@pytest.mark.parametrize("size", [0, 5_001, 100_003, None, -1])
@pytest.mark.parametrize("read", ["scan", "to_arrow"])
def test_a_reader_beside_a_writer_never_ends_at_a_file_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, read: str
) -> None:
    """The durable offset shows that the log went on."""
    root = tmp_path / "store"
    # The writer's next flush would restore a deleted file from its link.
    monkeypatch.setattr(NameGuard, "check", lambda _: [])
    config = lq.StoreConfig(mapped_file_size_commit_log=FILE, max_hash_slot_num=100)
    path = root / "commitlog" / str(FILE).zfill(20)
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for _ in range(COUNT):
            store.put(lq.Message("orders", b"x" * 300))
        store.flush()
        assert FILE + 100_003 < store.max_offset < 2 * FILE
        with lq.MessageStore.open(root) as reader:
            assert sum(1 for _ in reader.scan()) == COUNT
        if size == -1:
            # The file that was made in advance is gone too, so that no file follows.
            (root / "commitlog" / str(2 * FILE).zfill(20)).unlink(missing_ok=True)
            size = None
        if size is None:
            path.unlink()
        else:
            os.truncate(path, size)
        with lq.MessageStore.open(root) as reader:
            with pytest.raises(lq.errors.CorruptFrame) as caught:
                list(getattr(reader, read)())
            assert caught.value.path == str(path.parent if size is None else path)
            damage = lq.DamageLog()
            list(getattr(reader, read)(on_damage="skip", damage=damage))
            (span,) = damage.spans
            assert span.offset <= FILE + (size or 0)
            assert span.offset + span.length == store.max_offset
