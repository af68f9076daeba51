"""Counts over the last minute, hour and day, for mqadmin and other tools (``BrokerStatsManager``).

The names of the counts are RocketMQ's: TOPIC_PUT_NUMS and TOPIC_PUT_SIZE by topic, GROUP_GET_NUMS,
GROUP_GET_SIZE and SNDBCK_PUT_NUMS by topic@group, BROKER_PUT_NUMS and BROKER_GET_NUMS by cluster.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any, Final

from logquarry.broker.connection import Handler, Request
from logquarry.broker.core import Core
from logquarry.format import fastjson
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode

_WINDOWS: Final = {"statsMinute": (10.0, 5), "statsHour": (600.0, 5), "statsDay": (3_600.0, 23)}
"""Seconds between two samples of a window, and how many ended intervals it keeps."""
_LEAST_SECONDS: Final = 1.0
_SIZES: Final = {"TOPIC_PUT_SIZE": "TOPIC_PUT_NUMS", "GROUP_GET_SIZE": "GROUP_GET_NUMS"}
_OF_BROKER: Final = {"BROKER_PUT_NUMS": "TOPIC_PUT_NUMS", "BROKER_GET_NUMS": "GROUP_GET_NUMS"}

Totals = Mapping[str, Mapping[Any, int]]


class _Window:
    """How much each count grew in the last intervals; it keeps only counts that grew.

    Args:
        seconds: length of an interval.
        count: how many ended intervals it keeps.
        now: when the first interval begins.
    """

    def __init__(self, seconds: float, count: int, now: float) -> None:
        self._seconds = seconds
        self._ended: deque[tuple[float, Totals]] = deque(maxlen=count)
        """When each interval began, and the growth of the counts in it."""
        self._began = now
        self._totals: Totals = {}
        """The counts when the current interval began."""

    def sample(self, totals: Totals, now: float) -> None:
        """End the current interval if its time is over."""
        if now - self._began < self._seconds:
            return
        growth = {}
        for name, counts in totals.items():
            before = self._totals.get(name, {})
            growth[name] = {
                key: total - before.get(key, 0)
                for key, total in counts.items()
                if total != before.get(key, 0)
            }
        self._ended.append((self._began, growth))
        self._began = now
        self._totals = {name: dict(counts) for name, counts in totals.items()}

    def growth(self, name: str, key: Hashable, total: int, now: float) -> tuple[int, float]:
        """How much a count grew in the window, and the seconds of the window."""
        began = self._ended[0][0] if self._ended else self._began
        grown = total - self._totals.get(name, {}).get(key, 0)
        grown += sum(growth.get(name, {}).get(key, 0) for _, growth in self._ended)
        return grown, max(_LEAST_SECONDS, now - began)


class Statistics:
    """Samples the broker's counts. Only the event loop uses it.

    Args:
        core: the broker's parts.

    Attributes:
        mornings: messages put and messages sent to consumers, from the start to the last midnight.
        mornings_before: the same, to the midnight before.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        now = time.monotonic()
        self._windows = {name: _Window(*size, now) for name, size in _WINDOWS.items()}
        self._day = self._today()
        self.mornings = self.mornings_before = (0, 0)

    def handlers(self) -> Mapping[int, Handler]:
        """The requests that this part answers."""
        return {RequestCode.VIEW_BROKER_STATS_DATA: self.view}

    def _today(self) -> tuple[int, ...]:
        return tuple(time.localtime(self._core.clock() / 1_000)[:3])

    def totals(self) -> tuple[int, int]:
        """Messages put, and messages sent to consumers, since the start."""
        counts = self._core.counts
        return sum(counts.put.values()), sum(counts.got.values())

    def _counts(self) -> dict[str, Mapping[Any, int]]:
        counts, cluster = self._core.counts, self._core.options.cluster
        found: dict[str, Mapping[Any, int]] = {
            "TOPIC_PUT_NUMS": counts.put,
            "TOPIC_PUT_SIZE": counts.put_bytes,
            "GROUP_GET_NUMS": counts.got,
            "GROUP_GET_SIZE": counts.got_bytes,
            "SNDBCK_PUT_NUMS": counts.sent_back,
        }
        for name, source in _OF_BROKER.items():
            found[name] = {cluster: sum(found[source].values())}
        return found

    def sample(self) -> None:
        """Sample the counts; housekeeping calls this every few seconds."""
        now, counts = time.monotonic(), self._counts()
        for window in self._windows.values():
            window.sample(counts, now)
        day = self._today()
        if day != self._day:
            self._day = day
            self.mornings_before, self.mornings = self.mornings, self.totals()

    def rate(self, name: str, key: Hashable) -> float:
        """How much a count grows in a second, over the last minute."""
        total = self._counts()[name].get(key, 0)
        grown, seconds = self._windows["statsMinute"].growth(name, key, total, time.monotonic())
        return grown / seconds

    def view(self, request: Request) -> None:
        """One count over the last minute, hour and day (``BrokerStatsData``).

        The averages of sizes are bytes of a message.

        Raises:
            Refused: if there is no such count, or it is 0.
        """
        name, text = request.fields["statsName"], request.fields["statsKey"]
        counts, key = self._counts(), _key(name, text)
        total = counts.get(name, {}).get(key, 0)
        if not total:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"The stats <{name[:80]}> <{text[:200]}> not exist"
            )
        document = {}
        now, number_of = time.monotonic(), _SIZES.get(name, name)
        for window_name, window in self._windows.items():
            grown, seconds = window.growth(name, key, total, now)
            times, _ = window.growth(number_of, key, counts[number_of].get(key, 0), now)
            document[window_name] = {
                "avgpt": grown / times if times else 0.0,
                "sum": grown,
                "tps": grown / seconds,
            }
        request.reply(body=fastjson.compact(document).encode())


def _key(name: str, text: str) -> Hashable:
    """The key of a count, as :class:`Counts` has it: topic@group is a pair there."""
    if name.startswith(("GROUP_", "SNDBCK_")):
        topic, _, group = text.rpartition("@")
        return topic, group
    return text
