"""The name server: answers requests for routes and topics (``DefaultRequestProcessor``).

The name server serves only the broker in its own process. Other brokers cannot register with it.
The name server also stores settings of tools as keys and values (``KVConfigManager``), in the
store's file ``config/kvConfig.json``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from logquarry.broker.connection import Request
from logquarry.broker.core import Core, Part, answers
from logquarry.broker.tables import WRITE
from logquarry.disk.config_file import ConfigFile, ConfigTable
from logquarry.disk.disk import Disk
from logquarry.format import broker_json
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode

_READS_STANDARD_JSON: Final = 401
"""The number of version V4_9_4 in RocketMQ's ``MQVersion``.

Clients of this version or a later one receive standard JSON, even if they do not ask for it.
"""


class Names(Part):
    """Answers the requests for routes, topics and the cluster."""

    def __init__(self, core: Core, port: Callable[[], int]) -> None:
        super().__init__(core)
        self._port = port
        self._is_wiped = False
        """Whether routes leave out the write permission, because mqadmin has removed it."""

    def _broker(self) -> dict[str, Any]:
        core = self._core
        return {
            "brokerAddrs": {0: core.address},
            "brokerName": core.options.name,
            "cluster": core.options.cluster,
        }

    @answers(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    def route(self, request: Request) -> None:
        """Answer with the queues of a topic, and with the address of the broker."""
        name = request.fields["topic"]
        topic = self._core.tables.topic(name)
        if topic is None:
            raise Refused(
                f"No topic route info in name server for the topic: {name[:200]}",
                ResponseCode.TOPIC_NOT_EXIST,
            )
        is_strict = (
            request.fields["acceptStandardJsonOnly"]
            or request.command.version >= _READS_STANDARD_JSON
        )
        broker = self._broker()
        if is_strict:
            # Servers before RocketMQ 5 do not send this field, but the Rust client needs it.
            broker["enableActingMaster"] = False
        document = {
            "brokerDatas": [broker],
            "filterServerTable": {},
            "queueDatas": [
                {
                    "brokerName": self._core.options.name,
                    "perm": topic.perm & ~WRITE if self._is_wiped else topic.perm,
                    "readQueueNums": topic.read_queues,
                    "topicSynFlag": topic.sys_flag,
                    "topicSysFlag": topic.sys_flag,
                    "writeQueueNums": topic.write_queues,
                }
            ],
        }
        request.reply_json(document, quote_keys=is_strict)

    @answers(RequestCode.GET_BROKER_CLUSTER_INFO)
    def cluster(self, request: Request) -> None:
        """Answer with the brokers of the cluster. There is only one."""
        options = self._core.options
        document = {
            "brokerAddrTable": {options.name: self._broker()},
            "clusterAddrTable": {options.cluster: [options.name]},
        }
        request.reply_json(document)

    @answers(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    def topics(self, request: Request) -> None:
        """Answer with the names of all topics."""
        request.reply_json({"topicList": sorted(self._core.tables.topics)})

    @answers(RequestCode.GET_TOPICS_BY_CLUSTER)
    def topics_of_cluster(self, request: Request) -> None:
        """Answer with the names of all topics in a cluster."""
        is_ours = request.fields["cluster"] == self._core.options.cluster
        request.reply_json({"topicList": sorted(self._core.tables.topics) if is_ours else []})

    @answers(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
    def system_topics(self, request: Request) -> None:
        """Answer with the cluster's name and the broker's name, because RocketMQ has a system topic
        for each of these two names.
        """
        core = self._core
        names = [core.options.cluster, core.options.name]
        document = {"brokerAddr": core.address, "topicList": names}
        request.reply_json(document)

    @answers(RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.ADD_WRITE_PERM_OF_BROKER)
    def write_permission(self, request: Request) -> None:
        """Remove the write permission from all routes, or restore it.

        A restart of the broker also restores the permission.
        """
        is_wipe = request.command.code == RequestCode.WIPE_WRITE_PERM_OF_BROKER
        count = 0
        if request.fields["brokerName"] == self._core.options.name:
            self._is_wiped = is_wipe
            count = len(self._core.tables.topics)
        name = "wipeTopicCount" if is_wipe else "addTopicCount"
        request.reply(fields={name: str(count)})

    @answers(RequestCode.GET_NAMESRV_CONFIG)
    def settings(self, request: Request) -> None:
        """Answer with the settings of the name server, in the format of a properties file."""
        request.reply(body=f"listenPort={self._port()}\norderMessageEnable=false\n".encode())

    @answers(RequestCode.DELETE_TOPIC_IN_NAMESRV)
    def delete_topic(self, request: Request) -> None:
        """Answer the second request of mqadmin's deleteTopic.

        The first request deleted the topic at the broker.
        """
        request.reply()


_TABLE: Final = "configTable"
_MOST_CHARACTERS: Final = 4 << 20
"""Maximum length in characters of all names, keys and values together.

The limit is needed because each change writes the whole file.
"""

Namespaces = dict[str, dict[str, str]]


def _decode(data: bytes) -> Namespaces:
    document = broker_json.decode(data)
    if not isinstance(document, dict) or not isinstance(document.get(_TABLE), dict):
        raise ValueError(f"there is no {_TABLE}")
    found = document[_TABLE]
    return {
        str(name): {str(key): str(value) for key, value in dict(values).items()}
        for name, values in found.items()
    }


class KeyValues(Part):
    """Stores key-value settings of tools by namespace, and answers requests for them."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        table = ConfigTable(
            "kvConfig.json", _decode, lambda found: broker_json.encode({_TABLE: found})
        )
        self._file = ConfigFile(Disk(), Path(core.store.root), table)
        self._found: Namespaces | None = None
        self._changing = asyncio.Lock()

    async def _namespaces(self) -> Namespaces:
        if self._found is None:
            found = (await self._core.slow(self._file.load)).value or {}
            if self._found is None:
                self._found = found
        return self._found

    @answers(RequestCode.PUT_KV_CONFIG)
    async def put(self, request: Request) -> None:
        """Store a value for a key in a namespace."""
        self._core.tables.require_writer()
        fields = request.fields
        async with self._changing:
            namespaces = await self._copy()
            size = sum(
                len(name) + sum(len(key) + len(value) for key, value in values.items())
                for name, values in namespaces.items()
            )
            if size + sum(map(len, fields.values())) > _MOST_CHARACTERS:
                raise Refused(
                    f"the name server keeps at most {_MOST_CHARACTERS} characters; delete a setting"
                )
            namespaces.setdefault(fields["namespace"], {})[fields["key"]] = fields["value"]
            await self._save(namespaces)
        request.reply()

    @answers(RequestCode.DELETE_KV_CONFIG)
    async def delete(self, request: Request) -> None:
        """Delete the value of a key in a namespace, if there is one."""
        self._core.tables.require_writer()
        fields = request.fields
        async with self._changing:
            namespaces = await self._copy()
            if namespaces.get(fields["namespace"], {}).pop(fields["key"], None) is not None:
                await self._save(namespaces)
        request.reply()

    async def _copy(self) -> Namespaces:
        return {name: dict(values) for name, values in (await self._namespaces()).items()}

    async def _save(self, changed: Namespaces) -> None:
        # Save the file before the settings in memory change. If the save fails, the settings in
        # memory are still those of the file.
        await self._core.slow(lambda: self._file.save(changed))
        self._found = changed

    @answers(RequestCode.GET_KV_CONFIG)
    async def get(self, request: Request) -> None:
        """Answer with the value of a key in a namespace."""
        name, key = request.fields["namespace"], request.fields["key"]
        value = (await self._namespaces()).get(name, {}).get(key)
        if value is None:
            raise Refused(
                f"No config item, Namespace: {name[:200]} Key: {key[:200]}",
                ResponseCode.QUERY_NOT_FOUND,
            )
        request.reply(fields={"value": value})

    @answers(RequestCode.GET_KVLIST_BY_NAMESPACE)
    async def of_namespace(self, request: Request) -> None:
        """Answer with all keys of a namespace, and their values."""
        name = request.fields["namespace"]
        found = (await self._namespaces()).get(name)
        if not found:
            raise Refused(f"No config item, Namespace: {name[:200]}", ResponseCode.QUERY_NOT_FOUND)
        request.reply_json({"table": found})
