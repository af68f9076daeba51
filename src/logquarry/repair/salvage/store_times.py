"""Corrects store times of saved messages, so that they never decrease in the new store.

RocketMQ searches a queue by time, and assumes that store times never decrease. But damage can
change STORETIMESTAMP unnoticed, because no CRC covers it, and a clock can be set back.
"""

from __future__ import annotations

import numpy as np

from logquarry.repair.audit.differences import Int64


class StoreTimes:
    """Finds the store times to correct, in the order of the new log.

    If one message is later than the next one, but the messages before and after it are in order,
    only its own time is wrong, and it gets the time of the next message. In other cases, each
    message that is earlier than the previous one gets the time of the previous one.

    Attributes:
        lowered: new store times of single wrong messages, by physical offset.
        raised: number of messages that are earlier than the previous one.
    """

    def __init__(self) -> None:
        self.lowered: dict[int, int] = {}
        self.raised = 0
        self._last = self._before = 0
        # The last message so far: the next message shows whether the time of this one is wrong.
        self._open = np.empty((2, 0), np.int64)

    def take(self, places: Int64, times: Int64) -> None:
        """Add some messages: their physical offsets, and their store times."""
        places, times = np.append(self._open, np.stack([places, times]), axis=1)
        before = np.append(self._before, times[:-1])
        late = np.flatnonzero((times[:-1] > times[1:]) & (before[:-1] <= times[1:]))
        self.lowered.update(zip(places[late].tolist(), times[late + 1].tolist(), strict=True))
        self._open = np.stack([places[-1:], times[-1:]])
        self._before = int(before[-1])
        times[late] = times[late + 1]
        self._settle(times[:-1])

    def finish(self) -> None:
        """Add the last message."""
        self._settle(self._open[1])

    def _settle(self, times: Int64) -> None:
        raised = raised_from(self._last, times)
        self.raised += int(np.count_nonzero(raised != times))
        self._last = int(raised[-1]) if len(raised) else self._last


def raised_from(last: int, times: Int64) -> Int64:
    """Store times, raised so that none is earlier than the previous one or than ``last``."""
    found: Int64 = np.maximum.accumulate(np.append(last, times))[1:]
    return found
