"""Salvage and convert: copy every undamaged message of a store into a new store.

The new store is made in the folder ``DIR/.salvage``. When the new store is complete, its files are
moved to ``DIR``, so that no program opens an incomplete store.

Other files that refer to messages by queue offset are copied, because queue offsets stay the same.
The timer wheel refers to messages by physical offset, which can change, so the salvage writes a new
wheel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from logquarry import arguments
from logquarry.arguments import Bars, now_ms
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable, UnreadableFile, UsageError
from logquarry.format import broker_json, timer
from logquarry.format.broker_json import CONFIG_FOLDERS
from logquarry.format.frame import ENTRY_HEAD, has_entry_head_reference
from logquarry.log.filesystem import below
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_folder
from logquarry.log.log_place import DLEDGER_FOLDER
from logquarry.log.readable import UNREADABLE, none_lost
from logquarry.log.rocksdb import tables_in_rocksdb
from logquarry.log.store_files import COMPACTED, CONFIG, LOCK, OPEN, SIDECAR, unread_lock
from logquarry.read import features as names
from logquarry.read.batch_queue import all_queues
from logquarry.read.features import find_features
from logquarry.read.fence import Action, require
from logquarry.read.pops import KV_STORE
from logquarry.read.store_sizes import require_log
from logquarry.read.timers import CHECK as TIMER_CHECK
from logquarry.read.timers import QUEUE_ID, check_or_none, precision, timers_of
from logquarry.repair.audit.timer_files import timer_log_file_size, write_timer_files
from logquarry.repair.findings import VerifyReport
from logquarry.repair.recover.wrong_names import check_file_size
from logquarry.repair.salvage.losses import ranges_json
from logquarry.repair.salvage.plan import SalvagePlan, plan_salvage
from logquarry.repair.salvage.target import LogWriter, SalvageTarget, carry, check_target
from logquarry.repair.verify_files import check_config, check_databases
from logquarry.text import counted, document, json_value
from logquarry.write.queue_table import topics_of

ORIGINALS: Final = "salvage"
"""Folder below ``.logquarry/`` with the unchanged originals of changed files."""

_LOST: Final = {
    names.ROCKSDB_QUEUES: "the queues become files of {} bytes, which each broker accepts only if "
    "its mappedFileSizeConsumeQueue agrees (for another size pass --config): run the broker with "
    "storeType=default",
    names.ROCKSDB_CONFIG: "copied as it is, but a broker with storeType=default reads JSON files: "
    "install logquarry[rocksdb] to get them, or create the topics again",
    names.ROCKSDB_STORE: "index and transactions in RocksDB are not carried over; waiting timer "
    "messages get a timer wheel",
    names.QUEUE_EXT: "the extension units of the queues; the broker then filters by the messages",
    names.TIERED: "messages that are only in the tiered storage are not read",
    names.CONTROLLER: "the epochs of the controller: the new store begins without them",
    names.UNKNOWN: "not known to be a part of a store; copy them if you need them",
}
"""Feature -> what the new store lacks, or has in another form, as text."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Files that are not in the new store, or are damaged there. ``feature`` is a name in
    docs/rocketmq-5.md, or a kind of findings.
    """

    feature: str
    paths: tuple[str, ...]
    reason: str


@dataclass(slots=True)
class MovedProgress:
    """A consumer offset after the end of its queue; salvage lowers it to ``now``, the end."""

    topic: str
    queue_id: int
    group: str
    was: int
    now: int


@dataclass(slots=True)
class Salvaged:
    """The result of a salvage. In a preview, nothing was written.

    Attributes:
        into: the new store's folder, None for a preview.
        progress: the consumer offsets that were changed.
        files: paths of the copied configuration files.
        carried: other files and folders that were copied unchanged.
        timers: number of timer messages in the new store's timer wheel.
        uncommitted: for a conversion, the number of messages that the DLedger group had not
            committed (0 if unknown, or if the log is no DLedger log); for a salvage, None. These
            messages are copied, because a broker may have acknowledged them.
    """

    plan: SalvagePlan
    into: str | None = None
    progress: list[MovedProgress] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    left_behind: list[LeftBehind] = field(default_factory=list)
    timers: int = 0
    seconds: float = 0.0
    uncommitted: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the new store has all messages and all other files of the old store."""
        return self.plan.is_whole and not self.left_behind

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``salvage --json`` or ``convert --json`` (docs/json.md)."""
        plan, stale = self.plan, self.plan.stale
        # In a DLedger log, each message moves by a different number of bytes: omit the list.
        moved = [p for p in plan.pieces if p.to != p.start and not plan.has_heads]
        return {
            "store": plan.store,
            "into": self.into,
            **document(plan, ("looked_at", "messages", "bytes")),
            "topics": [
                {"topic": name, **document(one)} for name, one in sorted(plan.topics.items())
            ],
            **document(plan, ("lost",)),
            "lost_bytes": sum(span.length for span in plan.lost),
            "gaps": ranges_json({key: story.gaps for key, story in plan.queues.items()}),
            "moved": [
                {"offset": piece.start, "length": piece.stop - piece.start, "to": piece.to}
                for piece in moved
            ],
            "raised_times": plan.raised_times,
            "lowered_times": len(plan.lowered_times),
            "rotten_queue_offsets": plan.rotten_offsets,
            "rotten_queue_ids": len(plan.right_queues),
            "rotten_transaction_types": len(plan.right_types),
            "ends_without_half": plan.ends,
            "wrong_property_crcs": plan.wrong_crcs,
            "contradicted": plan.contradicted,
            "displaced": [one._asdict() for one in plan.displaced],
            "stale": {
                **document(stale, ("messages", "bytes", "included")),
                "moved_queue_offsets": stale.moved,
                "spans": [{"offset": start, "length": end - start} for start, end in stale.spans],
            },
            "consumers": json_value(self.progress),
            "config_files": self.files,
            **document(self, ("carried", "left_behind", "timers")),
            "seconds": round(self.seconds, 3),
            **({} if self.uncommitted is None else document(self, ("uncommitted",))),
        }


def salvage(
    path: str | os.PathLike[str],
    into: str | os.PathLike[str] | None = None,
    *,
    include_stale: bool = False,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    bars: Bars | None = None,
) -> Salvaged:
    """Copy all messages of a damaged store that can be read without errors into a new store.

    The damaged store is not changed, but no other process may have it open. ``to_json()`` of the
    result is the document that ``logquarry salvage --json`` prints (docs/json.md).

    Args:
        path: folder or URL of the damaged store.
        into: the folder of the new store, empty or missing. If ``into`` is None, nothing is
            written, and the result shows which messages can be saved.
        include_stale: whether to also save valid frames after the log's end, which an earlier
            truncation left there. Such frames become the last messages of the new log.
        config: settings of the store; missing sizes are inferred from the files.
        storage_options: options of the file system, for a URL.
        bars: a function that is called with the name of each part of the work. The function must
            return a context manager for this part. The ``__enter__`` of the context manager must
            return a function, which salvage calls with this part's progress.

    Returns:
        The result. Its ``plan`` contains the saved messages and the losses. ``is_whole`` is true if
        the new store has all messages and all other files.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: if the new store cannot hold the store's queues.
        StoreUnavailable: if a process has the store open, or the disk fails or is full.
        CorruptStore: if queue offsets are invalid and cannot be corrected, if the store changes
            during the call, or if the disk no longer returns a part of the log that it returned
            before.
        UsageError: if an argument is invalid, or the folder is not empty or lies within the store.
    """
    arguments.optional(arguments.path, into, "into")
    target = None if into is None else local_folder(into)
    arguments.flag(include_stale, "include_stale")
    arguments.optional(arguments.function, bars, "bars")
    layout = StoreLayout.open(path, config, storage_options)
    return salvage_store(layout, target, include_stale=include_stale, bars=bars)


def salvage_store(
    layout: StoreLayout,
    into: Path | None = None,
    *,
    include_stale: bool = False,
    disk: Disk | None = None,
    bars: Bars | None = None,
) -> Salvaged:
    """See :func:`salvage`."""
    began = time.monotonic()
    bars = bars or (lambda _: nullcontext())
    if layout.is_live():
        reason = unread_lock(Path(layout.root) / LOCK) or OPEN
        raise StoreUnavailable(f"{layout.root}: {reason}")
    layout = layout.by_content()
    # Do not stop at a file whose inode cannot be read: salvage the other files.
    layout.filesystem.lost_names = {}
    require(layout, Action.SALVAGE)
    check_file_size(layout)
    if into is not None:
        check_target(layout, into)
    with bars("reading") as progress:
        plan = plan_salvage(layout, include_stale=include_stale, progress=progress)
    found = Salvaged(plan)
    found.carried, found.left_behind = _other_files(layout, plan.config.queue_file_size)
    found.progress, documents = _config(layout, plan)
    # Do not copy the files of a feature that is left behind, for example tieredStoreMetadata.json:
    # the new store would seem to have the feature.
    for path in (path for one in found.left_behind for path in one.paths):
        documents.pop(path, None)
    found.left_behind += _unreadable_files(layout, ())
    found.left_behind += _invalid_files(layout, found.carried)
    found.left_behind += [
        LeftBehind("misnamed_file", (path,), reason) for path, reason in layout.log_names.doubts
    ]
    # Do not copy timercheck: _make_timer_files writes a new one for the new timer wheel.
    documents.pop(TIMER_CHECK, None)
    found.files = sorted(path for path in documents if path.startswith(f"{CONFIG}/"))
    if into is None:
        found.timers = len(timers_of(layout).due())
    else:
        found.into = str(into)
        target = SalvageTarget(into, disk or Disk())
        with target.begun():
            with none_lost(layout.root):
                with bars("copying") as progress:
                    LogWriter(layout, plan, target.disk, target.work).write(progress)
                with bars("building queues and index") as progress:
                    target.build(plan, progress)
                for path, data in documents.items():
                    target.disk.replace(target.work / path, data)
                for path in found.carried:
                    carry(layout, path, target.disk, target.work)
                found.timers = _make_timer_files(layout, plan.config, target.disk, target.work)
                known = {one.paths for one in found.left_behind}
                found.left_behind += [
                    one
                    for one in _unreadable_files(layout, found.carried)
                    if one.paths not in known
                ]
            found.seconds = time.monotonic() - began
            target.finish(found.to_json())
    found.seconds = time.monotonic() - began
    return found


# ------------------------------------------------------------------------------------ other files
def _other_files(
    layout: StoreLayout, queue_file_size: int | None
) -> tuple[list[str], list[LeftBehind]]:
    """Return the files besides log, queues, index and ``config/*``: first the copied files, then
    the files that are left behind.
    """
    found = find_features(layout)
    is_read = tables_in_rocksdb(layout.filesystem) is not None
    carried: list[str] = []
    left: list[LeftBehind] = []
    for one in found.features:
        name, paths = one.name, one.evidence
        if name == names.UNKNOWN:
            # Files and folders of ``config/`` are copied, even if no known version writes them.
            paths = tuple(path for path in paths if not path.startswith(f"{CONFIG}/"))
        if paths and name in _LOST and not (is_read and name == names.ROCKSDB_CONFIG):
            reason = f"{one.detail}: {_LOST[name].format(queue_file_size)}"
            left.append(LeftBehind(name, paths, reason))
    if layout.filesystem.list(KV_STORE):
        carried.append(KV_STORE)
    if found.get(names.COMPACTION) is not None and layout.filesystem.list(COMPACTED):
        carried.append(COMPACTED)
    # Do not copy these folders of RocksDB. Salvage writes their contents as JSON files, and a
    # broker would ignore the JSON files if it found RocksDB.
    in_json = frozenset(CONFIG_FOLDERS if is_read else ())
    for entry in layout.filesystem.list(CONFIG):
        if entry.is_dir and entry.name not in in_json:
            carried.append(f"{CONFIG}/{entry.name}")
    left += [
        LeftBehind(UNREADABLE, (path,), f"it {wrong}")
        for path, wrong in _wrong_entries(layout, carried)
    ]
    return carried, left


def _wrong_entries(layout: StoreLayout, carried: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pipes, broken links and other names that cannot be copied, each with the reason."""
    files = layout.filesystem
    for name in sorted(
        {entry.name for entry in files.list(CONFIG)} | {*files.broken_links(CONFIG)}
    ):
        if wrong := files.why_no_file(f"{CONFIG}/{name}"):
            yield f"{CONFIG}/{name}", wrong
    for folder in carried:
        for one in below(files, folder):
            if one.wrong is not None:
                yield one.path, one.wrong


def _unreadable_files(layout: StoreLayout, copied: Iterable[str]) -> Iterator[LeftBehind]:
    """Yield the files that the disk cannot read, and what the salvage does with them."""
    for path, why in sorted((layout.filesystem.lost_names or {}).items()):
        yield LeftBehind(UNREADABLE, (path,), f"it cannot be read: {why}")
    known = tuple(copied)
    for path, ranges in sorted(layout.filesystem.unreadable.items()):
        is_copied = any(path == name or path.startswith(f"{name}/") for name in known)
        if not ranges or not (is_copied or path.startswith(f"{CONFIG}/")):
            continue
        what = "copied with the bytes FF in their place" if is_copied else "the file is left out"
        length = sum(one.length for one in ranges)
        reason = f"{counted(length, 'byte')} from {ranges[0].offset} on {ranges[0].reason}: {what}"
        yield LeftBehind(UNREADABLE, (path,), reason)


def _invalid_files(layout: StoreLayout, carried: Iterable[str]) -> list[LeftBehind]:
    """Return the copied files and databases that verify reports as damage. A broker may not start
    with them, or may lose topics or consumer offsets.
    """
    report = VerifyReport(layout.root)
    check_config(layout, report)
    if KV_STORE in carried:
        check_databases(layout, report, is_live=False)
    return [
        LeftBehind(one.kind, (one.file,), f"it is invalid, and is copied unchanged: {one.reason}")
        for one in report.findings
        if one.severity == "damage" and one.file.startswith((CONFIG, KV_STORE))
    ]


def _make_timer_files(layout: StoreLayout, config: StoreConfig, disk: Disk, root: Path) -> int:
    """Write timer wheel, timer log and ``timercheck`` of the new store ``root``, whose log and
    queues are complete. Return how many messages wait in the wheel.
    """
    new = StoreLayout.open(root, config)
    if (timer.TOPIC, QUEUE_ID) not in new.queue_names:
        return 0
    check = check_or_none(layout)
    found = timers_of(new, check)
    write_timer_files(
        *(disk, root, found, now_ms()),
        file_size=timer_log_file_size(layout),
        precision_ms=precision(layout, check.read_time),
    )
    return len(found.due())


# ----------------------------------------------------------------------------------------- config
def _config(layout: StoreLayout, plan: SalvagePlan) -> tuple[list[MovedProgress], dict[str, bytes]]:
    documents: dict[str, bytes] = {}
    for entry in layout.filesystem.list(CONFIG):
        if not entry.is_dir:
            path = f"{CONFIG}/{entry.name}"
            # Skip pipes and devices, which cannot be read, and files that are deleted meanwhile.
            with suppress(UnreadableFile, FileNotFoundError):
                documents[path] = layout.filesystem.read(path)
    for file, table in (tables_in_rocksdb(layout.filesystem) or {}).items():
        documents[f"{CONFIG}/{file}"] = table
    topics = f"{CONFIG}/{broker_json.TOPICS_FILE}"
    if topics not in documents:
        # Without this file, a broker serves no topic of the new store.
        documents[topics] = broker_json.encode_topics(
            topics_of(plan.queues), batch_topics=plan.config.batch_topics
        ).encode()
    path = f"{CONFIG}/{broker_json.CONSUMER_OFFSET_FILE}"
    if path not in documents:
        return [], documents
    try:
        offsets = broker_json.decode_consumer_offsets(documents[path])
    except (ValueError, TypeError, RecursionError):
        return [], documents
    moved = _moved_progress(layout, plan, offsets)
    if moved:
        documents[f"{SIDECAR}/{ORIGINALS}/{broker_json.CONSUMER_OFFSET_FILE}"] = documents[path]
        for one in moved:
            offsets[one.topic, one.group][one.queue_id] = one.now
        text = broker_json.replace_member(
            documents[path].decode(),
            broker_json.OFFSET_TABLE,
            broker_json.encode_consumer_offsets(offsets),
        )
        documents[path] = text.encode()
    return moved, documents


def _moved_progress(
    layout: StoreLayout,
    plan: SalvagePlan,
    offsets: dict[tuple[str, str], dict[int, int]],
) -> list[MovedProgress]:
    """Return the consumer offsets that are after their queue's end in the new store. With such an
    offset, a broker would deliver all messages of the queue again, or skip new messages.
    """
    had = {queue.key: queue.max_offset for queue in all_queues(layout)}
    found: list[MovedProgress] = []
    for (topic, group), progress in offsets.items():
        for queue_id, was in progress.items():
            key = topic, queue_id
            story = plan.queues.get(key)
            end = 0 if story is None else story.next
            if end < was <= had.get(key, 0):
                found.append(MovedProgress(topic, queue_id, group, was, end))
    return found


def convert(
    layout: StoreLayout,
    into: Path | None = None,
    *,
    bars: Bars | None = None,
) -> Salvaged:
    """Copy a store with a DLedger log, or with a log in several folders, into a new store with its
    log in ``commitlog/``.

    A broker of RocketMQ 4.9 or 5 can serve the new store. The head before each frame of a DLedger
    log is not copied, so the messages get new physical offsets. The queue offsets do not change.
    ``into`` must be empty or missing; None writes nothing.

    Raises:
        UsageError: if the log is in ``commitlog/``, or the folder is not empty or lies within the
            store.
        UnsupportedStore: if a folder of the log is not found, or the store has several logs.
        StoreUnavailable: if a process has the store open, or the disk fails or is full.
    """
    if layout.log_folders.feature is None and layout.commit_log.files:
        raise UsageError(
            f"{layout.root}: its log is in commitlog/ already: a broker can use the store as it "
            f"is. To copy its sound messages: `logquarry salvage {layout.root} --into DIR`"
        )
    require_log(layout)
    uncommitted = _uncommitted(layout)
    found = salvage_store(layout, into, bars=bars)
    found.uncommitted = uncommitted
    return found


def _uncommitted(layout: StoreLayout) -> int:
    """Return how many messages a DLedger group had not committed; 0 if unknown."""
    folders = layout.log_folders
    if not folders.has_heads:
        return 0
    # The setting storePathDLedgerCommitLog changes the folder of the log, but not the folder of the
    # member's other files.
    member = folders.paths[0].partition("/")[0]
    if not member.startswith(DLEDGER_FOLDER):
        names = (entry.name for entry in layout.filesystem.list("") if entry.is_dir)
        member = next((name for name in names if name.startswith(DLEDGER_FOLDER)), member)
    try:
        text = layout.filesystem.read(f"{member}/checkpoint").decode("ascii", "replace")
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        committed = int(values["committedIndex"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0
    last = _last_index(layout)
    return 0 if last is None else max(0, last - committed)


def _last_index(layout: StoreLayout) -> int | None:
    last = None
    for file in layout.commit_log.files[-2:]:
        data, at = layout.open_file(file.path).window(0, file.size), 0
        while has_entry_head_reference(data, at, base=file.base, left=file.size - at):
            head = ENTRY_HEAD.struct.unpack_from(data, at)
            last, at = int(head[2]), at + int(head[1])
    return last
