"""Measure how much processor time and memory idle consumers cost a broker.

Run ``python -m benchmarks.bench_idle [CONSUMERS] [SECONDS]``.

Each consumer opens a connection, belongs to one of 100 groups, and sends pulls that ask the broker
to wait up to 15 seconds for messages, as RocketMQ's clients do. The result is the processor time of
the broker's process, and its memory before and after the consumers connected. ``rss`` includes the
pages of libraries that the process shares with other processes; ``uss`` does not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from typing import Any, Final

import psutil

from benchmarks.bench_broker import serving, standstills
from logquarry.protocol import remoting
from logquarry.protocol.remoting import RemotingCommand, RemotingReader
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode

GROUPS: Final = 100
QUEUES: Final = 8
HOLD_MS: Final = 15_000
SETTLE_SECONDS: Final = 5
_SUSPEND: Final = 2
_MIB: Final = 1 << 20


class Consumer(asyncio.Protocol):
    """A consumer that sends a heartbeat, then one pull after the other."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._group = f"group-{number % GROUPS}"
        self._reader = RemotingReader()
        self._opaque = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        subscription = {"topic": "idle", "subString": "*", "expressionType": "TAG"}
        group = {
            "groupName": self._group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [subscription],
        }
        beat = {
            "clientID": f"client-{self._number}",
            "consumerDataSet": [group],
            "producerDataSet": [],
        }
        self._send(RequestCode.HEART_BEAT, {}, json.dumps(beat).encode())
        self._pull()

    def _pull(self) -> None:
        self._send(
            RequestCode.PULL_MESSAGE,
            {
                "consumerGroup": self._group,
                "topic": "idle",
                "queueId": self._number % QUEUES,
                "queueOffset": 0,
                "maxMsgNums": 32,
                "sysFlag": _SUSPEND,
                "commitOffset": 0,
                "suspendTimeoutMillis": HOLD_MS,
                "subVersion": 0,
            },
        )

    def _send(self, code: RequestCode, fields: dict[str, Any], body: bytes = b"") -> None:
        self._opaque += 1
        texts = {name: str(value) for name, value in fields.items()}
        command = RemotingCommand(code=code, opaque=self._opaque, ext_fields=texts, body=body)
        self._transport.write(remoting.encode(command))

    def data_received(self, data: bytes) -> None:
        for answer in self._reader.receive_data(data):
            if answer.is_response and answer.opaque == self._opaque:
                assert answer.code == ResponseCode.PULL_NOT_FOUND, answer
                self._pull()


async def run(address: str, broker: psutil.Process, count: int, seconds: float) -> None:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    fields = {"topic": "idle", "readQueueNums": "8", "writeQueueNums": "8", "perm": "6"}
    created = RemotingCommand(code=RequestCode.UPDATE_AND_CREATE_TOPIC, opaque=0, ext_fields=fields)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(remoting.encode(created))
    await reader.read(1)
    before = broker.memory_full_info()
    for number in range(count):
        await loop.create_connection(partial(Consumer, number), host, int(port))
    await asyncio.sleep(SETTLE_SECONDS)
    used, began = _used(broker), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (_used(broker) - used) / (time.perf_counter() - began)
    after = broker.memory_full_info()
    print(
        f"{count} idle consumers: {share:.2%} of a core; "
        f"rss {before.rss // _MIB} -> {after.rss // _MIB} MiB, "
        f"uss {before.uss // _MIB} -> {after.uss // _MIB} MiB"
    )
    writer.close()


def _used(broker: psutil.Process) -> float:
    times = broker.cpu_times()
    return times.user + times.system


def main(arguments: list[str]) -> None:
    count = int(arguments[0]) if arguments else 1_000
    seconds = float(arguments[1]) if len(arguments) > 1 else 30.0
    with serving() as (address, broker), standstills():
        asyncio.run(run(address, psutil.Process(broker), count, seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
