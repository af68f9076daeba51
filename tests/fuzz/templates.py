"""Small stores of several layouts, sound or unclean, before any fault."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from tests.helpers import operator_faults

GOLDEN = (
    *("single", "rollover", "multidispatch", "delay", "real-broker", "v3-transactions"),
    *("batch", "unclean/abort-only", "unclean/garbage-tail", "unclean/cq-behind"),
)
ROCKETMQ5 = (
    *("5.1.4-plain", "5.5.0-plain", "5.5.0-kill", "5.5.0-lmq", "5.5.0-pop-kv", "5.5.0-timer"),
    *("5.5.0-cqext", "5.5.0-rocksdb", "5.5.0-dledger", "5.5.0-multipath", "5.5.0-batchcq"),
)
OURS = ("ours", "ours", "ours-crashed", "ours-no-mark")


@dataclass(frozen=True)
class Template:
    """A sound or unclean store, before any fault.

    Attributes:
        name: its name.
        root: its folder, which is copied.
        frames: physical offset -> bytes of each frame.
    """

    name: str
    root: Path
    frames: dict[int, bytes]


class Templates:
    """All stores by name; each is prepared at its first use.

    Args:
        golden: folder of the golden stores.
        rocketmq5: folder of the stores of RocketMQ 5.
        folder: for the other ones.
    """

    def __init__(self, golden: Path, rocketmq5: Path, folder: Path) -> None:
        self._golden = golden
        self._rocketmq5 = rocketmq5
        self._folder = folder
        self._made: dict[str, Template] = {}

    def choose(self, rng: random.Random) -> Template:
        """One store."""
        name = rng.choice(rng.choice((OURS, GOLDEN, ROCKETMQ5)))
        if name not in self._made:
            root = self._root(name)
            self._made[name] = Template(name, root, _frames(root))
        return self._made[name]

    def exported(self) -> Path:
        """Some messages as JSON lines, for imports."""
        path = self._folder / "exported.jsonl"
        if not path.exists():
            from tests.helpers.command import run

            root = self._folder / "to-export"
            operator_faults.make_store(root)
            run("export", root, "--to", path, "--format", "jsonl", "--limit", 5)
        return path

    def _root(self, name: str) -> Path:
        if name in GOLDEN:
            return self._golden / name / "store"
        if name in ROCKETMQ5:
            return self._rocketmq5 / name / "store"
        root = operator_faults.make_store(self._folder / name / "store")
        if name != "ours":
            operator_faults.crash(root)
        if name == "ours-no-mark":
            shutil.rmtree(root / ".logquarry")
        return root


def _frames(root: Path) -> dict[int, bytes]:
    found = {}
    with suppress(lq.errors.LogquarryError):
        for event in LogReader(StoreLayout.open(root)).events():
            if isinstance(event, Run):
                for position, size, *_ in event.rows.tolist():
                    data = event.window.data[position : position + size].tobytes()
                    found[event.window.base + position] = data
    return found
