"""Offsets that were lost with ``config/consumerOffset.json``: what can be known of them.

A group whose offsets are gone must not start anew as if it had never been: with ``latest`` it would
pass over messages, with ``earliest`` come upon all of them again. When the file was last written,
the group was about at the messages of that time; so it goes on a little before those. What stands
whole in a torn file is taken as it stands there.

That something was lost is told by a file that cannot be read (now, or set aside by an earlier
save), or by a group that the store knows of (it sent messages back, or the broker's list of groups
has it) while there is no file of offsets at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from logquarry.files.layout import CONFIG, quarantine
from logquarry.format import broker_config, java
from logquarry.store.consumer.subscription import dead_topic, retry_topic
from logquarry.store.disk.config_file import BACKUP

BEFORE_MS: Final = 10_000
"""How long before the last save an estimate begins: brokers save every 5 s."""

_ENTRY: Final = re.compile(r'"([^"\\@]+)@([^"\\]+)"\s*:\s*\{([0-9:,\s]*)\}')
_PAIR: Final = re.compile(r"\s*([0-9]{1,9})\s*:\s*([0-9]{1,18})\s*")


class OffsetEstimate(NamedTuple):
    """Where a group goes on in a queue, for want of the offset that it had committed.

    Attributes:
        topic: the queue's topic.
        queue_id: its number.
        offset: the queue offset.
        reason: where it comes from, in words.
    """

    topic: str
    queue_id: int
    offset: int
    reason: str


class LostOffsets:
    """What is left of the offsets of one store. Reads files, changes none.

    Args:
        root: the store's folder.
        has_offsets: whether a file of offsets could be read.
        topics: the topics that the store has.
    """

    def __init__(self, root: Path, *, has_offsets: bool, topics: Callable[[], set[str]]) -> None:
        config = root / CONFIG
        self._has_offsets = has_offsets
        self._topics = topics
        self._config = config
        name = broker_config.CONSUMER_OFFSET_FILE
        self._torn = [
            (path, text)
            for path in (config / name, config / f"{name}{BACKUP}")
            if (text := _torn_text(path)) is not None
        ]
        aside = quarantine(root, CONFIG)
        self._aside = sorted(aside.glob(f"{name}*")) if aside.is_dir() else []
        # As they are now: what is saved later says nothing of what was lost.
        self._saved_at = self._find_saved_at()

    @property
    def files(self) -> list[Path]:
        """The files that cannot be read, now or before they were set aside."""
        return [path for path, _ in self._torn] + self._aside

    def entries(self) -> Iterator[tuple[str, str, int, int, Path]]:
        """What stands whole in torn files: topic, group, queue id, offset, and the file."""
        for path, text in self._torn:
            for topic, group, pairs in _ENTRY.findall(text):
                for pair in pairs.split(","):
                    match = _PAIR.fullmatch(pair)
                    if match is not None:
                        yield topic, group, int(match[1]), int(match[2]), path

    def is_lost(self, group: str, topic: str, *, has_others: bool) -> bool:
        """Whether a group must have had offsets in a topic that are gone.

        Args:
            group: the group.
            topic: the topic.
            has_others: whether it has offsets in other topics.
        """
        if self._has_offsets and not self.files:
            return False
        texts = [text for _, text in self._torn]
        texts += [text for path in self._aside if (text := _text(path)) is not None]
        if any(f'"{topic}@{group}"' in text for text in texts):
            return True
        if has_others:
            return False
        if not {retry_topic(group), dead_topic(group)}.isdisjoint(self._topics()):
            return True
        if any(f'@{group}"' in text for text in texts):
            return True
        listed = _text(self._config / broker_config.SUBSCRIPTION_GROUP_FILE)
        return listed is not None and f'"{group}"' in listed

    @property
    def saved_at(self) -> tuple[int, Path] | None:
        """When offsets were last written before they were lost: milliseconds, and the file.

        That is a file of offsets, or where there is none left whatever was written last beside it.
        """
        return self._saved_at

    def _find_saved_at(self) -> tuple[int, Path] | None:
        paths = self.files
        if not paths and self._config.is_dir():
            paths = [path for path in self._config.iterdir() if path.is_file()]
        times = [(time, path) for path in paths if (time := _changed_at(path)) is not None]
        return max(times, default=None)


def _torn_text(path: Path) -> str | None:
    """The text of a file that is there and is no document."""
    try:
        broker_config.decode_consumer_offsets(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        return _text(path) or ""
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", java.UTF8_ERRORS)
    except OSError:
        return None


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except OSError:
        return None
