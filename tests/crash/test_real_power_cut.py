"""A real power cut: ext4 on a loop device is shut down under a writer, and mounted again."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import logquarry as lq
from logquarry.testing.model_store import ModelStore, explain
from tests.crash.checks import check_image, recovered
from tests.crash.ladder import count, seeds, told
from tests.crash.writer import SETTINGS, Order, writer

EACH: Final = 20
_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = struct.pack("I", 2)


class LoopDisk:
    """A file system in a file; its power can be cut."""

    def __init__(self, folder: Path) -> None:
        self.image = folder / "disk"
        self.mounted = folder / "mounted"
        self.mounted.mkdir()

    def make(self) -> None:
        with self.image.open("wb") as file:
            file.truncate(48 << 20)
        _run("mkfs.ext4", "-q", "-F", self.image)

    def mount(self) -> None:
        _run("mount", "-o", "loop", self.image, self.mounted)

    def cut(self) -> None:
        descriptor = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        # The maps of a store's files end with its readers.
        gc.collect()
        _run("umount", self.mounted)


def _run(*command: str | Path) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    made = LoopDisk(tmp_path)
    try:
        made.make()
        made.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        pytest.skip(f"no ext4 on a loop device here: {error} {said.decode()}")
    try:
        yield made
    finally:
        subprocess.run(["umount", "-l", str(made.mounted)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("seed", seeds(count(20), EACH))
def test_power_cuts_of_ext4(seed: int, disk: LoopDisk, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = disk.mounted / "store"
    settings = {"flush_disk_type": "SYNC_FLUSH"}
    config = lq.StoreConfig(**SETTINGS | settings)
    model = ModelStore()
    acked = 0
    with writer() as process:
        for number in range(1, EACH + 1):
            begun, after = time.monotonic(), rng.random() * 0.1
            wanted = rng.choice([0, 1, 20, 100])

            def stop(order: Order, begun: float = begun, after: float = after) -> bool:
                enough = len(order.acks) >= wanted  # noqa: B023 (used in this round only)
                if order.is_done or (enough and time.monotonic() - begun >= after):
                    # A sync during the shutdown may succeed: ext4 answers so at a moment that no
                    # real power cut has.
                    order.sure = len(order.acks)
                    disk.cut()
                    return True
                return False

            with told(seed, f"cut {number}", root, tmp_path):
                order = process.order(root, number, settings, stop)
                disk.unmount()
                disk.mount()
                order.tell(model, number, is_durable=True)
                acked += len(order.acks)
                wrong = check_image(root, config, model, model.mark())
                assert not wrong, explain(wrong)
                recovered(root, config, model)
    assert acked
