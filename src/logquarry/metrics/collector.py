"""The numbers of a store under the names that RocketMQ 5 gives them.

::

    from prometheus_client import REGISTRY
    from logquarry.metrics.collector import StoreCollector

    REGISTRY.register(StoreCollector(store))

They are reckoned when somebody scrapes; nothing is counted twice, and no thread is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from logquarry.errors import StoreError, UsageError
from logquarry.store.message_store import MessageStore
from logquarry.store.schedule.delivery import DELAYS_S
from logquarry.store.state import StoreState
from logquarry.store.stats import SIZES, StoreStats

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector, CollectorRegistry
except ModuleNotFoundError as _error:
    raise UsageError(
        "metrics need the package prometheus-client: pip install 'logquarry[metrics]'"
    ) from _error

if TYPE_CHECKING:
    from logquarry.store.message_store import StoreWriter

_NODE: Final = ("node_id",)
_TOPIC: Final = ("node_id", "topic")
_MS: Final = 1_000


class StoreCollector(Collector):
    """Gives a registry the numbers of one store. Any thread may scrape a store that is written.

    A store that is open for reading has no thread but that of its owner: give it one of its own.

    Args:
        store: the store.
        node_id: what the label ``node_id`` says (default: the store's broker name). RocketMQ puts
            its broker's name there.
    """

    def __init__(self, store: MessageStore, node_id: str | None = None) -> None:
        self._store = store
        self._node = store.broker if node_id is None else node_id

    def describe(self) -> list[Metric]:
        """Nothing: a registry would scrape otherwise when it is given the collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The numbers now; none of a store that was closed."""
        try:
            # Only an open store has one.
            _ = self._store.min_offset
            stats = self._store.stats()
        except StoreError:
            return
        yield from self._storage(stats.state)
        yield from self._kept(stats.state)
        if _counts(self._store):
            yield from self._work(stats)

    def _gauge(self, name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            family = GaugeMetricFamily(name, text, labels=_NODE)
            family.add_metric([self._node], value)
            yield family

    def _storage(self, state: StoreState) -> Iterator[Metric]:
        size = GaugeMetricFamily(
            "rocketmq_storage_size",
            "Bytes of the store's files.",
            labels=("node_id", "storage_type", "storage_medium"),
        )
        size.add_metric([self._node, "local", "disk"], sum(state.file_bytes.values()))
        yield size
        parts = GaugeMetricFamily(
            "logquarry_storage_size", "The same by folder.", labels=("node_id", "folder")
        )
        for folder, count in state.file_bytes.items():
            parts.add_metric([self._node, folder], count)
        yield parts
        yield from self._gauge(
            "rocketmq_storage_flush_behind_bytes",
            "Bytes of the log that are not known to be on the disk.",
            state.flush_behind,
        )
        yield from self._gauge(
            "rocketmq_storage_dispatch_behind_bytes",
            "Bytes of the log that are in no consume queue yet.",
            state.dispatch_behind,
        )
        yield from self._gauge(
            "rocketmq_storage_message_reserve_time",
            "Milliseconds since the oldest message was stored.",
            state.reserve_time_ms,
        )
        ratio = GaugeMetricFamily(
            "logquarry_disk_ratio", "How full the disk is, 0 to 1.", labels=("node_id", "folder")
        )
        for folder, used in (
            ("commitlog", state.commit_log_disk_ratio),
            ("consumequeue", state.consume_queue_disk_ratio),
        ):
            if used is not None:
                ratio.add_metric([self._node, folder], used)
        yield ratio
        name, text = "logquarry_log_min_offset", "Physical offset at which the log begins."
        yield from self._gauge(name, text, state.min_offset)
        name, text = "logquarry_log_max_offset", "Physical offset at which the log ends."
        yield from self._gauge(name, text, state.max_offset)

    def _kept(self, state: StoreState) -> Iterator[Metric]:
        kept = GaugeMetricFamily(
            "logquarry_retained_bytes", "Bytes of the log that a topic keeps.", labels=_TOPIC
        )
        messages = GaugeMetricFamily(
            "logquarry_retained_messages", "Messages of a topic in the log.", labels=_TOPIC
        )
        for topic, found in state.retained.items():
            kept.add_metric([self._node, topic], found.bytes)
            messages.add_metric([self._node, topic], found.messages)
        yield kept
        yield messages
        lag = GaugeMetricFamily(
            "rocketmq_consumer_lag_messages",
            "Messages that a group of consumers has not committed.",
            labels=("node_id", "topic", "consumer_group"),
        )
        for one in state.consumer_lag:
            lag.add_metric([self._node, one.topic, one.group], one.messages)
        yield lag
        waiting = GaugeMetricFamily(
            "logquarry_delayed_messages",
            "Delayed messages that are not delivered.",
            labels=("node_id", "level"),
        )
        for level in state.delay_levels:
            count = max(0, level.max_offset - level.delivered)
            waiting.add_metric([self._node, str(level.level)], count)
        yield waiting

        halves = GaugeMetricFamily(
            "rocketmq_half_messages",
            "Messages of a topic whose transaction nobody has ended.",
            labels=_TOPIC,
        )
        for topic, number in state.half_messages.items():
            halves.add_metric([self._node, topic], number)
        yield halves

    def _work(self, stats: StoreStats) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "rocketmq_messages_in_total", "Messages that were put.", labels=_TOPIC
        )
        size = CounterMetricFamily(
            "rocketmq_throughput_in_total", "Bytes of the log that were put.", labels=_TOPIC
        )
        for topic, found in stats.topics.items():
            messages.add_metric([self._node, topic], found.messages)
            size.add_metric([self._node, topic], found.bytes)
        yield messages
        yield size
        out = CounterMetricFamily(
            "rocketmq_messages_out_total", "Messages that gets gave.", labels=_NODE
        )
        out.add_metric([self._node], stats.get_messages)
        yield out
        refused = CounterMetricFamily(
            "logquarry_puts_failed_total", "Puts that were refused.", labels=_NODE
        )
        refused.add_metric([self._node], stats.put_failed)
        yield refused
        gets = CounterMetricFamily(
            "logquarry_gets_total", "Gets, by what came of them.", labels=("node_id", "found")
        )
        gets.add_metric([self._node, "true"], stats.get_found)
        gets.add_metric([self._node, "false"], stats.get_missed)
        yield gets
        sizes = HistogramMetricFamily(
            "rocketmq_message_size", "Bytes of the frames of messages.", labels=_NODE
        )
        sizes.add_metric([self._node], _buckets(stats.sizes, SIZES), stats.put_bytes)
        yield sizes
        delays = HistogramMetricFamily(
            "rocketmq_delay_message_latency",
            "Seconds for which messages that were delivered had been delayed.",
            labels=_TOPIC,
        )
        for topic, one in stats.delays.items():
            counts = _buckets(one.counts, DELAYS_S)
            delays.add_metric([self._node, topic], counts, one.seconds)
        yield delays
        longest = GaugeMetricFamily(
            "logquarry_longest_seconds", "The longest so far.", labels=("node_id", "of")
        )
        longest.add_metric([self._node, "put"], stats.put_longest_ms / _MS)
        longest.add_metric([self._node, "lock"], stats.lock_longest_ms / _MS)
        longest.add_metric([self._node, "get"], stats.get_longest_ms / _MS)
        yield longest


def prometheus_text(store: MessageStore, node_id: str | None = None) -> str:
    """The numbers of a store now, as Prometheus reads them."""
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(store, node_id))
    text: bytes = generate_latest(registry)
    return text.decode()


def _counts(store: MessageStore | StoreWriter) -> bool:
    """Whether a store counts what is done with it: those that are written do."""
    from logquarry.store.message_store import StoreWriter

    return isinstance(store, StoreWriter)


def _buckets(counts: Sequence[int], bounds: Sequence[int]) -> list[tuple[str, float]]:
    """Each class with all below it, by where it ends."""
    found: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, map(float, bounds)), "+Inf"], counts, strict=True):
        total += count
        found.append((bound, total))
    return found
