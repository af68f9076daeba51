"""TLS in the event loops of asyncio and of uvloop."""

from __future__ import annotations

import socket
import ssl
import sys
from pathlib import Path

import pytest

from logquarry.broker import BrokerOptions, background
from logquarry.protocol.remoting import RemotingCommand, RemotingReader, encode
from logquarry.protocol.remoting_codes import RequestCode
from tests.helpers.broker_client import PATIENCE_SECONDS, SMALL
from tests.helpers.replication import make_certificate

_CONNECTIONS = 200


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_no_handshake_loses_its_first_bytes(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop reads on after a pause, so a handshake sometimes had no beginning."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
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
