"""Sends that wait for the disk."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from logquarry.broker import Broker
from logquarry.format.batch import BatchItem, encode
from logquarry.protocol.remoting_codes import RequestCode
from tests.helpers.broker_client import SMALL, Client, send_fields
from tests.unit.broker.test_broker import play


def test_batches_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one sync runs, further batches come into the log, and the next sync is theirs."""
    gate = threading.Event()
    wire = encode([BatchItem(b"one", b""), BatchItem(b"two", b"")])
    fields = send_fields("t", i="", m="true")

    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        monkeypatch.setattr(os, "fdatasync", lambda _: gate.wait())
        start = broker.store.max_offset
        first = client.post(RequestCode.SEND_BATCH_MESSAGE, fields, wire)
        while broker.store.max_offset == start:
            await asyncio.sleep(0)
        size = broker.store.max_offset - start
        batches = [client.post(RequestCode.SEND_BATCH_MESSAGE, fields, wire) for _ in range(50)]
        while broker.store.max_offset < start + 51 * size:
            await asyncio.sleep(0)
        assert not first.done() and not any(batch.done() for batch in batches)
        gate.set()
        answers = await asyncio.gather(first, *batches)
        assert [answer.code for answer in answers] == [0] * 51
        offsets = [int(answer.ext_fields["queueOffset"]) for answer in answers]
        assert offsets == list(range(1, 103, 2))

    config = replace(SMALL, flush_disk_type="SYNC_FLUSH", sync_flush_timeout=60_000)
    try:
        play(scenario, tmp_path / "s", config=config)
    finally:
        gate.set()
