"""Queries that follow a store at full speed are killed repeatedly and keep every message once.

A log that they write equals that of an uninterrupted run. ``CRASH_N=20 CRASH_SEED=7 make test-slow
ARGS="tests/spark/test_stream_kills.py -s"`` kills each form twenty times, and prints what was hit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from tests.crash.ladder import SEED, count, told
from tests.helpers.lake import Lake
from tests.spark.killing import Killable

KILLS = count(3)
BURST_SECONDS, REST_SECONDS = 0.1, 0.5
"""While a query starts, which takes long on two cores, the writer alternates between writing and
pausing with a flush, so that the query has something to read."""
SESSION_SECONDS = 4.0
"""Most seconds of a query beside the writer after its first batch; a batch takes about one."""
STORE_TIME = slice(56, 64)
"""Offset of the store timestamp in a frame with IPv4 hosts."""
WAIT_SECONDS = 300
Numbers = npt.NDArray[np.int64]

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600 + 240 * KILLS)]


@dataclass
class Runs:
    """One form, killed and restarted while its store is written.

    Attributes:
        form: kind of the target; see `stream_query`.
        folder: folder for everything.
        messages: number of messages, once the writer has ended.
        hits: number of kills that interrupted something.
    """

    form: str
    folder: Path
    messages: int = 0
    hits: int = 0
    _started: list[Killable] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def begun(self) -> int:
        """Return how many batches, or files of a table, were begun."""
        if self.form in ("delta", "iceberg"):
            return len(Lake(self.form, self.out).parquet_files())
        return newest(self.folder / "checkpoint/offsets")

    def done(self) -> int:
        """Return how many of these are committed; call it while no process is running."""
        if self.form in ("delta", "iceberg"):
            return len(Lake(self.form, self.out).known_files()) if self.begun() else 0
        return newest(self.folder / "checkpoint/commits")

    # ------------------------------------------------------------------------------- what is done
    def kill_often(self, rng: random.Random) -> None:
        """Start and kill queries while the writer writes, KILLS times; then end the writer."""
        writer = Killable(
            "tests.spark.stream_writer",
            *(str(self.store), "0", "0"),
            errors=self.folder / "writer.err",
        )
        self._started.append(writer)
        writer.wait_for("open")
        writer.pause()
        for number in range(KILLS):
            query, begun = self.query("on", "2m"), self.begun()
            # Every fourth run may be killed before its first batch: a kill that always comes too
            # early proves nothing.
            while number % 4 < 3 and not self.gets_to_work(query, begun, writer):
                query.kill()
                query = self.query("on", "2m")
            writer.resume()
            time.sleep(rng.uniform(0, SESSION_SECONDS))
            how = rng.choice(["all", "worker", "driver"])
            if how == "worker":
                query.kill_a_worker(rng)
                time.sleep(rng.uniform(0, SESSION_SECONDS))
            if how == "driver":
                query.kill_the_driver()
            else:
                query.kill()
            writer.pause()
            self.hits += self.begun() > self.done()
            print(f"{how} {self.begun()}/{self.done()}", end=" ", flush=True)
        writer.resume()
        self.messages = int(writer.end(60))
        print(f"\n{self.form}: {KILLS} kills, {self.hits} of them within a batch, ", end="")
        print(f"{self.messages:,} messages; committed {self.done()}")

    def query(self, how: str, most: str) -> Killable:
        """A query that was started."""
        query = Killable(
            "tests.spark.stream_query",
            *(self.form, str(self.store), str(self.folder), how, most),
            errors=self.folder / f"query-{len(self._started)}.err",
        )
        self._started.append(query)
        query.wait_for("started")
        return query

    def gets_to_work(self, query: Killable, begun: int, writer: Killable) -> bool:
        """Wait for its first batch; return False if the query gave up on a slow machine."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.begun() <= begun and query.is_running:
            assert time.monotonic() < deadline, "it has begun nothing"
            assert writer.is_running, writer.errors
            writer.resume()
            time.sleep(BURST_SECONDS)
            writer.pause()
            time.sleep(REST_SECONDS)
        assert self.begun() > begun or is_slow(query), query.errors
        return self.begun() > begun

    def finish(self, most: str = "32m") -> None:
        """Run a query that reads all that is there."""
        while True:
            query = self.query("now", most)
            if query.ended(2 * WAIT_SECONDS) == 0:
                return
            assert is_slow(query), query.errors

    def end(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[[str, Path], Runs]]:
    made: list[Runs] = []

    def make(form: str, folder: Path) -> Runs:
        folder.mkdir(exist_ok=True)
        made.append(Runs(form, folder))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("form", ["parquet", "delta", "iceberg", "delta-by-batches"])
def test_every_message_is_in_the_table_once(
    form: str,
    runs: Callable[[str, Path], Runs],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    killed = runs(form, tmp_path)
    with told(SEED, form):
        killed.kill_often(random.Random(f"{SEED} {form}"))
        killed.finish()
        if form == "parquet":
            # The only form that the table's own package does not read.
            df = request.getfixturevalue("spark").read.parquet(str(killed.out))
            table = df.toArrow()
        else:
            table = Lake(form.partition("-")[0], killed.out).table()
        wanted = numbers_of(killed.store)
        assert np.array_equal(wanted, np.arange(killed.messages))
        order = np.argsort(table.column("physical_offset").to_numpy())
        assert np.array_equal(numbers(table.column("body"))[order], wanted)
        if form in ("delta", "iceberg"):
            lake = Lake(form, killed.out)
            assert lake.known_files() == lake.parquet_files()


@pytest.mark.parametrize("form", ["sink", "load"])
def test_logs_are_those_of_an_undisturbed_run(
    form: str, runs: Callable[[str, Path], Runs], tmp_path: Path
) -> None:
    killed = runs(form, tmp_path)
    with told(SEED, form):
        killed.kill_often(random.Random(f"{SEED} {form}"))
        killed.finish()
        before = {path.name: bytes_without_times(path) for path in stores(killed.out)}
        commits = tmp_path / "checkpoint" / "commits"
        last = newest(commits)
        for path in (commits / f"{last}", commits / f".{last}.crc"):
            path.unlink(missing_ok=True)
        killed.finish()
        assert newest(commits) >= last
        undisturbed = runs(form, tmp_path / "undisturbed")
        killed.store.rename(undisturbed.store)
        # The batches differ from those of the killed query, whose files must not be visible.
        undisturbed.finish("48m")
        bodies = []
        names = [path.name for path in stores(undisturbed.out)]
        assert names == [path.name for path in stores(killed.out)] == sorted(before)
        for name in names:
            one, other = killed.out / name, undisturbed.out / name
            check_same(bytes_without_times(one), before[name])
            check_same(bytes_without_times(one), bytes_without_times(other))
            assert queue_files(one) == queue_files(other)
            bodies.append(numbers_of(one))
            for root in (one, other):
                report = verify_store(StoreLayout.open(root))
                assert [f for f in report.findings if f.severity == "damage"] == []
        assert not list(tmp_path.rglob("*.frames"))
        assert np.array_equal(np.sort(np.concatenate(bodies)), np.arange(killed.messages))
        # One broker keeps the order of the source; of several, each keeps it for its part.
        assert all(np.all(np.diff(part) > 0) for part in bodies)


def is_slow(query: Killable) -> bool:
    """Return whether a query ended because the machine is busy.

    Spark gives a Python process ten seconds to start, and no setting changes that.
    """
    return "Python worker failed to connect back" in query.errors


# ---------------------------------------------------------------------------------- what is there
def newest(folder: Path) -> int:
    """Return the last batch that a log of the checkpoint contains, or -1."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=-1)


def stores(out: Path) -> list[Path]:
    return sorted(path for path in out.iterdir() if (path / "commitlog").is_dir())


def numbers(bodies: pa.ChunkedArray) -> Numbers:
    found: Numbers = bodies.cast(pa.string()).cast(pa.int64()).to_numpy()
    return found


def numbers_of(root: Path) -> Numbers:
    """Return what the writer wrote, in the log's order."""
    with lq.MessageStore.open(root) as store:
        return numbers(store.to_arrow(columns=["body"]).read_all().column("body"))


def bytes_without_times(root: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """Return the files of a log, without the store times of its messages."""
    files = {
        int(path.name): np.fromfile(path, np.uint8)
        for path in sorted((root / "commitlog").iterdir())
    }
    bases = np.array(list(files))
    with lq.MessageStore.open(root) as store:
        table = store.to_arrow(columns=["physical_offset"]).read_all()
    offsets = table.column("physical_offset").to_numpy()
    numbers_of_files = np.searchsorted(bases, offsets, side="right") - 1
    for number, (base, data) in enumerate(files.items()):
        at = offsets[numbers_of_files == number] - base
        data[at[:, None] + np.arange(STORE_TIME.start, STORE_TIME.stop)] = 0
    return {f"{base:020d}": data for base, data in files.items()}


def check_same(
    found: dict[str, npt.NDArray[np.uint8]], expected: dict[str, npt.NDArray[np.uint8]]
) -> None:
    # A preallocated file without messages is not a difference.
    used = [name for name, data in found.items() if data.any()]
    assert used == [name for name, data in expected.items() if data.any()]
    for name in used:
        assert len(found[name]) == len(expected[name])
        wrong = np.flatnonzero(found[name] != expected[name])
        assert not len(wrong), f"{name} differs at {wrong[0]} and {len(wrong) - 1} more"


def queue_files(root: Path) -> dict[str, bytes]:
    folder = root / "consumequeue"
    return {
        str(path.relative_to(folder)): data
        for path in sorted(folder.rglob("*"))
        if path.is_file() and any(data := path.read_bytes())
    }
