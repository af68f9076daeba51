"""Statistics of a broker for mqadmin: current numbers, and the growth of counts in the last minute,
hour and day.

The counts have the names that RocketMQ gives them (``BrokerStatsManager``). The key of a TOPIC_*
count is a topic. The key of a GROUP_* or SNDBCK_* count is topic@group. The key of a BROKER_* count
is the cluster's name. Some tools fail if the answer to ``getRuntimeInfo`` lacks one of the
counts. So the answer contains all counts of RocketMQ 4.9, even those that this broker does not
measure.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, Final

from logquarry import __version__
from logquarry.broker.acl import TRACE_TOPIC
from logquarry.broker.connection import Request
from logquarry.broker.core import Core, Part, answers
from logquarry.format import broker_json
from logquarry.protocol.remoting_codes import Refused, RequestCode
from logquarry.store.stats import StoreStats
from logquarry.text import size_text

_WINDOWS: Final = {"statsMinute": (10.0, 5), "statsHour": (600.0, 5), "statsDay": (3_600.0, 23)}
"""For each window: the length of an interval between two samples in seconds, and the number of
intervals to keep.
"""
_LEAST_SECONDS: Final = 1.0
_SIZES: Final = {"TOPIC_PUT_SIZE": "TOPIC_PUT_NUMS", "GROUP_GET_SIZE": "GROUP_GET_NUMS"}
_OF_BROKER: Final = {"BROKER_PUT_NUMS": "TOPIC_PUT_NUMS", "BROKER_GET_NUMS": "GROUP_GET_NUMS"}

Totals = Mapping[str, Mapping[Any, int]]


class _Window:
    # To save memory, only counts that have grown in an interval are stored.

    def __init__(self, seconds: float, count: int, now: float) -> None:
        self._seconds = seconds
        self._ended: deque[tuple[float, Totals]] = deque(maxlen=count)
        """For each kept interval, its beginning, and by how much the counts grew in it."""
        self._began = now
        self._totals: Totals = {}
        """The counts when the present interval began."""

    def sample(self, totals: Totals, now: float) -> None:
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
        # Return by how much a count has grown in the window, and how many seconds the window
        # covers.
        began = self._ended[0][0] if self._ended else self._began
        grown = total - self._totals.get(name, {}).get(key, 0)
        grown += sum(growth.get(name, {}).get(key, 0) for _, growth in self._ended)
        return grown, max(_LEAST_SECONDS, now - began)


class Statistics(Part):
    """Samples the broker's counts, and computes their growth. Only the event loop uses this object.

    ``mornings`` has the totals at the last midnight. ``mornings_before`` has the totals at the
    midnight one day earlier.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        now = time.monotonic()
        self._windows = {name: _Window(*size, now) for name, size in _WINDOWS.items()}
        self._day = self._today()
        self.mornings = self.mornings_before = (0, 0)

    def _today(self) -> tuple[int, ...]:
        return tuple(time.localtime(self._core.clock() / 1_000)[:3])

    def totals(self) -> tuple[int, int]:
        """Return (messages put, messages sent to consumers) since the broker's start."""
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
        """Take a sample of the counts. The housekeeping calls this method every 5 seconds."""
        now, counts = time.monotonic(), self._counts()
        for window in self._windows.values():
            window.sample(counts, now)
        day = self._today()
        if day != self._day:
            self._day = day
            self.mornings_before, self.mornings = self.mornings, self.totals()

    def rate(self, name: str, key: Hashable) -> float:
        """Return the growth of a count per second, averaged over the last minute."""
        total = self._counts()[name].get(key, 0)
        grown, seconds = self._windows["statsMinute"].growth(name, key, total, time.monotonic())
        return grown / seconds

    @answers(RequestCode.VIEW_BROKER_STATS_DATA)
    def view(self, request: Request) -> None:
        """Answer with the growth of a count in the last minute, hour, day (``BrokerStatsData``)."""
        # If the statistic counts bytes, the average ``avgpt`` is the number of bytes per message.
        name, text = request.fields["statsName"], request.fields["statsKey"]
        counts, key = self._counts(), _key(name, text)
        total = counts.get(name, {}).get(key, 0)
        if not total:
            raise Refused(f"The stats <{name[:80]}> <{text[:200]}> not exist")
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
        request.reply_json(document)


def _key(name: str, text: str) -> Hashable:
    if name.startswith(("GROUP_", "SNDBCK_")):
        topic, _, group = text.rpartition("@")
        return topic, group
    return text


_PUT_TIMES: Final = (
    *("<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s"),
    *("1~2s", "2~3s", "3~4s", "4~5s", "5~10s", "10s~"),
)
"""RocketMQ's names for the ranges of put times in
:data:`logquarry.store.single_calls.BUCKETS`.
"""
_MOST_INT: Final = (1 << 31) - 1
_TIMER: Final = (
    *("timerReadBehind", "timerOffsetBehind", "timerCongestNum"),
    *("timerEnqueueTps", "timerDequeueTps"),
)
"""Numbers that ``clusterList`` of mqadmin 5 expects.

This broker does not count them, and answers 0.
"""


class Runtime(Part):
    """Answers requests for the state and the settings of the broker."""

    def __init__(self, core: Core, statistics: Statistics) -> None:
        super().__init__(core)
        self._statistics = statistics
        self._began = core.clock()
        self._began_s = time.monotonic()

    @answers(RequestCode.GET_BROKER_RUNTIME_INFO)
    async def runtime_info(self, request: Request) -> None:
        """Answer with the state of the broker and the store: names and numbers, as text."""
        core = self._core
        found, disk = await core.slow(partial(_read, core))
        table = self._of_store(found) | self._of_clients() | disk
        request.reply_json({"table": table})

    def _of_store(self, found: StoreStats) -> dict[str, str]:
        state = found.state
        times = zip(_PUT_TIMES, found.put_times.values(), strict=True)
        total = tuple(map(sum, zip(found.get_found_rates, found.get_missed_rates, strict=True)))
        numbers = {
            "commitLogDiskRatio": state.commit_log_disk_ratio or 0.0,
            "commitLogMaxOffset": state.max_offset,
            "commitLogMinOffset": state.min_offset,
            "consumeQueueDiskRatio": state.consume_queue_disk_ratio or 0.0,
            "dispatchBehindBytes": state.dispatch_behind or 0,
            "dispatchMaxBuffer": 0,
            "earliestMessageTimeStamp": state.first_timestamp or -1,
            "getFoundTps": _rates(found.get_found_rates),
            "getMessageEntireTimeMax": round(found.get_longest_ms),
            "getMissTps": _rates(found.get_missed_rates),
            "getTotalTps": _rates(total),
            "getTransferedTps": _rates(found.get_rates),
            # RocketMQ 5 has renamed getTransferedTps to getTransferredTps, so give both names.
            "getTransferredTps": _rates(found.get_rates),
            "putMessageAverageSize": found.put_average_size,
            "putMessageDistributeTime": " ".join(f"[{name}]:{count}" for name, count in times),
            "putMessageEntireTimeMax": round(found.put_longest_ms),
            "putMessageFailedTimes": found.put_failed,
            "putMessageSizeTotal": found.put_bytes,
            "putMessageTimesTotal": found.put_messages,
            "putTps": _rates(found.put_rates),
            "remainHowManyDataToFlush": size_text(state.flush_behind or 0),
            "remainTransientStoreBufferNumbs": _MOST_INT,
        }
        for level in state.delay_levels:
            progress = f"{level.delivered},{level.max_offset}"
            numbers[f"scheduleMessageOffset_{level.level}"] = progress
        return {name: str(value) for name, value in numbers.items()}

    def _of_clients(self) -> dict[str, str]:
        core, statistics = self._core, self._statistics
        put, got = statistics.totals()
        numbers: dict[str, Any] = {
            "bootTimestamp": self._began,
            # Without this value, clusterList of mqadmin 5 shows the broker as not activated.
            "brokerActive": "true",
            "brokerVersion": 399,
            "brokerVersionDesc": f"logquarry {__version__}",
            "EndTransactionQueueSize": 0,
            "EndTransactionThreadPoolQueueCapacity": core.options.most_waiting,
            "msgGetTotalTodayMorning": statistics.mornings[1],
            "msgGetTotalTodayNow": got,
            "msgGetTotalYesterdayMorning": statistics.mornings_before[1],
            "msgPutTotalTodayMorning": statistics.mornings[0],
            "msgPutTotalTodayNow": put,
            "msgPutTotalYesterdayMorning": statistics.mornings_before[0],
            "pageCacheLockTimeMills": 0,
            "runtime": _duration(time.monotonic() - self._began_s),
            "startAcceptSendRequestTimeStamp": 0,
        }
        for name, waiting, most in (
            ("send", core.lanes.puts.waiting, core.options.most_waiting),
            ("pull", core.lanes.gets.waiting, core.lanes.gets.capacity),
            ("query", core.lanes.slow.waiting, core.lanes.slow.capacity),
        ):
            numbers[f"{name}ThreadPoolQueueCapacity"] = most
            numbers[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = 0
            numbers[f"{name}ThreadPoolQueueSize"] = waiting
        return {name: str(value) for name, value in numbers.items()} | dict.fromkeys(_TIMER, "0")

    @answers(RequestCode.GET_BROKER_CONFIG)
    def broker_config(self, request: Request) -> None:
        """Answer with the settings of the broker, in the format of a properties file."""
        # exportConfigs of mqadmin fails if one of these settings is missing.
        core, options, store = self._core, self._core.options, self._core.store.config
        settings = {
            "autoCreateSubscriptionGroup": options.create_groups,
            "autoCreateTopicEnable": options.create_topics,
            "brokerClusterName": options.cluster,
            "brokerId": 0,
            "brokerName": options.name,
            "brokerPermission": 6 if core.writer is not None else 4,
            "brokerRole": store.broker_role,
            "defaultTopicQueueNums": options.queues,
            "deleteWhen": store.delete_when,
            "enablePropertyFilter": True,
            "fileReservedTime": store.file_reserved_time,
            "filterServerNums": 0,
            "flushDiskType": store.flush_disk_type,
            "listenPort": core.address.rpartition(":")[2],
            "maxMessageSize": store.max_message_size,
            "messageDelayLevel": store.message_delay_level,
            "msgTraceTopicName": TRACE_TOPIC,
            "slaveReadEnable": False,
            "storePathRootDir": core.store.root,
            "traceOn": True,
            "traceTopicEnable": True,
            "useTLS": options.tls is not None,
        }
        text = "".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}\n"
            for name, value in settings.items()
        )
        request.reply(
            fields={"version": broker_json.compact({"counter": 0, "timestamp": self._began})},
            body=text.encode(),
        )


def _read(core: Core) -> tuple[StoreStats, dict[str, str]]:
    found = shutil.disk_usage(core.store.root)
    text = f"Total : {size_text(found.total)}, Free : {size_text(found.free)}."
    return core.store.stats(), {"commitLogDirCapacity": text}


def _rates(found: tuple[float, ...]) -> str:
    return " ".join(f"{rate:.2f}" for rate in found)


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {left} seconds ]"
