"""ConfigServer: its answers, its limits, and hostile peers."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import pytest

from logquarry.errors import ReplicationError, UsageError
from logquarry.format import broker_json
from logquarry.protocol import remoting
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import RequestCode
from logquarry.replication import ConfigServer, ConfigServerOptions, config_server
from logquarry.replication.config_server import FAST_PORT, REQUESTS
from logquarry.replication.wire import Surroundings
from logquarry.systems import read_file
from tests.helpers.broker_config import Client, asking, config_bytes, real_config, versioned, write
from tests.helpers.waiting import eventually


@pytest.fixture
def master(golden: Path, tmp_path: Path) -> Path:
    """A store with the config/ of a real broker."""
    return real_config(golden, tmp_path / "m")


# ----------------------------------------------------------------------------------------- answers
def test_what_is_served_is_what_the_file_says_now(master: Path) -> None:
    path = master / "config" / "delayOffset.json"
    with ConfigServer(master) as server, Client(server) as client:
        for number, age_s in enumerate((0, 0, 60, 60, 59, 60, 0)):
            # First an old file, which is cached; then other bytes with the same time.
            path.write_text(f'{{"offsetTable":{{1:{10**number}}}}}')
            stamp = 1_700_000_000 - age_s if age_s else time.time()
            os.utime(path, (stamp, stamp))
            for _ in range(3):
                client.say(asking(RequestCode.GET_ALL_DELAY_OFFSET))
                answer = client.hear()
                assert answer is not None
                assert broker_json.decode_delay_offsets(answer.body) == {1: 10**number}


def test_what_could_not_be_read_once_is_served_when_it_can(
    master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = master / "config" / "topics.json"
    expected = broker_json.decode_topic_document(path.read_bytes())
    for file in (path, master / "config" / "topics.json.bak"):
        os.utime(file, (1_700_000_000, 1_700_000_000))

    def out_of_descriptors(wanted: Path) -> bytes:
        if wanted == path:
            raise OSError(errno.EMFILE, "Too many open files")
        return read_file(wanted)

    with ConfigServer(master) as server, Client(server) as client:
        with monkeypatch.context() as patched:
            patched.setattr("logquarry.disk.config_file.read_file", out_of_descriptors)
            client.say(asking())
            answer = client.hear()
            # The backup.
            assert answer is not None and answer.code == 0
            assert broker_json.decode_topic_document(answer.body) != expected
        client.say(asking())
        answer = client.hear()
        assert answer is not None
        assert broker_json.decode_topic_document(answer.body) == expected


# ----------------------------------------------------------------------------------- hostile peers
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
        # Oneway requests and answers get no answer.
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
        # The server serves another peer meanwhile, and sends this one nothing more.
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
        # The port two above is free, but the port two below that one is taken by the first server.
        with pytest.raises(OSError, match="asks for topics there"):
            ConfigServer(master, port=server.port - FAST_PORT)
    with pytest.raises(UsageError, match="two below"):
        ConfigServer(master, port=2)
    alone = ConfigServer(master, options=ConfigServerOptions(fast_port=False))
    alone.close()


def test_a_server_that_fails_says_so(master: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> list[bytes]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(config_server.ConfigServer, "_answer", failing)
    with ConfigServer(master) as server, Client(server) as client:
        assert not server.status().has_ended
        client.say(asking())
        assert client.hear() is None
        eventually(lambda: server.status().has_ended)
        assert isinstance(server.error, ReplicationError) and "a bug" in str(server.error)
