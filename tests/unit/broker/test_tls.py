"""TLS in the event loops of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import time
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.broker import Broker, BrokerOptions, background
from logquarry.broker.acl import AccessControl, Account, sign
from logquarry.protocol.remoting import RemotingCommand, RemotingReader, encode
from logquarry.protocol.remoting_codes import RequestCode
from tests.helpers.broker_client import (
    PATIENCE_SECONDS,
    SMALL,
    connected,
    messages_of,
    pull_fields,
    send_fields,
)
from tests.helpers.replication import make_certificate
from tests.helpers.waiting import eventually

_CONNECTIONS = 200


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture
def contexts(tmp_path: Path) -> Contexts:
    """A server's context, and a context of clients that trust it."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, ssl.create_default_context(cafile=str(certificate))


@pytest.fixture(params=["asyncio", "uvloop"])
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with each event loop that is installed."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)


@pytest.mark.usefixtures("each_loop")
def test_no_handshake_loses_its_first_bytes(contexts: Contexts) -> None:
    """uvloop reads on after a pause, so a handshake sometimes had no beginning."""
    context, trusting = contexts
    question = encode(RemotingCommand(code=RequestCode.GET_BROKER_CLUSTER_INFO, opaque=7))
    with background(options=BrokerOptions(tls=context), config=SMALL) as broker:
        host, _, port = broker.name_server.rpartition(":")
        for _number in range(_CONNECTIONS):
            with (
                socket.create_connection((host, int(port)), PATIENCE_SECONDS) as plain,
                trusting.wrap_socket(plain, server_hostname="localhost") as client,
            ):
                client.sendall(question)
                reader = RemotingReader()
                answers: list[RemotingCommand] = []
                while not answers:
                    answers = reader.receive_data(client.recv(1 << 16))
                assert answers[0].opaque == 7 and answers[0].code == 0


@pytest.mark.usefixtures("each_loop")
def test_a_failed_handshake_has_a_reason(
    contexts: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    context, _trusting = contexts
    with background(options=BrokerOptions(tls=context), config=SMALL) as broker:
        host, _, port = broker.name_server.rpartition(":")
        socket.create_connection((host, int(port)), PATIENCE_SECONDS).close()
        eventually(lambda: "a TLS handshake failed: the client disconnected" in caplog.text)


def test_accounts_behind_tls(tmp_path: Path) -> None:
    """A send and a pull need a signature there too."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    both = frozenset({"PUB", "SUB"})
    acl = AccessControl(Account("client1", "secret1", default_topic=both, default_group=both))

    async def scenario() -> None:
        options = BrokerOptions(tls=context, acl=acl)
        async with Broker(tmp_path / "s", options=options, config=SMALL) as broker:
            client = await connected(broker.address, ssl=trusting, server_hostname="localhost")

            def as_account(
                fields: dict[str, object], body: bytes, secret: str = "secret1"
            ) -> dict[str, str]:
                texts = {name: str(value) for name, value in fields.items()}
                texts["AccessKey"] = "client1"
                return texts | {"Signature": sign(texts, body, secret).decode()}

            send, plain = RequestCode.SEND_MESSAGE_V2, send_fields("t")
            for fields in plain, as_account(plain, b"x", "another"), as_account(plain, b"y"):
                assert (await client.ask(send, fields, b"x")).code != 0
            assert (await client.ask(send, as_account(plain, b"x"), b"x")).code == 0
            pull = pull_fields("t", 0, sysFlag=2 | 4, suspendTimeoutMillis=30_000)
            assert (await client.ask(RequestCode.PULL_MESSAGE, pull)).code != 0
            got = await client.ask(RequestCode.PULL_MESSAGE, as_account(pull, b""))
            assert [message.body for message in messages_of(got)] == [b"x"]
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


@pytest.mark.usefixtures("each_loop")
def test_answers_that_a_client_does_not_read_count(contexts: Contexts) -> None:
    """Only the layer below TLS keeps the bytes of one large write."""
    context, trusting = contexts
    with background(options=BrokerOptions(tls=context), config=SMALL) as broker:
        size = 4_000_000
        broker.store.put(lq.Message("t", bytes(size)))
        fields = {"topic": "t", "key": "", "offset": "0"}
        question = encode(
            RemotingCommand(code=RequestCode.VIEW_MESSAGE_BY_ID, opaque=7, ext_fields=fields)
        )
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            plain.settimeout(PATIENCE_SECONDS)
            host, _, port = broker.address.rpartition(":")
            plain.connect((host, int(port)))
            with trusting.wrap_socket(plain, server_hostname="localhost") as client:
                client.sendall(question)
                end = time.monotonic() + PATIENCE_SECONDS
                answers = broker.core.unread_answers
                while not answers._total and time.monotonic() < end:
                    time.sleep(0.01)
                # The system's buffer of the socket has the other bytes.
                most = answers._total
                assert most > 100_000
                reader = RemotingReader()
                found: list[RemotingCommand] = []
                while not found:
                    found = reader.receive_data(client.recv(1 << 16))
                assert len(found[0].body) > size
