"""The safe recovery of every harmed golden store, compared with what RocketMQ recovered.

Each store is recovered twice: once by a writer that then reads and puts, once for all other tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.repair.verification import verify_store
from tests.conformance.golden_facts import ANY_LOSS, WITH_LOG, Scenario
from tests.helpers.files import bytes_of

LOST_BY_THE_HARM = {
    "frame-head-only": 1,
    "half-frame": 1,
    "last-log-gone": 23,
    "noabort-last-log-gone": 23,
    "crc-middle": 1,
    "crc-third-last-file": 1,
    "magic-middle": 1,
    "total-size-middle": 1,
    "body-length-middle": 1,
    "noabort-crc-middle": 1,
    "noabort-crc-third-last-file": 1,
    "noabort-half-frame": 1,
    "cq-ahead": 11,
    "noabort-cq-ahead": 11,
}
"""Messages that do not stand whole in the log any more; of all others nothing may be lost."""


@dataclass(frozen=True)
class Recovered:
    """A golden store that a writer opened once, and closed.

    Attributes:
        scenario: the golden scenario.
        root: the recovered copy of its store. A test may open it, but must change no file.
        before: bytes of all files of log and queues before, by path.
        end: the log's end, as the writer found it.
    """

    scenario: Scenario
    root: Path
    before: dict[Path, bytes]
    end: int


@pytest.fixture(scope="module", params=WITH_LOG)
def scenario(request: pytest.FixtureRequest, golden: Path) -> Scenario:
    return Scenario(golden / "unclean" / request.param)


@pytest.fixture(scope="module")
def recovered(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recovered]:
    root = tmp_path_factory.mktemp("recovered") / "store"
    shutil.copytree(scenario.store, root)
    files = [*root.glob("commitlog/*"), *root.glob("consumequeue/*/*/*")]
    before = {path.relative_to(root): path.read_bytes() for path in files}
    with lq.MessageStore.open(
        root, config=scenario.config, mode="rw", accept_loss=ANY_LOSS
    ) as store:
        end = store.max_offset
        assert store.wait_dispatched(timeout=60)
    yield Recovered(scenario, root, before, end)
    shutil.rmtree(root)


def read_through(store: lq.MessageStore) -> Iterator[tuple[str, int, lq.StoredMessage]]:
    """Every message that a consumer gets, queue by queue."""
    for topic, queue_id in store.queues():
        offset, stop = store.queue_offsets(topic, queue_id)[:2]
        while offset < stop:
            found = store.get(topic, queue_id, offset)
            for message in found.messages:
                yield topic, queue_id, message
            assert found.next_offset > offset
            offset = found.next_offset


def test_nothing_that_stands_whole_is_lost(
    scenario: Scenario, golden: Path, tmp_path: Path
) -> None:
    name = scenario.folder.name
    root = Path(shutil.copytree(scenario.store, tmp_path / "store"))
    lines = (golden / "unclean" / "before-harm-expected.jsonl").read_text("utf-8").splitlines()
    had = {line["physicalOffset"]: line for line in map(json.loads, lines)}
    kept_by_java = {line["physicalOffset"] for line in scenario.expected}
    with lq.MessageStore.open(
        root, config=scenario.config, mode="rw", accept_loss=ANY_LOSS
    ) as store:
        assert store.wait_dispatched(timeout=60)
        found = {message.physical_offset: message for message in store.scan(on_damage="skip")}
        assert len(had) - len(found) == LOST_BY_THE_HARM.get(name, 0)
        assert kept_by_java <= found.keys()
        for offset, message in found.items():
            assert message.message_id == had[offset]["msgId"]
        queued = [(t, q, m.queue_offset, m.physical_offset) for t, q, m in read_through(store)]
        assert sorted(offset for *_, offset in queued) == sorted(found)
        for topic, queue_id, queue_offset, offset in queued:
            message = found[offset]
            assert (topic, queue_id) == (message.topic, message.queue_id)
            assert queue_offset == message.queue_offset
        for message in found.values():
            for key in (message.keys or "").split():
                answer = store.query(message.topic, key, exact=True, max_count=64)
                assert message in answer, (message.topic, key)
        result = store.put(lq.Message("UnA", b"goes on", keys="new"))
        assert result.physical_offset >= max(found, default=0)
    with lq.MessageStore.open(root, config=scenario.config) as reader:
        after = [message.physical_offset for message in reader.scan(on_damage="skip")]
        assert after == [*sorted(found), result.physical_offset]


def test_what_was_there_is_there_still(recovered: Recovered) -> None:
    """Log bytes before the log's end are unchanged, and removed bytes are in quarantine."""
    root, end = recovered.root, recovered.end
    logs = {p.name: data for p, data in recovered.before.items() if p.parts[0] == "commitlog"}
    queues = {p: data for p, data in recovered.before.items() if p.parts[0] == "consumequeue"}
    aside = root / ".logquarry" / "quarantine"
    saved = list(aside.rglob("*.from-*"))
    for name, data in logs.items():
        path = root / "commitlog" / name
        if not path.exists():
            if data.strip(b"\0"):
                assert (aside / "commitlog" / name).read_bytes() == data
            continue
        kept = max(0, min(len(data), end - int(name)))
        assert path.read_bytes()[:kept] == data[:kept]
        rest = data[kept:].rstrip(b"\0")
        if rest:
            copies = [p.read_bytes() for p in saved if p.name == f"{name}.from-{kept}"]
            assert any(copy.rstrip(b"\0") == rest for copy in copies)
    for place, data in queues.items():
        now = (root / place).read_bytes() if (root / place).exists() else b""
        if now != data and data.strip(b"\0"):
            folder = aside / place.parent
            assert list(folder.glob(f"{place.name}*")) or len(now.rstrip(b"\0")) > len(
                data.rstrip(b"\0")
            )


def test_it_is_recovered_once(recovered: Recovered, caplog: pytest.LogCaptureFixture) -> None:
    root = recovered.root
    first = bytes_of(root)
    caplog.clear()
    lq.MessageStore.open(root, config=recovered.scenario.config, mode="rw").close()
    assert not [record for record in caplog.records if "recovered" in record.message]
    again = bytes_of(root)
    assert {name for name in first if first[name] != again.get(name)} <= {"lock"}


def test_verify_finds_only_what_cannot_be_mended(recovered: Recovered) -> None:
    scenario = recovered.scenario
    report = verify_store(lq.MessageStore.open(recovered.root, config=scenario.config).layout)
    kinds = {finding.kind for finding in report.findings if finding.severity == "damage"}
    if scenario.folder.name in LOST_BY_THE_HARM:
        assert not kinds & {"queue_missing", "queue_behind", "queue_gap", "index_entry_wrong"}
    else:
        assert kinds <= {"blank_lost", "bad_magic", "zeroed", "torn_tail"}, report.findings
