"""Measure how fast a broker accepts the sends of clients that do not wait for each answer.

Run ``python -m benchmarks.bench_broker [COUNT] [RATE]``.

The broker is ``logquarry broker`` with its default settings, in a separate process. The result
counts the processor time of all threads of the broker, not of the client. With RATE, the clients
send RATE messages a second, and the result also contains how long single sends took.

The host of a virtual machine can stop the whole machine for 100 ms. A second process measures such
pauses, so that you do not blame the broker for them.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psutil

from logquarry.protocol import remoting
from logquarry.protocol.remoting import RemotingCommand, RemotingReader
from logquarry.protocol.remoting_codes import RequestCode

BODY: Final = bytes(256)
CLIENTS: Final = 4
WINDOW: Final = 256
"""Maximum number of a client's sends that wait for an answer at the same time."""
PROPERTIES: Final = "KEYS\x01k1\x02UNIQ_KEY\x017F000001ABCD\x02WAIT\x01true\x02TAGS\x01a"
FIELDS: Final = {
    **{"a": "producers", "b": "load", "c": "TBW102", "d": "4", "e": "0", "f": "0"},
    **{"g": "1700000000000", "h": "0", "i": PROPERTIES, "j": "0", "k": "false", "m": "false"},
}


_SLEEPER: Final = """
import os, sys, threading, time
stopped = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
os.close(2)
late, last = [], time.perf_counter()
while not stopped.is_set():
    time.sleep(0.002)
    now = time.perf_counter()
    late.append(now - last - 0.002)
    last = now
late = sorted(round(1e3 * one) for one in late if one > 0.02)
print(f"standstills over 20 ms: {late or 'none'}", flush=True)
"""


@contextmanager
def standstills() -> Iterator[None]:
    """Context manager: print for how many milliseconds this machine stood still."""
    command = [sys.executable, "-c", _SLEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            # Wait until the process has started (it then closes stderr), because its start takes
            # processor time.
            assert process.stderr is not None
            process.stderr.read()
            yield
        finally:
            process.communicate()


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Run ``logquarry broker``; yield the broker's address and process id."""
    command = [sys.executable, "-m", "logquarry", "broker"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, f"{folder}/store", "--listen", "127.0.0.1:0", "--name-port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            # The line is "serving STORE at HOST:PORT, name server HOST:PORT".
            line = process.stdout.readline()
            yield line.partition(" at ")[2].partition(",")[0], process.pid
        finally:
            process.terminate()


class Sender(asyncio.Protocol):
    def __init__(self, count: int, rate: float) -> None:
        self._count = count
        self._rate = rate
        self._reader = RemotingReader()
        self._sent: dict[int, float] = {}
        self._next = 0
        self._began = time.perf_counter()
        self.times: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.fill()

    def fill(self) -> None:
        """Send as many messages as the window and the rate allow now."""
        now = time.perf_counter()
        allowed = self._count
        if self._rate:
            allowed = min(allowed, int((now - self._began) * self._rate))
        while self._next < allowed and len(self._sent) < WINDOW:
            command = RemotingCommand(
                code=RequestCode.SEND_MESSAGE_V2, opaque=self._next, ext_fields=FIELDS, body=BODY
            )
            self._transport.write(remoting.encode(command))
            self._sent[self._next] = now
            self._next += 1
        if self._rate and not self.done.done():
            asyncio.get_running_loop().call_later(0.002, self.fill)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        for answer in self._reader.receive_data(data):
            assert answer.code == 0, answer
            self.times.append(now - self._sent.pop(answer.opaque))
        if len(self.times) == self._count:
            self.done.set_result(None)
            self._transport.close()
        elif not self._rate:
            self.fill()


async def run(address: str, broker: psutil.Process, count: int, rate: float) -> None:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    before, began = broker.cpu_times(), time.perf_counter()
    senders = []
    for _ in range(CLIENTS):
        _, sender = await loop.create_connection(
            lambda: Sender(count // CLIENTS, rate / CLIENTS), host, int(port)
        )
        senders.append(sender)
    await asyncio.gather(*(sender.done for sender in senders))
    took, after = time.perf_counter() - began, broker.cpu_times()
    used = after.user + after.system - before.user - before.system
    times = sorted(time for sender in senders for time in sender.times)
    print(
        f"{len(times)} sends: {len(times) / took:,.0f}/s, {len(times) / used:,.0f} for a second "
        f"of the broker's processor; p50 {times[len(times) // 2] * 1e3:.1f} ms, "
        f"p99 {times[len(times) * 99 // 100] * 1e3:.1f} ms"
    )


def main(arguments: list[str]) -> None:
    """Measure three times; the first time includes loading the broker's code."""
    count = int(arguments[0]) if arguments else 100_000
    rate = float(arguments[1]) if len(arguments) > 1 else 0.0
    with serving() as (address, broker):
        for _ in range(3):
            with standstills():
                asyncio.run(run(address, psutil.Process(broker), count, rate))


if __name__ == "__main__":
    main(sys.argv[1:])
