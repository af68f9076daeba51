"""Stores in an S3 bucket are read and checked like those on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

import logquarry as lq
from logquarry.errors import StoreNotFound, UsageError
from logquarry.log import filesystem
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from logquarry.repair.verification import verify_store
from tests.helpers.s3_server import Options, put_stores, s3_server
from tests.helpers.store_maker import StoreMaker

NAMES = ("single", "unclean/crc-middle")


@pytest.fixture(scope="module")
def server() -> Iterator[Options]:
    with s3_server() as options:
        yield options


@pytest.fixture(scope="module")
def urls(server: Options, golden: Path) -> dict[str, str]:
    return put_stores(server, {name: golden / name / "store" for name in NAMES})


def test_the_same_messages(server: Options, urls: dict[str, str], golden: Path) -> None:
    with (
        lq.MessageStore.open(urls["single"], storage_options=server) as remote,
        lq.MessageStore.open(golden / "single" / "store") as local,
    ):
        assert list(remote.scan()) == list(local.scan())
        topic, queue_id = sorted(local.layout.queue_names)[0]
        assert [m.physical_offset for m in remote.get(topic, queue_id, 0).messages] == [
            m.physical_offset for m in local.get(topic, queue_id, 0).messages
        ]


@pytest.mark.parametrize(
    ("name", "stretch_bytes"), [("single", 8 << 20), ("unclean/crc-middle", 20_000)]
)
def test_the_same_findings(
    server: Options, urls: dict[str, str], golden: Path, name: str, stretch_bytes: int
) -> None:
    remote = StoreLayout.open(urls[name], storage_options=server)
    found = verify_store(remote, stretch_bytes=stretch_bytes).to_json()
    alone = verify_store(StoreLayout.open(golden / name / "store")).to_json()
    assert found | {"store": "", "findings": bare(found)} == (
        alone | {"store": "", "findings": bare(alone)}
    )


def bare(document: dict[str, object]) -> list[object]:
    findings = document["findings"]
    assert isinstance(findings, list)
    return findings


def test_what_cannot_be_reached_is_told(server: Options, urls: dict[str, str]) -> None:
    assert urls
    with pytest.raises((StoreNotFound, UsageError), match="no-such-bucket"):
        lq.MessageStore.open("s3://no-such-bucket/store", storage_options=server)
    with pytest.raises((StoreNotFound, UsageError)):
        options = server | {"scheme": "gopher"}
        lq.MessageStore.open(urls["single"], storage_options=options)


def test_a_walk_fetches_less_than_twice_the_bytes_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request fetches more bytes than a step needs, and the next windows are parts of them."""
    maker = StoreMaker(log_file_size=1 << 20)
    for _ in range(800):
        maker.put(body=bytes(1_000))
    root = str(maker.write(tmp_path / "store"))
    fetched = counted_fetches(monkeypatch)
    layout = StoreLayout(filesystem.ArrowFileSystem(fs.LocalFileSystem(), root, root))
    reader = LogReader(layout, batch_bytes=16 << 10)
    runs = [event for event in reader.events() if isinstance(event, Run)]
    assert len(runs) > 50 and sum(len(run.rows) for run in runs) == 800
    assert sum(fetched) < 2 << 20


def test_reads_of_scattered_places_fetch_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path)
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    fetched = counted_fetches(monkeypatch)
    view = filesystem.ArrowFileSystem(fs.LocalFileSystem(), root, root).open("file")
    for start in (500_000, 100_000, 900_000, 600_000):
        assert len(view.window(start, 20)) >= 20
    assert fetched == [32 << 10] * 4
    # The next reads follow each other.
    at = 0
    while at < view.size:
        at += len(view.window(at, 20))
    assert fetched[4:] == [32 << 10, *[128 << 10] * 7, (128 << 10) - (32 << 10)]


def counted_fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all requests, with smaller limits."""
    fetched: list[int] = []
    fetch = filesystem._ArrowFile._range

    def counted(file: filesystem._ArrowFile, start: int, length: int) -> memoryview:
        data = fetch(file, start, length)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(filesystem, "REMOTE_RANGE", 128 << 10)
    monkeypatch.setattr(filesystem, "REMOTE_LEAST", 32 << 10)
    monkeypatch.setattr(filesystem._ArrowFile, "_range", counted)
    return fetched
