"""Topics that an administrator deleted: the log still has their messages, but no queue has them."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from logquarry.errors import CorruptFile, UsageError
from logquarry.format import broker_json
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import read_config
from logquarry.write.queue_table import is_listed


class DeletedTopics:
    """The topics that ``config/topics.json`` no longer lists.

    A broker adds a topic to the file before the topic's first message, removes a deleted topic, and
    writes the time of each change (``DataVersion``). So a topic was deleted if the file was changed
    after one of the topic's messages was stored, and does not list the topic.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout

    def has(self, topic: str, stored: int) -> bool:
        """Whether a topic was deleted; ``stored`` is the store time of one of its messages."""
        topics, changed = self._topics
        return changed > stored and topic not in topics and is_listed(topic)

    @cached_property
    def _topics(self) -> tuple[Collection[str], int]:
        """The listed topics, and the time of the last change in milliseconds; 0 if unknown."""
        try:
            text = read_config(self._layout.filesystem, broker_json.TOPICS_FILE)
            document = broker_json.decode_topic_document(text)
            changed = broker_json.whole(
                document[broker_json.DATA_VERSION]["timestamp"], "timestamp"
            )
            return document["topicConfigTable"], changed
        except (FileNotFoundError, CorruptFile, UsageError, ValueError, TypeError, KeyError):
            # The check of the configuration files reports an invalid file.
            return (), 0
