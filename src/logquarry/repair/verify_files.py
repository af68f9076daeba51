"""Checks the files of a store besides log and index, and the names of queue files.

Topic, queue id and queue offset of a message show in which queue file its entry belongs. If most
entries of a queue file belong in another file, the file was renamed, or two files were swapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final

from logquarry.dialect31.open_transactions import transaction_frames
from logquarry.dialect31.state_table import TransactionCheck
from logquarry.errors import CorruptFile, StoreNotFound, UnreadableFile, is_at_limit
from logquarry.format import broker_json, checkpoint, frame, properties, queue_entry
from logquarry.format.broker_json import CONFIG_TABLES
from logquarry.format.epochs import EPOCH_FILE, decode_epochs
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log import earlier_writers
from logquarry.log.earlier_writers import OFFSET_AT, ROCKSDB_STORE, harmed_offset
from logquarry.log.filesystem import FileView, LocalFileSystem, below
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import UNREADABLE
from logquarry.log.rocksdb import (
    RocksDb,
    is_installed,
    is_there,
    lost_files,
    place_of,
    read_config,
)
from logquarry.log.store_files import (
    CHECKPOINT,
    COMPACTED,
    CONFIG,
    CONSUME_QUEUE,
    DURABLE,
    INTENT,
    LOADS,
    NAME_DIGITS,
    REDO_LOG,
    SETTINGS,
    SIDECAR,
    STATE_TABLE,
    StoreFile,
)
from logquarry.log.walk import LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import holds_data
from logquarry.read.log_end import lost_tail
from logquarry.read.pops import KV_STORE
from logquarry.repair.audit.harmed_frames import HarmedType, corrected
from logquarry.repair.findings import VerifyReport
from logquarry.repair.recover.store_folders import wrong_entries

_PIECE: Final = 16 << 20
_LEFTOVERS: Final = (f"{SIDECAR}/rebuild",)
_MOST_ENTRIES: Final = 9
"""Maximum number of entries in a queue file whose frames are read to check the file's name."""
_LIVE_ATTEMPTS: Final = 3
_REMEDY: Final = "move it out of the store, or correct the link"
_MARK: Final = properties.INNER_MULTI_DISPATCH.encode()


def check_names(layout: StoreLayout, report: VerifyReport) -> None:
    """Report each path of a store file that is a folder, a pipe, a broken link, or a link to
    another file of the store.
    """
    if not isinstance(layout.filesystem, LocalFileSystem):
        return
    root = Path(layout.root)
    # Some paths are checked twice, for example the folder of the log.
    reasons = {error.path: error.reason for error in wrong_entries(root, layout.config)}
    for path, reason in reasons.items():
        name = path.relative_to(root) if path.is_relative_to(root) else path
        report.add("wrong_entry", str(name), 0, reason)


def check_checkpoint(
    layout: StoreLayout, report: VerifyReport, *, messages: int, last_time: int, is_live: bool
) -> None:
    """Compare the checkpoint with the log's last store time ``last_time`` (in milliseconds)."""
    try:
        found = layout.read_checkpoint()
    except UnreadableFile:
        return
    except ValueError as error:
        report.add("checkpoint_short", CHECKPOINT, 0, str(error))
        return
    if found is None:
        report.add("checkpoint_missing", CHECKPOINT, 0, "RocketMQ creates a new one")
        return
    offset = harmed_offset(layout.filesystem)
    if offset is not None:
        reason = f"{offset} is not the offset that a broker of 5.5 writes there"
        report.add("checkpoint_offset", CHECKPOINT, OFFSET_AT, reason, 8)
    if not any(found):
        if messages:
            reason = "all zeros: RocketMQ treats no message as flushed"
            report.add("checkpoint_zero", CHECKPOINT, 0, reason)
    elif max(found) > last_time:
        lost = None if is_live else lost_tail(layout, last_time)
        reason = f"its time is {max(found)}, but the last message was stored at {last_time}"
        # A power cut can lose messages that were dispatched, but not synced.
        is_crash = layout.has_abort and found.physic_timestamp <= last_time
        if lost is not None or messages:
            is_explained = lost is None or is_crash
            report.add("checkpoint_ahead", CHECKPOINT, 0, lost or reason, is_explained=is_explained)


def read_other_files(layout: StoreLayout, report: VerifyReport) -> None:
    """Read all files that no other check reads, to find unreadable blocks."""
    if not isinstance(layout.filesystem, LocalFileSystem):
        return
    for folder in (CONFIG, COMPACTED, ROCKSDB_STORE):
        try:
            names = list(below(layout.filesystem, folder))
        except StoreNotFound as error:
            if folder not in {one.file for one in report.findings}:
                _add_unopened(report, folder, error)
            continue
        for path, is_dir, wrong in names:
            # Skip hidden names: the store does not use them, and editors leave links and pipes with
            # such names.
            if wrong is not None and not PurePosixPath(path).name.startswith("."):
                report.add("wrong_entry", path, 0, f"it {wrong}: {_REMEDY}")
            if is_dir or wrong is not None:
                continue
            try:
                view = layout.filesystem.open(path)
            except FileNotFoundError:
                # A running broker has deleted the file after it was listed.
                continue
            except StoreNotFound as error:
                _add_unopened(report, path, error)
                continue
            position = 0
            while (position := view.next_data(position)) < view.size:
                view.fault(position, _PIECE)
                position += _PIECE


def _add_unopened(report: VerifyReport, path: str, error: StoreNotFound) -> None:
    if is_at_limit(error) or isinstance(error.__cause__, PermissionError):
        # Permissions and limits of this process show nothing about the store.
        raise error
    report.add(UNREADABLE, path, 0, str(error))


def check_config(layout: StoreLayout, report: VerifyReport) -> None:
    """Check that the files of ``config/``, or their tables in RocksDB, can be read."""
    decoders: dict[str, Callable[[bytes], object]] = {
        broker_json.CONSUMER_OFFSET_FILE: broker_json.decode_consumer_offsets,
        broker_json.DELAY_OFFSET_FILE: broker_json.decode_delay_offsets,
        broker_json.TOPICS_FILE: partial(broker_json.decode_topic_document, needs_version=False),
        broker_json.SUBSCRIPTION_GROUP_FILE: partial(
            broker_json.decode_subscription_group_document, needs_version=False
        ),
    }
    for file in CONFIG_TABLES if is_installed() else ():
        place = place_of(layout.filesystem, file)
        try:
            _ = place is None or decoders.get(file, bytes)(read_config(layout.filesystem, file))
        except (CorruptFile, ValueError, TypeError) as error:
            report.add("bad_config", place or CONFIG, 0, str(error))
    for entry in layout.filesystem.list(CONFIG):
        if entry.is_dir or not entry.name.endswith(".json"):
            continue
        path = f"{CONFIG}/{entry.name}"
        decode: Callable[[bytes], object] = decoders.get(entry.name, broker_json.decode)
        try:
            decode(layout.filesystem.read(path))
        except UnreadableFile:
            continue
        except (ValueError, TypeError, RecursionError) as error:
            report.add("bad_config", path, 0, str(error))
        except FileNotFoundError:
            continue


def check_epochs(layout: StoreLayout, report: VerifyReport) -> None:
    """Check the list of the controller's epochs, if there is one."""
    try:
        decode_epochs(layout.filesystem.read(EPOCH_FILE))
    except FileNotFoundError:
        if any(entry.is_dir for entry in layout.filesystem.list("") if entry.name == EPOCH_FILE):
            report.add("bad_epochs", EPOCH_FILE, 0, "it is a folder")
    except (UnreadableFile, ValueError) as error:
        # No other check reads this file.
        report.add("bad_epochs", EPOCH_FILE, 0, str(error))


def check_entry_files(layout: StoreLayout, report: VerifyReport) -> None:
    """Report each file of a DLedger log whose first entry shows that the file's name is wrong."""
    log = layout.commit_log
    if not log.has_heads or not log.files:
        return
    folder = PurePosixPath(log.files[0].path).parent
    files = {file.path: file.base for file in log.files}
    ignored = (path for path in layout.ignored if PurePosixPath(path).parent == folder)
    starts: dict[str, int] = {}
    for path in (*files, *ignored):
        try:
            base = _first_entry(layout.filesystem.open(path))
        except (OSError, StoreNotFound):
            # The check of unreadable files reports the error.
            continue
        if base is not None:
            starts[path] = base
    for path, base in starts.items():
        named, right = files.get(path, -1), f"{folder}/{base:0{NAME_DIGITS}d}"
        is_copy = starts.get(right) == base
        if base == named or (is_copy and named < 0):
            # The file's name is right. Or the file is a copy that has no log file's name: such a
            # copy does no harm.
            continue
        reason = f"its first entry begins at physical offset {base}"
        if is_copy:
            reason += f", but {right} has this entry too: move this file out of the store"
        elif right in files:
            reason += f": move the other file that has its right name, then rename it to {right}"
        else:
            reason += f": rename the file to {right}"
        report.add("misnamed_entries", path, max(named, 0), reason)


def _first_entry(view: FileView) -> int | None:
    """Return the physical offset of the entry at the start of a DLedger file; None if no entry
    starts there, or if the head of the entry contradicts the entry's frame.
    """
    size = frame.ENTRY_HEAD.size + frame.HEAD.size
    data = bytes(view.head(size))
    if len(data) < size:
        return None
    base = frame.ENTRY_HEAD.values(data[: frame.ENTRY_HEAD.size])[4]
    fields = frame.HEAD.struct.unpack_from(data, frame.ENTRY_HEAD.size)
    is_entry = frame.has_entry_head_reference(memoryview(data), 0, base=base, left=view.size)
    is_frame = fields[1] in frame.MAGICS and fields[6] == base + frame.ENTRY_HEAD.size
    return base if is_entry and is_frame else None


def check_databases(layout: StoreLayout, report: VerifyReport, *, is_live: bool) -> None:
    """Read all records of the RocksDB folders of index, timers, transactions and pop records."""
    for folder in (ROCKSDB_STORE, KV_STORE):
        # A running broker replaces files while this function reads them. So repeat a failed check,
        # and report only the failure of the last attempt.
        for left in reversed(range(_LIVE_ATTEMPTS if is_live else 1)):
            try:
                _check_database(layout, folder, report)
                break
            except (CorruptFile, StoreNotFound) as error:
                if not left:
                    reason = error.reason if isinstance(error, CorruptFile) else str(error)
                    report.add("bad_rocksdb_store", folder, 0, reason)


def _check_database(layout: StoreLayout, folder: str, report: VerifyReport) -> None:
    if not is_there(layout.filesystem, folder):
        return
    lost = lost_files(layout.filesystem, folder)
    if lost is not None:
        raise CorruptFile(folder, 0, str(lost))
    if is_installed():
        database = RocksDb(layout.filesystem, folder)
        for family in database.families:
            for _ in database.items(family):
                pass
    elif any(holds_data(entry) for entry in layout.filesystem.list(folder)):
        reason = "it was not read: pip install 'logquarry[rocksdb]'"
        report.add("bad_rocksdb_store", folder, 0, reason, is_explained=True)


def check_sidecar(
    layout: StoreLayout, report: VerifyReport, *, is_live: bool, last_sound: int
) -> None:
    """Check logquarry's own files: settings, durable offset, and leftovers."""
    files = layout.filesystem
    try:
        earlier_writers.decode(files.read(SETTINGS))
    except FileNotFoundError:
        pass
    except (OSError, StoreNotFound, ValueError, RecursionError) as error:
        report.add("bad_settings", SETTINGS, 0, str(error))
    for folder in _LEFTOVERS:
        for entry in files.list(folder):
            reason = "left by interrupted work; you can remove it"
            report.add("leftover", f"{folder}/{entry.name}", 0, reason)
    if files.exists(f"{LOADS}/{INTENT}") and not is_live:
        reason = "a load was interrupted; open the store for writing to finish it"
        report.add("unfinished_load", f"{LOADS}/{INTENT}", 0, reason)
    durable: earlier_writers.Durable | None = None
    try:
        mark = checkpoint.decode_mark(files.read(DURABLE))
        if mark is not None:
            # Another check reports a checkpoint that is missing, too short or unreadable.
            with suppress(FileNotFoundError, ValueError):
                durable = earlier_writers.require_durable(files)
    except (FileNotFoundError, UnreadableFile):
        return
    except (OSError, StoreNotFound) as error:
        report.add("durable_mark_invalid", DURABLE, 0, f"the durable offset is unknown: {error}")
        return
    if mark is None:
        reason = "its magic or its CRC is wrong: the durable offset is unknown"
        report.add("durable_mark_invalid", DURABLE, 0, reason)
        return
    if durable is None:
        reason = "it belongs to another checkpoint: the durable offset is unknown"
        report.add("durable_mark_foreign", DURABLE, 0, reason)
    elif mark.offset > last_sound and not is_live:
        reason = f"the durable offset is {mark.offset}, but the log ends at {last_sound}"
        report.add("durable_mark_ahead", DURABLE, 0, reason)


def check_transactions(
    layout: StoreLayout, end: int, report: VerifyReport, harmed_types: Mapping[int, HarmedType]
) -> None:
    """Compare the state table and the redo log of a store of 3.x with the log. ``harmed_types``
    has, by physical offset, the frames whose transaction type was changed by damage.

    After a crash, the tables usually differ from the log, so the findings are only notes.
    """
    check = TransactionCheck()
    # Include frames whose only damage is in the body, as a recovery does.
    for event in LogReader(layout, bound=end, check_crc=False).events():
        if isinstance(event, Run):
            frames = transaction_frames(event.window, event.rows)
            check.take(corrected(frames, harmed_types))
    faults = list(check.table_faults(layout))
    for kind, is_stale in (("state_table_wrong", False), ("state_table_stale", True)):
        reasons = [reason for reason, stale in faults if stale is is_stale]
        if reasons:
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            crashed = layout.has_abort
            report.add(kind, STATE_TABLE, 0, reasons[0] + more, is_explained=crashed)
    fault = check.redo_fault(layout)
    if fault is not None:
        report.add("redo_log_wrong", REDO_LOG, 0, fault, is_explained=layout.has_abort)


def misnamed_queue_files(layout: StoreLayout, files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Check the queues to which ``files`` belong; yield (path, reason) for each misnamed file."""
    log = CommitLog(layout)
    keys = {tuple(path.split("/")[1:3]) for path in files if path.startswith(f"{CONSUME_QUEUE}/")}
    found: dict[str, str] = {}
    for topic, queue_id in layout.queue_names:
        if (topic, str(queue_id)) not in keys:
            continue
        for file in layout.queue(topic, queue_id).files:
            right = _right_path(layout, log, file)
            if right is not None and right != file.path:
                found[file.path] = right
    for path, right in sorted(found.items()):
        reason = f"its entries belong in {right}"
        if found.get(right) == path:
            reason += ": the names of the two files look swapped"
        yield path, f"{reason}; `logquarry recover` makes the queue again from the log"


def _right_path(layout: StoreLayout, log: CommitLog, file: StoreFile) -> str | None:
    places = Counter(islice(_places(layout, log, file), _MOST_ENTRIES))
    if not places:
        return None
    (right, count), *_ = places.most_common(1)
    return right if 2 * count > places.total() else None


def _places(layout: StoreLayout, log: CommitLog, file: StoreFile) -> Iterator[str]:
    try:
        data = layout.open_file(file.path).window(0, file.size)[: file.size]
    except FileNotFoundError:
        return
    for position in range(0, len(data) - UNIT_SIZE + 1, UNIT_SIZE):
        entry = queue_entry.decode_at(data, position)
        if not entry.is_written:
            return
        if entry.is_filler:
            continue
        found = log.sound_frame_at(entry.physical_offset, check_crc=False)
        # If a frame has multi-dispatch copies, its fields do not show to which queue an entry
        # belongs: skip the frame.
        if found is None or _MARK in found.properties:
            continue
        base = found.queue_offset * UNIT_SIZE - position
        if base >= 0:
            topic = found.topic.decode("utf-8", "replace")
            yield f"{CONSUME_QUEUE}/{topic}/{found.queue_id}/{base:0{NAME_DIGITS}d}"
