"""The log's last files are missing or empty, or its first one is a link to a missing disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from tests.helpers import operator_faults
from tests.helpers.command import ended as run

READS = (
    ("messages", "STORE", "--jsonl"),
    ("export", "STORE", "--to", "OUT", "--format", "jsonl"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return operator_faults.make_store(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "store")


def called(words: tuple[str, ...], root: Path) -> tuple[int, str]:
    names = {"STORE": str(root), "OUT": str(root.parent / "out.jsonl")}
    done = run(*(names.get(word, word) for word in words))
    return done.exit_code, done.output


@pytest.mark.parametrize("is_crashed", [False, True])
@pytest.mark.parametrize("evidence", ["durable offset", "queues", "index"])
@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_no_command_ends_with_0(
    root: Path, *, is_crashed: bool, evidence: str, is_empty: bool, count: int
) -> None:
    if is_crashed:
        (root / "abort").touch()
    if evidence != "durable offset":
        shutil.rmtree(root / ".logquarry")
    if evidence != "queues":
        shutil.rmtree(root / "consumequeue")
    for path in operator_faults.log_files(root)[-count:]:
        if is_empty:
            os.truncate(path, 0)
        else:
            path.unlink()
    for words in READS:
        code, output = called(words, root)
        assert code == 1
        assert "next: logquarry" in output and "--on-damage skip" in output
        code, output = called((*words, "--on-damage", "skip"), root)
        assert code == 0
        assert "skipped" in output


@pytest.mark.parametrize("is_crashed", [False, True])
def test_the_index_alone_shows_the_loss(root: Path, *, is_crashed: bool) -> None:
    if is_crashed:
        (root / "abort").touch()
    shutil.rmtree(root / ".logquarry")
    shutil.rmtree(root / "consumequeue")
    operator_faults.log_files(root)[-1].unlink()
    # The index has no size for the last message.
    assert "(11 messages lost, 7,161 bytes)" in run("verify", root).output
    for command in (("recover",), ("recover", "--apply"), ("rebuild", "--in-place", "--apply")):
        shown = run(command[0], root, *command[1:])
        assert shown.exit_code == 4
        assert "11 messages would be lost" in shown.output
    with pytest.raises(lq.errors.StoreUnavailable, match="11 messages would be lost"):
        lq.MessageStore.open(root, mode="rw")
    shown = run("salvage", root)
    assert shown.exit_code == 1
    assert "the log reached 56313 once and ends at 49152 now" in shown.output
    shown = run("recover", root, "--apply", "--accept-loss", "7161")
    assert shown.exit_code == 0
    assert "11 messages lost, 7,161 bytes" in shown.output
    assert "would be" not in shown.output
    assert run("verify", root).exit_code == 0
    assert "nothing to do" in run("recover", root).output


@pytest.mark.parametrize("is_crashed", [False, True])
def test_the_checkpoint_alone_shows_the_loss(root: Path, *, is_crashed: bool) -> None:
    if is_crashed:
        (root / "abort").touch()
    for name in (".logquarry", "consumequeue", "index"):
        shutil.rmtree(root / name)
    operator_faults.log_files(root)[-1].unlink()
    verified = run("verify", root)
    assert verified.exit_code == 1
    assert "checkpoint_ahead" in verified.output
    for command in ("info", "recover", "salvage", "messages"):
        shown = run(command, root)
        assert "later messages are lost" in shown.output
        assert shown.exit_code == (1 if command in ("recover", "salvage") else 0)
    assert run("recover", root, "--apply").exit_code == 0
    verified = run("verify", root)
    assert verified.exit_code == 0
    assert "checkpoint_ahead" not in verified.output
    assert "nothing to do" in run("recover", root).output


def test_salvage_promises_nothing_of_messages_before_the_log(root: Path) -> None:
    operator_faults.log_files(root)[0].unlink()
    for name in (".logquarry", "consumequeue", "index"):
        shutil.rmtree(root / name)
    shown = run("salvage", root)
    assert "earlier messages have expired, or their files are missing" in shown.output
    assert "; nothing in the existing files is lost" in shown.output


def test_an_index_file_of_another_header_shows_nothing(root: Path) -> None:
    (path,) = (root / "index").iterdir()
    data = bytearray(path.read_bytes())
    data[24:32] = (57_000).to_bytes(8, "big")
    path.write_bytes(data)
    shutil.rmtree(root / ".logquarry")
    assert run("messages", root).exit_code == 0
    assert "lost" not in run("info", root).output


def test_one_wrong_entry_is_no_loss(root: Path) -> None:
    """After bit rot in the last entry of a queue, only the queue is damaged."""
    path = sorted((root / "consumequeue/orders/0").iterdir())[-1]
    data = bytearray(path.read_bytes())
    data[-20:-12] = (1 << 40).to_bytes(8, "big")
    path.write_bytes(data)
    assert run("messages", root).exit_code == 0


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_first_file_is_no_file(root: Path, *, is_folder: bool) -> None:
    first = operator_faults.log_files(root)[0]
    first.unlink()
    if is_folder:
        first.mkdir()
    else:
        first.symlink_to("/no/such/disk/file")
    assert run("verify", root).exit_code == 1
    assert run("messages", root).exit_code == 1
    assert "messages lost" in run("info", root).output
    assert run("salvage", root).exit_code == 1


def test_all_files_are_empty(root: Path) -> None:
    for path in (root / "commitlog").iterdir():
        os.truncate(path, 0)
    shown = run("messages", root)
    assert shown.exit_code == 4
    assert "the log's files are empty, but the queues point to 56,929 bytes" in shown.output
    with pytest.raises(lq.errors.LogquarryError):
        lq.MessageStore.open(root, mode="rw")


def test_rebuild_in_place_refuses_before_it_builds(root: Path) -> None:
    operator_faults.log_files(root)[1].unlink()
    for options in ((), ("--apply",)):
        shown = run("rebuild", root, "--in-place", *options)
        assert shown.exit_code == 4
        assert "23 messages would be lost" in shown.output
    assert not (root / ".logquarry/rebuild").exists()
    assert run("rebuild", root, "--into", root.parent / "out").exit_code == 0


def test_a_renamed_queue_is_no_multi_dispatch(root: Path) -> None:
    (root / "consumequeue/orders").rename(root / "consumequeue/other")
    shown = run("info", root).output
    assert "consumequeue/other/0: its entries point to messages of another queue" in shown
    assert "multi_dispatch" not in shown


SIZES = (
    ("mappedFileSizeCommitLog=32768", "its files have 16384 bytes"),
    ("mappedFileSizeConsumeQueue=4000", "its files have 400 bytes"),
    ("maxHashSlotNum=77\nmaxIndexNum=99", "leave both settings out"),
)
COMMANDS = (
    *(("info",), ("stats",), ("messages",), ("verify",), ("recover",), ("recover", "--apply")),
    *(("rebuild",), ("salvage",), ("retain", "--keep-bytes", "10k")),
)


@pytest.mark.parametrize(("line", "words"), SIZES)
def test_sizes_of_another_store_are_a_usage_error(root: Path, line: str, words: str) -> None:
    config = root.parent / "broker.conf"
    config.write_text(line + "\n")
    for command, *options in COMMANDS:
        shown = run(command, root, *options, "--config", config)
        assert shown.exit_code == 2, (command, options, shown.output)
        assert words in shown.output


def test_all_commands_count_the_same_loss(root: Path, made: Path) -> None:
    """The queues reach several files beyond the log, or the durable offset does."""
    for path in operator_faults.log_files(root)[-3:]:
        path.unlink()
    (done,) = re.findall(r"[\d,]+ messages lost, [\d,]+ bytes", run("verify", root).output)
    for words in (
        ("info", root),
        ("messages", root, "--on-damage", "skip"),
        ("diff", root, made),
    ):
        assert done in run(*words).output
    shutil.rmtree(root / ".logquarry")
    assert done in run("info", root).output


def test_a_folder_in_place_of_an_index_file_ends_with_a_next_step(root: Path) -> None:
    (path,) = (root / "index").iterdir()
    path.unlink()
    path.mkdir()
    last = run("verify", root).stdout.splitlines()[-1]
    assert last == (
        f"next: move index/{path.name} out of the store, then: "
        f"logquarry rebuild {root} --in-place --index"
    )
    path.rmdir()
    assert run("rebuild", root, "--in-place", "--index", "--apply").exit_code == 0
    assert "next:" not in run("verify", root).stdout


def test_a_stray_folder_is_named_once(root: Path) -> None:
    """The root of each ext4 file system has a folder lost+found."""
    for part in ("commitlog", "index"):
        (root / part / "lost+found").mkdir()
    assert sorted(run("recover", root).stderr.splitlines()) == [
        f"warning: {root}/{part}/lost+found: not a store file, ignored"
        for part in ("commitlog", "index")
    ]
