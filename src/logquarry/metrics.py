"""Collects the metrics of a store or a broker for Prometheus, under the names of RocketMQ 5.

::

    from prometheus_client import REGISTRY
    from logquarry.metrics import StoreCollector

    REGISTRY.register(StoreCollector(store))

A collector computes the metrics at each scrape, without a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.store.message_store import MessageStore, StoreWriter
from logquarry.store.schedule.delivery import DELAYS_S
from logquarry.store.single_calls import SIZES
from logquarry.store.state import StoreState
from logquarry.store.stats import StoreStats

try:
    from prometheus_client import generate_latest, start_http_server
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
    from logquarry.broker import Broker

_NODE: Final = ("node_id",)
_TOPIC: Final = ("node_id", "topic")
_MS: Final = 1_000


def _in_utf_8(metric: Metric) -> Metric:
    """Escape label values that UTF-8 cannot encode, as the text format is UTF-8.

    Names of folders and of consumer groups can contain lone surrogates.
    """
    metric.samples = [
        sample._replace(
            labels={
                name: value.encode("utf-8", "backslashreplace").decode()
                for name, value in sample.labels.items()
            }
        )
        for sample in metric.samples
    ]
    return metric


class StoreCollector(Collector):
    """Collects the metrics of one store.

    Any thread may scrape a store that is open for writing. Only one thread may use a store that is
    open for reading, so open a separate store for the collector.

    Args:
        node_id: value of the label ``node_id``; None means the store's broker name, which RocketMQ
            uses.
    """

    def __init__(self, store: MessageStore, node_id: str | None = None) -> None:
        self._store = store
        self._node = store.broker if node_id is None else node_id

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registering the collector does not scrape the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; yield nothing if the store is closed.

        Raises StoreNotFound or CorruptStore if the disk fails.
        """
        try:
            # min_offset raises StoreUnavailable if the store is closed.
            _ = self._store.min_offset
            stats = self._store.stats()
        except StoreUnavailable:
            return
        yield from map(_in_utf_8, self._storage(stats.state))
        yield from map(_in_utf_8, self._kept(stats.state))
        # Skip the counts of operations: a store that is open for reading has none.
        if isinstance(self._store, StoreWriter):
            yield from map(_in_utf_8, self._work(stats))

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
            "logquarry_storage_size", "Bytes of a folder's files.", labels=("node_id", "folder")
        )
        for folder, count in state.file_bytes.items():
            parts.add_metric([self._node, folder], count)
        yield parts
        yield from self._gauge(
            "rocketmq_storage_flush_behind_bytes",
            "Bytes of the log that are not synced yet.",
            state.flush_behind,
        )
        yield from self._gauge(
            "rocketmq_storage_dispatch_behind_bytes",
            "Bytes of the log that are not in the consume queues yet.",
            state.dispatch_behind,
        )
        yield from self._gauge(
            "rocketmq_storage_message_reserve_time",
            "Milliseconds since the oldest message was stored.",
            state.reserve_time_ms,
        )
        ratio = GaugeMetricFamily(
            "logquarry_disk_ratio", "Used part of the disk, 0 to 1.", labels=("node_id", "folder")
        )
        for folder, used in (
            ("commitlog", state.commit_log_disk_ratio),
            ("consumequeue", state.consume_queue_disk_ratio),
        ):
            if used is not None:
                ratio.add_metric([self._node, folder], used)
        yield ratio
        name, text = "logquarry_log_min_offset", "Physical offset of the first byte of the log."
        yield from self._gauge(name, text, state.min_offset)
        name, text = "logquarry_log_max_offset", "Physical offset after the last byte of the log."
        yield from self._gauge(name, text, state.max_offset)

    def _kept(self, state: StoreState) -> Iterator[Metric]:
        kept = GaugeMetricFamily(
            "logquarry_retained_bytes", "Bytes of a topic's messages in the log.", labels=_TOPIC
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
            "Messages that a consumer group has not committed.",
            labels=("node_id", "topic", "consumer_group"),
        )
        for one in state.consumer_lag:
            lag.add_metric([self._node, one.topic, one.group], one.messages)
        yield lag
        waiting = GaugeMetricFamily(
            "logquarry_delayed_messages",
            "Delayed messages that are not delivered yet.",
            labels=("node_id", "level"),
        )
        for level in state.delay_levels:
            count = max(0, level.max_offset - level.delivered)
            waiting.add_metric([self._node, str(level.level)], count)
        yield waiting
        halves = GaugeMetricFamily(
            "rocketmq_half_messages",
            "Transactional messages of a topic that are neither committed nor rolled back.",
            labels=_TOPIC,
        )
        for topic, number in state.half_messages.items():
            halves.add_metric([self._node, topic], number)
        yield halves

    def _work(self, stats: StoreStats) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "rocketmq_messages_in_total", "Messages that puts stored.", labels=_TOPIC
        )
        size = CounterMetricFamily(
            "rocketmq_throughput_in_total", "Bytes that puts added to the log.", labels=_TOPIC
        )
        for topic, found in stats.topics.items():
            messages.add_metric([self._node, topic], found.messages)
            size.add_metric([self._node, topic], found.bytes)
        yield messages
        yield size
        out = CounterMetricFamily(
            "rocketmq_messages_out_total", "Messages that gets returned.", labels=_NODE
        )
        out.add_metric([self._node], stats.get_messages)
        yield out
        refused = CounterMetricFamily(
            "logquarry_puts_failed_total", "Puts that failed.", labels=_NODE
        )
        refused.add_metric([self._node], stats.put_failed)
        yield refused
        gets = CounterMetricFamily(
            "logquarry_gets_total",
            "Gets, by whether they found a message.",
            labels=("node_id", "found"),
        )
        gets.add_metric([self._node, "true"], stats.get_found)
        gets.add_metric([self._node, "false"], stats.get_missed)
        yield gets
        sizes = HistogramMetricFamily(
            "rocketmq_message_size", "Size of message frames in bytes.", labels=_NODE
        )
        sizes.add_metric([self._node], _buckets(stats.sizes, SIZES), stats.put_bytes)
        yield sizes
        delays = HistogramMetricFamily(
            "rocketmq_delay_message_latency",
            "Scheduled delay of delivered delayed messages in seconds.",
            labels=_TOPIC,
        )
        for topic, one in stats.delays.items():
            counts = _buckets(one.counts, DELAYS_S)
            delays.add_metric([self._node, topic], counts, one.seconds)
        yield delays
        longest = GaugeMetricFamily(
            "logquarry_longest_seconds",
            "Longest duration of an operation so far.",
            labels=("node_id", "of"),
        )
        longest.add_metric([self._node, "put"], stats.put_longest_ms / _MS)
        longest.add_metric([self._node, "lock"], stats.lock_longest_ms / _MS)
        longest.add_metric([self._node, "get"], stats.get_longest_ms / _MS)
        yield longest


def prometheus_text(store: MessageStore, node_id: str | None = None) -> str:
    """Return the current metrics of a store, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(store, node_id))
    text: bytes = generate_latest(registry)
    return text.decode()


def _buckets(counts: Sequence[int], bounds: Sequence[int]) -> list[tuple[str, float]]:
    # Prometheus expects cumulative counts: the number of values up to each bound.
    found: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, map(float, bounds)), "+Inf"], counts, strict=True):
        total += count
        found.append((bound, total))
    return found


_LABELS: Final = ("cluster", "node_id")


class BrokerCollector(Collector):
    """Collects the metrics of a broker's clients and answers. Any thread may call the methods."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registering the collector does not scrape the broker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of clients and answers."""
        return map(_in_utf_8, self._metrics())

    def _metrics(self) -> Iterator[Metric]:
        core = self._broker.core
        labels = [core.options.cluster, core.options.name]
        producers = GaugeMetricFamily(
            "rocketmq_producer_connections", "Connections of producers.", labels=_LABELS
        )
        producers.add_metric(labels, sum(map(len, list(core.clients.producers.values()))))
        yield producers
        consumers = GaugeMetricFamily(
            "rocketmq_consumer_connections",
            "Connections of the consumers of a group.",
            labels=(*_LABELS, "consumer_group"),
        )
        for name, group in list(core.clients.consumers.items()):
            consumers.add_metric([*labels, name], len(group.clients))
        yield consumers
        out = CounterMetricFamily(
            "rocketmq_group_messages_out_total",
            "Messages that the broker sent to consumers of a group.",
            labels=(*_LABELS, "topic", "consumer_group"),
        )
        size = CounterMetricFamily(
            "rocketmq_group_throughput_out_total",
            "Bytes that the broker sent to consumers of a group.",
            labels=(*_LABELS, "topic", "consumer_group"),
        )
        for (topic, group_name), count in list(core.counts.got.items()):
            out.add_metric([*labels, topic, group_name], count)
            size.add_metric([*labels, topic, group_name], core.counts.got_bytes[topic, group_name])
        yield out
        yield size
        requests = CounterMetricFamily(
            "logquarry_requests_total", "Requests by their code.", labels=(*_LABELS, "code")
        )
        for code, count in list(core.counts.requests.items()):
            requests.add_metric([*labels, str(code)], count)
        yield requests
        refused = CounterMetricFamily(
            "logquarry_sends_refused_total", "Sends that got SYSTEM_BUSY.", labels=_LABELS
        )
        refused.add_metric(labels, core.counts.refused)
        yield refused
        held = GaugeMetricFamily(
            "logquarry_waiting_jobs",
            "Store calls that wait for a thread.",
            labels=(*_LABELS, "lane"),
        )
        for name in ("puts", "gets", "slow"):
            held.add_metric([*labels, name], getattr(core.lanes, name).waiting)
        yield held


class MetricsServer:
    """A running HTTP server of metrics."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop the server, and wait for its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(broker: Broker, host: str, port: int) -> MetricsServer:
    """Serve the metrics of a running broker over HTTP. With port 0, the system chooses a port."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BrokerCollector(broker))
    # Export metrics of the store only if it is open for writing: if it is open for reading, only
    # the broker's thread may use it.
    if isinstance(broker.store, StoreWriter):
        registry.register(StoreCollector(broker.store))
    return MetricsServer(registry, host, port)
