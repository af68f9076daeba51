"""Collects the metrics of a store or a broker for Prometheus, under the names of RocketMQ 5.

::

    from prometheus_client import REGISTRY
    from logquarry.metrics import StoreCollector

    REGISTRY.register(StoreCollector(store))

A collector computes the metrics at each scrape, without a thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logquarry.errors import MissingExtra, StoreUnavailable
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
    raise MissingExtra(
        "metrics need the package prometheus-client: pip install 'logquarry[metrics]'"
    ) from _error

if TYPE_CHECKING:
    from logquarry.broker import Broker

_MS: Final = 1_000

_Sample = tuple[Any, ...]
"""The values of a sample's labels, and then the other arguments of ``add_metric``."""


def _metric(
    shared: Mapping[str, str],
    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily],
    name: str,
    text: str,
    samples: Iterable[_Sample],
) -> Metric:
    """Make one metric. Each sample has the labels in ``shared``, and the labels that ``name`` lists
    in braces.

    The text format is UTF-8, so the label values are escaped: names of folders and of consumer
    groups can contain lone surrogates.
    """
    name, *labels = re.findall(r"\w+", name)
    metric = kind(name, text, labels=(*shared, *labels))
    for sample in samples:
        own, found = sample[: len(labels)], sample[len(labels) :]
        values = (*shared.values(), *own)
        metric.add_metric([v.encode("utf-8", "backslashreplace").decode() for v in values], *found)
    return metric


class StoreCollector(Collector):
    """Collects the metrics of one store.

    Any thread may scrape a store that is open for writing. Only one thread may use a store that is
    open for reading, so open a separate store for the collector.

    Args:
        node_id: value of the label ``node_id``; None means the store's broker name, which RocketMQ
            uses.
    """

    _known: StoreStats | None = None

    def __init__(self, store: MessageStore, node_id: str | None = None) -> None:
        self._store = store
        shared = {"node_id": store.broker if node_id is None else node_id}
        self._gauge = partial(_metric, shared, GaugeMetricFamily)
        self._counter = partial(_metric, shared, CounterMetricFamily)
        self._histogram = partial(_metric, shared, HistogramMetricFamily)

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
            stats = self._store.stats() if self._known is None else self._known
        except StoreUnavailable:
            return
        yield from self._of_state(stats.state)
        # Skip the counts of operations: a store that is open for reading has none.
        if isinstance(self._store, StoreWriter):
            yield from self._of_calls(stats)

    def _of_state(self, state: StoreState) -> Iterator[Metric]:
        gauge = self._gauge
        yield gauge(
            "rocketmq_storage_size{storage_type,storage_medium}",
            "Bytes of the store's files.",
            [("local", "disk", sum(state.file_bytes.values()))],
        )
        yield gauge(
            "logquarry_storage_size{folder}",
            "Bytes of a folder's files.",
            state.file_bytes.items(),
        )
        for name, text, value in (
            (
                "rocketmq_storage_flush_behind_bytes",
                "Bytes of the log that are not synced yet.",
                state.flush_behind,
            ),
            (
                "rocketmq_storage_dispatch_behind_bytes",
                "Bytes of the log that are not in the consume queues yet.",
                state.dispatch_behind,
            ),
            (
                "rocketmq_storage_message_reserve_time",
                "Milliseconds since the oldest message was stored.",
                state.reserve_time_ms,
            ),
            (
                "logquarry_log_min_offset",
                "Physical offset of the first byte of the log.",
                state.min_offset,
            ),
            (
                "logquarry_log_max_offset",
                "Physical offset after the last byte of the log.",
                state.max_offset,
            ),
        ):
            if value is not None:
                yield gauge(name, text, [(value,)])
        ratios = {
            "commitlog": state.commit_log_disk_ratio,
            "consumequeue": state.consume_queue_disk_ratio,
        }
        yield gauge(
            "logquarry_disk_ratio{folder}",
            "Used part of the disk, 0 to 1.",
            [(folder, ratio) for folder, ratio in ratios.items() if ratio is not None],
        )
        yield gauge(
            "logquarry_retained_bytes{topic}",
            "Bytes of a topic's messages in the log.",
            [(topic, found.bytes) for topic, found in state.retained.items()],
        )
        yield gauge(
            "logquarry_retained_messages{topic}",
            "Messages of a topic in the log.",
            [(topic, found.messages) for topic, found in state.retained.items()],
        )
        yield gauge(
            "rocketmq_consumer_lag_messages{topic,consumer_group}",
            "Messages that a consumer group has not committed.",
            [(lag.topic, lag.group, lag.messages) for lag in state.consumer_lag],
        )
        yield gauge(
            "logquarry_delayed_messages{level}",
            "Delayed messages that are not delivered yet.",
            [
                (str(one.level), max(0, one.max_offset - one.delivered))
                for one in state.delay_levels
            ],
        )
        yield gauge(
            "rocketmq_half_messages{topic}",
            "Transactional messages of a topic that are neither committed nor rolled back.",
            state.half_messages.items(),
        )

    def _of_calls(self, stats: StoreStats) -> Iterator[Metric]:
        counter = self._counter
        yield counter(
            "rocketmq_messages_in_total{topic}",
            "Messages that puts stored.",
            [(topic, found.messages) for topic, found in stats.topics.items()],
        )
        yield counter(
            "rocketmq_throughput_in_total{topic}",
            "Bytes that puts added to the log.",
            [(topic, found.bytes) for topic, found in stats.topics.items()],
        )
        yield counter(
            "rocketmq_messages_out_total", "Messages that gets returned.", [(stats.get_messages,)]
        )
        yield counter("logquarry_puts_failed_total", "Puts that failed.", [(stats.put_failed,)])
        yield counter(
            "logquarry_gets_total{found}",
            "Gets, by whether they found a message.",
            [("true", stats.get_found), ("false", stats.get_missed)],
        )
        yield self._histogram(
            "rocketmq_message_size",
            "Size of message frames in bytes.",
            [(_buckets(stats.sizes, SIZES), stats.put_bytes)],
        )
        yield self._histogram(
            "rocketmq_delay_message_latency{topic}",
            "Scheduled delay of delivered delayed messages in seconds.",
            [
                (topic, _buckets(one.counts, DELAYS_S), one.seconds)
                for topic, one in stats.delays.items()
            ],
        )
        longest = {
            "put": stats.put_longest_ms,
            "lock": stats.lock_longest_ms,
            "get": stats.get_longest_ms,
        }
        yield self._gauge(
            "logquarry_longest_seconds{of}",
            "Longest duration of an operation so far.",
            [(name, ms / _MS) for name, ms in longest.items()],
        )


def prometheus_text(
    store: MessageStore, node_id: str | None = None, *, stats: StoreStats | None = None
) -> str:
    """Return the current metrics of a store, in Prometheus's text format.

    If the caller passes the store's ``stats()``, the function does not read them again.
    """
    registry = CollectorRegistry(auto_describe=False)
    collector = StoreCollector(store, node_id)
    collector._known = stats
    registry.register(collector)
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


class BrokerCollector(Collector):
    """Collects the metrics of a broker's clients and answers. Any thread may call the methods."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registering the collector does not scrape the broker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of clients and answers."""
        core = self._broker.core
        shared = {"cluster": core.options.cluster, "node_id": core.options.name}
        gauge = partial(_metric, shared, GaugeMetricFamily)
        counter = partial(_metric, shared, CounterMetricFamily)
        yield gauge(
            "rocketmq_producer_connections",
            "Connections of producers.",
            [(sum(map(len, list(core.clients.producers.values()))),)],
        )
        yield gauge(
            "rocketmq_consumer_connections{consumer_group}",
            "Connections of the consumers of a group.",
            [(name, len(group.clients)) for name, group in list(core.clients.consumers.items())],
        )
        got = list(core.counts.got.items())
        yield counter(
            "rocketmq_group_messages_out_total{topic,consumer_group}",
            "Messages that the broker sent to consumers of a group.",
            [(*key, count) for key, count in got],
        )
        yield counter(
            "rocketmq_group_throughput_out_total{topic,consumer_group}",
            "Bytes that the broker sent to consumers of a group.",
            [(*key, core.counts.got_bytes[key]) for key, _ in got],
        )
        yield counter(
            "logquarry_requests_total{code}",
            "Requests by their code.",
            [(str(code), count) for code, count in list(core.counts.requests.items())],
        )
        yield counter(
            "logquarry_sends_refused_total",
            "Sends that got SYSTEM_BUSY.",
            [(core.counts.refused,)],
        )
        yield gauge(
            "logquarry_waiting_jobs{lane}",
            "Store calls that wait for a thread.",
            [(name, getattr(core.lanes, name).waiting) for name in ("puts", "gets", "slow")],
        )


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
    # Export metrics of the store only if it is open for writing. Only the broker's thread may use a
    # store that is open for reading, and the HTTP server runs in another thread.
    if isinstance(broker.store, StoreWriter):
        registry.register(StoreCollector(broker.store))
    return MetricsServer(registry, host, port)
