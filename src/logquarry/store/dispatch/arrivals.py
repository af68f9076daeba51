"""Who is told when messages can be had from their queues (``MessageArrivingListener``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from logquarry.scan.requests import DispatchRequests
    from logquarry.store.dispatch.dispatcher import Groups

logger = logging.getLogger(__name__)


class MessageArrival(NamedTuple):
    """Messages that came to a queue.

    Attributes:
        topic: the queue's topic.
        queue_id: its number.
        next_offset: one past the queue offset of the last of them.
        messages: how many.
        store_timestamp: of the last one, in milliseconds.
    """

    topic: str
    queue_id: int
    next_offset: int
    messages: int
    store_timestamp: int


Listener = Callable[[MessageArrival], None]


class ArrivalListeners:
    """The listeners of one store. Any thread may add and remove; the dispatcher tells."""

    def __init__(self) -> None:
        # Replaced, never changed, so that telling takes no lock; replacing does, or one is lost.
        self._listeners: tuple[Listener, ...] = ()
        self._change = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Tell a listener from now on; one that is there already is told once."""
        with self._change:
            if listener not in self._listeners:
                self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Tell it no more."""
        with self._change:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def tell(self, requests: DispatchRequests, groups: Groups) -> None:
        """Tell of what was dispatched: of each queue once."""
        if not self._listeners:
            return
        for (topic, queue_id), (rows, offsets) in groups.items():
            arrival = MessageArrival(
                topic,
                queue_id,
                int(offsets[-1]) + 1,
                len(offsets),
                int(requests.store_timestamp[rows[-1]]),
            )
            for listener in self._listeners:
                try:
                    listener(arrival)
                except (Exception, SystemExit):
                    # The dispatcher is everybody's: what ends a listener ends only that.
                    logger.exception("a listener failed at %s", arrival)
