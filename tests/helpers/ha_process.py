"""Runs a master or a slave with the commands of `oracle/run ha-master` and `ha-slave`.

::

    python -m tests.helpers.ha_process master PORT DIR --role SYNC_MASTER --params FILE
    python -m tests.helpers.ha_process slave HOST:PORT DIR --params FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.replication import HaMaster, HaSlave, MasterOptions, SlaveOptions
from tests.conformance.test_store_java import write_random


def say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def status(store: lq.StoreWriter) -> dict[str, Any]:
    slaves = store.log_feed().replicas
    return {
        "maxPhyOffset": store.max_offset,
        "connections": slaves.connected,
        "push2SlaveMaxOffset": slaves.acknowledged,
    }


def wait(reached: Any, offset: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while reached() < offset and time.monotonic() < end:
        time.sleep(0.005)
    return bool(reached() >= offset)


def obey(store: lq.StoreWriter) -> None:
    replicas = store.log_feed().replicas
    for line in sys.stdin:
        command, *words = line.split()
        if command == "status":
            say(status(store))
        elif command == "fill":
            write_random(store, int(words[0]), int(words[2]))
            say({"statuses": {}, "status": status(store)})
        elif command == "puts":
            # Put this many bodies of 100 bytes at once, and return their statuses.
            futures = [
                store.put_async(lq.Message("t", body=bytes(100))) for _ in range(int(words[0]))
            ]
            say(Counter(future.result(60).status.value for future in futures))
        elif command == "wait":
            is_there = wait(lambda: store.max_offset, int(words[0]), 60)
            say({"reached": is_there and store.wait_dispatched(int(words[0]), 60)})
        elif command == "waitack":
            say({"reached": wait(lambda: replicas.acknowledged, int(words[0]), 60)})
        elif command == "quit":
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["master", "slave"])
    parser.add_argument("where")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--role", default="ASYNC_MASTER")
    parser.add_argument("--params", type=Path, required=True)
    asked = parser.parse_args()
    config = lq.StoreConfig.from_mapping(json.loads(asked.params.read_text()))
    role = "SLAVE" if asked.side == "slave" else asked.role
    config = replace(config, broker_role=role)
    with lq.MessageStore.open(asked.folder, config=config, mode="rw") as store:
        if asked.side == "master":
            options = MasterOptions(full_history=True)
            with HaMaster(store, port=int(asked.where), options=options):
                say({"ready": True, "status": status(store)})
                obey(store)
        else:
            host, _, port = asked.where.rpartition(":")
            slave = SlaveOptions(start=0, first_pause=0.02, longest_pause=0.2)
            with HaSlave(store, host, int(port), options=slave) as following:
                say({"ready": True, "status": status(store)})
                obey(store)
                if following.error is not None:
                    raise following.error
    say({"shutdown": True})


if __name__ == "__main__":
    main()
