"""Warns of a topic in a filter that no store knows: such a read finds nothing, without an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from logquarry.log.filters import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import BATCH_QUEUE, CONSUME_QUEUE
from logquarry.read.compaction import compacted_topics
from logquarry.read.rocksdb_queue import open_queues, rocksdb_folders
from logquarry.text import listed, nearest, plural, printable

logger = logging.getLogger(__name__)

_Source = Callable[[StoreLayout], set[str] | None]
_NEAR: Final = 0.4
"""Least similarity of a name that the warning suggests."""
_MOST_NAMES: Final = 5


def warn_of_unknown_topics(layouts: Sequence[StoreLayout], wanted: MessageFilter) -> None:
    """Log a warning for each wanted topic that none of the stores knows, and for a bad pattern.

    A topic is known if it has queues, or the configuration names it. If any of the stores cannot
    list its topics, there is no warning. Messages that are not yet in a queue may be of any topic:
    so this is no error.

    Args:
        layouts: the stores' files.
        wanted: the filter of the read.
    """
    if wanted.topics is None and wanted.topic_pattern is None:
        return
    found: set[str] = set()
    # The cheapest source comes first: each plan reads the queues' names, which usually have all
    # topics. RocksDB takes longest to open.
    sources: tuple[_Source, ...] = (_with_queues, _configured, _in_rocksdb)
    for names in sources:
        for layout in layouts:
            others = names(layout)
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
    return sorted((wanted.topics or frozenset()) - found)


def _with_queues(layout: StoreLayout) -> set[str]:
    return {topic for topic, _ in (*layout.queue_names, *layout.batch_queue_names)}


def _configured(layout: StoreLayout) -> set[str]:
    """The topics of the configuration, of compaction, and of queue folders that are new."""
    folders = {
        entry.name
        for parent in (CONSUME_QUEUE, BATCH_QUEUE)
        for entry in layout.filesystem.list(parent)
        if entry.is_dir
    }
    return folders | compacted_topics(layout) | layout.read_topics().keys()


def _in_rocksdb(layout: StoreLayout) -> set[str] | None:
    """The topics with queues in RocksDB; None if they cannot be listed."""
    if not rocksdb_folders(layout):
        return set()
    database = open_queues(layout)
    return None if database is None else {topic for topic, _ in database.bounds}


def _nearest(topic: str, found: Iterable[str]) -> str:
    near = nearest(topic, sorted(found), _NEAR)
    return _some(found) if near is None else f" (did you mean {near!r}?)"


def _some(found: Iterable[str]) -> str:
    return f"; there are: {listed([*map(printable, sorted(found))], _MOST_NAMES)}"
