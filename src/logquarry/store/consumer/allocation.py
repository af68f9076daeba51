"""Which member of a group has which queues (``AllocateMessageQueueAveragely``)."""

from __future__ import annotations

from collections.abc import Sequence


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
