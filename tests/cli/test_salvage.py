"""``logquarry salvage``: output, new store and exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.format import checkpoint
from logquarry.format.frame import HEAD, MAGIC_V1, MAGIC_V2, Frame
from logquarry.repair.salvage.target import SalvageTarget
from logquarry.testing.builder import StoreBuilder
from tests.helpers.command import jsonl, run
from tests.helpers.files import overwrite
from tests.helpers.small_store import facts, opened


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    """20 messages of one topic, in two files."""
    with StoreBuilder(tmp_path / "small", file_size=1 << 12, queue_file_size=200) as builder:
        for number in range(20):
            body = b"body %d " % number + bytes(100)
            builder.put("orders", body, properties_string=f"KEYS\x01key{number}")
    return tmp_path / "small"


def test_a_sound_store(small_store: Path, tmp_path: Path) -> None:
    result = run("salvage", small_store, "--into", tmp_path / "new")
    assert result.stdout.splitlines()[-2].endswith("nothing is lost")
    run("verify", tmp_path / "new")
    assert jsonl(tmp_path / "new")[0]["broker"] == "new"


def test_a_damaged_store_ends_with_1_and_names_what_is_lost(
    damaged_store: Path, tmp_path: Path
) -> None:
    before = facts(damaged_store)
    dry = run("salvage", damaged_store, code=1)
    assert "can be saved" in dry.stdout
    assert dry.stdout.splitlines()[-1] == f"next: logquarry salvage {damaged_store} --into DIR"
    assert not (tmp_path / "new").exists()
    result = run("salvage", damaged_store, "--into", tmp_path / "new", code=1)
    assert "bad_body_crc" in result.stdout and "commitlog/00000000000000000000" in result.stdout
    assert facts(damaged_store) == before
    there = jsonl(tmp_path / "new")
    assert [m["body"] for m in there] == [
        m["body"] for m in jsonl(damaged_store, "--on-damage", "skip")
    ]
    run("verify", tmp_path / "new")


def test_lost_messages_that_only_the_index_has_count(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root) as store:
        for number in range(120):
            store.put(lq.Message("t", b"%03d" % number * 200, keys=f"k{number}"))
    shutil.rmtree(root / ".logquarry")
    last = max((root / "commitlog").iterdir())
    last.unlink()
    line = run("salvage", root, code=1).stdout.splitlines()[-2]
    lost = 120 - int(line.split()[0])
    assert lost > 1
    assert f"lost: {lost} messages; " in line
    shutil.rmtree(root / "consumequeue")
    line = run("salvage", root, "--into", tmp_path / "new", code=1).stdout.splitlines()[-2]
    assert f"lost: {lost} messages ({lost} of them only in the index); " in line


def test_the_document(damaged_store: Path, tmp_path: Path) -> None:
    result = run("salvage", damaged_store, "--into", tmp_path / "new", "--json", code=1)
    document = json.loads(result.stdout)
    stored = json.loads((tmp_path / "new/.logquarry/salvage.json").read_text())
    assert document | {"seconds": 0} == stored | {"seconds": 0}
    page = (Path(__file__).parents[2] / "docs/json.md").read_text()
    section = page[page.index("## `salvage --json`") :].split("\n## ")[0]
    assert [name for name in document if f"`{name}`" not in section] == []


def test_refusals(small_store: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/x").touch()
    assert "it holds x" in run("salvage", small_store, "--into", tmp_path / "new", code=2).stderr
    run("salvage", tmp_path / "nothing", code=3)


@pytest.mark.parametrize("topic", ["t" * 127, "t" * 128, "\u4e3b" * 43])
def test_frames_that_rocketmq_4_cannot_read_are_reported(topic: str, tmp_path: Path) -> None:
    is_long = len(topic.encode()) > 127
    magic = MAGIC_V2 if is_long else MAGIC_V1
    with StoreBuilder(tmp_path / "store", file_size=1 << 12, queue_file_size=200) as builder:
        builder.append(Frame(topic=topic.encode(), body=b"1", magic=magic))
        builder.put("orders", b"2")
    found = run("salvage", tmp_path / "store").stdout
    expected = "1 message in topics whose names are longer than 127 bytes: only RocketMQ 5"
    assert (expected in found) == is_long


def test_messages_in_batch_queues_are_reported(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root) as store:
        store.put(lq.Message("orders", b"1"))
    assert "batch queues" not in run("salvage", root).stdout
    topics = {"topicConfigTable": {"orders": {"attributes": {"queue.type": "BatchCQ"}}}}
    (root / "config" / "topics.json").write_text(json.dumps(topics))
    assert "1 message in batch queues: only RocketMQ 5 serves" in run("salvage", root).stdout


def test_an_interruption_says_what_is_left(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the last step leaves a complete store; a kill at once leaves a part of it."""
    into = tmp_path / "new"
    finish = SalvageTarget.finish

    def interrupted(self: SalvageTarget, report: Mapping[str, Any]) -> None:
        finish(self, report)
        raise KeyboardInterrupt

    monkeypatch.setattr(SalvageTarget, "finish", interrupted)
    result = run("salvage", small_store, "--into", into, code=130)
    assert f"{into}: it holds the complete store" in result.stderr
    assert f"`logquarry verify {into}`" in result.stderr
    again = run("salvage", small_store, "--into", into, code=2).stderr
    assert again.count("it holds the complete store") == 1
    run("verify", into)

    def killed(self: SalvageTarget, report: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    into = tmp_path / "part"
    monkeypatch.setattr(SalvageTarget, "finish", killed)
    monkeypatch.setattr(SalvageTarget, "discard", lambda self: None)
    result = run("salvage", small_store, "--into", into, code=130)
    assert f"is incomplete: remove {into / '.salvage'} to start again" in result.stderr
    assert result.stderr.index("error: interrupted") < result.stderr.index("is incomplete")

    def failing(self: SalvageTarget, report: Mapping[str, Any]) -> None:
        raise StoreUnavailable("the disk is gone")

    into = tmp_path / "failed"
    monkeypatch.setattr(SalvageTarget, "finish", failing)
    first, second, *_ = run("salvage", small_store, "--into", into, code=4).stderr.splitlines()
    assert first == "error: the disk is gone", "the cause comes first"
    assert "is incomplete: remove" in second


def last_line(*words: object) -> str:
    return run("salvage", *words, code=1).stdout.splitlines()[-2].partition("; ")[2]


def test_what_is_lost_although_nothing_points_to_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root) as store:
        for _ in range(29):
            store.put(lq.Message("t", bytes(600)))
            store.put(lq.Message("u", b"", queue_id=1))
        found = store.put(lq.Message("t", bytes(600)))
        store.put(lq.Message("u", b"", queue_id=1))
    at = found.physical_offset
    path = root / "commitlog" / f"{at - at % 16_384:020d}"
    overwrite(path, at % 16_384, bytes(found.size))
    line = last_line(root)
    assert line == f"lost: 1 message; {found.size} bytes of the log in 1 place"
    shutil.rmtree(root / "consumequeue")
    line = last_line(root)
    reason = "no queue and no index points there"
    assert line == f"lost: {found.size} bytes of the log in 1 place; {reason}"


def test_a_loss_of_which_only_the_checkpoint_knows(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root) as store:
        for _ in range(60):
            store.put(lq.Message("t", bytes(600)))
    for folder in ("consumequeue", "index", ".logquarry"):
        shutil.rmtree(root / folder)
    with lq.MessageStore.open(root) as reader:
        last = max(message.store_timestamp for message in reader.scan())
    times = checkpoint.LAYOUT.struct.pack(*[last + 60_000] * 3)
    overwrite(root / "checkpoint", 0, times)
    max((root / "commitlog").iterdir()).unlink()
    assert last_line(root) == "lost: an unknown number of messages"


def test_a_frame_that_is_saved_in_no_queue(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root) as store:
        places = [
            store.put(lq.Message("t", b"x" * 50, queue_id=int(number == 20))).physical_offset
            for number in range(30)
        ]
    overwrite(root / "commitlog" / f"{0:020d}", places[20] + HEAD.offsets["queue_id"], bytes(4))
    shutil.rmtree(root / "consumequeue")
    assert last_line(root) == "1 frame saved, but in no queue"
