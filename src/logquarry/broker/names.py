"""The name server: answers requests for routes and topics (``DefaultRequestProcessor``).

It knows only one broker: the one in the same process. Brokers cannot register.

Tools store settings in the name server, as values by namespace and key (``KVConfigManager``).
mqadmin, for example, stores the order of topics. The broker writes these settings to
``config/kvConfig.json`` of the store, in RocketMQ's format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from logquarry.broker.connection import Handler, Request
from logquarry.broker.core import Core
from logquarry.broker.tables import WRITE
from logquarry.disk.config_file import ConfigTable, config_file
from logquarry.disk.disk import LocalDisk
from logquarry.format import fastjson
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode

_READS_STANDARD_JSON: Final = 401
"""V4_9_4 in RocketMQ's ``MQVersion``. Newer clients get standard JSON, even if they do not request
it.
"""


class Names:
    """Answers the requests to the name server.

    Args:
        core: the broker's parts.
        port: returns the port of the name server.
    """

    def __init__(self, core: Core, port: Callable[[], int]) -> None:
        self._core = core
        self._port = port
        self._is_wiped = False
        """Whether mqadmin has removed the write permission of all topics from the routes."""

    def handlers(self) -> Mapping[int, Handler]:
        """The requests that this part answers."""
        return {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self.route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self.cluster,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self.topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.system_topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self.delete_topic,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self.write_permission,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self.write_permission,
            RequestCode.GET_NAMESRV_CONFIG: self.settings,
        }

    def _broker(self) -> dict[str, Any]:
        core = self._core
        return {
            "brokerAddrs": {0: core.address},
            "brokerName": core.options.name,
            "cluster": core.options.cluster,
        }

    def route(self, request: Request) -> None:
        """The route of a topic: its queues, and the address of the broker."""
        name = request.fields["topic"]
        topic = self._core.tables.topic(name)
        if topic is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"No topic route info in name server for the topic: {name[:200]}",
            )
        is_strict = (
            request.fields["acceptStandardJsonOnly"]
            or request.command.version >= _READS_STANDARD_JSON
        )
        broker = self._broker()
        if is_strict:
            # The Rust client needs this field of RocketMQ 5.
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
        request.reply(body=fastjson.compact(document, quote_keys=is_strict).encode())

    def cluster(self, request: Request) -> None:
        """The cluster with its one broker."""
        options = self._core.options
        document = {
            "brokerAddrTable": {options.name: self._broker()},
            "clusterAddrTable": {options.cluster: [options.name]},
        }
        request.reply(body=fastjson.compact(document).encode())

    def topics(self, request: Request) -> None:
        """The names of all topics."""
        _reply_topics(request, sorted(self._core.tables.topics))

    def topics_of_cluster(self, request: Request) -> None:
        """The names of the topics of a cluster."""
        is_ours = request.fields["cluster"] == self._core.options.cluster
        _reply_topics(request, sorted(self._core.tables.topics) if is_ours else [])

    def system_topics(self, request: Request) -> None:
        """The names of the cluster and of the broker. Both are also names of topics."""
        core = self._core
        names = [core.options.cluster, core.options.name]
        document = {"brokerAddr": core.address, "topicList": names}
        request.reply(body=fastjson.compact(document).encode())

    def write_permission(self, request: Request) -> None:
        """Remove the write permission from all routes, or restore it, until the broker ends.

        Without the permission, producers stop sending when they request the routes again.
        """
        is_wipe = request.command.code == RequestCode.WIPE_WRITE_PERM_OF_BROKER
        count = 0
        if request.fields["brokerName"] == self._core.options.name:
            self._is_wiped = is_wipe
            count = len(self._core.tables.topics)
        name = "wipeTopicCount" if is_wipe else "addTopicCount"
        request.reply(fields={name: str(count)})

    def settings(self, request: Request) -> None:
        """The settings of the name server as a properties file."""
        port = self._port()
        request.reply(body=f"listenPort={port}\norderMessageEnable=false\n".encode())

    def delete_topic(self, request: Request) -> None:
        """Answer mqadmin's deleteTopic. mqadmin has already deleted the topic at the broker."""
        request.reply()


def _reply_topics(request: Request, names: list[str]) -> None:
    request.reply(body=fastjson.compact({"topicList": names}).encode())


_TABLE: Final = "configTable"
_MOST_CHARACTERS: Final = 4 << 20
"""Maximum characters of all names and values, because each change writes the whole file."""

Namespaces = dict[str, dict[str, str]]


def _decode(data: bytes) -> Namespaces:
    document = fastjson.decode(data)
    if not isinstance(document, dict) or not isinstance(document.get(_TABLE), dict):
        raise ValueError(f"there is no {_TABLE}")
    found = document[_TABLE]
    return {
        str(name): {str(key): str(value) for key, value in dict(values).items()}
        for name, values in found.items()
    }


def _encode(namespaces: Namespaces) -> str:
    return fastjson.encode({_TABLE: namespaces})


class KeyValues:
    """Answers the requests for key-value settings.

    Args:
        core: the broker's parts.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        table = ConfigTable("kvConfig.json", _decode, _encode)
        self._file = config_file(LocalDisk(), Path(core.store.root), table)
        self._found: Namespaces | None = None

    def handlers(self) -> Mapping[int, Handler]:
        """The requests that this part answers."""
        return {
            RequestCode.PUT_KV_CONFIG: self.put,
            RequestCode.GET_KV_CONFIG: self.get,
            RequestCode.DELETE_KV_CONFIG: self.delete,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self.of_namespace,
        }

    async def _namespaces(self) -> Namespaces:
        if self._found is None:
            found = (await self._core.slow(self._file.load)).value or {}
            if self._found is None:
                self._found = found
        return self._found

    async def put(self, request: Request) -> None:
        """Store a value.

        Raises:
            Refused: if the store is read-only, or has too many values.
        """
        self._core.tables.require_writer()
        fields, namespaces = request.fields, await self._namespaces()
        size = sum(
            len(name) + sum(len(key) + len(value) for key, value in values.items())
            for name, values in namespaces.items()
        )
        if size + sum(map(len, fields.values())) > _MOST_CHARACTERS:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"the name server keeps at most {_MOST_CHARACTERS} characters; delete a setting",
            )
        namespaces.setdefault(fields["namespace"], {})[fields["key"]] = fields["value"]
        await self._save()
        request.reply()

    async def delete(self, request: Request) -> None:
        """Delete a value, if there is one."""
        self._core.tables.require_writer()
        fields, namespaces = request.fields, await self._namespaces()
        if namespaces.get(fields["namespace"], {}).pop(fields["key"], None) is not None:
            await self._save()
        request.reply()

    async def _save(self) -> None:
        # Copy the table: the loop may change it while the thread encodes it.
        copy = {name: dict(values) for name, values in (await self._namespaces()).items()}
        await self._core.slow(lambda: self._file.save(copy))

    async def get(self, request: Request) -> None:
        """One value.

        Raises:
            Refused: if there is none.
        """
        name, key = request.fields["namespace"], request.fields["key"]
        value = (await self._namespaces()).get(name, {}).get(key)
        if value is None:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {name[:200]} Key: {key[:200]}",
            )
        request.reply(fields={"value": value})

    async def of_namespace(self, request: Request) -> None:
        """The values of a namespace.

        Raises:
            Refused: if there are none.
        """
        name = request.fields["namespace"]
        found = (await self._namespaces()).get(name)
        if not found:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {name[:200]}")
        request.reply(body=fastjson.compact({"table": found}).encode("utf-8", "replace"))
