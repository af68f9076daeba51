"""Settings that tools keep at the name server: values by namespace and key (``KVConfigManager``).

mqadmin keeps the order of topics there. The broker keeps them in ``config/kvConfig.json`` of the
store, with RocketMQ's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from logquarry.broker.connection import Handler, Request
from logquarry.broker.core import Core
from logquarry.disk.config_file import ConfigTable, config_file
from logquarry.disk.disk import LocalDisk
from logquarry.format import fastjson
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode

_TABLE: Final = "configTable"
_MOST_CHARACTERS: Final = 4 << 20
"""Of all namespaces, keys and values: each change writes the whole file."""

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
        """Keep a value.

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
        # A copy: the loop may change the table while the thread encodes it.
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
