"""Counts of what a broker has done, in a limited amount of memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key")


@dataclass(slots=True)
class Counts:
    """Counts since the broker's start, for metrics and mqadmin.

    - ``put`` and ``put_bytes``: messages that were put, and the bytes of their frames, by topic.
    - ``got`` and ``got_bytes``: messages that were sent to consumers, and the bytes of their
      frames, by topic and group.
    - ``sent_back``: messages that consumers sent back, by topic and group.
    - ``requests``: requests, by code.
    - ``refused``: sends that the broker answered with SYSTEM_BUSY.

    A count stays even if its topic or group is deleted. Clients can cause any number of pairs of a
    topic and a group, so each of these counts has at most ``most`` keys (``most_counts``). After
    that, new keys are counted together, under empty names (for ``requests``, under the code -1).
    """

    most: int

    put: Counter[str] = field(default_factory=Counter)
    put_bytes: Counter[str] = field(default_factory=Counter)
    got: Counter[tuple[str, str]] = field(default_factory=Counter)
    got_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent_back: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)
    refused: int = 0

    def add_put(self, topic: str, messages: int, size: int) -> None:
        """Count messages that were put into a topic."""
        key = self._known(self.put, topic, "")
        self.put[key] += messages
        self.put_bytes[key] += size

    def add_got(self, topic: str, group: str, messages: int, size: int) -> None:
        """Count messages of a topic that were sent to consumers of a group."""
        key = self._known(self.got, (topic, group), ("", ""))
        self.got[key] += messages
        self.got_bytes[key] += size

    def add_sent_back(self, topic: str, group: str) -> None:
        """Count a message of a topic that a consumer of a group sent back."""
        self.sent_back[self._known(self.sent_back, (topic, group), ("", ""))] += 1

    def add_request(self, code: int) -> None:
        """Count a request."""
        self.requests[self._known(self.requests, code, -1)] += 1

    def _known(self, counts: Counter[_Key], key: _Key, others: _Key) -> _Key:
        return key if key in counts or len(counts) < self.most else others
