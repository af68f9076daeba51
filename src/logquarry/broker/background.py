"""Runs a broker in a thread, for programs and tests without asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from logquarry.broker.broker import Broker
from logquarry.broker.options import BrokerOptions
from logquarry.config import StoreConfig
from logquarry.units import Clock


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop that is installed: uvloop's, or asyncio's without it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@contextmanager
def background(
    path: str | PathLike[str] | None = None,
    *,
    options: BrokerOptions | None = None,
    config: StoreConfig | None = None,
    clock: Clock | None = None,
) -> Iterator[Broker]:
    """Run a broker in a thread while the block runs.

    Other threads may use the broker's ``name_server``, ``address`` and ``store``, and nothing else
    of it. In a forked child the broker does not run, and the end of the block does nothing.

    Args:
        path: as for :class:`Broker`.
        options: likewise.
        config: likewise.
        clock: likewise.
    """
    process = os.getpid()
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="logquarry-broker", daemon=True)
    thread.start()
    try:
        broker = Broker(path, options=options, config=config, clock=clock)
        try:
            asyncio.run_coroutine_threadsafe(broker.start(), loop).result()
            yield broker
        finally:
            # A forked child has no thread that would run the loop, and shares the parent's sockets
            # and store.
            if os.getpid() == process:
                asyncio.run_coroutine_threadsafe(broker.stop(), loop).result()
    finally:
        if os.getpid() == process:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
