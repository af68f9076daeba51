"""A master and a slave on loopback, and their stores."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.protocol.ha_messages import HaTimes
from tests.helpers.waiting import PATIENCE_SECONDS

SIZES = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 16,
    mapped_file_size_consume_queue=2_000,
    max_hash_slot_num=500,
    max_index_num=2_000,
)
QUICK = HaTimes(heartbeat_ms=100, housekeeping_ms=2_000)


def opened(path: Path, role: str = "ASYNC_MASTER", **settings: object) -> lq.StoreWriter:
    config = replace(SIZES, broker_role=role, **settings)  # type: ignore[arg-type]
    return lq.MessageStore.open(path, config=config, mode="rw")


def fill(store: lq.StoreWriter, count: int, *, first: int = 0, body: int = 700) -> int:
    """Put messages of several kinds and sizes; return the log's end."""
    for number in range(first, first + count):
        size = number * 37 % body
        message = lq.Message(
            f"topic-{number % 3}",
            body=bytes([number % 251]) * size,
            queue_id=number % 2,
            keys=f"key-{number}",
            delay_level=0 if number % 7 else 3,
        )
        if number % 11 == 0:
            store.put_batch([lq.Message("batch", body=bytes(size)) for _ in range(3)])
        else:
            store.put(message)
    assert store.wait_dispatched(timeout=PATIENCE_SECONDS)
    return store.max_offset


def log_bytes(path: Path, end: int, start: int = 0) -> bytes:
    """The bytes of a store's log between two offsets."""
    found = bytearray()
    for file in sorted((path / "commitlog").iterdir()):
        base = int(file.name)
        if base < end:
            data = file.read_bytes()
            found += data[max(0, start - base) : max(0, end - base)]
    return bytes(found)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
