"""The metrics of a broker for Prometheus, about its store, its clients and its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from logquarry.broker import Broker
from logquarry.metrics.collector import StoreCollector
from logquarry.store.message_store import StoreWriter

_LABELS: Final = ("cluster", "node_id")


class BrokerCollector(Collector):
    """Collects the numbers of a broker's clients. Any thread may scrape it.

    Args:
        broker: a running broker.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering the collector does not scrape the broker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics now."""
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
    """A running server of metrics.

    Attributes:
        address: its host:port.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(broker: Broker, host: str, port: int) -> MetricsServer:
    """Serve the metrics of a running broker over HTTP.

    Args:
        broker: the broker.
        host: address to listen on.
        port: port; 0: the system chooses.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BrokerCollector(broker))
    # Only one thread may use a store that is open for reading: the broker's.
    if isinstance(broker.store, StoreWriter):
        registry.register(StoreCollector(broker.store))
    return MetricsServer(registry, host, port)
