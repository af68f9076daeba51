"""Start and stop of a broker in a program: wrong arguments, second calls, cancelled calls."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import logquarry as lq
from logquarry.broker import Broker, BrokerOptions, background
from logquarry.broker.broker import new_event_loop
from logquarry.broker.connection import Connection
from logquarry.errors import StoreError, UsageError
from logquarry.protocol.remoting import RemotingCommand, RemotingReader, encode
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers import python_process
from tests.helpers.broker_client import (
    PATIENCE_SECONDS,
    SMALL,
    connected,
    messages_of,
    serving,
)


@pytest.mark.parametrize("wrong", [{"options": {"port": 1}}, {"options": {}}, {"config": {}}])
def test_arguments_of_a_wrong_type(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{name} takes"):
        Broker(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"host": 5}, {"queues": "8"}, {"read_only": "yes"}, {"tls": "x"}, {"acl": {}}),
        *({"poll_ms": -1}, {"idle_s": float("nan")}, {"name": ""}, {"cluster": "a\x02b"}),
        *({"offsets": Path("o")}, {"offsets": 5, "read_only": True}),
    ],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        BrokerOptions(**wrong)


@pytest.mark.parametrize("where", ["s", "s/config", "file"])
def test_a_folder_that_cannot_keep_the_offsets(tmp_path: Path, where: str) -> None:
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=SMALL) as store:
        store.put(lq.Message("t", b"x"))
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    options = BrokerOptions(read_only=True, offsets=tmp_path / where)
    with pytest.raises(UsageError, match="--offsets"), background(tmp_path / "s", options=options):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_a_second_start_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        broker = Broker(tmp_path / "s", config=SMALL)
        async with broker:
            with pytest.raises(UsageError, match="runs already"):
                await broker.start()
            with pytest.raises(StoreError, match="has the store open for writing already"):
                await Broker(tmp_path / "s", config=SMALL).start()
            client = await connected(broker.address)
            assert (await client.send("t")).code == 0
            await client.close()
        # It can be started again after its end.
        async with broker:
            assert len(list(broker.store.scan())) == 1

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


@pytest.mark.parametrize("is_temporary", [True, False])
def test_a_cancelled_call_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_temporary: bool
) -> None:
    """``asyncio.wait_for`` cancels a start or a stop that takes too long."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("logquarry.broker.broker._SHM", str(tmp_path / "missing"))
    path = None if is_temporary else tmp_path / "s"

    async def scenario() -> None:
        for steps in range(4):
            broker = Broker(path, config=SMALL)
            starting = asyncio.create_task(broker.start())
            for _ in range(steps):
                await asyncio.sleep(0)
            starting.cancel()
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            check()
        for steps in range(1, 4):
            broker = Broker(path, config=SMALL)
            await broker.start()
            stopping = asyncio.create_task(broker.stop())
            for _ in range(steps):
                await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            check()

    def check() -> None:
        names = {thread.name for thread in threading.enumerate()}
        assert not [name for name in names if name.startswith(("broker-", "logquarry-"))]
        if is_temporary:
            assert not list(tmp_path.iterdir())
        elif path is not None and path.exists():
            with lq.MessageStore.open(path, mode="rw", config=SMALL):
                pass

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_a_read_only_store_that_vanishes(tmp_path: Path) -> None:
    """As if its disk were unmounted: with an empty queue, consumers would start again at 0."""
    path = tmp_path / "s"
    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        store.put(lq.Message("t", b"x"))

    async def scenario() -> None:
        async with serving(path, read_only=True) as (_, client):
            assert (await client.pull("t", 1)).code == ResponseCode.PULL_NOT_FOUND
            path.rename(tmp_path / "away")
            for offset in 1, 5, 2:
                answer = await client.pull("t", offset, consumerGroup="g")
                assert answer.code == ResponseCode.SYSTEM_ERROR
                assert str(path) in str(answer.remark)
            (tmp_path / "away").rename(path)
            assert (await client.pull("t", 1)).code == ResponseCode.PULL_NOT_FOUND
            assert len(messages_of(await client.pull("t"))) == 1

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_two_stops_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        broker = Broker(tmp_path / "s", config=SMALL)
        starting = asyncio.create_task(broker.start())
        await asyncio.sleep(0)
        # Both wait for the start.
        await asyncio.gather(broker.stop(), broker.stop())
        await starting
        with pytest.raises(UsageError, match="not running"):
            broker.store  # noqa: B018

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_a_transport_of_another_event_loop() -> None:
    # The transports of uvloop are not a subclass of asyncio's.
    transport, server = mock.Mock(), mock.Mock()
    transport.get_extra_info.side_effect = {"peername": ("127.0.0.1", 5)}.get
    connection = Connection(server)
    connection.connection_made(transport)
    assert connection.is_open
    assert connection.address == "127.0.0.1:5"
    server.opened.assert_called_once_with(connection)


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_event_loop_of_a_thread(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_installed:
        uvloop = pytest.importorskip("uvloop")
        kind = uvloop.Loop
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
        kind = asyncio.BaseEventLoop
    loop = new_event_loop()
    assert isinstance(loop, kind)
    loop.close()
    with background(config=SMALL) as broker:
        host, _, port = broker.address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as client:
            question = RemotingCommand(code=RequestCode.GET_BROKER_CONFIG, opaque=7)
            client.sendall(encode(question))
            reader = RemotingReader()
            answers: list[RemotingCommand] = []
            while not answers:
                answers = reader.receive_data(client.recv(1 << 16))
            assert answers[0].opaque == 7 and answers[0].code == ResponseCode.SUCCESS


def test_a_forked_child_ends_and_leaves_the_broker_alone(tmp_path: Path) -> None:
    program = """
        import os, socket, sys
        from logquarry.broker import background

        with background() as broker:
            folder = broker.store.root
            host, port = broker.address.split(":")
            with socket.create_connection((host, int(port))):
                child = os.fork()
                if not child:
                    sys.exit(7)
                _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), os.path.exists(folder), broker.store.topics)
        print(os.path.exists(folder))
    """
    done = python_process.run(program)
    assert done.stdout.splitlines() == ["7 True ()", "False"], done
    assert done.returncode == 0, done.stderr


def _store_with_offsets(root: Path, offset: int) -> Path:
    """A store with a message, and the offset of the group ``group``; return the offsets' file."""
    with lq.MessageStore.open(root, mode="rw", config=SMALL) as store:
        store.put(lq.Message("t", b"x"))
    path = root / "config" / "consumerOffset.json"
    path.write_text(f'{{"offsetTable":{{"t@group":{{0:{offset}}}}}}}')
    return path


async def _offset_of(client: Any) -> str:
    where = {"consumerGroup": "group", "topic": "t", "queueId": 0}
    answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, where)
    return str(answer.ext_fields["offset"])


@pytest.mark.parametrize("read_only", [False, True])
def test_unreadable_offsets_refuse_the_start(tmp_path: Path, read_only: bool) -> None:
    """As in RocketMQ. Without its offset, a group could start at the end of its queues."""
    path = _store_with_offsets(tmp_path / "s", 1)
    path.write_bytes(bytes(40))
    before = path.read_bytes()
    options = BrokerOptions(read_only=read_only)
    with (
        pytest.raises(StoreError, match=r"consumerOffset.json: .*Put the file back"),
        background(tmp_path / "s", options=options),
    ):
        pass
    assert path.read_bytes() == before
    path.unlink()
    with background(tmp_path / "s", options=options):
        pass


@pytest.mark.parametrize("read_only", [False, True])
def test_a_readable_backup_of_the_offsets(
    tmp_path: Path, read_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = _store_with_offsets(tmp_path / "s", 1)
    path.rename(path.with_name(f"{path.name}.bak"))
    path.write_bytes(bytes(40))

    async def whole() -> None:
        async with serving(tmp_path / "s", read_only=read_only) as (_, client):
            assert await _offset_of(client) == "1"

    asyncio.run(whole())
    assert "consumerOffset.json.bak instead" in caplog.text
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_own_offsets_replace_unreadable_offsets_of_the_store(tmp_path: Path) -> None:
    _store_with_offsets(tmp_path / "s", 1).write_bytes(bytes(40))
    (tmp_path / "o/config").mkdir(parents=True)
    own = tmp_path / "o/config/consumerOffset.json"
    own.write_text('{"offsetTable":{"t@group":{0:1}}}')

    async def whole() -> None:
        async with serving(tmp_path / "s", read_only=True, offsets=tmp_path / "o") as (_, client):
            assert await _offset_of(client) == "1"

    asyncio.run(whole())
    own.write_bytes(bytes(40))
    own.with_name(f"{own.name}.bak").unlink(missing_ok=True)
    options = BrokerOptions(read_only=True, offsets=tmp_path / "o")
    with (
        pytest.raises(StoreError, match=str(own)),
        background(tmp_path / "s", options=options),
    ):
        pass
