"""The consumers of one group in one process, and the assignment of queues to them.

The assignment of queues follows RocketMQ's ``AllocateMessageQueueAveragely``.

A member claims only free queues, and the previous owner releases a queue between two messages. So
no two consumers handle the same message, and the next owner starts after the last handled
message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from logquarry.read.log_queues import QueueKey


def allocate(queue_ids: Sequence[int], count: int, number: int) -> Sequence[int]:
    """Return a member's part of the queues: two members' parts differ by at most one queue."""
    each, rest = divmod(len(queue_ids), count)
    start = number * each + min(number, rest)
    return queue_ids[start : start + each + (number < rest)]


class Member(Protocol):
    """The interface that a group requires of a consumer."""

    @property
    def topics(self) -> Sequence[str]:
        """The topics that the member consumes."""

    def disturb(self) -> None:
        """Make the consumer check, after the current message, which queues it has. Thread-safe."""


class ConsumerGroup:
    """The members of one group. Thread-safe. ``version`` increases at each new assignment."""

    def __init__(
        self, name: str, queue_ids: Callable[[str], Sequence[int]], wake: Callable[[], None]
    ) -> None:
        self.name = name
        self.version = 0
        self._queue_ids = queue_ids
        self._wake = wake
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._owners: dict[QueueKey, Member] = {}

    def join(self, member: Member) -> None:
        """Add a member."""
        with self._lock:
            self._members = [*self._members, member]
        self.share_out()

    def leave(self, member: Member) -> None:
        """Remove a member, and release the member's queues."""
        with self._lock:
            self._members = [other for other in self._members if other is not member]
            self._owners = {key: who for key, who in self._owners.items() if who is not member}
        self.share_out()

    def share_out(self) -> None:
        """Make all members check which queues are assigned to them."""
        with self._lock:
            self.version += 1
            members = self._members
        for member in members:
            member.disturb()
        self._wake()

    def share_of(self, member: Member) -> set[QueueKey]:
        """Return the queues assigned to a member, even if other members still own some of them."""
        members = self._members
        share: set[QueueKey] = set()
        for topic in member.topics:
            others = [other for other in members if topic in other.topics]
            if member in others:
                ids = allocate(self._queue_ids(topic), len(others), others.index(member))
                share |= {(topic, queue_id) for queue_id in ids}
        return share

    def release(self, member: Member, keys: set[QueueKey]) -> None:
        """Give up queues, so that others can claim them. The caller has committed its messages."""
        with self._lock:
            for key in keys:
                if self._owners.get(key) is member:
                    del self._owners[key]
            self.version += 1
        self._wake()

    def claim(self, member: Member, keys: set[QueueKey]) -> set[QueueKey]:
        """Claim queues that are free or that the member already owns; return these queues."""
        with self._lock:
            if member not in self._members:
                return set()
            free = {key for key in keys if self._owners.get(key, member) is member}
            self._owners |= dict.fromkeys(free, member)
            return free
