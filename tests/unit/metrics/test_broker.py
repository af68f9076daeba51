"""The metrics of a broker, as Prometheus scrapes them."""

from __future__ import annotations

import asyncio
import http.client
from contextlib import closing
from pathlib import Path

import pytest

from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import PATIENCE_SECONDS, messages_of, send_fields, serving
from tests.unit.metrics.test_collector import parsed


def test_a_broker(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from logquarry.metrics.collector import serve_metrics

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
