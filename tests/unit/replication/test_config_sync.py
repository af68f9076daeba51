"""ConfigSync: which tables are copied, what stays, and hostile masters."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.cli import replication
from logquarry.errors import ProtocolViolation, StoreUnavailable, UsageError
from logquarry.format import broker_json
from logquarry.log.store_files import quarantine
from logquarry.protocol import remoting
from logquarry.protocol.remoting import LARGEST_FRAME, RemotingCommand, RemotingReader
from logquarry.replication import (
    ConfigServer,
    ConfigServerOptions,
    ConfigSync,
    ConfigSynced,
    ConfigSyncOptions,
    config_server,
    sync_config,
)
from tests.helpers.broker_config import config_bytes, real_config, versioned, write
from tests.helpers.replication import make_certificate, opened
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

FILES = ["topics.json", "consumerOffset.json", "delayOffset.json", "subscriptionGroup.json"]
PATIENT = ConfigSyncOptions(timeout=PATIENCE_SECONDS)
Answers = Callable[[RemotingCommand], bytes]


@pytest.fixture
def master(golden: Path, tmp_path: Path) -> Path:
    """A store with the config/ of a real broker."""
    return real_config(golden, tmp_path / "m")


@pytest.fixture
def slave(tmp_path: Path) -> Iterator[lq.StoreWriter]:
    with opened(tmp_path / "s", "SLAVE") as store:
        yield store


def fetch(store: lq.StoreWriter, server: ConfigServer) -> ConfigSynced:
    return sync_config(store, server.host, server.port, options=PATIENT)


# -------------------------------------------------------------------------------------- copies
def test_all_four_tables(master: Path, slave: lq.StoreWriter) -> None:
    with ConfigServer(master) as server:
        assert fetch(slave, server) == (tuple(FILES), (), ())
        for name in FILES:
            ours, theirs = (Path(root) / "config" / name for root in (slave.root, master))
            # The broker's own bytes.
            assert ours.read_bytes() == theirs.read_bytes()
        before = config_bytes(Path(slave.root))
        assert fetch(slave, server) == ((), (), ())
        assert config_bytes(Path(slave.root)) == before
        assert server.status().answered == 8


def test_topics_and_groups_are_taken_as_a_whole_where_their_version_is_another(
    master: Path, slave: lq.StoreWriter
) -> None:
    root = Path(slave.root)
    for name, table in (
        ("topics.json", "topicConfigTable"),
        ("subscriptionGroup.json", "subscriptionGroupTable"),
    ):
        write(master, name, versioned(table, 3, a={}, b={}))
        write(root, name, versioned(table, 3, other={}))
    with ConfigServer(master) as server:
        assert not {"topics.json", "subscriptionGroup.json"} & set(fetch(slave, server).written)
        # An older version replaces a newer one too, because it is the master's.
        for counter in (9, 2):
            write(master, "topics.json", versioned("topicConfigTable", counter, a={}))
            assert fetch(slave, server).written == ("topics.json",)
        assert list(broker_json.decode_topics((root / "config/topics.json").read_bytes())) == ["a"]
        backup = json.loads((root / "config/topics.json.bak").read_bytes())
        assert backup["dataVersion"]["counter"] == 9


def test_what_a_topic_has_besides_is_kept(tmp_path: Path, slave: lq.StoreWriter) -> None:
    entry = {"perm": 6, "attributes": {"k": ["é", 1.5, None, True]}, "topicName": "t"}
    write(tmp_path / "m", "topics.json", versioned("topicConfigTable", 1, t=entry))
    with ConfigServer(tmp_path / "m") as server:
        fetch(slave, server)
    found = json.loads((Path(slave.root) / "config/topics.json").read_bytes())
    assert found["topicConfigTable"]["t"] == entry


def test_offsets_are_taken_group_by_group(master: Path, slave: lq.StoreWriter) -> None:
    write(master, "consumerOffset.json", '{"offsetTable":{"t@g":{0:5,1:6},"t@new":{0:1}}}')
    write(
        Path(slave.root), "consumerOffset.json", '{"offsetTable":{"t@g":{0:9,7:7},"t@old":{0:3}}}'
    )
    with ConfigServer(master) as server:
        assert "consumerOffset.json" in fetch(slave, server).written
    data = (Path(slave.root) / "config" / "consumerOffset.json").read_bytes()
    assert broker_json.decode_consumer_offsets(data) == {
        ("t", "g"): {0: 5, 1: 6},
        ("t", "new"): {0: 1},
        ("t", "old"): {0: 3},
    }


def test_a_consumer_of_the_slave_does_not_write_over_them(
    tmp_path: Path, master: Path, slave: lq.StoreWriter
) -> None:
    write(master, "consumerOffset.json", '{"offsetTable":{"t@g":{0:5}}}')
    with opened(tmp_path / "other") as other:
        other.put(lq.Message("t", body=b"one", queue_id=0))
        slave.log_feed().append_data(0, bytes(other.log_feed().select(0) or b""))
        slave.log_feed().vouch(other.max_offset)
    assert slave.wait_dispatched(timeout=PATIENCE_SECONDS)
    with (
        ConfigServer(master) as server,
        slave.consumer("own", "t", timeout=PATIENCE_SECONDS) as own,
    ):
        assert next(iter(own)).body == b"one"
        fetch(slave, server)
        own.commit()
    data = (Path(slave.root) / "config" / "consumerOffset.json").read_bytes()
    found = broker_json.decode_consumer_offsets(data)
    assert found["t", "g"] == {0: 5} and found["t", "own"] == {0: 1}


def test_what_the_master_has_not_got_stays(tmp_path: Path, slave: lq.StoreWriter) -> None:
    write(Path(slave.root), "delayOffset.json", '{"offsetTable":{3:4}}')
    before = config_bytes(Path(slave.root))
    with ConfigServer(tmp_path / "m") as server:
        assert fetch(slave, server) == ((), tuple(FILES), ())
    assert config_bytes(Path(slave.root)) == before


def test_a_table_without_offsets_makes_no_file(tmp_path: Path, slave: lq.StoreWriter) -> None:
    write(tmp_path / "m", "consumerOffset.json", '{"offsetTable":{}}')
    with ConfigServer(tmp_path / "m") as server:
        assert fetch(slave, server).written == ()
    assert not config_bytes(Path(slave.root))


def test_a_masters_bak_serves_and_what_is_spoilt_is_told(
    master: Path, slave: lq.StoreWriter
) -> None:
    for name in ("topics.json", "subscriptionGroup.json"):
        (master / "config" / name).write_bytes(b"{ torn")
    with ConfigServer(master) as server:
        synced = fetch(slave, server)
    assert set(synced.written) == set(FILES) - {"subscriptionGroup.json"}
    assert synced.problems == (
        "subscriptionGroup.json: the master refuses, code 1: "
        "subscriptionGroup.json cannot be served",
    )
    backup = json.loads((master / "config" / "topics.json.bak").read_bytes())
    assert json.loads((Path(slave.root) / "config/topics.json").read_bytes()) == backup


def test_a_spoilt_file_of_the_slave_is_set_aside(master: Path, slave: lq.StoreWriter) -> None:
    root = Path(slave.root)
    for name in FILES:
        write(root, name, "{ torn")
    with ConfigServer(master) as server:
        assert fetch(slave, server).written == tuple(FILES)
    aside = quarantine(root, "config")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == dict.fromkeys(
        FILES, b"{ torn"
    )


def test_who_is_no_slave_takes_nothing(master: Path, tmp_path: Path) -> None:
    with ConfigServer(master) as server:
        with opened(tmp_path / "other") as other, pytest.raises(UsageError, match="not SLAVE"):
            fetch(other, server)
        with lq.MessageStore.open(tmp_path / "other") as read, pytest.raises(StoreUnavailable):
            fetch(read, server)  # type: ignore[arg-type]
        with opened(tmp_path / "s", "SLAVE") as gone:
            pass
        with pytest.raises(StoreUnavailable):
            fetch(gone, server)
    assert not config_bytes(tmp_path / "s")


def test_a_slave_delivers_nothing(slave: lq.StoreWriter) -> None:
    # Delivery would overwrite the offsets of the master.
    with pytest.raises(StoreUnavailable, match="its master delivers"):
        slave.start_delivery()
    with pytest.raises(StoreUnavailable, match="its master delivers"):
        slave.deliver_due()


def test_again_and_again(master: Path, slave: lq.StoreWriter) -> None:
    with ConfigServer(master) as server:
        port = server.port
        options = ConfigSyncOptions(interval=0.01, timeout=PATIENCE_SECONDS)
        with ConfigSync(slave, server.host, port, options=options) as sync:
            eventually(lambda: sync.status().times > 0)
            write(master, "delayOffset.json", '{"offsetTable":{2:77}}')
            path = Path(slave.root) / "config" / "delayOffset.json"
            eventually(lambda: b"2:77" in path.read_bytes())
            server.close()
            eventually(lambda: sync.status().trouble != "")
            assert not sync.status().has_ended
            with ConfigServer(master, port=port):
                eventually(lambda: sync.status().trouble == "")
            assert sync.status().master == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("suffix", "number"),
    [("", errno.EMFILE), ("", errno.ESTALE), ("", errno.EACCES), (".new", errno.EMFILE)],
)
def test_it_tries_again_if_a_file_cannot_be_opened_now(
    master: Path, slave: lq.StoreWriter, monkeypatch: pytest.MonkeyPatch, suffix: str, number: int
) -> None:
    path = Path(slave.root) / "config" / "topics.json"
    write(Path(slave.root), path.name, versioned("topicConfigTable", 1, other={}))
    system = os.open

    def refuse(at: Any, *more: Any, **options: Any) -> int:
        if str(at) == f"{path}{suffix}":
            raise OSError(number, os.strerror(number), at)
        return system(at, *more, **options)

    options = ConfigSyncOptions(interval=0.01, timeout=PATIENCE_SECONDS)
    with ConfigServer(master) as server, monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with ConfigSync(slave, server.host, server.port, options=options) as sync:
            eventually(lambda: os.strerror(number) in sync.status().trouble)
            patched.undo()
            eventually(lambda: sync.status().times > 0 or sync.status().has_ended)
            assert not sync.status().has_ended
    assert path.read_bytes() == (master / "config" / path.name).read_bytes()


def test_a_disk_that_fails_ends_it(master: Path, tmp_path: Path) -> None:
    store = opened(tmp_path / "s", "SLAVE")
    try:
        with ConfigServer(master) as server:
            store._health.poison("for a test")
            with ConfigSync(store, server.host, server.port) as sync:
                eventually(lambda: sync.status().has_ended)
                assert isinstance(sync.error, StoreUnavailable)
    finally:
        store.close()
    assert not config_bytes(tmp_path / "s")


# ------------------------------------------------------------------------------ hostile masters
@contextmanager
def broker(answers: Answers) -> Iterator[int]:
    """The port of a server that answers each request with the given bytes; empty bytes close it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                with connection:
                    talk(connection)
        except OSError:
            pass

    def talk(connection: socket.socket) -> None:
        reader = RemotingReader()
        while data := connection.recv(1 << 16):
            for command in reader.receive_data(data):
                answer = answers(command)
                if not answer:
                    return
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(PATIENCE_SECONDS)


BAD_TABLES = {
    "nothing": b"",
    "no json": b"{",
    "no object": b"[]",
    "no table": b"{}",
    "no utf-8": b'{"offsetTable":{"\xff@g":{}}}',
    "deep": b"[" * 100_000,
    "a table that is a list": b'{"offsetTable":[],"topicConfigTable":[],"dataVersion":{}}',
    "entries that are numbers": b'{"offsetTable":{"t@g":1},"topicConfigTable":{"t":1},'
    b'"subscriptionGroupTable":{"g":1},"dataVersion":{"counter":1,"timestamp":1}}',
    "no version": b'{"topicConfigTable":{},"subscriptionGroupTable":{},"offsetTable":{"a@b":[]}}',
    "broken numbers": b'{"offsetTable":{"t@g":{0:1.5},"1":{}},"topicConfigTable":'
    b'{"t":{"perm":"x"}},"subscriptionGroupTable":{"g":1},'
    b'"dataVersion":{"counter":1,"timestamp":1}}',
    "large numbers": b'{"offsetTable":{"t@g":{0:9223372036854775808},"3":99999999999999999999},'
    b'"topicConfigTable":{"t":{"x":1e999}},"subscriptionGroupTable":{"g":{"x":1e999}},'
    b'"dataVersion":{"counter":1,"timestamp":1}}',
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_what_cannot_be_read_replaces_nothing(
    name: str, master: Path, slave: lq.StoreWriter
) -> None:
    with ConfigServer(master) as server:
        fetch(slave, server)
    before = config_bytes(Path(slave.root))
    with broker(lambda command: remoting.encode(command.answer(0, body=BAD_TABLES[name]))) as port:
        synced = sync_config(slave, "127.0.0.1", port, options=PATIENT)
    assert [problem.partition(":")[0] for problem in synced.problems] == FILES
    assert synced.written == () and config_bytes(Path(slave.root)) == before


def test_a_refusal_is_told_in_few_words(slave: lq.StoreWriter) -> None:
    with broker(lambda command: remoting.encode(command.answer(2, remark="busy" * 999))) as port:
        problems = sync_config(slave, "127.0.0.1", port, options=PATIENT).problems
    assert len(problems) == 4 and "code 2: busybusy" in problems[0]
    assert all(len(problem) < 300 for problem in problems)


@pytest.mark.parametrize("strange", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x01"])
def test_another_protocol_is_told(strange: bytes, slave: lq.StoreWriter) -> None:
    with broker(lambda _: strange) as port, pytest.raises(ProtocolViolation):
        sync_config(slave, "127.0.0.1", port, options=PATIENT)


def test_who_hangs_up_or_says_nothing(master: Path, slave: lq.StoreWriter) -> None:
    with broker(lambda _: b"") as port, pytest.raises(ConnectionError, match="ended"):
        sync_config(slave, "127.0.0.1", port, options=PATIENT)

    def other(command: RemotingCommand) -> bytes:
        # A request, and an answer to another request.
        own = RemotingCommand(code=40, opaque=command.opaque)
        late = RemotingCommand(code=0, opaque=command.opaque + 1, flag=1, body=b"{}")
        return remoting.encode(own) + remoting.encode(late)

    hurried = ConfigSyncOptions(timeout=0.05)
    with broker(other) as port, pytest.raises(TimeoutError):
        sync_config(slave, "127.0.0.1", port, options=hurried)
    assert not config_bytes(Path(slave.root))


def test_closing_does_not_wait_for_an_answer(slave: lq.StoreWriter) -> None:
    asked = threading.Event()

    def silent(command: RemotingCommand) -> bytes:
        asked.set()
        return remoting.encode(RemotingCommand(code=40, opaque=0))

    options = ConfigSyncOptions(timeout=10_000)
    with broker(silent) as port, ConfigSync(slave, "127.0.0.1", port, options=options) as sync:
        assert asked.wait(PATIENCE_SECONDS)
        sync.close()
        assert not sync._threads[0].is_alive()


@pytest.mark.parametrize("options", [{"interval": 0}, {"timeout": -1}])
def test_settings_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ConfigSyncOptions(**options)  # type: ignore[arg-type]


def test_a_table_that_fits_no_frame(
    master: Path, slave: lq.StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LARGEST_FRAME - 5_000 < config_server._LARGEST_DOCUMENT < LARGEST_FRAME - 500
    monkeypatch.setattr(config_server, "_LARGEST_DOCUMENT", 5_000)
    write(master, "topics.json", versioned("topicConfigTable", 1, t={"x": "y" * 5_000}))
    with ConfigServer(master) as server:
        synced = fetch(slave, server)
    assert synced.problems == (
        "topics.json: the master refuses, code 1: topics.json cannot be served",
    )
    assert len(synced.written) == 3


def test_tls(master: Path, slave: lq.StoreWriter, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    large = {f"topic-{number}": {"x": "y" * 1_000} for number in range(500)}
    write(master, "topics.json", versioned("topicConfigTable", 1, **large))
    asks = replace(PATIENT, server_name="localhost")
    served = replication.ServerTls(str(certificate), str(key), str(certificate)).context()
    with ConfigServer(master, options=ConfigServerOptions(tls=served)) as server:
        bare = replication.client_tls(True, str(certificate), None, None)
        # A peer without TLS and a peer without certificate get nothing.
        for options in (PATIENT, replace(asks, tls=bare)):
            with pytest.raises((OSError, ProtocolViolation)):
                sync_config(slave, server.host, server.port, options=options)
        assert not config_bytes(Path(slave.root))
        known = replication.client_tls(True, str(certificate), str(certificate), str(key))
        synced = sync_config(slave, server.host, server.port, options=replace(asks, tls=known))
        assert synced == (tuple(FILES), (), ())
    found = json.loads((Path(slave.root) / "config/topics.json").read_bytes())
    assert found["topicConfigTable"] == large
