"""Random faults of disks and of operators, then one random command: the store stays what it is.

``LOGQUARRY_SEEDS=1000:1200`` chooses the seeds.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import logquarry as lq
from logquarry.cli.main import app
from logquarry.cli.outcome import ExitCode
from logquarry.errors import LogquarryError
from logquarry.repair.recover.plan import RecoveryMode
from tests.conformance.rocketmq5 import rocketmq5_stores
from tests.fuzz.faulty_stores import FaultyStore
from tests.fuzz.templates import Templates

CODES = {ExitCode.CLEAN, ExitCode.FINDINGS, ExitCode.USAGE, ExitCode.UNREADABLE, ExitCode.REFUSED}
WORDS = (
    *("info STORE", "info STORE --exact --json", "info STORE --transactions"),
    *("messages STORE", "messages STORE --jsonl", "messages STORE --on-damage skip --jsonl"),
    *("messages STORE --on-damage stop --jsonl", "messages STORE --topic orders --jsonl"),
    *("messages STORE --key key3", "messages STORE --offset 0", "messages STORE --limit 3"),
    *("verify STORE", "verify STORE --json", "stats STORE", "stats STORE --prometheus"),
    *("report STORE --html OUT", "export STORE --to OUT --format jsonl"),
    *("export STORE --to OUT --format jsonl --on-damage skip", "diff STORE SOUND"),
    *("diff STORE STORE", "diff SOUND STORE --json", "salvage STORE", "salvage STORE --into OUT"),
    *("salvage STORE --into OUT --include-stale", "recover STORE", "recover STORE --json"),
    *("recover STORE --mode rocketmq", "rebuild STORE", "rebuild STORE --into OUT"),
    *("rebuild STORE --into OUT --queues", "rebuild STORE --in-place"),
    *("retain STORE --keep-bytes 10k", "retain STORE --older-than 1h --json"),
    *("convert STORE", "convert STORE --into OUT"),
)
"""Commands that only read the store."""
CHANGES = (
    *("recover STORE --apply",) * 3,
    *("recover STORE --apply --mode rocketmq", "recover STORE --apply --accept-loss 1000000000"),
    *("rebuild STORE --in-place --apply",) * 2,
    *("rebuild STORE --in-place --apply --queues", "rebuild STORE --in-place --apply --index"),
    *(
        "retain STORE --keep-bytes 10k --apply",
        "retain STORE --older-than 1h --apply --max-files 1",
    ),
    *("import SOURCE STORE", "import SOURCE STORE --keep-times"),
)
"""Commands that change the store."""
LOCK = "store/lock"
WHOLE_LOG = ("verify", "salvage")
"""Commands that judge the whole log: they must not end with 0 if a message cannot be read."""
READING = (
    *("messages STORE", "messages STORE --jsonl", "messages STORE --on-damage skip --jsonl"),
    *("export STORE --to OUT --format jsonl", "info STORE --exact --json"),
    *("export STORE --to OUT --format jsonl --on-damage skip", "diff STORE SOUND"),
    *("diff SOUND STORE --json", "messages STORE --on-damage stop --jsonl"),
)
"""Commands that read to the log's end: if a message cannot be read, they must not end with 0
without a word of it."""
WORDS_OF_LOSS = (
    *("skipped", "torn tail", "lost", "stopped", "damage  ", "behind"),
    *('"signs": [\n', '"damage": [\n'),
)
DOUBT = "earlier messages have expired, or their files are missing"


def seeds(default: str) -> range:
    """The seeds that the environment chooses."""
    first, _, last = os.environ.get("LOGQUARRY_SEEDS", default).partition(":")
    return range(int(first), int(last))


@pytest.fixture(scope="module")
def templates(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Templates:
    rocketmq5 = rocketmq5_stores(tmp_path_factory)
    return Templates(golden, rocketmq5, tmp_path_factory.mktemp("templates"))


# ------------------------------------------------------------------------------------------ calls
def call(words: str, names: dict[str, Path]) -> Result:
    """Run a command; only our errors may end it, with a code of the table."""
    arguments = [str(names.get(word, word)) for word in words.split()]
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in CODES, result.exit_code
    assert "Traceback" not in result.output
    if result.exit_code not in (ExitCode.CLEAN, ExitCode.FINDINGS):
        assert result.output.strip(), "nothing is printed"
    return result


def read_all(store: Any, rng: random.Random) -> None:
    """Every way to read an open store, each of which may raise our errors only."""
    calls: list[Callable[[], object]] = [
        lambda: list(store.scan()),
        lambda: list(store.scan(on_damage="skip")),
        lambda: store.to_arrow(on_damage="skip").read_all(),
        store.stats,
        lambda: store.max_offset,
        lambda: store.min_offset,
        lambda: store.query("orders", "key3"),
        lambda: store.message_at(0),
        lambda: repr(store),
    ]
    with suppress(LogquarryError):
        for topic, queue_id in sorted(store.queues())[:6]:
            calls += [
                partial(read_queue, store, topic, queue_id),
                partial(store.queue_offsets, topic, queue_id),
                partial(consume, store, topic),
            ]
    rng.shuffle(calls)
    for one in calls:
        with suppress(LogquarryError):
            one()


def read_queue(store: Any, topic: str, queue_id: int) -> None:
    offsets = store.queue_offsets(topic, queue_id)
    at = offsets.min
    for _ in range(200):
        if at >= offsets.max:
            break
        after = store.get(topic, queue_id, at, max_count=32).next_offset
        assert after > at, (topic, queue_id, at)
        at = after


def consume(store: Any, topic: str) -> None:
    with store.consumer("fuzzers", topic, timeout=0) as consumer:
        for count, _ in enumerate(consumer):
            if count > 500:
                break


def open_and_read(root: Path, rng: random.Random) -> None:
    with suppress(LogquarryError), lq.MessageStore.open(root) as store:
        read_all(store, rng)


def open_and_write(root: Path, rng: random.Random) -> None:
    with suppress(LogquarryError), lq.MessageStore.open(root, mode="rw") as store:
        with suppress(LogquarryError):
            store.put(lq.Message("orders", b"put by the test", keys="key3"))
        read_all(store, rng)


# ----------------------------------------------------------------------------------------- checks
Messages = dict[int, tuple[str, bytes]]
"""Physical offset -> topic and body of a message."""


def readable(root: Path) -> Messages | None:
    """What a reader gets that skips damage; None if the store does not open."""
    try:
        with lq.MessageStore.open(root) as store:
            return {
                one.physical_offset: (one.topic, one.body) for one in store.scan(on_damage="skip")
            }
    except LogquarryError:
        return None


def saved(root: Path) -> int | None:
    """How many messages a salvage saves; None if there is nothing to salvage."""
    try:
        return lq.salvage(root).plan.messages
    except LogquarryError:
        return None


@dataclass
class Combination:
    """A store, its faults, and a command.

    Args:
        templates: the stores.
        folder: for all files.
        seed: chooses.
    """

    templates: Templates
    folder: Path
    seed: int

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.store = FaultyStore(self.templates.choose(rng), self.folder / "faulty")
        self.store.harm(rng, rng.choice((1, 1, 2, 2, 3, 4)))
        kind = rng.choices(("words", "changes", "read", "write"), (10, 8, 1, 2))[0]
        self.words = {
            "words": rng.choice(WORDS),
            "changes": rng.choice(CHANGES),
            "read": "open r",
            "write": "open rw",
        }[kind]
        self.changes = kind in ("changes", "write")

    @property
    def told(self) -> str:
        return f"seed {self.seed}: {self.words} of {self.store.told}"

    def run(self, number: int) -> Result | None:
        """Run the command once."""
        root = self.store.root
        if self.words == "open r":
            open_and_read(root, self.rng)
        elif self.words == "open rw":
            open_and_write(root, self.rng)
        else:
            names = {
                "STORE": root,
                "SOUND": self.store.template.root,
                "OUT": self.folder / f"out{number}",
                "SOURCE": self.templates.exported(),
            }
            return call(self.words, names)
        return None

    def check(self) -> None:
        """Run the command twice, and check what must be true after each run."""
        with self.store.probed():
            if self.changes:
                self._check_change()
            else:
                self._check_reading()

    def _check_reading(self) -> None:
        store = self.store
        before = store.state()
        results = [self.run(number) for number in range(2)]
        after = store.state()
        changed = [name for name in before.keys() | after if before.get(name) != after.get(name)]
        assert not changed, f"changed: {changed}"
        first, second = results
        if first is not None and second is not None:
            assert first.exit_code == second.exit_code, "the second run ends differently"
            is_whole_log = self.words.startswith(WHOLE_LOG) and store.has_log
            is_silent = self.words in READING and store.has_log
            is_silent &= not any(words in first.output for words in WORDS_OF_LOSS)
            # Only the queues show a wrong bit that no CRC covers, and an expired file.
            is_silent &= not any("rotten" in words for words in store.done)
            if first.exit_code == 0 and (is_whole_log or is_silent):
                lost = set(store.template.frames) - store.whole()
                if lost and self.words.startswith(WHOLE_LOG):
                    lost -= store.unguarded(names="wrong topic or queue id" in first.output)
                # Readers stay silent about expired messages; a check names the doubt.
                if not store.log_start_is_recorded and (is_silent or DOUBT in first.output):
                    lost -= set(range(store.log_start))
                assert not lost, f"exit code 0, but not whole: {sorted(lost)[:5]}"

    def _check_change(self) -> None:
        root = self.store.root
        before, could_save = readable(root), saved(root)
        state = self.store.state()
        mode: RecoveryMode = "rocketmq" if "rocketmq" in self.words else "safe"
        allowed = 0
        with suppress(LogquarryError):
            plan = lq.recover(root, mode=mode)
            allowed = plan.loss.bytes if plan.loss is not None else 0
        result = self.run(0)
        if result is not None and result.exit_code == ExitCode.REFUSED:
            after = self.store.state()
            # A lock is taken in a file, which is made if it is missing.
            changed = [n for n in state if n != LOCK and state[n][2:] != after.get(n, ())[2:]]
            assert not changed, f"refused, but changed: {changed}: {result.output}"
        if "--accept-loss" not in self.words and "retain" not in self.words:
            self._check_kept(before, could_save, allowed)
        again = self.run(1)
        if result is not None and again is not None and result.exit_code == 0:
            assert again.exit_code == 0, f"the second run ends with {again.output}"
            if self.words.startswith("recover"):
                assert "nothing to do" in again.output, again.output

    def _check_kept(self, before: Messages | None, could_save: int | None, allowed: int) -> None:
        after = readable(self.store.root)
        if before:
            assert after is not None, "the store cannot be read any more"
            lost = {
                offset: self.store.template.frames.get(offset, b"")
                for offset in before.keys() - after.keys()
            }
            size = sum(map(len, lost.values()))
            assert size <= allowed, f"lost, told {allowed}: {sorted(lost)[:5]}, {size} bytes"
            assert all(after[at] == before[at] for at in before.keys() & after.keys())
        if could_save:
            left = saved(self.store.root)
            assert left is not None, "the store cannot be salvaged any more"
            assert left >= could_save or allowed, f"salvage saved {could_save}, now {left}"


def check(templates: Templates, folder: Path, seed: int) -> None:
    combination = Combination(templates, folder, seed)
    try:
        combination.check()
    except Exception as error:
        error.add_note(combination.told)
        raise


FIRST = 30
"""Seeds that each run tries; a seed below found faults too."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", seeds(f"0:{FIRST}"))
def test_faults_and_a_command(templates: Templates, tmp_path: Path, seed: int) -> None:
    check(templates, tmp_path, seed)


FOUND = (
    *(15, 20, 40, 49, 61, 82, 155, 172, 240, 280, 473, 487),
    *(216, 309, 549, 555, 612, 880, 1307, 1317, 1550, 1797, 1811, 1965),
    *(20052, 30076, 50339, 61196, 61409, 71103, 71957, 72281, 80287, 90079, 90145, 200258, 210549),
    *(211709, 211981, 220951, 230802, 231015, 251860),
)
"""Seeds that found faults: queues, a log's end or files in unreadable blocks; an empty index
file; offset 0 of a DLedger log; a lost tail that salvage did not report; a file for a folder; lost
last files after a crash; unreadable pages that were written in place; a link in place of the log's
first file; a read without end beside a writer; a last file lost together with the queues;
a lost first file; an unreadable queue file in mode rocketmq;
sizes that the index does not have; the number of a transaction; a field that no CRC covers;
a misnamed file after a lost one; retention up to a missing file; new
queues that ended the log at its first damage; a log without files; a file in place of a
queue's folder, in mode rocketmq; a topic that rotted; an index that was rebuilt alone; a circle of
links in a queue's folder; a queue entry that ended the log exabytes later;
a log, queues and checkpoint of which only a folder in place of an index file was left;
a link of the log to nothing, without queues; damage in the last file that no exact count told;
a salvage of a log without files, of which only checkpoint and index were left."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [seed for seed in FOUND if seed >= FIRST])
def test_seeds_that_found_faults(templates: Templates, tmp_path: Path, seed: int) -> None:
    check(templates, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("hundred", range(20))
def test_many_faults_and_commands(templates: Templates, tmp_path: Path, hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(templates, tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))


START = "import sys; from logquarry.cli.main import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_no_command_ends_by_a_signal(templates: Templates, tmp_path: Path, seed: int) -> None:
    combination = Combination(templates, tmp_path, seed)
    words = random.Random(seed).choice(WORDS + CHANGES)
    names = {
        "STORE": combination.store.root,
        "SOUND": combination.store.template.root,
        "OUT": tmp_path / "out",
        "SOURCE": templates.exported(),
    }
    arguments = [str(names.get(word, word)) for word in words.split()]
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode in CODES, (combination.told, words, done.returncode, done.stderr[-500:])
