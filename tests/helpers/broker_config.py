"""Files of config/ for tests, and a client that requests them from a server."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

from logquarry.protocol import remoting
from logquarry.protocol.remoting import RemotingCommand, RemotingReader
from logquarry.protocol.remoting_codes import RequestCode
from logquarry.replication import ConfigServer
from tests.helpers.waiting import PATIENCE_SECONDS


def real_config(golden: Path, root: Path) -> Path:
    """A store with nothing but the config/ of a real broker; its folder."""
    shutil.copytree(golden / "real-broker" / "store" / "config", root / "config")
    return root


def versioned(table: str, counter: int, **entries: object) -> str:
    return json.dumps({"dataVersion": {"counter": counter, "timestamp": 5}, table: entries})


def write(root: Path, name: str, text: str) -> None:
    (root / "config").mkdir(parents=True, exist_ok=True)
    (root / "config" / name).write_text(text)


def config_bytes(root: Path) -> dict[str, bytes]:
    folder = root / "config"
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


class Client:
    """Sends requests to a server."""

    def __init__(self, server: ConfigServer, port: int | None = None) -> None:
        self.wire = socket.create_connection(
            (server.host, server.port if port is None else port), PATIENCE_SECONDS
        )
        self._reader = RemotingReader()
        self._came: list[RemotingCommand] = []

    def say(self, *commands: RemotingCommand) -> None:
        self.wire.sendall(b"".join(map(remoting.encode, commands)))

    def hear(self) -> RemotingCommand | None:
        """Return the next answer; None at the connection's end."""
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
