"""Each command on each store of RocketMQ 5, judged by a real broker of that version.

Make the stores first, one folder for each version and scenario (a minute each, 8 GB of holes)::

    for scenario in $(RMQ=5.5.0 oracle/v5/run list | cut -d' ' -f1); do
        tests/conformance/make_store5.sh STORES 5.5.0 $scenario
    done

Then run the cells. Results go into ``tests/data/rocketmq5_matrix.jsonl``; cells that have one are
skipped without ``--again``. The page docs/compatibility.md is made from the results::

    python -m tests.conformance.matrix5 STORES --only '5.5.0/*' --commands put,recover --again
    python -m tools.docs_tables

A cell with a broker takes half a minute. ``--list`` prints the cells that would run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import logquarry as lq
from logquarry.errors import LogquarryError, UnsupportedStore
from logquarry.log.layout import StoreLayout
from logquarry.read import features
from tests.conformance import broker_truth
from tests.conformance.broker_truth import BrokerFailure, Truth
from tests.conformance.rocketmq5 import state_of

RESULTS = Path(__file__).parents[1] / "data" / "rocketmq5_matrix.jsonl"

SERVED, READ, REFUSED, NOT_NEEDED, FAILED = "served", "read", "refused", "not needed", "failed"
RESULTS_OF_SUCCESS = frozenset({SERVED, READ, REFUSED, NOT_NEEDED})

_MOST_TOLD = 3
_WHOLE = 1 << 63
_COMMAND = "from logquarry.cli.main import app; app()"

_MEANS_FEATURE = {
    "storePathCommitLog": features.SEVERAL_LOG_PATHS,
    "enableDLegerCommitLog": features.DLEDGER,
    "dLeger": features.DLEDGER,
    "storeType": features.ROCKSDB_QUEUES,
    "configManagerVersion": features.ROCKSDB_QUEUES,
    "combineCQUseRocksdbForLmq": features.ROCKSDB_QUEUES,
    "rocksdbCQDoubleWriteEnable": features.ROCKSDB_QUEUES,
    "useSeparateStorePathForRocksdbCQ": features.ROCKSDB_QUEUES,
    "indexRocksDBEnable": features.ROCKSDB_STORE,
    "timerRocksDBEnable": features.ROCKSDB_STORE,
    "transRocksDBEnable": features.ROCKSDB_STORE,
    "enableControllerMode": features.CONTROLLER,
    "allAckInSyncStateSet": features.CONTROLLER,
    "messageStorePlugIn": features.TIERED,
    "tiered": features.TIERED,
}
"""Settings, by their first letters, that a new store without the feature is started without."""


@dataclass(frozen=True)
class Store:
    """One store of the folder of stores.

    Attributes:
        folder: its folder, with ``broker.conf``.
        version: the broker's version.
        scenario: the oracle's scenario.
        state: ``clean``, ``live`` (copied while the broker ran) or ``killed``.
    """

    folder: Path
    version: str
    scenario: str
    state: str

    @property
    def name(self) -> str:
        """``version/scenario``; with ``-live`` for a copy of a running broker's store."""
        return f"{self.version}/{self.scenario}{'-live' if self.state == 'live' else ''}"

    @property
    def path(self) -> Path:
        """The store itself."""
        return self.folder / ("store-live" if self.state == "live" else "store")

    @property
    def truth(self) -> Path:
        """The folder with what the broker served. A killed store has it after its recovery."""
        return self.folder / "after" if self.state == "killed" else self.folder


@dataclass(frozen=True)
class Result:
    """The result of one command on one store.

    Attributes:
        store: :attr:`Store.name`.
        command: one of :data:`COMMANDS`.
        result: one of the constants of this module.
        detail: what was left behind or failed, in words.
    """

    store: str
    command: str
    result: str
    detail: str = ""


class Wrong(Exception):
    """A command did not do what it has to do."""


def stores_in(root: Path) -> list[Store]:
    """The finished stores of a folder, killed and clean ones before live ones."""
    found = []
    for done in sorted(root.glob("*/*/done")):
        folder = done.parent
        version, scenario = folder.parent.name, folder.name
        if scenario.startswith("kill"):
            if (folder / "after" / "queues.json").exists():
                found.append(Store(folder, version, scenario, "killed"))
            continue
        found.append(Store(folder, version, scenario, "clean"))
        if (folder / "store-live").exists():
            found.append(Store(folder, version, scenario, "live"))
    return sorted(found, key=lambda store: (store.state == "live", store.name))


# ----------------------------------------------------------------------------------- commands
def _read(store: Store, work: Path) -> Result:
    config = broker_truth.config_of(work)
    with lq.MessageStore.open(work / "store", config=config) as found:
        told = broker_truth.differences_of_scan(found, store.truth, below=_log_end(store, work))
        return _told(store, "read", told)


def _get(store: Store, work: Path) -> Result:
    if store.state == "killed":
        # Its queues lack the last messages, as in the broker before its recovery.
        _run("recover", work / "store", "--apply")
    config = broker_truth.config_of(work)
    with lq.MessageStore.open(work / "store", config=config) as found:
        truth = Truth.read(store.truth)
        told = broker_truth.differences_of_queues(found, truth, below=_log_end(store, work))
        return _told(store, "get", told)


def _verify(store: Store, work: Path) -> Result:
    found = _run("verify", work / "store", "--json")
    if found.returncode == 0:
        return Result(store.name, "verify", READ)
    try:
        document = json.loads(found.stdout)
        told = [f"{one['kind']} ({one['severity']})" for one in document["findings"]]
    except (ValueError, LookupError):
        told = [found.stderr.strip().splitlines()[-1][:200]]
    return _told(store, "verify", dict.fromkeys(told))


def _told(store: Store, command: str, told: Iterable[str]) -> Result:
    differences = list(told)
    if not differences:
        return Result(store.name, command, READ)
    return Result(store.name, command, FAILED, _few(differences))


def _few(words: list[str]) -> str:
    more = f" and {len(words) - _MOST_TOLD} more" if len(words) > _MOST_TOLD else ""
    return "; ".join(words[:_MOST_TOLD]) + more


def _untouched(store: Store, work: Path) -> Result:
    return _served(store, "untouched", work)


def _put(store: Store, work: Path) -> Result:
    before = Truth.read(store.truth)
    names = [name for name in before.pulled if _is_ordinary(name.rpartition("/")[0])]
    ours = {}
    with lq.MessageStore.open(work / "store", mode="rw") as found:
        for name in {name.rpartition("/")[0]: name for name in names}.values():
            topic, _, number = name.rpartition("/")
            message = lq.Message(topic, b"ours", queue_id=int(number), keys="ours", tags="TagA")
            ours[name] = found.put(message).queue_offset
    return _served(store, "put", work, ours=ours)


def _is_ordinary(topic: str) -> bool:
    return not topic.startswith(("%", "rmq_sys_", "RMQ_SYS_", "SCHEDULE_TOPIC", "TRANS_CHECK"))


def _recover(store: Store, work: Path) -> Result:
    _changed(_run("recover", work / "store", "--apply"))
    return _served(store, "recover", work)


def _rebuild(store: Store, work: Path) -> Result:
    _changed(_run("rebuild", work / "store", "--in-place", "--apply"))
    return _served(store, "rebuild", work)


def _retain(store: Store, work: Path) -> Result:
    """The broker shuts the store down, retention deletes all log files but the last."""
    before = broker_truth.serve(work, store.version)
    _changed(_run("retain", work / "store", "--keep-bytes", "1", "--apply"))
    with lq.MessageStore.open(work / "store") as found:
        start = found.min_offset
        if not start:
            raise Wrong("no file had expired")
        lows = {f"{t}/{q}": found.queue_offsets(t, q).min for t, q in found.queues()}
    after = broker_truth.serve(work, store.version)
    lost = broker_truth.not_served(
        before, after, end=_WHOLE, moved=False, root=work / "store", start=start
    )
    for name, low in lows.items():
        if name in before.pulled and after.bounds[name][0] != low:
            lost.append(f"{name} begins at {after.bounds[name][0]}, and ours at {low}")
    result = FAILED if lost else SERVED
    return Result(store.name, "retain", result, _few(lost))


def _salvage(store: Store, work: Path) -> Result:
    return _new_store("salvage", store, work)


def _convert(store: Store, work: Path) -> Result:
    return _new_store("convert", store, work)


def _new_store(command: str, store: Store, work: Path) -> Result:
    there = state_of(work / "store")
    # The oracle's paths are relative to the working folder.
    made = _run(command, "store", "--into", "new", "--config", "broker.conf", "--json", cwd=work)
    if command == "convert" and made.returncode == 2:
        return Result(store.name, command, NOT_NEEDED, "its log is in commitlog/ already")
    _changed(made)
    if state_of(work / "store") != there:
        raise Wrong(f"{command} changed the store that it reads")
    document = json.loads(made.stdout)
    left = [one["feature"] for one in document["left_behind"]]
    if document.get("lost"):
        raise Wrong(f"lost: {_few([str(one) for one in document['lost']])}")
    end = _log_end(store, work)
    (work / "store").rename(work / "old")
    (work / "new").rename(work / "store")
    _without_settings(work)
    found = _served(store, command, work, end=end, moved=features.DLEDGER in _features(store.path))
    detail = f"left behind: {', '.join(left)}" if left else ""
    return Result(
        store.name, command, found.result, "; ".join(filter(None, (detail, found.detail)))
    )


def _features(path: Path) -> set[str]:
    found = features.find_features(StoreLayout.open(path))
    return {feature.name for feature in found.features}


def _without_settings(work: Path) -> None:
    """Remove the settings of features that the new store does not have."""
    has = _features(work / "store")
    gone = tuple(setting for setting, feature in _MEANS_FEATURE.items() if feature not in has)
    path = work / "broker.conf"
    lines = path.read_text("utf-8").splitlines()
    path.write_text("".join(f"{line}\n" for line in lines if not line.startswith(gone)))


COMMANDS: dict[str, Callable[[Store, Path], Result]] = {
    "read": _read,
    "get": _get,
    "verify": _verify,
    "put": _put,
    "recover": _recover,
    "rebuild": _rebuild,
    "salvage": _salvage,
    "convert": _convert,
    "untouched": _untouched,
    "retain": _retain,
}
"""Command -> what runs it. ``untouched`` starts the broker over a plain copy: it shows what the
broker itself does to a store. ``retain`` needs a log of several files."""
READERS = ("read", "get", "verify")
WRITERS = ("put", "recover", "rebuild", "salvage", "convert")


def run_cell(store: Store, command: str, work: Path) -> Result:
    """Run one command on a copy of a store, and ask a broker.

    Args:
        store: the store; it is not changed.
        command: one of :data:`COMMANDS`.
        work: a new folder for the copy.
    """
    copy = ["cp", "-a", "--sparse=always", str(store.path), str(work / "store")]
    subprocess.run(copy, check=True)
    shutil.copy(store.folder / "broker.conf", work)
    before = state_of(work / "store")
    try:
        return COMMANDS[command](store, work)
    except (UnsupportedStore, _Refused) as error:
        if state_of(work / "store") != before:
            return Result(store.name, command, FAILED, f"refused, but changed the store: {error}")
        found = re.search(r"cannot .*?: (\w+) \(", str(error))
        return Result(store.name, command, REFUSED, found[1] if found else str(error)[:200])
    except (BrokerFailure, Wrong, LogquarryError) as error:
        return Result(store.name, command, FAILED, str(error)[:300])


class _Refused(Exception):
    """A command ended with exit code 4."""


def _run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def _changed(found: subprocess.CompletedProcess[str]) -> None:
    """Raise if a command did not do its work; exit code 1 means that it found something."""
    if found.returncode == 4:
        lines = (found.stdout + found.stderr).splitlines()
        raise _Refused(next((line for line in lines if ": it cannot " in line), lines[-1]))
    if found.returncode not in (0, 1):
        raise Wrong(f"exit code {found.returncode}: {found.stderr.strip()[-200:]}")


def _log_end(store: Store, work: Path) -> int:
    """A physical offset after all compared messages: a killed store ends before its truth."""
    if store.state != "killed":
        return _WHOLE
    with lq.MessageStore.open(work / "store") as found:
        return max(message.physical_offset for message in found.scan()) + 1


def _served(
    store: Store,
    command: str,
    work: Path,
    *,
    ours: dict[str, int] | None = None,
    end: int | None = None,
    moved: bool = False,
) -> Result:
    """Start the broker over the copy, and compare what it serves."""
    if end is None and store.state == "killed":
        with lq.MessageStore.open(store.path) as found:
            end = max(message.physical_offset for message in found.scan()) + 1
    before = Truth.read(store.truth)
    after = broker_truth.serve(work, store.version)
    lost = broker_truth.not_served(
        before, after, end=_WHOLE if end is None else end, moved=moved, root=store.path
    )
    lost += broker_truth.puts_not_served(after, ours or {})
    if lost:
        return Result(store.name, command, FAILED, f"{len(lost)} not served: {_few(lost)}")
    return Result(store.name, command, SERVED)


# ----------------------------------------------------------------------------------- results
def recorded(path: Path = RESULTS) -> dict[tuple[str, str], Result]:
    """(store, command) -> the recorded result."""
    if not path.exists():
        return {}
    lines = path.read_text("utf-8").splitlines()
    return {(r.store, r.command): r for r in (Result(**json.loads(line)) for line in lines)}


def record(result: Result, path: Path = RESULTS) -> None:
    """Add a result, or replace the recorded one."""
    found = recorded(path) | {(result.store, result.command): result}
    rows = [asdict(found[key]) for key in sorted(found)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main() -> int:
    """Run the cells; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("stores", type=Path)
    parser.add_argument("--only", default="*", help="stores, for example '5.5.0/*'")
    parser.add_argument("--commands", default=",".join((*READERS, *WRITERS)))
    parser.add_argument("--again", action="store_true", help="also cells with a result")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    there = recorded(given.results)
    failed = False
    for store in stores_in(given.stores):
        if not fnmatch.fnmatch(store.name, given.only):
            continue
        for command in given.commands.split(","):
            if (store.name, command) in there and not given.again:
                continue
            if given.list:
                print(store.name, command)
                continue
            with tempfile.TemporaryDirectory(prefix="matrix5-") as work:
                result = run_cell(store, command, Path(work))
            record(result, given.results)
            failed |= result.result == FAILED
            print(result.store, result.command, result.result, result.detail, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
