"""The metrics of a store in Prometheus's text format.

The metrics of a broker, as Prometheus scrapes them.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import UsageError
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from tests.helpers.broker_client import PATIENCE_SECONDS, messages_of, send_fields, serving
from tests.helpers.small_store import NOW, config


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(({"node_id": "node"} | labels).items())]


def test_a_store_that_is_written(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    from logquarry.metrics import StoreCollector

    topic = 'evil"\\topic'
    registry = client.CollectorRegistry()
    clock = FakeClock(NOW)
    with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as store:
        registry.register(StoreCollector(store, "node"))
        sizes = [store.put(lq.Message(topic, bytes(size))).size for size in (10, 1_500)]
        many = store.put_many([lq.Message("t", b"x"), lq.Message("t", b"y")])
        with pytest.raises(lq.errors.MessageRejected):
            store.put(lq.Message("a/b", b""))
        store.wait_dispatched()
        store.get("t", 0, 0)
        store.get("t", 0, 2)
        clock.advance(5_000)
        samples = parsed(client.generate_latest(registry).decode())
        store.put(lq.Message(topic, b""))
        later = parsed(client.generate_latest(registry).decode())
    named = {"topic": topic}
    assert value(samples, "rocketmq_messages_in_total", **named) == 2
    assert value(later, "rocketmq_messages_in_total", **named) == 3
    assert value(samples, "rocketmq_throughput_in_total", **named) == sum(sizes)
    assert value(samples, "rocketmq_messages_in_total", topic="t") == 2
    assert value(samples, "logquarry_retained_bytes", **named) == sum(sizes)
    assert value(samples, "logquarry_retained_messages", topic="t") == 2
    assert value(samples, "rocketmq_messages_out_total") == 2
    assert value(samples, "logquarry_puts_failed_total") == 1
    assert value(samples, "logquarry_gets_total", found="false") == 1
    assert value(samples, "rocketmq_message_size_bucket", le="1024.0") == 3
    assert value(samples, "rocketmq_message_size_bucket", le="+Inf") == 4
    assert value(samples, "rocketmq_message_size_count") == 4
    assert value(samples, "rocketmq_message_size_sum") == sum(sizes) + int(many.size.sum())
    assert value(samples, "rocketmq_storage_dispatch_behind_bytes") == 0
    assert value(samples, "rocketmq_storage_message_reserve_time") == 5_000
    end = value(samples, "logquarry_log_max_offset")
    assert end == sum(sizes) + int(many.size.sum())
    # A closed store has no metrics, and a scrape raises no error.
    assert client.generate_latest(registry) == b""


def test_a_store_at_rest(golden: Path) -> None:
    pytest.importorskip("prometheus_client")
    from logquarry.metrics import prometheus_text

    with lq.MessageStore.open(golden / "real-broker" / "store") as store:
        samples = parsed(prometheus_text(store, "node"))
        kept = store.stats().state.retained
    names = {name for name, _ in samples}
    # The counts of a process are unknown to other processes.
    assert not names & {"rocketmq_messages_in_total", "rocketmq_message_size_bucket"}
    assert names >= {
        "rocketmq_storage_size",
        "rocketmq_storage_flush_behind_bytes",
        "rocketmq_storage_dispatch_behind_bytes",
        "rocketmq_storage_message_reserve_time",
        "rocketmq_consumer_lag_messages",
        "logquarry_retained_bytes",
    }
    for topic, found in kept.items():
        assert value(samples, "logquarry_retained_bytes", topic=topic) == found.bytes
    lag = value(
        samples, "rocketmq_consumer_lag_messages", topic="MainTopic", consumer_group="cg_main"
    )
    assert lag == 0


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("prometheus_client", "logquarry.metrics")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"logquarry\[metrics\]"):
        import logquarry.metrics  # noqa: F401


def test_the_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(example, names)


def test_delayed_messages_and_transactions(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from logquarry.metrics import prometheus_text

    clock = FakeClock(NOW)
    with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as store:
        for level in (1, 5, 6):  # 1 s, 60 s, 2 m
            store.put(lq.Message("t", b"", delay_level=level))
        store.put(lq.Message("u", b"", delay_level=1, born_timestamp=NOW - 700_000))
        with store.transaction(lq.Message("u", b"")) as t:
            t.leave_open()
        with store.transaction(lq.Message("u", b"")) as t:
            t.commit()
        store.wait_dispatched()
        before = parsed(prometheus_text(store, "node"))
        # The latency does not include a late delivery.
        clock.advance(500_000)
        assert store.deliver_due() == 4
        samples = parsed(prometheus_text(store, "node"))
        document = store.stats().to_json()
    name = "rocketmq_delay_message_latency"
    assert not any(found.startswith(name) for found, _ in before)
    assert value(samples, f"{name}_bucket", topic="t", le="60.0") == 2
    assert value(samples, f"{name}_bucket", topic="t", le="600.0") == 3
    assert value(samples, f"{name}_sum", topic="t") == 1 + 60 + 120
    assert value(samples, f"{name}_bucket", topic="u", le="600.0") == 0
    assert value(samples, f"{name}_count", topic="u") == 1
    assert value(samples, "rocketmq_half_messages", topic="u") == 1
    assert document["delays"]["t"] == {"counts": [2, 1, 0, 0, 0, 0, 0], "seconds": 181}
    assert document["state"]["half_messages"] == {"u": 1}


def test_a_broker(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from logquarry.metrics import serve_metrics

    async def scenario() -> str:
        async with serving(tmp_path / "s", most_waiting_bytes=100) as (broker, client):
            assert (await client.send("t")).code == 0
            busy = await client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("t"), bytes(200))
            assert busy.code == ResponseCode.SYSTEM_BUSY
            await client.heartbeat(group="g", producer="p")
            while not messages_of(await client.pull("t", consumerGroup="g")):
                await asyncio.sleep(0.01)
            server = serve_metrics(broker, "127.0.0.1", 0)

            def scrape() -> str:
                with closing(http.client.HTTPConnection(server.address)) as connection:
                    connection.request("GET", "/metrics")
                    return connection.getresponse().read().decode()

            text = await asyncio.to_thread(scrape)
            await asyncio.to_thread(server.close)
            return text

    samples = parsed(asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS)))

    def value(name: str, **labels: str) -> float:
        node = {"cluster": "DefaultCluster", "node_id": "broker-a"}
        return samples[name, frozenset((node | labels).items())]

    group = {"topic": "t", "consumer_group": "g"}
    assert value("rocketmq_producer_connections") == 1
    assert value("rocketmq_consumer_connections", consumer_group="g") == 1
    assert value("rocketmq_group_messages_out_total", **group) == 1
    assert value("rocketmq_group_throughput_out_total", **group) > 4
    assert value("logquarry_requests_total", code="310") == 2
    assert value("logquarry_requests_total", code="34") == 1
    assert value("logquarry_sends_refused_total") == 1
    assert value("logquarry_waiting_jobs", lane="puts") == 0
    # The metrics of the store are there too.
    assert any(name == "rocketmq_messages_in_total" for name, _ in samples)
