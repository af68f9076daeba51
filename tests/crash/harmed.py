"""Damaged stores whose recovery has many steps, and the result that each recovery must have.

A store is filled, its process dies, and some of its files are damaged. A seed chooses the files:
some dozens of seeds cover each kind of step.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.errors import StoreError
from logquarry.repair.recover.plan import RecoveryMode, RecoveryPlan, StepKind
from logquarry.repair.recover.store_folders import REPORT
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from logquarry.testing.disk_state import DiskState
from logquarry.testing.faulty_disk import FaultyDisk
from logquarry.testing.model_store import Seen
from tests.crash.workload import START, STORE
from tests.helpers.files import overwrite

LOG_SIZE: Final = 2_048
UNITS: Final = 5
CONFIG: Final = lq.StoreConfig(
    mapped_file_size_commit_log=LOG_SIZE,
    mapped_file_size_consume_queue=20 * UNITS,
    max_hash_slot_num=5,
    max_index_num=8,
    flush_disk_type="ASYNC_FLUSH",
)
LATER: Final = START + 1_000_000
"""When recoveries name their files."""
_NEED_MARK: Final = frozenset({"rot", "log file gone"})


@dataclass
class Harmed:
    """A store that was not closed in order.

    Args:
        root: the folder that the disk covers; the store is in it.
        rng: chooses the messages and the harms.
        mode: of its recovery.
        is_durable: whether all of the store is on the disk; otherwise most of it is only in the
            page cache, and nothing is harmed.
        messages: how many are put.
        least_harms: minimum number of harms.

    Attributes:
        disk: what it is on.
        harms: the harms.
        hit: bodies of the messages that the harms have destroyed.
        tokens: other bytes than messages that no recovery may lose.
        spoilt: queue files whose first entry is wrong, so that a recovery overwrites the entry.
    """

    root: Path
    rng: random.Random
    mode: RecoveryMode = "safe"
    is_durable: bool = True
    messages: int = 24
    least_harms: int = 0
    disk: FaultyDisk = field(init=False)
    harms: list[str] = field(default_factory=list)
    hit: set[bytes] = field(default_factory=set)
    tokens: list[bytes] = field(default_factory=list)
    spoilt: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        live = self.root if not self.is_durable else self.root.with_name(f"{self.root.name}-live")
        live.mkdir(parents=True)
        disk = FaultyDisk(live)
        store = StoreWriter.start(
            live / STORE, config=CONFIG, clock=FakeClock(START, step=1), disk=disk
        )
        for number in range(self.messages):
            body = b"%d:" % number + self.rng.randbytes(8) + bytes(self.rng.randrange(150))
            store.put(
                lq.Message(
                    self.rng.choice(["t", "t", "u"]),
                    body,
                    queue_id=self.rng.randrange(2),
                    keys=f"k{number}",
                )
            )
        # RocketMQ does not start on a queue file that was being made.
        if self.is_durable or self.mode == "rocketmq" or self.rng.random() < 0.5:
            assert store.wait_dispatched(timeout=60)
        self.is_flushed = self.is_durable and self.rng.random() < 0.8
        if self.is_flushed:
            store.flush()
        self.log = Seen.of(store, queues=False).log
        self.end = store.max_offset
        disk.stop_at(disk.faults.total + 1)
        with contextlib.suppress(StoreError):
            store.close()
        if self.is_durable:
            disk.state().killed().write(self.root)
            shutil.rmtree(live)
            self._harm()
            disk = FaultyDisk(self.root)
        else:
            disk.restart()
        if self.mode == "rocketmq":
            # Nor does it start on a log file that the writer was making ahead.
            for path in sorted((self.store / "commitlog").iterdir()):
                if path.stat().st_size < LOG_SIZE:
                    disk.remove(path)
                    disk.sync_names(path.parent)
        self.disk = disk

    @property
    def store(self) -> Path:
        """The store's folder."""
        return self.root / STORE

    # -------------------------------------------------------------------------------- harms
    def _harm(self) -> None:
        harms = self._harms()
        count = self.rng.randint(self.least_harms, 4)
        for name in self.rng.sample(sorted(harms), min(count, len(harms))):
            if name in _NEED_MARK and (not self.is_flushed or "no mark" in self.harms):
                # After the durable offset this would be a torn tail, and a recovery removes all
                # that follows.
                continue
            if name == "no mark" and not _NEED_MARK.isdisjoint(self.harms):
                continue
            self.harms.append(name)
            harms[name]()
        if self.mode == "safe" and self.rng.random() < 0.5:
            self._rename_log_files()
        parts = [self.store / name for name in ("commitlog", "consumequeue", "index")]
        # A later harm may have removed what an earlier one wrote.
        self.tokens = [token for token in self.tokens if not self.lacks(*parts, tokens=[token])]

    def _harms(self) -> dict[str, Callable[[], None]]:
        """The kinds of damage, by name; a seed combines them."""
        harms = {
            "torn tail": self._write_behind_the_end,
            "file behind the end": self._make_file_behind,
            "queue file of another size": self._lengthen_a_queue,
            "units that are wrong": self._spoil_units,
            "unit of other tags": self._change_tags,
            "queue gone": self._lose_a_queue,
            "index that is none": self._spoil_index,
            "index gone": lambda: shutil.rmtree(self.store / "index"),
            "no mark": lambda: (self.store / ".logquarry" / "durable").unlink(missing_ok=True),
            "no checkpoint": (self.store / "checkpoint").unlink,
        }
        if self.mode == "rocketmq":
            # RocketMQ refuses the store, or cuts off all that follows.
            del harms["file behind the end"], harms["queue file of another size"]
            return harms
        return harms | {
            "rot": self._flip,
            "log file gone": self._lose_a_log_file,
            "log file too long": self._lengthen_a_log_file,
            "log file too short": self._shorten_the_last,
            "name that is wrong": self._make_misnamed,
        }

    def _token(self) -> bytes:
        token = b"\xee" + self.rng.randbytes(12) + b"\xee"
        self.tokens.append(token)
        return token

    def _log_file(self, base: int) -> Path:
        return self.store / "commitlog" / f"{base:020d}"

    def _last_base(self) -> int:
        return (self.end - 1) // LOG_SIZE * LOG_SIZE

    def _write_behind_the_end(self) -> None:
        path = self._log_file(self._last_base())
        at = self.end - self._last_base()
        token = self._token()
        if at + len(token) <= path.stat().st_size:
            overwrite(path, at, token)
        else:
            self.tokens.pop()

    def _make_file_behind(self) -> None:
        base = self._last_base() + 2 * LOG_SIZE
        self._log_file(base).write_bytes(self._token().ljust(LOG_SIZE, b"\0"))

    def _make_misnamed(self) -> None:
        self._log_file(777).write_bytes(self._token().ljust(LOG_SIZE, b"\0"))

    def _rename_log_files(self) -> None:
        """Swap two names, or move the first after the end. Other harms need the right names."""
        files = sorted(
            path for path in (self.store / "commitlog").iterdir() if path.name[-1] != "7"
        )
        other = self.rng.choice([files[-1], self._log_file(self._last_base() + 4 * LOG_SIZE)])
        self.harms.append(f"{files[0].name} renamed to {other.name}")
        between = files[0].rename(self.store / "between")
        if other.exists():
            other.rename(files[0])
        between.rename(other)

    def _lengthen_a_log_file(self) -> None:
        path = self._log_file(self.rng.randrange(0, self._last_base() + 1, LOG_SIZE))
        if path.exists() and path.stat().st_size == LOG_SIZE:
            path.write_bytes(path.read_bytes() + self._token())

    def _shorten_the_last(self) -> None:
        path = self._log_file(self._last_base())
        if path.stat().st_size == LOG_SIZE:
            length = min(LOG_SIZE, self.end - self._last_base() + 40)
            path.write_bytes(path.read_bytes()[:length])

    def _lose_a_log_file(self) -> None:
        base = LOG_SIZE
        if base >= self._last_base():
            return
        self._log_file(base).unlink()
        self.hit.update(
            m.body for m in self.log if m.physical_offset // LOG_SIZE * LOG_SIZE == base
        )

    def _flip(self) -> None:
        message = self.rng.choice(self.log[:-3])
        path = self._log_file(message.physical_offset // LOG_SIZE * LOG_SIZE)
        if path.exists():
            data = path.read_bytes()
            at = data.index(message.body)
            overwrite(path, at, bytes([data[at] ^ 1]))
            self.hit.add(message.body)

    def _queue_file(self) -> Path | None:
        files = [p for p in sorted((self.store / "consumequeue").rglob("*")) if p.is_file()]
        return self.rng.choice(files) if files else None

    def _lengthen_a_queue(self) -> None:
        if (path := self._queue_file()) is not None:
            path.write_bytes(path.read_bytes() + self._token())

    def _spoil_units(self) -> None:
        if (path := self._queue_file()) is not None:
            # A recovery overwrites these bytes and does not keep them: it has the right ones from
            # the log.
            at = 20 * self.rng.randrange(UNITS)
            overwrite(path, at, self.rng.randbytes(20))
            if not at:
                self.spoilt.add(path)

    def _change_tags(self) -> None:
        path = self._queue_file()
        if path is not None and path not in self.spoilt and any(path.read_bytes()[:20]):
            token = b"\xee" + self.rng.randbytes(7)
            self.tokens.append(token)
            overwrite(path, 12, token)

    def _lose_a_queue(self) -> None:
        if (path := self._queue_file()) is not None:
            shutil.rmtree(path.parent)

    def _spoil_index(self) -> None:
        folder = self.store / "index"
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        if files:
            path = self.rng.choice(files)
            # With a time that makes RocketMQ remove the file, too.
            head = path.read_bytes()[:8] + b"\x7f" + bytes(31)
            path.write_bytes((head + self._token()).ljust(path.stat().st_size, b"\xee"))

    # ------------------------------------------------------------------------------ recoveries
    def recover(self, root: Path, disk: Disk | None = None) -> RecoveryPlan:
        """Recover the store, or a copy of it."""
        return recover(root, self.mode, disk)

    def comes_to(self, folder: Path) -> Outcome:
        """The expected result, which a recovery of a copy on a healthy disk gives."""
        root = self.disk.state().killed().write(folder) / STORE
        self.recover(root)
        outcome = Outcome.of(root)
        lost = {message.body for message in self.log} - {m.body for m in outcome.seen.log}
        assert lost <= self.hit, (self.harms, lost)
        assert not self.lacks(root)
        shutil.rmtree(folder)
        return outcome

    def lacks(self, *roots: Path, tokens: Collection[bytes] | None = None) -> list[str]:
        """The tokens that no file of some folders has."""
        held = [path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()]
        return [
            f"bytes are lost: {token!r}"
            for token in (self.tokens if tokens is None else tokens)
            if not any(token in data for data in held)
        ]


@dataclass(frozen=True)
class Outcome:
    """What readers get from a recovered store, and what a check finds."""

    seen: Seen
    unit_files: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, root: Path) -> Outcome:
        """Read a store that needs no recovery."""
        with lq.MessageStore.open(root, config=CONFIG) as store:
            seen = Seen.of(store, queues=True, keys=True, on_damage="skip")
        files = sorted((root / "consumequeue").rglob("*"))
        kept = ((str(p.relative_to(root)), p.read_bytes()) for p in files if p.is_file())
        # The file that is made ahead may be missing.
        return cls(seen, tuple((name, data) for name, data in kept if any(data)))


class Moment(NamedTuple):
    """A moment of a recovery; ``is_done`` after its end."""

    number: int
    call: str
    is_done: bool
    state: DiskState


def recover(root: Path, mode: RecoveryMode, disk: Disk | None = None) -> RecoveryPlan:
    """Recover a store as the command does."""
    return lq.recover(
        root,
        mode=mode,
        apply=True,
        accept_loss=1 << 40,
        config=CONFIG,
        clock=FakeClock(LATER, step=1),
        disk=disk,
    )


@dataclass
class Recovery:
    """A recovery of a damaged store: its disk at each call, and the expected result."""

    harmed: Harmed
    wanted: Outcome
    moments: list[Moment]
    sites: dict[str, int]
    is_told: bool
    """Whether it leaves a report."""

    def crashes(self, rng: random.Random, count: int, folder: Path) -> Iterator[list[str]]:
        """What is wrong after power cuts, half of them after the recovery's end."""
        for number in range(count):
            last = self.moments[-1]
            moment = last if number % 2 else rng.choice(self.moments)
            root = moment.state.crash(rng).write(folder) / STORE
            try:
                wrong = self.check(root, moment)
            except (StoreError, OSError, ValueError, AssertionError) as error:
                wrong = [f"{type(error).__name__}: {error}"]
            shutil.rmtree(folder)
            yield [f"power cut before {moment.number} {moment.call}: {found}" for found in wrong]

    def check(self, root: Path, moment: Moment) -> list[str]:
        """What is wrong with the store that a power cut left."""
        harmed = self.harmed
        if not harmed.is_durable and not moment.is_done:
            # Until the recovery says that it is done, bytes that are not on the disk may be lost.
            return []
        wrong = harmed.lacks(root)
        if (root / "abort").exists():
            if moment.is_done:
                wrong.append("it is not closed in order")
            self._again(root, moment)
            wrong += harmed.lacks(root)
        found = Outcome.of(root)
        if harmed.mode == "rocketmq":
            return wrong + self._check_rocketmq(found, moment)
        report = root / ".logquarry" / "quarantine" / REPORT
        if self.is_told and not isinstance(json.loads(report.read_bytes()), dict):
            wrong.append("the report is none")
        plan = lq.recover(root, mode=harmed.mode, config=CONFIG)
        wrong += [f"a recovery is not done: {step}" for step in plan.steps]
        if found.seen != self.wanted.seen:
            wrong.append("readers get something else")
        if found.unit_files != self.wanted.unit_files:
            wrong.append("the queues are not the same")
        return wrong

    def _again(self, root: Path, moment: Moment) -> None:
        """Recover the store that a power cut left."""
        try:
            self.harmed.recover(root)
        except StoreError:
            if self.harmed.mode != "rocketmq" or moment.is_done:
                raise
            # RocketMQ does not start on a file that was being made.
            recover(root, "safe")

    def _check_rocketmq(self, found: Outcome, moment: Moment) -> list[str]:
        """A second start of RocketMQ may end differently from an undisturbed first one.

        It may then have other keys in the index, and other ends of queues, but not another log.
        """
        wanted = self.wanted
        if found.seen.log != wanted.seen.log:
            return ["the log is not the same"]
        if moment.is_done and found != wanted:
            return ["readers get something else"]
        return []


def recovery_of(
    folder: Path,
    seed: int,
    *,
    mode: RecoveryMode = "safe",
    ignored: Collection[str] = (),
) -> Recovery:
    """A recovery of a store that a seed chooses.

    Args:
        folder: for all files.
        seed: chooses.
        mode: whose rules.
        ignored: places of the code whose syncs do nothing.
    """
    rng = random.Random(seed)
    harmed = Harmed(folder / "harmed", rng, mode, is_durable=seed % 3 != 0)
    wanted = harmed.comes_to(folder / "whole")
    moments: list[Moment] = []
    disk = harmed.disk
    disk.sites.clear()
    disk.ignored.update(ignored)

    def note(call: str) -> None:
        moments.append(Moment(disk.faults.total, call, False, disk.state()))

    disk.observe = note
    plan = harmed.recover(harmed.store, disk)
    disk.observe = None
    is_told = mode == "safe" and any(step.kind is not StepKind.REMOVE for step in plan.steps)
    moments.append(Moment(disk.faults.total, "the end", True, disk.state()))
    return Recovery(harmed, wanted, moments, dict(disk.sites), is_told)
