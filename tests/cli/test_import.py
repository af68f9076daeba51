"""``logquarry import``: accepted rows, refused rows, and messages to the user."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import zlib
from pathlib import Path
from time import time_ns
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import logquarry as lq
from logquarry.cli.outcome import is_out_of_memory
from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.format import sys_flag
from logquarry.ingest import importing
from logquarry.write.put_many import ManyWriter
from tests.helpers.command import jsonl, run
from tests.helpers.exports import export_parquet, exported_lines, kept
from tests.helpers.imports import Document, Import, line, write
from tests.helpers.small_store import NOW, SMALL


# ----------------------------------------------------------------------------------- accepted rows
def test_least_that_a_line_has_to_say(tmp_path: Path, put_in: Import) -> None:
    source = write(
        tmp_path / "few.jsonl",
        line(),
        "",
        line(keys="k1 k2", tags="t", uniq_key="u", properties={"a": "b"}),
        line(content=b"", queue_id=3, queue_offset=17, properties_string="x\x01y\x02"),
    )
    result = put_in(source, "--json")
    document = json.loads(result.stdout)
    assert document.pop("seconds") >= 0
    assert document == {
        "source": str(source),
        "store": str(tmp_path / "store"),
        "files": [str(source)],
        "messages": 3,
        "bytes": document["bytes"],
        "topics": [{"topic": "orders", "messages": 3, "bytes": document["bytes"]}],
        "first_offset": 0,
        "end_offset": document["bytes"],
        "raised_times": None,
    }
    first, second, third = jsonl(tmp_path / "store")
    assert (first["properties_string"], first["born_host"]) == ("", "127.0.0.1:0")
    assert second["properties_string"] == "a\x01b\x02KEYS\x01k1 k2\x02TAGS\x01t\x02UNIQ_KEY\x01u"
    assert (third["queue_id"], third["queue_offset"], third["body"]) == (3, 0, "")
    assert third["properties_string"] == "x\x01y\x02"


def test_it_is_put_behind_what_is_there(golden: Path, tmp_path: Path, put_in: Import) -> None:
    lines = exported_lines(golden / "single" / "store", tmp_path / "a.jsonl")
    put_in(tmp_path / "a.jsonl", "--keep-times")
    with lq.MessageStore.open(tmp_path / "store", mode="rw") as store:
        between = lq.Message(lines[0]["topic"], b"between", queue_id=lines[0]["queue_id"])
        now = store.put(between).store_timestamp
    result = put_in(tmp_path / "a.jsonl", "--keep-times")
    assert f"{len(lines)} store times raised to" in result.stderr
    found = jsonl(tmp_path / "store")
    assert len(found) == 2 * len(lines) + 1
    # Queue offsets and store times continue.
    assert {m["store_timestamp"] for m in found[len(lines) :]} == {now}
    assert kept(found[: len(lines)], keep_times=True) == kept(lines, keep_times=True)
    offsets: dict[tuple[str, int], list[int]] = {}
    for message in found:
        offsets.setdefault((message["topic"], message["queue_id"]), []).append(
            message["queue_offset"]
        )
    assert all(found == list(range(len(found))) for found in offsets.values())
    assert "no damage" in run("verify", tmp_path / "store").stdout


def test_kept_times_do_not_fall_behind(tmp_path: Path, put_in: Import) -> None:
    times = [NOW, NOW - 5, NOW + 7, NOW + 6, NOW + 7]
    source = write(tmp_path / "t.jsonl", *(line(store_timestamp=time) for time in times))
    assert json.loads(put_in(source, "--keep-times", "--json").stdout)["raised_times"] == 2
    found = [message["store_timestamp"] for message in jsonl(tmp_path / "store")]
    assert found == [NOW, NOW, NOW + 7, NOW + 7, NOW + 7]


def test_a_message_without_a_store_time_gets_the_time_of_the_import(
    tmp_path: Path, put_in: Import
) -> None:
    times = [NOW, None, None]
    source = write(tmp_path / "t.jsonl", *(line(store_timestamp=time) for time in times), line())
    before = time_ns() // 1_000_000
    assert json.loads(put_in(source, "--keep-times", "--json").stdout)["raised_times"] == 0
    first, *others = [message["store_timestamp"] for message in jsonl(tmp_path / "store")]
    assert first == NOW
    assert len(others) == 3 and all(before <= other for other in others)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("SCHEDULE_TOPIC_XXXX", "also those that the old broker has already delivered"),
        ("rmq_sys_wheel_timer", "also those that the old broker has already delivered"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", "a broker can end the wrong transactions"),
    ],
)
def test_a_warning_names_messages_that_a_broker_processes_again(
    topic: str, expected: str, tmp_path: Path, put_in: Import
) -> None:
    source = write(tmp_path / "s.jsonl", line(), line(topic=topic, properties={"DELAY": "3"}))
    result = put_in(source)
    assert f"warning: put 1 message of {topic}: " in result.stderr and expected in result.stderr
    assert "export only your own topics (--topic)" in result.stderr
    assert "warning: " not in put_in(write(tmp_path / "o.jsonl", line())).stderr


def test_columns_in_which_all_values_are_missing(tmp_path: Path, put_in: Import) -> None:
    names = ("queue_id", "born_timestamp", "born_host", "sys_flag", "tags", "properties")
    given = {"topic": ["orders"], "body": [b"text"], "keys": ["k"]}
    table = pa.table(given | {name: pa.nulls(1) for name in names})
    pq.write_table(table, tmp_path / "nulls.parquet")
    put_in(tmp_path / "nulls.parquet")
    (found,) = jsonl(tmp_path / "store")
    assert (found["queue_id"], found["properties"]) == (0, {"KEYS": "k"})
    pq.write_table(table.set_column(0, "topic", [pa.nulls(1)]), tmp_path / "no-topic.parquet")
    assert "row 1: the topic is missing" in put_in(tmp_path / "no-topic.parquet", code=1).stderr


def test_bytes_that_are_no_text_and_hosts_within_ipv6(tmp_path: Path, put_in: Import) -> None:
    data = b"\xff\x01\xfe\x02\x02a\x01b\x02"
    mapped = "10.1.2.3:99"
    source = write(
        tmp_path / "odd.jsonl",
        line(
            properties_string="���",
            properties_base64=base64.b64encode(data).decode(),
            sys_flag=sys_flag.BORN_HOST_V6,
            born_host=mapped,
            store_host="[2001:db8::1]:10911",
        ),
    )
    put_in(source)
    with lq.MessageStore.open(tmp_path / "store") as store:
        (message,) = store.scan()
        assert message.frame.properties == data
        assert message.frame.born_host.hex() == "00000000000000000000ffff0a01020300000063"
        assert message.sys_flag == sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6
    export_parquet(tmp_path / "store", tmp_path / "parquet")
    lines = jsonl(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "before")
    put_in(tmp_path / "parquet")
    after = jsonl(tmp_path / "store")
    assert kept(after, keep_times=False) == kept(lines, keep_times=False)


def test_parts_of_messages_from_parquet(tmp_path: Path, put_in: Import) -> None:
    table = pa.table(
        {
            "topic": pa.array(["a", "b"]).dictionary_encode(),
            "body": pa.array([b"1", b"22"], pa.large_binary()),
            "queue_id": pa.array([1, None], pa.int64()),
            "tags": ["t", None],
            "keys": [None, "k"],
            "uniq_key": ["u", "v"],
            "born_timestamp": pa.array([5, 6], pa.timestamp("ms")),
            "store_timestamp": pa.array([NOW, NOW + 1]),
        }
    )
    pq.write_table(table, tmp_path / "few.parquet")
    put_in(tmp_path / "few.parquet", "--keep-times")
    found = [
        (m["topic"], m["queue_id"], m["born_timestamp"], m["store_timestamp"], m["properties"])
        for m in jsonl(tmp_path / "store")
    ]
    assert found == [
        ("a", 1, 5, NOW, {"TAGS": "t", "UNIQ_KEY": "u"}),
        ("b", 0, 6, NOW + 1, {"KEYS": "k", "UNIQ_KEY": "v"}),
    ]


def test_several_files(tmp_path: Path, put_in: Import) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("b", "a"):
        write(folder / f"{name}.jsonl", line(topic=name))
    write(folder / "_not.jsonl", "no data")
    put_in(folder)
    put_in(folder / "[b-z].jsonl")
    put_in(f"{tmp_path}/**/a.jsonl")
    assert [message["topic"] for message in jsonl(tmp_path / "store")] == ["a", "b", "b", "a"]


def test_nothing_to_put(tmp_path: Path, put_in: Import) -> None:
    document = json.loads(put_in(write(tmp_path / "none.jsonl"), "--json").stdout)
    assert (document["messages"], document["first_offset"]) == (0, None)


# -------------------------------------------------------------------------------------- manifests
def with_manifest(folder: Path, **changes: Any) -> Path:
    entries = [
        {
            "path": path.name,
            "broker": "b",
            "rows": pq.ParquetFile(path).metadata.num_rows,
            "first_offset": int(pq.read_table(path)["physical_offset"][0].as_py()),
        }
        | changes
        for path in sorted(folder.glob("*.parquet"), reverse=True)
    ]
    document = {"written_by": "logquarry", "files": entries, "damage": [{}]}
    (folder / "_manifest.json").write_text(json.dumps(document))
    (folder / "_SUCCESS").touch()
    return folder


@pytest.fixture
def exported(golden: Path, tmp_path: Path) -> Path:
    store = golden / "single" / "store"
    return with_manifest(export_parquet(store, tmp_path / "exported", split_size=30_000))


def test_a_manifest_tells_the_files(
    exported: Path, golden: Path, tmp_path: Path, put_in: Import
) -> None:
    # The file names do not show the format.
    for number, path in enumerate(sorted(exported.glob("*.parquet"), reverse=True)):
        path.rename(exported / f"{number}.parquet")
    assert len(list(exported.glob("*.parquet"))) > 2
    with_manifest(exported)
    before = exported_lines(golden / "single" / "store", tmp_path / "a.jsonl")
    result = put_in(exported)
    assert "the export had skipped 1 damaged place" in result.stderr
    after = jsonl(tmp_path / "store")
    assert kept(after, keep_times=False) == kept(before, keep_times=False)


def test_manifests_that_are_wrong(exported: Path, tmp_path: Path, put_in: Import) -> None:
    with_manifest(exported, rows=3)
    assert "but the export's manifest states 3" in put_in(exported, code=3).stderr
    with_manifest(exported, path="gone.parquet")
    assert "gone.parquet: No such file" in put_in(exported, code=3).stderr
    with_manifest(exported, path="../x.parquet")
    assert "outside of it" in put_in(exported, code=3).stderr
    for text in ('{"files": [{"path": 1}]}', "[" * 100_000):
        (exported / "_manifest.json").write_text(text)
        assert "is not a manifest of an export" in put_in(exported, code=3).stderr
    with_manifest(exported)
    (exported / "_SUCCESS").unlink()
    assert "the export is incomplete" in put_in(exported, code=3).stderr
    assert not (tmp_path / "store").exists()


# ------------------------------------------------------------------------------------ refused rows
BAD_LINES: list[tuple[Document | str, str]] = [
    ("{", "line 2: is not JSON"),
    ("[1]", "line 2: is [1], but must be a JSON object"),
    ("null", "line 2: is null, but must be a JSON object"),
    ('{"topic": "\\ud800", "body": ""}', "line 2: topic is"),
    (line(topic=None), "line 2: the topic is missing"),
    ({"topic": "orders"}, "line 2: the body is missing"),
    (line(body=None), "line 2: the body is missing (was it redacted?)"),
    (line(body="?"), "line 2: body is not base64"),
    (line(body=5), "line 2: body is 5, but must be base64"),
    (line(topic=5), "line 2: topic is 5, but must be text"),
    (line(queue_id="1"), 'line 2: queue_id is "1", but must be a whole number'),
    (line(flag=True), "line 2: flag is true, but must be a whole number"),
    (line(flag=2**31), "line 2: flag is 2147483648"),
    (line(store_timestamp=1.5), "line 2: store_timestamp is 1.5"),
    (line(colour="red"), "line 2: an export has no column 'colour'"),
    (line(properties={"a": 1}), "line 2: properties is"),
    (line(properties_string=1), "line 2: properties_string is 1"),
    (line(properties_base64="="), "line 2: properties_base64 is not base64"),
    (line(born_host="nowhere"), "line 2: born_host: not a host and port"),
    (line(born_host="1.2.3.4:65536"), "line 2: born_host: not a host and port: '1.2.3.4:65536'"),
    (line(store_host="[::1]:-1"), "line 2: store_host: not a host and port: '[::1]:-1' (ports"),
    (line(sys_flag=0x20, store_host=None), "line 2: SYSFLAG 0x20 marks a host as IPv6"),
    (line(body_crc=5), "line 2: the CRC of the body differs from body_crc"),
    (line(topic="a/b"), "line 2: not a topic to write to: 'a/b'"),
    (line(topic=""), "line 2: not a topic to write to"),
    (line(content=bytes(66_000)), "line 2: 66097 bytes do not fit into a file"),
    (line(properties_string="x" * 33_000), "line 2: the properties have 33000 characters"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES, ids=[reason for _, reason in BAD_LINES])
@pytest.mark.parametrize("behind", [False, True])
def test_one_bad_line_and_nothing_is_put(
    bad: Document | str,
    reason: str,
    behind: bool,
    tmp_path: Path,
    put_in: Import,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if behind:
        # In a later piece: without the check, the rows before it would already be in the store.
        monkeypatch.setattr(importing, "LINES_BYTES", 1)
    source = write(tmp_path / "bad.jsonl", line(), bad, line())
    assert f"{source}: {reason}" in put_in(source, code=1).stderr
    if (tmp_path / "store").exists():
        assert jsonl(tmp_path / "store") == []


def test_bad_files(tmp_path: Path, put_in: Import) -> None:
    whole = pa.table({"topic": ["a"], "body": [b"b"]})
    source = tmp_path / "x.parquet"

    def refused(table: pa.Table, reason: str, code: int = 3) -> None:
        pq.write_table(table, source)
        assert f"{source}: {reason}" in put_in(source, code=code).stderr

    refused(whole.append_column("colour", pa.array([1])), "an export has no column 'colour'")
    refused(whole.drop_columns(["body"]), "the column body is missing")
    refused(whole.set_column(0, "topic", pa.array([1])), "the column topic is int64, but must be")
    refused(whole.append_column("flag", pa.array(["1"])), "the column flag is string, but must be")
    refused(whole.append_column("flag", pa.array([2**40])), "the column flag: ")
    refused(
        whole.set_column(1, "body", pa.array([None], pa.binary())), "row 1: the body is missing", 1
    )
    refused(whole.append_column("body_crc", pa.array([7])), "row 1: the CRC of the body", 1)
    two = pa.concat_tables([whole, whole.set_column(0, "topic", pa.array(["a/b"]))])
    refused(two, "row 2: not a topic", 1)
    pq.write_table(whole, source)
    source.write_bytes(source.read_bytes()[:-9])
    put_in(source, code=3)
    assert "No such file" in put_in(tmp_path / "gone", code=3).stderr
    assert "contains no files to import" in put_in(tmp_path / "*.nothing", code=3).stderr
    assert "only local files" in put_in("s3://bucket/x", code=2).stderr
    source.write_bytes(b"\xff\xfe")
    assert "line 1: is not JSON" in put_in(source, code=1).stderr


def test_content_in_the_place_of_compressed_bodies(tmp_path: Path, put_in: Import) -> None:
    stored = zlib.compress(b"content")
    crc = zlib.crc32(stored) & 0x7FFFFFFF
    content = write(tmp_path / "c.jsonl", line(content=b"content", sys_flag=1, body_crc=crc))
    assert "from an export with --decompress" in put_in(content, code=1).stderr
    write(content, line(content=b"content", sys_flag=1))
    assert "from an export with --decompress" in put_in(content, code=1).stderr
    write(content, line(content=stored, sys_flag=1, body_crc=crc), line(content=stored, sys_flag=1))
    put_in(content)
    assert len(jsonl(tmp_path / "store")) == 2


def test_delays_and_waits_are_not_done_again(tmp_path: Path, put_in: Import) -> None:
    strings = ["DELAY\x013", "WAIT\x01false\x02", "INNER_MULTI_DISPATCH\x01%LMQ%a"]
    source = write(tmp_path / "d.jsonl", *(line(properties_string=text) for text in strings))
    put_in(source)
    found = jsonl(tmp_path / "store")
    assert [message["properties_string"] for message in found] == strings
    assert {message["topic"] for message in found} == {"orders"}


# ------------------------------------------------------------------------- refusals and interrupts
def test_a_store_that_is_open_elsewhere(tmp_path: Path, put_in: Import) -> None:
    source = write(tmp_path / "a.jsonl", line())
    with lq.MessageStore.open(tmp_path / "store", mode="rw", config=lq.StoreConfig(**SMALL)):
        put_in(source, code=4)
    put_in(source)
    # After a crash the import first recovers the store, as any writer does.
    (tmp_path / "store" / "abort").touch()
    put_in(source)
    assert len(jsonl(tmp_path / "store")) == 2


def test_what_is_no_store(tmp_path: Path, put_in: Import) -> None:
    source = write(tmp_path / "a.jsonl", line())
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").touch()
    assert "not a store, and not empty" in put_in(source, code=3).stderr


def test_a_failing_disk_never_makes_an_import_remove_a_store(
    tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk fails, Path.glob finds nothing since Python 3.13."""
    put_in(write(tmp_path / "a.jsonl", line()))
    invalid = write(tmp_path / "b.jsonl", line(topic="a/b"))
    with monkeypatch.context() as failing:
        failing.setattr(Path, "glob", lambda *_: iter(()))
        root = tmp_path / "store"
        put_in(invalid, code=1)
    assert len(jsonl(root)) == 1


@pytest.mark.parametrize("quiet", [False, True])
def test_an_interrupt_says_how_many_are_in(
    quiet: bool, tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "LINES_BYTES", 1)
    source = write(tmp_path / "a.jsonl", *(line(content=b"%d" % n) for n in range(5)))
    put_stored = ManyWriter.put_stored
    calls = 0

    def interrupted(self: ManyWriter, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return put_stored(self, *arguments)

    monkeypatch.setattr(ManyWriter, "put_stored", interrupted)
    result = put_in(source, *(["--quiet"] if quiet else []), code=130)
    assert f"the first 3 messages of {source} are in {tmp_path / 'store'}" in result.stderr
    assert "--skip 3\n" in result.stderr and "interrupted" in result.stderr
    assert [base64.b64decode(m["body"]) for m in jsonl(tmp_path / "store")] == [b"0", b"1", b"2"]
    assert not (tmp_path / "store" / "abort").exists()
    monkeypatch.undo()
    put_in(source, "--skip", "3")
    assert [base64.b64decode(m["body"]) for m in jsonl(tmp_path / "store")] == [
        b"%d" % n for n in range(5)
    ]


def test_skip_takes_whole_and_partial_batches(tmp_path: Path, put_in: Import) -> None:
    source = write(tmp_path / "a.jsonl", *(line(content=b"%d" % n) for n in range(5)))
    put_in(source, "--skip", "4")
    assert [base64.b64decode(m["body"]) for m in jsonl(tmp_path / "store")] == [b"4"]
    put_in(source, "--skip", "5")
    assert len(jsonl(tmp_path / "store")) == 1
    assert "has only 5 messages" in put_in(source, "--skip", "6", code=2).stderr
    assert len(jsonl(tmp_path / "store")) == 1


def test_an_interrupt_that_comes_late(
    tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", line(), line())
    put_stored = ManyWriter.put_stored

    def interrupted(self: ManyWriter, *arguments: Any) -> Any:
        result = put_stored(self, *arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(ManyWriter, "put_stored", interrupted)
    result = put_in(source, code=130)
    assert f"all 2 messages of {source} are in {tmp_path / 'store'}\n" in result.stderr
    assert len(jsonl(tmp_path / "store")) == 2


def test_a_full_disk_says_how_many_are_in(
    tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "LINES_BYTES", 1)
    source = write(tmp_path / "a.jsonl", *(line() for _ in range(5)))
    put_stored = ManyWriter.put_stored
    calls = 0

    def full(self: ManyWriter, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            return put_stored(self, *arguments)
        error = StoreUnavailable("no space left", status="CREATE_MAPEDFILE_FAILED")
        error.appended = put_stored(self, *arguments)
        raise error

    monkeypatch.setattr(ManyWriter, "put_stored", full)
    result = put_in(source, code=4)
    assert "the first 3 messages" in result.stderr and "no space left" in result.stderr
    step = result.stderr.splitlines()[-1]
    assert step.startswith("next: ") and step.endswith(" --skip 3")
    assert len(jsonl(tmp_path / "store")) == 3
    calls = 0
    result = put_in(source, "--skip", "1", code=4)
    assert "the first 4 messages" in result.stderr
    assert result.stderr.splitlines()[-1].endswith(" --skip 4")
    assert result.stderr.splitlines()[-1].count("--skip") == 1


def test_a_sync_that_fails_after_the_last_put_is_no_success(
    tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Disk, descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def put_then_fail(self: ManyWriter, *arguments: Any) -> Any:
        result = put_stored(self, *arguments)
        monkeypatch.setattr(Disk, "fdatasync", fail)
        return result

    source = write(tmp_path / "a.jsonl", line(), line())
    put_stored = ManyWriter.put_stored
    monkeypatch.setattr(ManyWriter, "put_stored", put_then_fail)
    result = put_in(source, code=4)
    assert "sync failed: Input/output error" in result.stderr
    uncertain = f"it is not certain which of the messages 1 to 2 of {source} are in"
    assert uncertain in result.stderr and "all 2 messages" not in result.stderr
    assert "at the physical offset 0 and above" in result.stderr
    command = f"logquarry recover {tmp_path / 'store'} --apply --config "
    assert command in result.stderr.splitlines()[-1]
    assert "put 2 messages" not in result.stderr


@pytest.mark.parametrize("most_kept", [0, 1 << 30])
def test_many_bodies_of_all_sizes(
    most_kept: int, tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logquarry.ingest.importing.MOST_KEPT", most_kept)
    monkeypatch.setattr("logquarry.ingest.rows.PARQUET_BYTES", 4_000)
    bodies = [bytes([n % 256]) * (n * n % 7_000) for n in range(400)]
    table = pa.table({"topic": ["t"] * 400, "body": bodies, "flag": pa.array(range(400))})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=150)
    put_in(tmp_path / "x.parquet")
    found = jsonl(tmp_path / "store")
    assert [base64.b64decode(message["body"]) for message in found] == bodies
    assert [message["flag"] for message in found] == list(range(400))


@pytest.mark.timeout(60)
def test_a_pipe_is_no_source(tmp_path: Path) -> None:
    """An import reads its source twice, and a pipe delivers its bytes only once."""
    os.mkfifo(tmp_path / "pipe")
    reader, writer = os.pipe()
    os.write(writer, b'{"topic":"t","body":""}\n')
    os.close(writer)
    try:
        for source in (tmp_path / "pipe", f"/dev/fd/{reader}"):
            error = run("import", source, tmp_path / "store", code=3).stderr
            assert f"{source}: is not a plain file: save its content in a file" in error
    finally:
        os.close(reader)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "empty"])
def test_no_empty_store_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    """Otherwise an operator could think that the import had succeeded."""
    monkeypatch.setattr(importing, "LINES_BYTES", 10)
    good = write(tmp_path / "good.jsonl", line())
    bad = write(tmp_path / "bad.jsonl", line(), line(topic=5))
    new = tmp_path / "new"
    if is_there:
        new.mkdir()
    run("import", bad, new, code=1)
    assert new.is_dir() == is_there
    assert not is_there or not list(new.iterdir())
    monkeypatch.setattr(ManyWriter, "check_stored", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    run("import", good, new, code=130)
    assert new.is_dir() == is_there
    monkeypatch.undo()
    run("import", good, new)
    monkeypatch.setattr(importing, "LINES_BYTES", 10)
    run("import", bad, new, code=1)
    with lq.MessageStore.open(new) as store:
        assert len(list(store.scan())) == 1


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowMemoryError("realloc of size 256 failed"),
        pa.ArrowException("Unknown error: Failed to launch worker thread: Resource ..."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lack_of_memory_is_no_unreadable_source(
    tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    source = export_parquet(golden / "single" / "store", tmp_path / "parquet")

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with pytest.raises(type(error)) as raised:
        run("import", source, tmp_path / "store")
    assert is_out_of_memory(raised.value)
