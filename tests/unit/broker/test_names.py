"""The name server: routes, the write permission, and the settings of tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from logquarry.broker import Broker, names
from logquarry.disk.config_file import ConfigFile
from logquarry.errors import StoreUnavailable
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import Client, connected, document_of, play


def test_the_name_server_gives_routes(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        names = await connected(broker.name_server)
        answer = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        assert f'"brokerAddrs":{{0:"{broker.address}"}}' in answer.body.decode()
        route = document_of(answer)
        assert route["queueDatas"][0]["writeQueueNums"] == 4
        strict = {"topic": "t", "acceptStandardJsonOnly": "true"}
        answer = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, strict)
        standard = json.loads(answer.body)
        assert standard["brokerDatas"][0].pop("enableActingMaster") is False
        assert standard == route
        # Clients since RocketMQ 4.9.4 get it without the field. The Rust client relies on that.
        for version, is_standard in ((400, False), (401, True)):
            answer = await names.ask(
                RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"}, version=version
            )
            text = answer.body.decode()
            assert (f'"brokerAddrs":{{"0":"{broker.address}"}}' in text) is is_standard
            assert ('"enableActingMaster":false' in text) is is_standard
        answer = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "none"})
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        # The name server is not a broker.
        assert (await names.send("t")).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        cluster = document_of(await names.ask(RequestCode.GET_BROKER_CLUSTER_INFO))
        assert cluster["clusterAddrTable"] == {"DefaultCluster": ["broker-a"]}
        topics = document_of(await names.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        assert {"t", "TBW102"} <= set(topics["topicList"])
        await names.close()

    play(scenario, tmp_path / "s")


def test_key_value_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name server keeps them in the store, as mqadmin's updateKvConfig sets them."""
    where = {"namespace": "ORDER_TOPIC_CONFIG", "key": "t"}
    code = RequestCode

    async def first(broker: Broker, _: Client) -> None:
        client = await connected(broker.name_server)
        for request in code.GET_KV_CONFIG, code.GET_KVLIST_BY_NAMESPACE:
            assert (await client.ask(request, where)).code == ResponseCode.QUERY_NOT_FOUND
        for value in "broker-a:1", "broker-a:2":
            assert (await client.ask(code.PUT_KV_CONFIG, where | {"value": value})).code == 0
        assert (await client.ask(code.GET_KV_CONFIG, where)).ext_fields == {"value": "broker-a:2"}
        other = where | {"key": "other"}
        assert (await client.ask(code.PUT_KV_CONFIG, other | {"value": "x"})).code == 0
        for _number in range(2):
            assert (await client.ask(code.DELETE_KV_CONFIG, other)).code == 0
        monkeypatch.setattr(names, "_MOST_CHARACTERS", 100)
        large = other | {"value": "x" * 60}
        assert (await client.ask(code.PUT_KV_CONFIG, large)).code == ResponseCode.SYSTEM_ERROR
        await client.close()

    async def second(broker: Broker, client: Client) -> None:
        found = document_of(await client.ask(code.GET_KVLIST_BY_NAMESPACE, where))
        assert found == {"table": {"t": "broker-a:2"}}
        if broker.options.read_only:
            for request in code.PUT_KV_CONFIG, code.DELETE_KV_CONFIG:
                answer = await client.ask(request, where | {"value": "x"})
                assert answer.code == ResponseCode.NO_PERMISSION

    path = tmp_path / "s"
    play(first, path)
    play(second, path)
    play(second, path, read_only=True)
    written = json.loads((path / "config" / "kvConfig.json").read_text())
    assert written == {"configTable": {"ORDER_TOPIC_CONFIG": {"t": "broker-a:2"}}}


def test_the_name_server_takes_the_write_permission_away(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        names = await connected(broker.name_server)

        async def permission() -> int:
            route = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
            return int(document_of(route)["queueDatas"][0]["perm"])

        count = str(len(broker.core.tables.topics))
        for code, name, expected in (
            (RequestCode.WIPE_WRITE_PERM_OF_BROKER, "wipeTopicCount", 4),
            (RequestCode.ADD_WRITE_PERM_OF_BROKER, "addTopicCount", 6),
        ):
            answer = await names.ask(code, {"brokerName": "other"})
            assert answer.ext_fields == {name: "0"}
            answer = await names.ask(code, {"brokerName": "broker-a"})
            assert answer.ext_fields == {name: count}
            assert await permission() == expected
        settings = await names.ask(RequestCode.GET_NAMESRV_CONFIG)
        port = broker.name_server.rpartition(":")[2]
        assert f"listenPort={port}\n".encode() in settings.body
        await names.close()

    play(scenario, tmp_path / "s")


def test_settings_stay_if_a_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, where = RequestCode, {"namespace": "n", "key": "k"}

    def full(*_: object) -> bool:
        raise StoreUnavailable("the disk is full")

    async def scenario(broker: Broker, _: Client) -> None:
        client = await connected(broker.name_server)
        assert (await client.ask(code.PUT_KV_CONFIG, where | {"value": "1"})).code == 0
        with monkeypatch.context() as failing:
            failing.setattr(ConfigFile, "save", full)
            assert (await client.ask(code.PUT_KV_CONFIG, where | {"value": "2"})).code != 0
            assert (await client.ask(code.DELETE_KV_CONFIG, where)).code != 0
            assert (await client.ask(code.GET_KV_CONFIG, where)).ext_fields == {"value": "1"}
        assert (await client.ask(code.DELETE_KV_CONFIG, where)).code == 0
        assert (await client.ask(code.GET_KV_CONFIG, where)).code == ResponseCode.QUERY_NOT_FOUND
        await client.close()

    play(scenario, tmp_path / "s")
