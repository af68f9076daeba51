"""Commits the staged rows of many tasks to one or several stores: all rows exactly once, or none.

In one store, an intent file makes the load atomic (:mod:`logquarry.store.load.loading`). With
several stores, a crash can leave the load in some of the stores. Therefore a document (the
decision) records the load's segments before the first append. Segments are the files with the
load's staged rows.
After a crash, the next load into the same path completes the decided load. If the interrupted load
is tried again, the segments of the second attempt are dropped.

::

    lock -> complete a decided load -> in the ledger? -> dead letters in place -> DECIDE
         -> each store: intent, append, ledger (in parallel) -> ledger -> remove segments
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock
from logquarry.errors import CorruptFile, StoreNotFound, StoreUnavailable, UsageError
from logquarry.format.index import IndexShape
from logquarry.ingest.staging import LoadPlan, Staged, by_broker
from logquarry.log.layout import StoreLayout
from logquarry.log.location import lies_in_store
from logquarry.log.store_files import COMMIT_LOG, CONSUME_QUEUE, LOADS
from logquarry.paths import exists, is_folder
from logquarry.read.fence import Action, require
from logquarry.read.store_sizes import with_sizes
from logquarry.store.load.ledger import (
    LOADS_PLACES,
    Ledger,
    LoadId,
    forget_letters,
    place_letters,
    read_document,
    remove_staged,
    write_document,
)
from logquarry.store.load.loading import Loaded
from logquarry.store.load.segment import Segment, find_segment
from logquarry.store.message_store import StoreWriter
from logquarry.text import counted, json_value, plural, size_text

logger = logging.getLogger(__name__)

_DECISION: Final = "decision.json"
_PATIENCE_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05
_LARGE: Final = 1 << 30
_MANY_TIMES: Final = 8
_SMALL: Final = 64 << 20
"""If a load has fewer bytes of frames than this number, it appends to its stores one after the
other.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Appending:
    """The segments (files of staged frames) to append to one store. Small and picklable.

    Attributes:
        loads: folder of the segments, relative to the store.
    """

    store: str
    config: StoreConfig
    load: LoadId
    segments: tuple[Segment, ...]
    loads: str

    @property
    def bytes(self) -> int:
        """Bytes of all frames."""
        return sum(segment.bytes for segment in self.segments)


RunAppends = Callable[[Sequence[Appending]], Sequence[Loaded]]
"""Runs :func:`append_to_store` for each store; returns the results in the same order."""


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The result of a load.

    Attributes:
        rows: number of messages that this call appended.
        bytes: bytes of the appended frames.
        rejected: number of rows in the dead letters.
        was_there: whether an earlier call had completed the load, so that this call appended
            nothing.
        stores: (log's end before, log's end now) by the folder of the store.
    """

    rows: int = 0
    bytes: int = 0
    rejected: int = 0
    was_there: bool = False
    stores: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def _check_dead_letters(plan: LoadPlan) -> None:
    if plan.dead_letters is None:
        return
    stores = [*map(plan.store, range(plan.brokers)), plan.loads]
    held = (store for store in stores if lies_in_store(plan.dead_letters, store, plan.config))
    if (store := next(held, None)) is not None:
        raise UsageError(
            f"deadLetterPath: {plan.dead_letters} lies in {store}, where dead letters would look "
            "like files of the store: give a folder outside of it"
        )


def append_to_store(appending: Appending, disk: Disk | None = None) -> Loaded:
    """Append the segments of a load to one store, unless an earlier attempt has appended them. Then
    remove the segments.

    The removal frees the memory and the disk blocks of the segments. If the load appends to its
    stores one after the other, the next store's log can use this space.

    Raises StoreError if the messages cannot be put into their queues. The log then already has the
    load, and the next opening of the store puts the load's messages into the queues.
    """
    # An attempt that Spark has given up can still be running, and can hold the store's lock.
    opened = _patiently(
        lambda: StoreWriter.start(appending.store, config=appending.config, disk=disk),
        lambda: _is_held(appending.store),
    )
    with opened as store:
        loaded = store.load_staged(appending.load, appending.segments, appending.loads)
        names = [segment.name for segment in appending.segments]
        remove_staged(Path(appending.store) / appending.loads, appending.load, names)
        # If the dispatcher fails, wait_dispatched() raises the error; close() would only log the
        # error.
        store.wait_dispatched()
        return loaded


def _is_held(store: str) -> bool:
    try:
        return StoreLayout.open(store).is_live()
    except StoreNotFound:
        return False


def append_here(appendings: Sequence[Appending]) -> Sequence[Loaded]:
    """Append to all stores in this process, in parallel: one thread per processor, but at least
    four threads, and at most one per store.

    A small load appends to its stores one after the other, so that only one store is open at a
    time. The files of an open store take much more disk space than a few messages.
    """
    if sum(appending.bytes for appending in appendings) < _SMALL:
        return [append_to_store(appending) for appending in appendings]
    most = max(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(max(1, min(most, len(appendings))), "load") as pool:
        return list(pool.map(append_to_store, appendings))


def plan_load(plan: LoadPlan) -> LoadPlan:
    """Return the plan, completed with the file sizes that the existing stores use."""
    root = Path(plan.path)
    is_store = any(is_folder(root / name) for name in (COMMIT_LOG, CONSUME_QUEUE))
    if plan.brokers > 1 and is_store:
        raise UsageError(
            f"{root}: is a store, but {plan.brokers} brokers need a folder that contains their "
            "stores: give another folder"
        )
    _check_dead_letters(plan)
    sizes: StoreConfig | None = None
    for broker in range(plan.brokers):
        try:
            layout: StoreLayout | None = StoreLayout.open(plan.store(broker), plan.config)
        except StoreNotFound:
            layout = None
        if layout is not None:
            require(layout, Action.LOAD, mode=plan.config.recovery)
        found = with_sizes(plan.config, layout)
        if sizes is None or _log_size(found) < _log_size(sizes):
            sizes = found
    assert sizes is not None
    return replace(plan, sizes=sizes)


def _warn_of_space(plan: LoadPlan, segments: Mapping[int, Sequence[Segment]]) -> None:
    new = [broker for broker in segments if not exists(plan.store(broker) / COMMIT_LOG)]
    shape = plan.sizes.index_shape or IndexShape()
    allocated = len(new) * (_log_size(plan.sizes) + shape.file_size)
    needed = sum(segment.bytes for broker in new for segment in segments[broker])
    if allocated > max(_LARGE, _MANY_TIMES * needed):
        logger.warning(
            "%s: %s will be created. Each takes at least %s of disk space while its messages are "
            "loaded, but all messages together have %s. For smaller files see docs/sink.md, Disk "
            "space",
            plan.path,
            plural(len(new), "new store"),
            size_text(allocated // len(new)),
            size_text(needed),
        )


def _log_size(config: StoreConfig) -> int:
    size = config.mapped_file_size_commit_log
    assert size is not None
    return size


def commit_load(
    plan: LoadPlan,
    load: LoadId,
    tasks: Sequence[Staged],
    *,
    run: RunAppends = append_here,
    disk: Disk | None = None,
    is_batch: bool = False,
) -> LoadSummary:
    """Append the segments of all tasks to the stores, unless an earlier call has done so.

    Args:
        run: appends to the stores.
        disk: the disk for the writes to the folder of the loads; None for the usual disk.
        is_batch: whether the load is a batch of a stream. A stream repeats only its last batch, so
            the load must not have a lower version than the last load.

    Raises:
        UsageError: in three cases: a task has staged rows of another load; the load has the last
            load's version, but more rows; a batch has a lower version than the last load.
        CorruptFile: if a segment has changed since it was staged. If a segment is missing or has
            another size, nothing is appended to any store. If only the content has changed, nothing
            is appended to the store of this segment.
        StoreUnavailable: if a store cannot be written. If the load was already decided, the next
            load into the same path completes it.
    """
    if any(task.load != load for task in tasks):
        raise UsageError(f"{plan.path}: a task has staged another load than {load}")
    own = disk or Disk()
    own.make_folders(plan.loads)
    with _locked(own, plan.loads):
        decision, ledger = _Decision(plan, own), Ledger(own, Path(plan.path))
        decision.require_segments()
        decision.finish(run)
        if ledger.has(load):
            _require_repeated(plan, load, tasks, ledger.last(load), is_batch=is_batch)
            _forget(plan, load)
            return LoadSummary(was_there=True)
        if not _began(plan, load, own):
            _place_dead_letters(plan, load, tasks, own)
        segments = by_broker(tasks)
        _warn_of_space(plan, segments)
        if plan.brokers == 1:
            # A load without rows also creates the store, and adds an entry to the store's ledger.
            store = str(plan.store(0))
            # Do not send the list of queues to the task, because the segment files contain it.
            sent = tuple(replace(segment, queues=()) for segment in segments.get(0, ()))
            found = {store: run([Appending(store, plan.config, load, sent, LOADS)])[0]}
        elif segments:
            for segment in chain.from_iterable(segments.values()):
                # Check the segments before the decision. After the decision, a missing segment
                # would make each later load into this path fail too.
                find_segment(plan.loads / load.staged, segment)
            decision.make(load, {plan.store(b).name: some for b, some in segments.items()})
            found = decision.finish(run)
        else:
            ledger.add(load, 0)
            found = {}
        _forget(plan, load)
        if not load.is_named:
            ledger.forget(load)
        if plan.brokers == 1 and any(loaded.was_there for loaded in found.values()):
            # An earlier call had begun this load, and the opening of the store has completed it.
            _require_repeated(plan, load, tasks, ledger.last(load), is_batch=is_batch)
    return LoadSummary(
        rows=sum(loaded.rows for loaded in found.values()),
        bytes=sum(loaded.bytes for loaded in found.values()),
        rejected=sum(task.rejected for task in tasks),
        was_there=any(loaded.was_there for loaded in found.values()),
        stores={store: (loaded.start, loaded.end) for store, loaded in found.items()},
    )


def _require_repeated(
    plan: LoadPlan,
    load: LoadId,
    tasks: Sequence[Staged],
    last: tuple[int, int | None] | None,
    *,
    is_batch: bool,
) -> None:
    """Raise UsageError if `load` cannot be a repetition of an earlier load.

    For example, if a query continues with a checkpoint from a backup, Spark gives the numbers of
    earlier batches to other rows. If the sink skipped such a batch, the rows would be lost.
    """
    version, count = last or (load.version, None)
    rows = sum(segment.rows for task in tasks for _, segment in task.segments)
    if version > load.version and is_batch:
        why = f"the last batch in the store is {version}"
    elif version == load.version and count is not None and rows > count:
        why = f"it has {counted(rows, 'row')}, and the load with this version has {count}"
    else:
        return
    advice = (
        "the checkpoint is older than the store, or another run of the query has continued: see "
        "docs/sink.md, Lost checkpoint"
        if is_batch
        else "pass a higher txnVersion for other rows"
    )
    raise UsageError(f"{plan.path}: {load} is not a repetition of an earlier load: {why}: {advice}")


def _place_dead_letters(plan: LoadPlan, load: LoadId, tasks: Sequence[Staged], disk: Disk) -> None:
    if plan.dead_letters is None:
        return
    folder = Path(plan.dead_letters)
    ordered = sorted(tasks, key=lambda task: task.partition)
    names = [task.dead_letters for task in ordered if task.dead_letters is not None]
    if names or is_folder(folder):
        disk.make_folders(folder)
        place_letters(folder, load, names, disk)


def _forget(plan: LoadPlan, load: LoadId) -> None:
    remove_staged(plan.loads, load)
    if plan.dead_letters is not None:
        forget_letters(Path(plan.dead_letters), load)


def discard_load(plan: LoadPlan, load: LoadId, tasks: Sequence[Staged]) -> None:
    """Remove the staged files of a cancelled load, unless the load is decided."""
    disk = Disk()
    if not is_folder(plan.loads):
        return
    with _locked(disk, plan.loads):
        if _began(plan, load, disk):
            return
        names = [segment.name for task in tasks for _, segment in task.segments]
        # An unnamed load has a unique generated name. No other attempt uses files of this load, so
        # remove all of them.
        remove_staged(plan.loads, load, names if load.is_named else None)
        if plan.dead_letters is not None:
            letters = [task.dead_letters for task in tasks if task.dead_letters is not None]
            folder = Path(plan.dead_letters)
            forget_letters(folder, load, letters if load.is_named else None)


def _began(plan: LoadPlan, load: LoadId, disk: Disk) -> bool:
    decided = _Decision(plan, disk).load
    intent = Ledger(disk, Path(plan.path)).intent() if plan.brokers == 1 else None
    return load in (decided, None if intent is None else intent.load)


class _Decision:
    # The document that decides a load into several brokers. While the document exists, the next
    # load into the same path first completes the decided load.

    def __init__(self, plan: LoadPlan, disk: Disk) -> None:
        self._plan = plan
        self._disk = disk
        self._path = plan.loads / _DECISION

    @property
    def load(self) -> LoadId | None:
        found = self._read()
        return None if found is None else found[0]

    def make(self, load: LoadId, stores: Mapping[str, Sequence[Segment]]) -> None:
        # From here on, the load is decided: after a crash, the next load appends the segments.
        document = json_value({"load": load, "stores": stores})
        write_document(self._disk, self._path, document)

    def require_segments(self) -> None:
        # A store removes its segments only after its ledger has the load. But if an older copy has
        # replaced the store, the copy's ledger lacks the load, and the load cannot be completed.
        load, stores = self._read() or (None, {})
        root = Path(self._plan.path)
        for name, segments in stores.items():
            ledger = Ledger(self._disk, root / name)
            # If the append has begun, the next opening of the store finishes it or rolls it back.
            if load is None or ledger.has(load) or ledger.intent() is not None:
                continue
            try:
                for segment in segments:
                    find_segment(self._plan.loads / load.staged, segment)
            except CorruptFile as error:
                reason = (
                    f"an interrupted load ({load}) cannot be completed: {root / name} does not "
                    f"have the load, and a segment is missing or damaged ({error}). If this store "
                    "was restored from a backup, put back its newest copy; else see docs/sink.md, "
                    "Stores from a backup"
                )
                raise CorruptFile(str(self._path), 0, reason) from error

    def finish(self, run: RunAppends) -> dict[str, Loaded]:
        found = self._read()
        if found is None:
            return {}
        load, stores = found
        root = Path(self._plan.path)
        appendings = [
            Appending(str(root / name), self._plan.config, load, segments, LOADS_PLACES[1])
            for name, segments in stores.items()
        ]
        done = dict(zip(stores, run(appendings), strict=True))
        if load.is_named:
            rows = sum(segment.rows for segment in chain.from_iterable(stores.values()))
            Ledger(self._disk, root).add(load, rows)
        self._disk.remove(self._path)
        # Remove the load from the stores' ledgers last. While a store's ledger has the load, a
        # repetition after a crash appends nothing to this store.
        for name in () if load.is_named else stores:
            Ledger(self._disk, root / name).forget(load)
        remove_staged(self._plan.loads, load)
        return {str(root / name): loaded for name, loaded in done.items()}

    def _read(self) -> tuple[LoadId, dict[str, tuple[Segment, ...]]] | None:
        document = read_document(self._path)
        if document is None:
            return None
        try:
            load = LoadId.from_json(document["load"])
            stores = {}
            for name, segments in document["stores"].items():
                if not name.removeprefix("broker-").isdecimal():
                    raise ValueError(f"invalid broker name {name!r}")
                stores[name] = tuple(map(Segment.from_json, segments))
            return load, stores
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CorruptFile(str(self._path), 0, f"invalid decision: {error!r}") from error


@contextmanager
def _locked(disk: Disk, folder: Path) -> Iterator[None]:
    lock = _patiently(lambda: StoreLock(disk, folder), lambda: True)
    try:
        yield
    finally:
        lock.release()


def _patiently(take: Callable[[], T], is_held: Callable[[], bool]) -> T:
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return take()
        except StoreUnavailable:
            if time.monotonic() > until or not is_held():
                raise
        time.sleep(_POLL_SECONDS)
