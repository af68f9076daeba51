"""Infers settings from a store's files. These settings determine the sizes of files, and which
entries the queues and the index contain.

These sources are searched for a setting, in this order: the user's configuration, the files, the
settings recorded in the store (:mod:`logquarry.log.earlier_writers`), RocketMQ's default.

If the files contradict the configuration, the store is refused. With wrong sizes, reads would miss
messages, and writes would destroy entries.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import Any, Final

from logquarry import text
from logquarry.config import DEFAULT_COMMIT_LOG_FILE, DIALECTS, StoreConfig
from logquarry.errors import UsageError
from logquarry.format import batch, frame, index, java, queue_entry
from logquarry.format.arrays import REACHED_STOP
from logquarry.format.frame import Frame
from logquarry.log import codec
from logquarry.log.earlier_writers import levels_text
from logquarry.log.layout import StoreLayout
from logquarry.log.log_place import setting
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import (
    CONSUME_QUEUE,
    INDEX,
    FileSequence,
    StoreFile,
    fits_files,
    shown_sizes,
    size_of,
)
from logquarry.log.walk import BlankSpan, LogReader
from logquarry.read.batch_queue import BatchQueue, all_queues
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import other_queues
from logquarry.read.index import Index, has_index_tags
from logquarry.read.index_file import kept_shape, likely_shape
from logquarry.read.log_end import LastEntries, last_entries
from logquarry.read.log_queues import LMQ_PREFIX
from logquarry.read.queue import ConsumeQueue

logger = logging.getLogger(__name__)
_LEAST_LOG_FILE: Final = frame.FIXED_SIZE_V1 + 1 + frame.BLANK.size
"""Minimum size of a log file, in bytes: a message with a topic of one byte, and the blank for which
a writer reserves the file's last bytes.
"""
_MOST_QUEUES: Final = 256
"""Maximum number of queues whose last entry is read. There is a limit, because with LMQ (light
message queues) a store can have very many queues.
"""


def with_entry_rules(
    layout: StoreLayout, files: OpenFiles | None = None, lasts: LastEntries | None = None
) -> StoreLayout:
    """Return the layout, completed with the settings that determine which entries queues and index
    contain.

    ``enable_multi_dispatch`` stays None if neither the files nor the recorded settings show it.
    """
    config, kept = layout.config, layout.kept_settings
    files = files or OpenFiles(layout)
    found: dict[str, Any] = {}
    if config.dialect is None:
        dialect = kept.get("dialect") or DIALECTS[1 if layout.has_state_table else 0]
        try:
            config = config.in_dialect(dialect)
        except UsageError:
            # The configuration has a setting that RocketMQ 3.1 does not have, so the broker's
            # version is 4.x or later.
            config = config.in_dialect(DIALECTS[0])
    if config.index_tags is None:
        found["index_tags"] = has_index_tags(layout, files)
    if not config.is_3_1:
        found |= _multi_dispatch(layout, files, lasts or {})
        found["batch_topics"] = config.batch_topics | other_queues(layout).batch
    return layout.with_config(dataclasses.replace(config, **found))


def _multi_dispatch(
    layout: StoreLayout, files: OpenFiles, lasts: LastEntries
) -> dict[str, bool | None]:
    config = layout.config
    is_on, has_lmq = config.enable_multi_dispatch, config.enable_lmq
    if is_on is not None and has_lmq is not None:
        return {}
    is_found, found_lmq = False, None
    if is_on is not False:
        is_found, found_lmq = _find_multi_dispatch(layout, files, lasts)
    if is_on is None:
        is_on = is_found or layout.kept_settings.get("enable_multi_dispatch")
    if has_lmq is None:
        has_lmq = found_lmq
    if has_lmq is None and config.enable_multi_dispatch is None:
        # Use the recorded setting. If none is recorded, LMQ is on if multi-dispatch is on. Else LMQ
        # stays unknown, and the names of queues decide later.
        has_lmq = layout.kept_settings.get("enable_lmq", True if is_on else None)
    return {"enable_multi_dispatch": is_on, "enable_lmq": has_lmq}


def with_sizes(
    config: StoreConfig,
    layout: StoreLayout | None,
    files: OpenFiles | None = None,
    lasts: LastEntries | None = None,
) -> StoreConfig:
    """Return the user's settings, completed with settings that a store's files show. Without a
    layout, they are completed with defaults.

    Raises UsageError if the files contradict the settings. Delay levels are completed too, because
    with wrong levels the times in the schedule queues would look wrong. If ``lasts`` is given, it
    must contain every queue of the store.
    """
    if layout is None:
        config = config.in_dialect(config.dialect or DIALECTS[0])
        config = dataclasses.replace(
            config,
            message_index_enable=config.message_index_enable is not False,
            enable_multi_dispatch=bool(config.enable_multi_dispatch),
            enable_lmq=bool(config.enable_lmq),
        )
        return _sized(config, {}, None, shape=config.index_shape)
    layout = layout.with_config(config)
    if lasts is None:
        queues, batch_queues = layout.queue_files(), layout.batch_queue_files()
    else:
        queues = [queue.listed for queue in lasts if isinstance(queue, ConsumeQueue)]
        batch_queues = [queue.listed for queue in lasts if isinstance(queue, BatchQueue)]
    require_own_settings(layout, queues)
    files = files or OpenFiles(layout)
    layout = with_entry_rules(layout, files, lasts)
    config = layout.config
    if layout.delay_levels_ms != config.delay_levels_ms:
        levels = levels_text(layout.delay_levels_ms)
        config = dataclasses.replace(config, message_delay_level=levels)
    if config.message_index_enable is None:
        is_on = layout.kept_settings.get("message_index_enable")
        if is_on is None or layout.index_files:
            # If messageIndexEnable is false, RocketMQ creates no folder for the index.
            is_new = not layout.commit_log.files or not layout.queue_names
            is_on = INDEX in layout.folders or is_new
        config = dataclasses.replace(config, message_index_enable=is_on)
    kept = dict(layout.kept_settings)
    for name, sequences in (
        ("mapped_file_size_commit_log", [layout.commit_log.files]),
        ("mapped_file_size_consume_queue", [queue.files for queue in queues]),
        ("mapper_file_size_batch_consume_queue", [queue.files for queue in batch_queues]),
        ("tran_state_table_mapped_file_size", [layout.state_table.files]),
        ("tran_redo_log_mapped_file_size", [layout.redo_log.files]),
    ):
        if name in kept and not fits_files(kept[name], sequences):
            del kept[name]
    if config.mapped_file_size_commit_log is None and "mapped_file_size_commit_log" not in kept:
        log_size = _inferred_log_size(layout, lasts)
        config = dataclasses.replace(config, mapped_file_size_commit_log=log_size)
    queue_size = _common_size(queues, queue_entry.UNIT_SIZE)
    batch_size = _common_size(batch_queues, batch.ENTRY_SIZE)
    shape = config.index_shape or _shape_of(layout, files)
    return _sized(config, kept, layout, queue_size, batch_size, shape)


def _sized(
    config: StoreConfig,
    kept: dict[str, Any],
    layout: StoreLayout | None,
    queue_size: int = 0,
    batch_queue_size: int = 0,
    shape: index.IndexShape | None = None,
) -> StoreConfig:
    table_size = redo_size = 0
    if config.is_3_1 or (layout is not None and layout.has_state_table):
        table_size = kept.get(
            "tran_state_table_mapped_file_size",
            queue_entry.DEFAULT_STATES_PER_FILE * queue_entry.STATE_SIZE,
        )
        redo_size = kept.get(
            "tran_redo_log_mapped_file_size",
            queue_entry.DEFAULT_STATES_PER_FILE * queue_entry.UNIT_SIZE,
        )
    if layout is not None:
        table_size = layout.state_table.file_size if layout.state_table.files else table_size
        redo_size = layout.redo_log.file_size if layout.redo_log.files else redo_size
    shape = shape or index.DEFAULT_SHAPE
    return dataclasses.replace(
        config,
        mapped_file_size_commit_log=config.mapped_file_size_commit_log
        or kept.get("mapped_file_size_commit_log")
        or DEFAULT_COMMIT_LOG_FILE,
        mapped_file_size_consume_queue=config.queue_file_size
        or kept.get("mapped_file_size_consume_queue")
        or queue_size
        or queue_entry.DEFAULT_UNITS_PER_FILE * queue_entry.UNIT_SIZE,
        mapper_file_size_batch_consume_queue=config.batch_queue_file_size
        or kept.get("mapper_file_size_batch_consume_queue")
        or batch_queue_size
        or batch.DEFAULT_ENTRIES_PER_FILE * batch.ENTRY_SIZE,
        tran_state_table_mapped_file_size=config.state_table_file_size or table_size or None,
        tran_redo_log_mapped_file_size=config.redo_log_file_size or redo_size or None,
        max_hash_slot_num=shape.slots,
        max_index_num=shape.entries,
    )


def _inferred_log_size(layout: StoreLayout, lasts: LastEntries | None) -> int | None:
    """Return the size of log files that the files show; None if they show no size."""
    log = layout.commit_log
    if not log.files or (log.file_size and not _is_cut_short(layout, lasts)):
        return log.file_size or None
    # If there are several files here, each of them has 0 bytes.
    logger.warning(
        "%s: this log file has %s, and no file shows the size of log files: "
        "logquarry assumes mapped_file_size_commit_log=%d. If the broker has another size, give it "
        "in the configuration",
        layout.filesystem.full_path(log.files[0].path),
        text.counted(log.files[0].size, "byte"),
        DEFAULT_COMMIT_LOG_FILE,
    )
    return None


def _is_cut_short(layout: StoreLayout, lasts: LastEntries | None) -> bool:
    """Whether the log has only one file, and this file has lost its end.

    The last bytes of a complete log file are zeros, a blank, or old bytes after a blank. If the
    last bytes are neither zeros nor a blank, the file may have lost its end. The result is then
    true if two more conditions are met: a queue points to a message whose end is not in the file,
    and the file has no blank. A file with a blank is complete, and only later files are missing.
    """
    log = layout.commit_log
    if len(log.files) != 1 or log.has_heads:
        return False
    file = log.files[0]
    if file.size < _LEAST_LOG_FILE:
        return True
    stop = min(file.size, log.file_size) - frame.BLANK.size
    try:
        end = bytes(layout.open_file(file.path).window(stop, frame.BLANK.size))
    except FileNotFoundError:
        return False
    if not any(end) or end == frame.encode_blank(frame.BLANK.size):
        return False
    queues = None if lasts is None else list(lasts)
    furthest = next(iter(last_entries(layout, queues, lasts)), None)
    if furthest is None or furthest.end <= file.base + stop:
        return False
    # This walk over the file is rarely necessary, and reads no bodies.
    events = LogReader(layout, check_crc=False).events(file.base)
    return not any(isinstance(event, BlankSpan) for event in events)


def _common_size(queues: list[FileSequence], entry_size: int) -> int:
    """Return the most frequent size of queue files, because single files may be damaged; 0 if there
    is no file.
    """
    sizes = Counter(
        file.size
        for queue in queues
        for file in queue.files
        if 0 < file.size <= java.INT_MAX and file.size % entry_size == 0
    )
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def _shape_of(layout: StoreLayout, files: OpenFiles) -> index.IndexShape | None:
    for file in Index(layout, files=files).files:
        if file.shape is not None:
            return file.shape
    size = max((entry.size for entry in layout.index_files), default=0)
    kept = kept_shape(layout)
    if kept is not None or size <= index.HEADER.size:
        # Index files without entries, for example after a crash, do not show their shape. Use the
        # recorded shape.
        return kept
    shape = likely_shape(size)
    logger.warning(
        "%s: no file of its index has an entry that shows its sizes: max_hash_slot_num=%d and "
        "max_index_num=%d are assumed, as the files' size allows. If the broker has others, give "
        "them in the configuration",
        layout.root,
        shape.slots,
        shape.entries,
    )
    return shape


def require_own_settings(layout: StoreLayout, found: list[FileSequence] | None = None) -> None:
    """Raise UsageError if the files contradict a size in the configuration. ``found`` has the files
    of each consume queue (default: they are listed).
    """
    config = layout.config
    if config.mapped_file_size_commit_log is not None:
        require_stated_size(layout)
    if config.queue_file_size is not None:
        found = layout.queue_files() if found is None else found
        queues = [queue.files for queue in found]
        sizes = [file.size for files in queues for file in files if file.size]
        # If several files have the same size, and no file has another size, assume that this size
        # is right. If files had been truncated, their sizes would differ.
        shown = shown_sizes(queues) or (set(sizes) if sizes[1:] and len(set(sizes)) == 1 else set())
        if shown and config.queue_file_size not in shown:
            common = _common_size(found, queue_entry.UNIT_SIZE)
            raise UsageError(
                f"{layout.filesystem.full_path(CONSUME_QUEUE)}: its files have "
                f"{text.counted(common, 'byte')}, but "
                "mappedFileSizeConsumeQueue in the "
                f"configuration is {config.mapped_file_size_consume_queue}: leave the setting out"
            )
    stated = config.index_shape
    if stated is None or any(file.size == stated.file_size for file in layout.index_files):
        return
    plain = dataclasses.replace(config, max_hash_slot_num=None, max_index_num=None)
    for file in Index(layout.with_config(plain)).files:
        shape = file.shape
        # A crash may leave a file that is too short for all its entries. Such a file contradicts
        # the settings only if its number of slots differs.
        is_torn = (
            shape is not None
            and layout.has_abort
            and shape.slots == stated.slots
            and shape.entries < stated.entries
        )
        if shape is not None and shape != stated and not is_torn:
            raise UsageError(
                f"{layout.filesystem.full_path(file.path)}: it has "
                f"{text.counted(shape.slots, 'slot')} and room for "
                f"{text.counted(shape.entries, 'entry', 'entries')}, but the configuration gives "
                f"{stated.slots} (maxHashSlotNum) and {stated.entries} (maxIndexNum): leave both "
                "settings out"
            )


def require_stated_size(layout: StoreLayout) -> None:
    """Raise UsageError if the configured size of log files contradicts the files."""
    stated, files = layout.config.mapped_file_size_commit_log, layout.commit_log.files
    if stated is None or fits_files(stated, [files]):
        return
    if shown_sizes([files]) or any(
        message_behind(layout, file, stated) is not None for file in files
    ):
        raise UsageError(
            f"{layout.log_path(-1)}: its files have {text.counted(size_of(files), 'byte')}, "
            f"but mappedFileSizeCommitLog in the configuration is {stated}: leave the setting "
            "out"
        )


def message_behind(layout: StoreLayout, file: StoreFile, size: int) -> int | None:
    """Search a log file for a message that begins or ends after the file's first ``size`` bytes.
    Return its position in the file; None if there is no such message.
    """
    if file.size <= size:
        return None
    view = layout.open_file(file.path)
    stop = min(view.size, java.INT_MAX)
    data = view.window(0, stop)[:stop]
    window = codec.Window.of(data, file.base, stop)
    for start in (view.next_data(size), 0):
        position, code = codec.find_frame(window, start, stop, check_crc=True)
        end = position + int.from_bytes(data[position : position + 4], "big")
        if code == REACHED_STOP and end > size:
            return position
    return None


def require_log(layout: StoreLayout) -> None:
    """Raise UnsupportedStore if the log is missing or empty, although other files of the store show
    that it had messages.

    Also refuses a configuration with sizes that the files contradict (UsageError).
    """
    require_own_settings(layout)
    if any(file.size for file in layout.commit_log.files):
        return
    missing = layout.missing_log
    if missing is None:
        # The store is new, or a writer has just created the first log file. List the files again,
        # so that the file is found.
        layout.refresh()
    else:
        what = "the log's files are empty" if layout.commit_log.files else "the log has no files"
        known = _known(layout) or f"{missing.evidence[0]} knows of messages"
        reason = f"{what}, but {known}: is a disk not mounted?"
        path = setting(layout.config, "storePathCommitLog")
        reason = f"storePathCommitLog={path}: {reason}" if path else reason
        raise dataclasses.replace(missing, reason=reason).error(layout.root)


def _known(layout: StoreLayout) -> str:
    messages = 0
    starts, ends = [], []
    for queue in all_queues(layout):
        last, first = queue.last_entry, next(queue.entries(0), None)
        if last is None or first is None:
            continue
        messages += queue.max_offset - first[0]
        starts.append(first[1].physical_offset)
        ends.append(last.end)
    if not ends:
        return ""
    size = max(ends) - min(starts)
    return f"the queues point to {size:,} bytes ({text.plural(messages, 'message')})"


def _find_multi_dispatch(
    layout: StoreLayout, files: OpenFiles, lasts: LastEntries
) -> tuple[bool, bool | None]:
    """Find out from messages whether multi-dispatch fills any queue, and whether LMQ is on (None if
    unknown).

    With enableMultiDispatch, a frame lists the further queues of its message
    (INNER_MULTI_DISPATCH). If LMQ is on, all queues whose topic is named ``%LMQ%...`` have the
    queue id 0.
    """
    if layout.other_log is not None or not layout.commit_log.files:
        return False, None
    log = CommitLog(layout, files=files)
    names = list(layout.queue_names)
    if len(names) > _MOST_QUEUES or any(topic.startswith(LMQ_PREFIX) for topic, _ in names):
        topics = layout.read_topics()
        # The number of reads is limited. So first read the queues that multi-dispatch usually
        # fills: LMQ queues, then queues of topics that are not in topics.json.
        names.sort(key=lambda key: (not key[0].startswith(LMQ_PREFIX), key[0] in topics))
    known = {queue.key: last for queue, last in lasts.items() if isinstance(queue, ConsumeQueue)}
    is_on = False
    for key in names[:_MOST_QUEUES]:
        topic, queue_id = key
        is_lmq = topic.startswith(LMQ_PREFIX)
        if is_on and not is_lmq:
            break
        entry = known[key] if key in known else ConsumeQueue(layout, *key, files=files).last_entry
        if entry is None or entry.is_filler:
            continue
        copied = log.outcome_at(entry.physical_offset, check_crc=False)
        if not isinstance(copied, Frame) or not copied.is_copied_to(topic):
            continue
        is_on = True
        if is_lmq and (queue_id or copied.queue_id):
            return True, not queue_id
    return is_on, None
