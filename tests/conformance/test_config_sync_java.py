"""Synchronization of config/ with RocketMQ's brokers, in both directions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import broker_json
from logquarry.replication import ConfigServer, ConfigSyncOptions, sync_config
from tests.conformance.oracle import QUICK_JVM, RUN, Master, require_oracle, started
from tests.helpers.broker_config import real_config
from tests.helpers.replication import opened
from tests.helpers.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.java

PROGRAM = Path(__file__).parents[1] / "data" / "ConfigBroker.java"
FILES = ["topics.json", "consumerOffset.json", "delayOffset.json", "subscriptionGroup.json"]
PATIENT = ConfigSyncOptions(timeout=PATIENCE_SECONDS)
TARGET = RUN.parent / "target"


Broker = Callable[..., AbstractContextManager[Master]]
"""Starts the real broker of ConfigBroker.java with its arguments; the block begins when it is
ready."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Broker:
    """Compile the program once: `java ConfigBroker.java` would compile it at each start."""
    require_oracle()
    folder = tmp_path_factory.mktemp("classes")
    path = f"{TARGET}/classes:{(TARGET / 'classpath.txt').read_text()}"
    subprocess.run(["javac", "-cp", path, "-d", folder, PROGRAM], check=True)
    opened_up = ("java.nio", "sun.nio.ch", "java.lang", "java.util")

    @contextmanager
    def begun(*arguments: str | Path) -> Iterator[Master]:
        running = started(
            "java",
            *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in opened_up),
            *("-Drocketmq.client.logUseSlf4j=true", "-Doracle.log=OFF"),
            *(f"-Duser.home={TARGET}/home", *QUICK_JVM.split()),
            *("-cp", f"{folder}:{path}", PROGRAM.stem),
            *arguments,
        )
        try:
            yield running
        finally:
            running.kill()

    return begun


@pytest.fixture
def config(golden: Path, tmp_path: Path) -> Path:
    """A store with nothing but the config/ of a real broker."""
    return real_config(golden, tmp_path / "m")


def test_our_slave_asks_a_real_master(broker: Broker, config: Path, tmp_path: Path) -> None:
    with broker("master", config) as master, opened(tmp_path / "s", "SLAVE") as slave:
        port = master.ready["port"]
        assert sync_config(slave, "127.0.0.1", port, options=PATIENT) == (tuple(FILES), (), ())
        assert sync_config(slave, "127.0.0.1", port, options=PATIENT).written == ()
        for command in ("topic fresh", "group cg_fresh", "offset cg_fresh fresh 42"):
            assert master.ask(command)["done"]
        synced = sync_config(slave, "127.0.0.1", port, options=PATIENT)
        assert (set(FILES) - set(synced.written), synced.problems) == ({"delayOffset.json"}, ())
        master.ask("persist")
        ours, theirs = (
            {name: (root / "config" / name).read_bytes() for name in FILES}
            for root in (tmp_path / "s", config)
        )
        for name in ("topics.json", "subscriptionGroup.json"):
            assert b"fresh" in theirs[name] and ours[name] == theirs[name], name
        offsets = broker_json.decode_consumer_offsets(ours["consumerOffset.json"])
        assert offsets["fresh", "cg_fresh"] == {0: 42}
        # A real broker's table has no order.
        assert offsets == broker_json.decode_consumer_offsets(theirs["consumerOffset.json"])
        master.quit()


def test_a_real_slave_asks_our_master(broker: Broker, config: Path, tmp_path: Path) -> None:
    folder = config / "config"
    # The slave had offsets before, and keeps those that the master does not have.
    (tmp_path / "s" / "config").mkdir(parents=True)
    (tmp_path / "s" / "config" / "consumerOffset.json").write_text(
        '{"offsetTable":{"a@own":{0:3}}}'
    )
    with (
        ConfigServer(config) as server,
        broker("slave", tmp_path / "s", server.address),
    ):
        assert server.status().answered == 4
    found = {name: (tmp_path / "s" / "config" / name).read_bytes() for name in FILES}
    for name in ("topics.json", "subscriptionGroup.json"):
        assert json.loads(found[name]) == json.loads((folder / name).read_bytes()), name
    delays = broker_json.decode_delay_offsets
    assert delays(found["delayOffset.json"]) == delays((folder / "delayOffset.json").read_bytes())
    offsets = broker_json.decode_consumer_offsets
    expected = offsets((folder / "consumerOffset.json").read_bytes()) | {("a", "own"): {0: 3}}
    assert offsets(found["consumerOffset.json"]) == expected


def test_a_real_slave_keeps_what_our_master_has_not_got(broker: Broker, tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path / "m", mode="rw", config=lq.StoreConfig()) as store:
        root = store.root
    (tmp_path / "s" / "config").mkdir(parents=True)
    kept = '{"offsetTable":{"a@own":{0:3}}}'
    (tmp_path / "s" / "config" / "consumerOffset.json").write_text(kept)
    with ConfigServer(root) as server, broker("slave", tmp_path / "s", server.address):
        assert (server.status().answered, server.status().refused) == (0, 0)
    assert (tmp_path / "s" / "config" / "consumerOffset.json").read_text() == kept
