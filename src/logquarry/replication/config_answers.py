"""Answers to what a slave's broker asks its master's, from the files in a store's ``config/``.

RocketMQ's four requests (``AdminBrokerProcessor``) get what the files say; every other one is "not
supported": nothing can be changed from outside. A file is read once for all who ask, until it
changes.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from logquarry.protocol.remoting import (
    LARGEST_FRAME,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    encode,
    encode_head,
)
from logquarry.store.config_tables import (
    CONSUMER_OFFSETS,
    DELAY_OFFSETS,
    SUBSCRIPTION_GROUPS,
    TOPICS,
    ConfigTable,
    config_file,
)
from logquarry.store.disk.config_file import ConfigFile
from logquarry.store.disk.disk import LocalDisk

logger = logging.getLogger(__name__)


class TableRequest(NamedTuple):
    """How a table is asked for.

    Attributes:
        code: the request.
        table: the table.
        nothing: the remark with which a broker that has none refuses.
    """

    code: RequestCode
    table: ConfigTable
    nothing: str


REQUESTS: Final = (
    TableRequest(RequestCode.GET_ALL_TOPIC_CONFIG, TOPICS, "No topic in this broker"),
    TableRequest(
        RequestCode.GET_ALL_CONSUMER_OFFSET, CONSUMER_OFFSETS, "No consumer offset in this broker"
    ),
    TableRequest(RequestCode.GET_ALL_DELAY_OFFSET, DELAY_OFFSETS, "No delay offset in this broker"),
    TableRequest(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        SUBSCRIPTION_GROUPS,
        "No subscription group in this broker",
    ),
)
"""In the order in which a RocketMQ slave asks."""
_BY_CODE: Final = {request.code.value: request for request in REQUESTS}

_SETTLED_NS: Final = 2_000_000_000
"""A file may change again, and its time not, if it is younger."""
_LARGEST_DOCUMENT: Final = LARGEST_FRAME - (1 << 12)
"""The rest is for a frame's header."""

_Signature = tuple[int, int, int]
"""Another one when a file was written: inode, time of its last change, bytes."""


class _Found(NamedTuple):
    """What a table's file was found to say.

    Attributes:
        signatures: of the file and of the one before it, then.
        document: that; None where there is none.
        is_spoilt: whether there is a file that cannot be served.
        is_sure: whether each file that was looked at could be read: what could not may be the next
            time, without another signature.
    """

    signatures: tuple[_Signature | None, ...]
    document: bytes | None
    is_spoilt: bool
    is_sure: bool


class ConfigAnswers:
    """Answers from the files of one store. For one thread.

    Args:
        root: the store's folder.

    Attributes:
        given: how many answers held a table.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = LocalDisk()
        self._known: dict[str, _Found] = {}
        self.given = 0

    def answer(self, command: RemotingCommand) -> list[bytes]:
        """The parts of the frame that answers a request."""
        request = _BY_CODE.get(command.code)
        if request is None:
            remark = f" request type {command.code} not supported"
            return [encode(command.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark))]
        found = self._found(request.table)
        if found.document is None:
            # What is wrong with a file is nobody else's business.
            name = request.table.file
            remark = f"{name} cannot be served" if found.is_spoilt else request.nothing
            return [encode(command.answer(ResponseCode.SYSTEM_ERROR, remark=remark))]
        answer = command.answer(ResponseCode.SUCCESS, body=found.document)
        self.given += 1
        return [encode_head(answer), answer.body]

    def _found(self, table: ConfigTable) -> _Found:
        """What a table's file says; it is read again where it may say something else."""
        file = config_file(self._disk, self._root, table)
        now = time.time_ns()
        signatures = (_signature(file.path), _signature(file.backup))
        known = self._known.get(table.file)
        if known is None or known.signatures != signatures:
            known = _load(file, table, signatures)
            settled = (found is None or now - found[1] > _SETTLED_NS for found in signatures)
            if known.is_sure and all(settled):
                self._known[table.file] = known
        return known


def _load(
    file: ConfigFile[Any], table: ConfigTable, signatures: tuple[_Signature | None, ...]
) -> _Found:
    """Read a table's file, or the one before it."""
    loaded = file.load()
    if loaded.value is None:
        return _Found(signatures, None, bool(loaded.problems), not loaded.problems)
    try:
        document = table.encode(loaded.value).encode("utf-8", "backslashreplace")
    except ValueError as error:
        logger.warning("%s is not served: %s", loaded.path, error)
        return _Found(signatures, None, True, True)
    if len(document) > _LARGEST_DOCUMENT:
        logger.warning("%s is not served: it is too large for a frame", loaded.path)
        return _Found(signatures, None, True, True)
    return _Found(signatures, document, False, not loaded.problems)


def _signature(path: Path) -> _Signature | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
