"""Which member of a group has which queues (``AllocateMessageQueueAveragely``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from logquarry.read.log_queues import QueueKey


def allocate(queue_ids: Sequence[int], count: int, number: int) -> Sequence[int]:
    """The queues of one member: neighbours, as many as the others have, or one more.

    Args:
        queue_ids: the queues of a topic, sorted.
        count: how many members there are.
        number: which of them it is, from 0.
    """
    each, rest = divmod(len(queue_ids), count)
    start = number * each + min(number, rest)
    return queue_ids[start : start + each + (number < rest)]


# --------------------------------------------------------------------------------------------------
# The consumers of one group in one process: which queue is whose.
#
# Queues are shared out anew when a consumer comes or goes, or a queue appears. One is taken only
# when nobody has it: who had it gives it up itself, between two messages, so that no message is
# with two consumers, and what was handled is known before another goes on.


class Member(Protocol):
    """A consumer, as its group knows it."""

    @property
    def topics(self) -> Sequence[str]:
        """What it consumes."""

    def disturb(self) -> None:
        """Have it look at its queues after the message that it is at. May be called any time."""


class ConsumerGroup:
    """The members of one group.

    Args:
        name: the group's name.
        queue_ids: the queues of a topic.
        wake: wakes consumers that wait.

    Attributes:
        version: another one whenever queues may have to change hands.
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
        """Who has a queue."""
        return self._owners.get((topic, queue_id))

    def join(self, member: Member) -> None:
        """Take part from now on."""
        with self._lock:
            self._members = [*self._members, member]
        self.share_out()

    def leave(self, member: Member) -> None:
        """Take part no more; its queues are free."""
        with self._lock:
            self._members = [other for other in self._members if other is not member]
            self._owners = {key: who for key, who in self._owners.items() if who is not member}
        self.share_out()

    def share_out(self) -> None:
        """Have all members look which queues are theirs."""
        with self._lock:
            self.version += 1
            members = self._members
        for member in members:
            member.disturb()
        self._wake()

    def share_of(self, member: Member) -> set[QueueKey]:
        """The queues that a member is to have, whoever has them now."""
        members = self._members
        share: set[QueueKey] = set()
        for topic in member.topics:
            others = [other for other in members if topic in other.topics]
            if member in others:
                ids = allocate(self._queue_ids(topic), len(others), others.index(member))
                share |= {(topic, queue_id) for queue_id in ids}
        return share

    def release(self, member: Member, keys: set[QueueKey]) -> None:
        """Give queues up; what of them was handled has to be known by now."""
        with self._lock:
            for key in keys:
                if self._owners.get(key) is member:
                    del self._owners[key]
            self.version += 1
        # Somebody may wait for them.
        self._wake()

    def claim(self, member: Member, keys: set[QueueKey]) -> set[QueueKey]:
        """Take those of some queues that nobody has, or that the member took before."""
        with self._lock:
            if member not in self._members:
                return set()
            free = {key for key in keys if self._owners.get(key, member) is member}
            self._owners |= dict.fromkeys(free, member)
            return free
