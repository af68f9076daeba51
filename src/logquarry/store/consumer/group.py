"""The assignment of queues to the consumers of a group (``AllocateMessageQueueAveragely``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from logquarry.read.log_queues import QueueKey


def allocate(queue_ids: Sequence[int], count: int, number: int) -> Sequence[int]:
    """The queues of one member: a range of ``queue_ids``.

    The ranges of two members differ by at most one queue in length.

    Args:
        queue_ids: the queues of a topic, sorted.
        count: number of members.
        number: number of this member, from 0.
    """
    each, rest = divmod(len(queue_ids), count)
    start = number * each + min(number, rest)
    return queue_ids[start : start + each + (number < rest)]


# --------------------------------------------------------------------------------------------------
# The consumers of one group in one process
#
# The assignment changes when a consumer joins or leaves, or a queue appears. A member claims only
# free queues: the previous owner releases a queue between two messages. So no two consumers have
# the same message, and the next owner knows which messages are handled.


class Member(Protocol):
    """The interface of a consumer for its group."""

    @property
    def topics(self) -> Sequence[str]:
        """The topics that it consumes."""

    def disturb(self) -> None:
        """Make it check its assignment after the current message. Callable from any thread."""


class ConsumerGroup:
    """The members of one group.

    Args:
        name: the group's name.
        queue_ids: gives the queues of a topic.
        wake: wakes consumers that wait.

    Attributes:
        version: changes whenever the assignment may have changed.
    """

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

    @property
    def members(self) -> tuple[Member, ...]:
        """Its consumers, the oldest first."""
        return tuple(self._members)

    def owner(self, topic: str, queue_id: int) -> Member | None:
        """The owner of a queue, None if it is free."""
        return self._owners.get((topic, queue_id))

    def join(self, member: Member) -> None:
        """Add a member."""
        with self._lock:
            self._members = [*self._members, member]
        self.share_out()

    def leave(self, member: Member) -> None:
        """Remove a member; its queues become free."""
        with self._lock:
            self._members = [other for other in self._members if other is not member]
            self._owners = {key: who for key, who in self._owners.items() if who is not member}
        self.share_out()

    def share_out(self) -> None:
        """Make all members check their assignment."""
        with self._lock:
            self.version += 1
            members = self._members
        for member in members:
            member.disturb()
        self._wake()

    def share_of(self, member: Member) -> set[QueueKey]:
        """The queues assigned to a member, regardless of their current owners."""
        members = self._members
        share: set[QueueKey] = set()
        for topic in member.topics:
            others = [other for other in members if topic in other.topics]
            if member in others:
                ids = allocate(self._queue_ids(topic), len(others), others.index(member))
                share |= {(topic, queue_id) for queue_id in ids}
        return share

    def release(self, member: Member, keys: set[QueueKey]) -> None:
        """Release queues; the caller has committed their handled messages."""
        with self._lock:
            for key in keys:
                if self._owners.get(key) is member:
                    del self._owners[key]
            self.version += 1
        # Another member may wait for them.
        self._wake()

    def claim(self, member: Member, keys: set[QueueKey]) -> set[QueueKey]:
        """Claim the queues that are free, or that the member already owns."""
        with self._lock:
            if member not in self._members:
                return set()
            free = {key for key in keys if self._owners.get(key, member) is member}
            self._owners |= dict.fromkeys(free, member)
            return free
