"""Reads many messages in physical order, as objects (``scan``) or as Arrow batches
(``to_arrow``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from logquarry import arguments
from logquarry.log import batches, schema
from logquarry.log.batches import DamageLog, MessageFilter, OnDamage, names, tag_expression
from logquarry.log.columns import Decoding
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import BATCH_QUEUE, CONSUME_QUEUE
from logquarry.log.walk import Run
from logquarry.read.compaction import compacted_topics
from logquarry.read.rocksdb_queue import open_queues, rocksdb_folders
from logquarry.read.selection import Selection, plan_read, read_in_order
from logquarry.read.store_sizes import require_log
from logquarry.text import listed, nearest, plural, printable

if TYPE_CHECKING:
    from logquarry.stored_message import StoredMessage


def message_filter(
    topics: str | Iterable[str] | None,
    queue_id: int | None,
    tags: str | None,
    keys: str | Iterable[str] | None,
    since: int | str | date | None,
    until: int | str | date | None,
) -> MessageFilter:
    """Make a filter from the arguments of ``scan``. Raises UsageError for an invalid argument."""
    since_ms, until_ms = arguments.time_range(since, until)
    return MessageFilter(
        topics=names(arguments.optional(arguments.names, topics, "topics"), "topics"),
        queue_ids=None if queue_id is None else frozenset({arguments.int32(queue_id, "queue_id")}),
        tags=tag_expression(arguments.optional(arguments.text, tags, "tags")),
        keys=names(arguments.optional(arguments.names, keys, "keys"), "keys"),
        since_ms=since_ms,
        until_ms=until_ms,
    )


def runs(
    layout: StoreLayout,
    wanted: MessageFilter,
    on_damage: OnDamage,
    damage: DamageLog | None,
    *,
    check_crc: bool = True,
    stop_offset: int | None = None,
) -> Iterator[Run]:
    """Yield runs of frames in physical order. The runs contain every message before ``stop_offset``
    that can pass the filter. The caller must still apply the filter.
    """
    batches.check_policy(on_damage)
    if damage is not None:
        arguments.instance(damage, "damage", batches.DamageLog, "a DamageLog")
    require_log(layout)
    selection = Selection(wanted=wanted, stop_offset=stop_offset)
    plan = plan_read(layout, selection, skip_damage=on_damage == "skip")
    events = read_in_order(layout, plan, check_crc=check_crc)
    return batches.message_runs(events, on_damage, damage, limit=layout.config.decompress_limit)


def messages(
    layout: StoreLayout,
    broker: str,
    wanted: MessageFilter,
    on_damage: OnDamage = "default",
    damage: DamageLog | None = None,
    *,
    stop_offset: int | None = None,
) -> Iterator[StoredMessage]:
    """Yield the messages that pass a filter, in physical order."""
    decoding = Decoding(broker=broker, delay_levels_ms=layout.delay_levels_ms)
    found = runs(layout, wanted, on_damage, damage, stop_offset=stop_offset)
    return batches.messages(found, decoding, wanted)


def arrow_reader(
    layout: StoreLayout,
    broker: str,
    wanted: MessageFilter,
    *,
    columns: Sequence[str] | None = None,
    on_damage: OnDamage = "default",
    damage: DamageLog | None = None,
    decompress: bool = False,
    stop_offset: int | None = None,
) -> pa.RecordBatchReader:
    """Return a reader for the messages that pass a filter, as record batches. A batch is read from
    the store when the caller requests it.
    """
    arguments.flag(decompress, "decompress")
    chosen = schema.NAMES
    if columns is not None:
        chosen = schema.check_names(arguments.names(columns, "columns"))
    decoding = Decoding(
        columns=chosen,
        broker=broker,
        delay_levels_ms=layout.delay_levels_ms,
        decompress=decompress,
        decompress_limit=layout.config.decompress_limit,
        on_bad_body=batches.BadBodies(layout, on_damage, damage),
    )
    has_body = "body" in chosen
    found = runs(layout, wanted, on_damage, damage, check_crc=has_body, stop_offset=stop_offset)
    return pa.RecordBatchReader.from_batches(
        schema.arrow_schema(chosen), batches.record_batches(found, decoding, wanted)
    )


logger = logging.getLogger(__name__)

_NEAR: Final = 0.4
_MOST_NAMES: Final = 5


def warn_of_unknown_topics(layouts: Sequence[StoreLayout], wanted: MessageFilter) -> None:
    """Log a warning for each topic in the filter that no store has, and for a topic pattern that no
    topic matches. Also check the topics of queue ranges, because the read ignores a range whose
    topic is misspelled.

    There is no warning if the topics of a store cannot be listed. An unknown topic is no error,
    because the log may have messages of the topic that were not dispatched to a queue yet.
    """
    if wanted.topics is None and wanted.topic_pattern is None and not wanted.queue_ranges:
        return
    found: set[str] = set()
    # Try the cheapest source first. The names of queues are cached, but opening RocksDB is slow.
    for source in (_with_queues, _configured, _in_rocksdb):
        for layout in layouts:
            others = source(layout)
            if others is None:
                return
            found |= others
        if not _missing(wanted, found) and any(map(wanted.takes_topic, found)):
            return
    if not found:
        return
    where = layouts[0].root if len(layouts) == 1 else plural(len(layouts), "store")
    for topic in _missing(wanted, found):
        logger.warning("%s: no queue has the topic %r%s", where, topic, _nearest(topic, found))
    if wanted.topic_pattern is not None and not any(map(wanted.takes_topic, found)):
        logger.warning(
            "%s: no topic matches the pattern %r%s", where, wanted.topic_pattern, _some(found)
        )


def _missing(wanted: MessageFilter, found: set[str]) -> list[str]:
    ranges = {topic for topic, _ in wanted.queue_ranges or ()}
    return sorted(((wanted.topics or frozenset()) | ranges) - found)


def _with_queues(layout: StoreLayout) -> set[str]:
    return {topic for topic, _ in (*layout.queue_names, *layout.batch_queue_names)}


def _configured(layout: StoreLayout) -> set[str]:
    """Return the topics that have a queue folder, and the topics in the broker's configuration. The
    function lists the folders again, because the cached list may be old.
    """
    folders = {
        entry.name
        for parent in (CONSUME_QUEUE, BATCH_QUEUE)
        for entry in layout.filesystem.list(parent)
        if entry.is_dir
    }
    return folders | compacted_topics(layout) | layout.read_topics().keys()


def _in_rocksdb(layout: StoreLayout) -> set[str] | None:
    if not rocksdb_folders(layout):
        return set()
    database = open_queues(layout)
    return None if database is None else {topic for topic, _ in database.bounds}


def _nearest(topic: str, found: Iterable[str]) -> str:
    near = nearest(topic, sorted(found), _NEAR)
    return _some(found) if near is None else f" (did you mean {near!r}?)"


def _some(found: Iterable[str]) -> str:
    return f"; there are: {listed([*map(printable, sorted(found))], _MOST_NAMES)}"
