"""A master's config/ on its slave: what is taken, what is not, and who may ask."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.cli import serving
from logquarry.errors import ProtocolViolation, ReplicationError, StoreUnavailable, UsageError
from logquarry.files.layout import quarantine
from logquarry.format import broker_config
from logquarry.protocol import remoting
from logquarry.protocol.remoting import (
    LARGEST_FRAME,
    RemotingCommand,
    RemotingReader,
    RequestCode,
)
from logquarry.replication import (
    ConfigServer,
    ConfigServerOptions,
    ConfigSync,
    ConfigSynced,
    ConfigSyncOptions,
    config_answers,
    sync_config,
)
from logquarry.replication.config_answers import REQUESTS
from logquarry.replication.config_server import FAST_PORT
from logquarry.replication.wire import Surroundings
from tests.replication_pair import PATIENCE_SECONDS, eventually, make_certificate, opened

FILES = ["topics.json", "consumerOffset.json", "delayOffset.json", "subscriptionGroup.json"]
PATIENT = ConfigSyncOptions(timeout=PATIENCE_SECONDS)
Answers = Callable[[RemotingCommand], bytes]


def versioned(table: str, counter: int, **entries: object) -> str:
    return json.dumps({"dataVersion": {"counter": counter, "timestamp": 5}, table: entries})


def write(root: Path, name: str, text: str) -> None:
    (root / "config").mkdir(parents=True, exist_ok=True)
    (root / "config" / name).write_text(text)


def config_bytes(root: Path) -> dict[str, bytes]:
    folder = root / "config"
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


@pytest.fixture
def master(golden: Path, tmp_path: Path) -> Path:
    """A store with the config/ of a real broker."""
    shutil.copytree(golden / "real-broker" / "store" / "config", tmp_path / "m" / "config")
    return tmp_path / "m"


@pytest.fixture
def slave(tmp_path: Path) -> Iterator[lq.MessageStore]:
    with opened(tmp_path / "s", "SLAVE") as store:
        yield store


def fetch(store: lq.MessageStore, server: ConfigServer) -> ConfigSynced:
    return sync_config(store, server.host, server.port, options=PATIENT)


# ------------------------------------------------------------------------------- what is taken
def test_all_four_tables(master: Path, slave: lq.MessageStore) -> None:
    with ConfigServer(master) as server:
        assert fetch(slave, server) == (tuple(FILES), (), ())
        for name in FILES:
            ours, theirs = (Path(root) / "config" / name for root in (slave.root, master))
            # As the broker itself wrote them, byte for byte.
            assert ours.read_bytes() == theirs.read_bytes()
        before = config_bytes(Path(slave.root))
        assert fetch(slave, server) == ((), (), ())
        assert config_bytes(Path(slave.root)) == before
        assert server.status().answered == 8


def test_topics_and_groups_are_taken_as_a_whole_where_their_version_is_another(
    master: Path, slave: lq.MessageStore
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
        # An older one counts too: it is the master's.
        for counter in (9, 2):
            write(master, "topics.json", versioned("topicConfigTable", counter, a={}))
            assert fetch(slave, server).written == ("topics.json",)
        assert list(broker_config.decode_topics((root / "config/topics.json").read_bytes())) == [
            "a"
        ]
        backup = json.loads((root / "config/topics.json.bak").read_bytes())
        assert backup["dataVersion"]["counter"] == 9


def test_what_a_topic_has_besides_is_kept(tmp_path: Path, slave: lq.MessageStore) -> None:
    entry = {"perm": 6, "attributes": {"k": ["é", 1.5, None, True]}, "topicName": "t"}
    write(tmp_path / "m", "topics.json", versioned("topicConfigTable", 1, t=entry))
    with ConfigServer(tmp_path / "m") as server:
        fetch(slave, server)
    found = json.loads((Path(slave.root) / "config/topics.json").read_bytes())
    assert found["topicConfigTable"]["t"] == entry


def test_offsets_are_taken_group_by_group(master: Path, slave: lq.MessageStore) -> None:
    write(master, "consumerOffset.json", '{"offsetTable":{"t@g":{0:5,1:6},"t@new":{0:1}}}')
    write(
        Path(slave.root), "consumerOffset.json", '{"offsetTable":{"t@g":{0:9,7:7},"t@old":{0:3}}}'
    )
    with ConfigServer(master) as server:
        assert "consumerOffset.json" in fetch(slave, server).written
    data = (Path(slave.root) / "config" / "consumerOffset.json").read_bytes()
    assert broker_config.decode_consumer_offsets(data) == {
        ("t", "g"): {0: 5, 1: 6},
        ("t", "new"): {0: 1},
        ("t", "old"): {0: 3},
    }


def test_a_consumer_of_the_slave_does_not_write_over_them(
    tmp_path: Path, master: Path, slave: lq.MessageStore
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
    found = broker_config.decode_consumer_offsets(data)
    assert found["t", "g"] == {0: 5} and found["t", "own"] == {0: 1}


def test_what_is_served_is_what_the_file_says_now(master: Path) -> None:
    path = master / "config" / "delayOffset.json"
    with ConfigServer(master) as server, Client(server) as client:
        for number, age_s in enumerate((0, 0, 60, 60, 59, 60, 0)):
            # One that is old enough to be remembered, and the same time with other bytes.
            path.write_text(f'{{"offsetTable":{{1:{10**number}}}}}')
            stamp = 1_700_000_000 - age_s if age_s else time.time()
            os.utime(path, (stamp, stamp))
            for _ in range(3):
                client.say(asking(RequestCode.GET_ALL_DELAY_OFFSET))
                answer = client.hear()
                assert answer is not None
                assert broker_config.decode_delay_offsets(answer.body) == {1: 10**number}


def test_what_the_master_has_not_got_stays(tmp_path: Path, slave: lq.MessageStore) -> None:
    write(Path(slave.root), "delayOffset.json", '{"offsetTable":{3:4}}')
    before = config_bytes(Path(slave.root))
    with ConfigServer(tmp_path / "m") as server:
        assert fetch(slave, server) == ((), tuple(FILES), ())
    assert config_bytes(Path(slave.root)) == before


def test_a_table_without_offsets_makes_no_file(tmp_path: Path, slave: lq.MessageStore) -> None:
    write(tmp_path / "m", "consumerOffset.json", '{"offsetTable":{}}')
    with ConfigServer(tmp_path / "m") as server:
        assert fetch(slave, server).written == ()
    assert not config_bytes(Path(slave.root))


def test_a_masters_bak_serves_and_what_is_spoilt_is_told(
    master: Path, slave: lq.MessageStore
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


def test_what_could_not_be_read_once_is_served_when_it_can(
    master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = master / "config" / "topics.json"
    expected = broker_config.decode_topic_document(path.read_bytes())
    for file in (path, master / "config" / "topics.json.bak"):
        os.utime(file, (1_700_000_000, 1_700_000_000))
    read = Path.read_bytes

    def out_of_descriptors(self: Path) -> bytes:
        if self == path:
            raise OSError(errno.EMFILE, "Too many open files")
        return read(self)

    with ConfigServer(master) as server, Client(server) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", out_of_descriptors)
            client.say(asking())
            answer = client.hear()
            # The one before it.
            assert answer is not None and answer.code == 0
            assert broker_config.decode_topic_document(answer.body) != expected
        client.say(asking())
        answer = client.hear()
        assert answer is not None
        assert broker_config.decode_topic_document(answer.body) == expected


def test_a_spoilt_file_of_the_slave_is_set_aside(master: Path, slave: lq.MessageStore) -> None:
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
            fetch(read, server)
        with opened(tmp_path / "s", "SLAVE") as gone:
            pass
        with pytest.raises(StoreUnavailable):
            fetch(gone, server)
    assert not config_bytes(tmp_path / "s")


def test_a_slave_delivers_nothing(slave: lq.MessageStore) -> None:
    # It would write over what it has of its master.
    with pytest.raises(StoreUnavailable, match="its master delivers"):
        slave.start_delivery()
    with pytest.raises(StoreUnavailable, match="its master delivers"):
        slave.deliver_due()


def test_again_and_again(master: Path, slave: lq.MessageStore) -> None:
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


def test_a_disk_that_fails_ends_it(master: Path, tmp_path: Path) -> None:
    store = opened(tmp_path / "s", "SLAVE")
    try:
        with ConfigServer(master) as server:
            store._health.poison("for a test")  # type: ignore[attr-defined]
            with ConfigSync(store, server.host, server.port) as sync:
                eventually(lambda: sync.status().has_ended)
                assert isinstance(sync.error, StoreUnavailable)
    finally:
        store.close()
    assert not config_bytes(tmp_path / "s")


# ------------------------------------------------------------------------------ hostile masters
@contextmanager
def broker(answers: Answers) -> Iterator[int]:
    """The port of something that answers each request with any bytes; empty ones end it."""
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
    b'{"t":{"perm":"x"}},"subscriptionGroupTable":{"g":{"x":NaN}},'
    b'"dataVersion":{"counter":1,"timestamp":1}}',
    "large numbers": b'{"offsetTable":{"t@g":{0:9223372036854775808},"3":99999999999999999999},'
    b'"topicConfigTable":{"t":{"x":1e999}},"subscriptionGroupTable":{"g":{"x":1e999}},'
    b'"dataVersion":{"counter":1,"timestamp":1}}',
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_what_cannot_be_read_replaces_nothing(
    name: str, master: Path, slave: lq.MessageStore
) -> None:
    with ConfigServer(master) as server:
        fetch(slave, server)
    before = config_bytes(Path(slave.root))
    with broker(lambda command: remoting.encode(command.answer(0, body=BAD_TABLES[name]))) as port:
        synced = sync_config(slave, "127.0.0.1", port, options=PATIENT)
    assert [problem.partition(":")[0] for problem in synced.problems] == FILES
    assert synced.written == () and config_bytes(Path(slave.root)) == before


def test_a_refusal_is_told_in_few_words(slave: lq.MessageStore) -> None:
    with broker(lambda command: remoting.encode(command.answer(2, remark="busy" * 999))) as port:
        problems = sync_config(slave, "127.0.0.1", port, options=PATIENT).problems
    assert len(problems) == 4 and "code 2: busybusy" in problems[0]
    assert all(len(problem) < 300 for problem in problems)


@pytest.mark.parametrize("strange", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x01"])
def test_another_protocol_is_told(strange: bytes, slave: lq.MessageStore) -> None:
    with broker(lambda _: strange) as port, pytest.raises(ProtocolViolation):
        sync_config(slave, "127.0.0.1", port, options=PATIENT)


def test_who_hangs_up_or_says_nothing(master: Path, slave: lq.MessageStore) -> None:
    with broker(lambda _: b"") as port, pytest.raises(ConnectionError, match="ended"):
        sync_config(slave, "127.0.0.1", port, options=PATIENT)

    def other(command: RemotingCommand) -> bytes:
        # A request of its own, and an answer to something else.
        own = RemotingCommand(code=40, opaque=command.opaque)
        late = RemotingCommand(code=0, opaque=command.opaque + 1, flag=1, body=b"{}")
        return remoting.encode(own) + remoting.encode(late)

    hurried = ConfigSyncOptions(timeout=0.05)
    with broker(other) as port, pytest.raises(TimeoutError):
        sync_config(slave, "127.0.0.1", port, options=hurried)
    assert not config_bytes(Path(slave.root))


def test_closing_does_not_wait_for_an_answer(slave: lq.MessageStore) -> None:
    asked = threading.Event()

    def silent(command: RemotingCommand) -> bytes:
        asked.set()
        return remoting.encode(RemotingCommand(code=40, opaque=0))

    options = ConfigSyncOptions(timeout=10_000)
    with broker(silent) as port, ConfigSync(slave, "127.0.0.1", port, options=options) as sync:
        assert asked.wait(PATIENCE_SECONDS)
        sync.close()
        assert not sync._thread.is_alive()


@pytest.mark.parametrize("options", [{"interval": 0}, {"timeout": -1}])
def test_settings_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ConfigSyncOptions(**options)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- strangers
class Client:
    """Talks to a server in frames."""

    def __init__(self, server: ConfigServer, port: int | None = None) -> None:
        self.wire = socket.create_connection(
            (server.host, server.port if port is None else port), PATIENCE_SECONDS
        )
        self._reader = RemotingReader()
        self._came: list[RemotingCommand] = []

    def say(self, *commands: RemotingCommand) -> None:
        self.wire.sendall(b"".join(map(remoting.encode, commands)))

    def hear(self) -> RemotingCommand | None:
        """The next answer; None at the connection's end."""
        while not self._came:
            try:
                data = self.wire.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._came += self._reader.receive_data(data)
        return self._came.pop(0)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()


def asking(code: int = RequestCode.GET_ALL_TOPIC_CONFIG, opaque: int = 1) -> RemotingCommand:
    return RemotingCommand(code=code, opaque=opaque)


def test_everything_else_is_not_supported(master: Path) -> None:
    before = config_bytes(master)
    known = {request.code for request in REQUESTS}
    with ConfigServer(master) as server, Client(server) as client:
        for code in [-1, 0, 10, 17, 25, 310, *range(20, 50), *range(200, 220)]:
            if code not in known:
                client.say(RemotingCommand(code=code, opaque=code, body=b"x"))
                answer = client.hear()
                assert answer is not None and answer.is_response
                assert (answer.code, answer.opaque) == (3, code)
                assert answer.remark == f" request type {code} not supported"
        # What wants no answer gets none, and what is one neither.
        client.say(
            RemotingCommand(code=21, opaque=5, flag=2),
            RemotingCommand(code=21, opaque=6, flag=1),
            asking(opaque=7),
        )
        answer = client.hear()
        assert answer is not None and answer.opaque == 7 and answer.code == 0
    assert config_bytes(master) == before


@pytest.mark.parametrize("strange", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x01\x00\x01", b"\xff" * 64])
def test_strangers_are_hung_up_on(strange: bytes, master: Path) -> None:
    with ConfigServer(master) as server:
        with Client(server) as client:
            client.wire.sendall(strange)
            assert client.hear() is None
        eventually(lambda: server.status().connections == 0)
        assert server.status().refused == 1


def test_who_reads_nothing_costs_no_more_than_an_answer(master: Path) -> None:
    write(master, "topics.json", versioned("topicConfigTable", 1, t={"x": "y" * (4 << 20)}))
    count = 6
    with ConfigServer(master) as server, Client(server) as client, Client(server) as other:
        client.say(*(asking(opaque=number) for number in range(count)))
        eventually(lambda: server.status().answered > 0)
        # Another one is served meanwhile, and this one gets nothing more.
        for number in range(3):
            other.say(asking(RequestCode.GET_ALL_DELAY_OFFSET, number))
            assert other.hear() is not None
        assert server.status().answered < 3 + count
        for number in range(count):
            answer = client.hear()
            assert answer is not None and answer.opaque == number and len(answer.body) > 4 << 20


def test_connections_are_capped_and_strangers_make_room(master: Path) -> None:
    options = ConfigServerOptions(max_connections=3)
    with ConfigServer(master, options=options) as server, Client(server) as known:
        known.say(asking())
        assert known.hear() is not None
        strangers = [socket.create_connection((server.host, server.port)) for _ in range(12)]
        eventually(lambda: server.status().refused == 10)
        with Client(server) as late:
            late.say(asking())
            assert late.hear() is not None
        known.say(asking())
        assert known.hear() is not None, "who has asked stays"
        assert server.status().connections <= 3
        for wire in strangers:
            wire.close()


def test_the_idle_have_to_go(master: Path) -> None:
    class Later(Surroundings):
        now = 0

        def now_ms(self) -> int:
            return self.now

    surroundings = Later()
    options = ConfigServerOptions(idle_ms=1_000)
    with (
        ConfigServer(master, options=options, surroundings=surroundings) as server,
        Client(server) as silent,
        Client(server) as slow,
        Client(server) as known,
    ):
        slow.wire.sendall(remoting.encode(asking())[:-1])
        known.say(asking())
        assert known.hear() is not None
        eventually(lambda: server.status().connections == 3)
        surroundings.now = 900
        known.say(asking())
        assert known.hear() is not None
        surroundings.now = 1_100
        assert silent.hear() is None and slow.hear() is None
        known.say(asking())
        assert known.hear() is not None


def test_who_may_connect(master: Path) -> None:
    options = ConfigServerOptions(allow=("10.0.0.0/8",))
    with ConfigServer(master, options=options) as server:
        with Client(server) as client:
            assert client.hear() is None
        assert server.status().refused == 1
    with pytest.raises(UsageError, match="allow"):
        ConfigServerOptions(allow=("everybody",))


@pytest.mark.parametrize("options", [{"max_connections": 0}, {"idle_ms": 0}])
def test_server_settings_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ConfigServerOptions(**options)  # type: ignore[arg-type]


def test_two_ports(master: Path) -> None:
    with ConfigServer(master) as server:
        for port in (server.port, server.port + FAST_PORT):
            with Client(server, port) as client:
                client.say(asking())
                answer = client.hear()
                assert answer is not None and answer.code == 0
        # The port two above is free for all that is known: ours is what is two below it.
        with pytest.raises(OSError, match="asks for topics there"):
            ConfigServer(master, port=server.port - FAST_PORT)
    with pytest.raises(UsageError, match="two below"):
        ConfigServer(master, port=2)
    alone = ConfigServer(master, options=ConfigServerOptions(fast_port=False))
    alone.close()


def test_a_table_that_fits_no_frame(
    master: Path, slave: lq.MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LARGEST_FRAME - 5_000 < config_answers._LARGEST_DOCUMENT < LARGEST_FRAME - 500
    monkeypatch.setattr(config_answers, "_LARGEST_DOCUMENT", 5_000)
    write(master, "topics.json", versioned("topicConfigTable", 1, t={"x": "y" * 5_000}))
    with ConfigServer(master) as server:
        synced = fetch(slave, server)
    assert synced.problems == (
        "topics.json: the master refuses, code 1: topics.json cannot be served",
    )
    assert len(synced.written) == 3


def test_tls(master: Path, slave: lq.MessageStore, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    large = {f"topic-{number}": {"x": "y" * 1_000} for number in range(500)}
    write(master, "topics.json", versioned("topicConfigTable", 1, **large))
    asks = replace(PATIENT, server_name="localhost")
    served = serving.server_tls(str(certificate), str(key), str(certificate))
    with ConfigServer(master, options=ConfigServerOptions(tls=served)) as server:
        bare = serving.client_tls(True, str(certificate), None, None)
        # Whoever speaks no TLS, and whoever has no certificate, gets nothing.
        for options in (PATIENT, replace(asks, tls=bare)):
            with pytest.raises((OSError, ProtocolViolation)):
                sync_config(slave, server.host, server.port, options=options)
        assert not config_bytes(Path(slave.root))
        known = serving.client_tls(True, str(certificate), str(certificate), str(key))
        synced = sync_config(slave, server.host, server.port, options=replace(asks, tls=known))
        assert synced == (tuple(FILES), (), ())
    found = json.loads((Path(slave.root) / "config/topics.json").read_bytes())
    assert found["topicConfigTable"] == large


def test_a_server_that_fails_says_so(master: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> list[bytes]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(config_answers.ConfigAnswers, "answer", failing)
    with ConfigServer(master) as server, Client(server) as client:
        assert not server.status().has_ended
        client.say(asking())
        assert client.hear() is None
        eventually(lambda: server.status().has_ended)
        assert isinstance(server.error, ReplicationError) and "a bug" in str(server.error)
