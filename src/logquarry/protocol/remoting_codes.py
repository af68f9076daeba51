"""The codes of RocketMQ's remoting protocol, and a table with the header fields of each request.

:data:`REQUESTS` has a row for each request of RocketMQ 4.9 (``RequestCode``), and for the requests
of 5.x that clients need. :func:`parse` reads the fields of a request: it ignores fields that it
does not know, as RocketMQ does.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

from logquarry.format import fastjson
from logquarry.protocol.remoting_header import BOOL, REQUIRED, TEXT, HeaderField, parse_fields


class RequestCode(IntEnum):
    """The requests that logquarry serves or sends."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    GET_CONSUMER_RUNNING_INFO = 307
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    GET_BROKER_CONSUME_STATS = 317
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    LITE_PULL_MESSAGE = 361


class ResponseCode(IntEnum):
    """Result codes of answers."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207


class Refused(Exception):
    """Raised to refuse a request: the answer then has a code other than SUCCESS.

    Attributes:
        code: the response code.
    """

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code


_LARGEST_BODY: Final = 2 << 20
"""Maximum bytes of a JSON body: enough for a heartbeat of 4,000 groups.

Parsing 16 MiB can take seconds, during which the event loop does nothing else.
"""
_KINDS: Final = {"text": TEXT, "bool": BOOL, "int": 31, "long": 63}
_DEFAULTS: Final[Mapping[str, Any]] = {"text": "", "int": 0, "long": 0, "bool": False}


def _fields(words: str, keys: str = "") -> tuple[HeaderField, ...]:
    """Fields from ``name:kind`` words; ``?`` after the kind marks an optional field.

    A missing optional field is empty, 0 or False; with ``??`` it is None.

    Args:
        words: the fields.
        keys: one letter for each field: the field's name in the short header of a send request.
    """
    found = []
    for number, word in enumerate(words.split()):
        name, _, kind = word.partition(":")
        is_optional, has_none = kind.endswith("?"), kind.endswith("??")
        kind = kind.rstrip("?")
        key = keys[number] if keys else name
        default = (None if has_none else _DEFAULTS[kind]) if is_optional else REQUIRED
        found.append(HeaderField(name, _KINDS[kind], default, key))
    return tuple(found)


_SEND: Final = (
    "producerGroup:text topic:text defaultTopic:text defaultTopicQueueNums:int queueId:int "
    "sysFlag:int bornTimestamp:long flag:int properties:text? reconsumeTimes:int? unitMode:bool? "
    "maxReconsumeTimes:int?? batch:bool?"
)
_LETTERS: Final = "abcdefghijklm"
_QUEUE: Final = "topic:text queueId:int"
_KEY: Final = "namespace:text key:text"
_GROUP_QUEUE: Final = "consumerGroup:text topic:text queueId:int"
_PULL: Final = (
    f"{_GROUP_QUEUE} queueOffset:long maxMsgNums:int sysFlag:int commitOffset:long? "
    "suspendTimeoutMillis:long? subscription:text? subVersion:long? expressionType:text? "
    "maxMsgBytes:int?"
)
_TOPIC: Final = (
    "topic:text defaultTopic:text? readQueueNums:int writeQueueNums:int perm:int "
    "topicFilterType:text? topicSysFlag:int? order:bool?"
)


class RequestType(NamedTuple):
    """A row of the table of requests.

    Attributes:
        code: the request code.
        name: RocketMQ's name.
        where: ``broker`` or ``names`` if logquarry's broker or name server answers it; ``client``
            if the broker sends it to clients; empty if logquarry does not support it.
        fields: the header fields that logquarry reads.
    """

    code: int
    name: str
    where: str
    fields: tuple[HeaderField, ...] = ()


def _served(code: RequestCode, where: str, words: str = "", keys: str = "") -> RequestType:
    return RequestType(int(code), code.name, where, _fields(words, keys))


_C = RequestCode
_ROWS: Final = (
    _served(_C.SEND_MESSAGE, "broker", _SEND),
    _served(_C.PULL_MESSAGE, "broker", _PULL),
    _served(
        _C.QUERY_MESSAGE,
        "broker",
        "topic:text key:text maxNum:int beginTimestamp:long endTimestamp:long "
        "_UNIQUE_KEY_QUERY:bool?",
    ),
    RequestType(13, "QUERY_BROKER_OFFSET", ""),
    _served(_C.QUERY_CONSUMER_OFFSET, "broker", _GROUP_QUEUE),
    _served(_C.UPDATE_CONSUMER_OFFSET, "broker", f"{_GROUP_QUEUE} commitOffset:long"),
    _served(_C.UPDATE_AND_CREATE_TOPIC, "broker", _TOPIC),
    _served(_C.UPDATE_AND_CREATE_TOPIC_LIST, "broker"),
    _served(_C.GET_ALL_TOPIC_CONFIG, "broker"),
    RequestType(22, "GET_TOPIC_CONFIG_LIST", ""),
    RequestType(23, "GET_TOPIC_NAME_LIST", ""),
    RequestType(25, "UPDATE_BROKER_CONFIG", ""),
    _served(_C.GET_BROKER_CONFIG, "broker"),
    RequestType(27, "TRIGGER_DELETE_FILES", ""),
    _served(_C.GET_BROKER_RUNTIME_INFO, "broker"),
    _served(_C.SEARCH_OFFSET_BY_TIMESTAMP, "broker", f"{_QUEUE} timestamp:long"),
    _served(_C.GET_MAX_OFFSET, "broker", _QUEUE),
    _served(_C.GET_MIN_OFFSET, "broker", _QUEUE),
    _served(_C.GET_EARLIEST_MSG_STORETIME, "broker", _QUEUE),
    _served(_C.VIEW_MESSAGE_BY_ID, "broker", "offset:long"),
    _served(_C.HEART_BEAT, "broker"),
    _served(
        _C.UNREGISTER_CLIENT, "broker", "clientID:text producerGroup:text? consumerGroup:text?"
    ),
    _served(
        _C.CONSUMER_SEND_MSG_BACK,
        "broker",
        "offset:long group:text delayLevel:int originMsgId:text? originTopic:text? unitMode:bool? "
        "maxReconsumeTimes:int??",
    ),
    _served(
        _C.END_TRANSACTION,
        "broker",
        "producerGroup:text tranStateTableOffset:long commitLogOffset:long commitOrRollback:int "
        "fromTransactionCheck:bool? msgId:text? transactionId:text?",
    ),
    _served(_C.GET_CONSUMER_LIST_BY_GROUP, "broker", "consumerGroup:text"),
    _served(_C.CHECK_TRANSACTION_STATE, "client"),
    _served(_C.NOTIFY_CONSUMER_IDS_CHANGED, "client"),
    _served(_C.LOCK_BATCH_MQ, "broker"),
    _served(_C.UNLOCK_BATCH_MQ, "broker"),
    _served(_C.GET_ALL_CONSUMER_OFFSET, "broker"),
    _served(_C.GET_ALL_DELAY_OFFSET, "broker"),
    _served(_C.CHECK_CLIENT_CONFIG, "broker"),
    RequestType(50, "UPDATE_AND_CREATE_ACL_CONFIG", ""),
    RequestType(51, "DELETE_ACL_CONFIG", ""),
    RequestType(52, "GET_BROKER_CLUSTER_ACL_INFO", ""),
    RequestType(53, "UPDATE_GLOBAL_WHITE_ADDRS_CONFIG", ""),
    RequestType(54, "GET_BROKER_CLUSTER_ACL_CONFIG", ""),
    _served(_C.PUT_KV_CONFIG, "names", f"{_KEY} value:text"),
    _served(_C.GET_KV_CONFIG, "names", _KEY),
    _served(_C.DELETE_KV_CONFIG, "names", _KEY),
    RequestType(103, "REGISTER_BROKER", ""),
    RequestType(104, "UNREGISTER_BROKER", ""),
    _served(_C.GET_ROUTEINFO_BY_TOPIC, "names", "topic:text acceptStandardJsonOnly:bool?"),
    _served(_C.GET_BROKER_CLUSTER_INFO, "names"),
    _served(_C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, "broker"),
    _served(_C.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "broker"),
    _served(_C.GET_TOPIC_STATS_INFO, "broker", "topic:text"),
    _served(_C.GET_CONSUMER_CONNECTION_LIST, "broker", "consumerGroup:text"),
    _served(_C.GET_PRODUCER_CONNECTION_LIST, "broker", "producerGroup:text"),
    _served(_C.WIPE_WRITE_PERM_OF_BROKER, "names", "brokerName:text"),
    _served(_C.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, "names"),
    _served(_C.DELETE_SUBSCRIPTIONGROUP, "broker", "groupName:text removeOffset:bool?"),
    _served(_C.GET_CONSUME_STATS, "broker", "consumerGroup:text topic:text?"),
    RequestType(209, "SUSPEND_CONSUMER", ""),
    RequestType(210, "RESUME_CONSUMER", ""),
    RequestType(213, "ADJUST_CONSUMER_THREAD_POOL", ""),
    RequestType(214, "WHO_CONSUME_THE_MESSAGE", ""),
    _served(_C.DELETE_TOPIC_IN_BROKER, "broker", "topic:text"),
    _served(_C.DELETE_TOPIC_IN_NAMESRV, "names", "topic:text"),
    _served(_C.GET_KVLIST_BY_NAMESPACE, "names", "namespace:text"),
    _served(_C.RESET_CONSUMER_CLIENT_OFFSET, "client"),
    RequestType(221, "GET_CONSUMER_STATUS_FROM_CLIENT", ""),
    _served(
        _C.INVOKE_BROKER_TO_RESET_OFFSET,
        "broker",
        "topic:text group:text timestamp:long isForce:bool?",
    ),
    RequestType(223, "INVOKE_BROKER_TO_GET_CONSUMER_STATUS", ""),
    _served(_C.GET_TOPICS_BY_CLUSTER, "names", "cluster:text"),
    _served(_C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, "broker"),
    _served(_C.QUERY_TOPIC_CONSUME_BY_WHO, "broker", "topic:text"),
    RequestType(301, "REGISTER_FILTER_SERVER", ""),
    RequestType(303, "QUERY_CONSUME_TIME_SPAN", ""),
    _served(_C.GET_SYSTEM_TOPIC_LIST_FROM_NS, "names"),
    _served(_C.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, "broker"),
    RequestType(306, "CLEAN_EXPIRED_CONSUMEQUEUE", ""),
    _served(
        _C.GET_CONSUMER_RUNNING_INFO,
        "broker",
        "consumerGroup:text clientId:text jstackEnable:bool?",
    ),
    RequestType(308, "QUERY_CORRECTION_OFFSET", ""),
    _served(
        _C.CONSUME_MESSAGE_DIRECTLY,
        "broker",
        "consumerGroup:text clientId:text msgId:text? brokerName:text? topic:text?",
    ),
    _served(_C.SEND_MESSAGE_V2, "broker", _SEND, _LETTERS),
    RequestType(311, "GET_UNIT_TOPIC_LIST", ""),
    RequestType(312, "GET_HAS_UNIT_SUB_TOPIC_LIST", ""),
    RequestType(313, "GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST", ""),
    _served(
        _C.CLONE_GROUP_OFFSET, "broker", "srcGroup:text destGroup:text topic:text? offline:bool?"
    ),
    _served(_C.VIEW_BROKER_STATS_DATA, "broker", "statsName:text statsKey:text"),
    RequestType(316, "CLEAN_UNUSED_TOPIC", ""),
    _served(_C.GET_BROKER_CONSUME_STATS, "broker", "isOrder:bool?"),
    RequestType(318, "UPDATE_NAMESRV_CONFIG", ""),
    _served(_C.GET_NAMESRV_CONFIG, "names"),
    _served(_C.SEND_BATCH_MESSAGE, "broker", _SEND, _LETTERS),
    _served(
        _C.QUERY_CONSUME_QUEUE,
        "broker",
        "topic:text queueId:int index:long count:int consumerGroup:text?",
    ),
    RequestType(322, "QUERY_DATA_VERSION", ""),
    RequestType(323, "RESUME_CHECK_HALF_MESSAGE", ""),
    _served(_C.SEND_REPLY_MESSAGE, "broker", _SEND),
    _served(_C.SEND_REPLY_MESSAGE_V2, "broker", _SEND, _LETTERS),
    _served(_C.PUSH_REPLY_MESSAGE_TO_CLIENT, "client"),
    _served(_C.ADD_WRITE_PERM_OF_BROKER, "names", "brokerName:text"),
    _served(_C.GET_ALL_PRODUCER_INFO, "broker"),
    RequestType(329, "DELETE_EXPIRED_COMMITLOG", ""),
    _served(_C.QUERY_TOPICS_BY_CONSUMER, "broker", "group:text"),
    _served(_C.QUERY_SUBSCRIPTION_BY_CONSUMER, "broker", "group:text topic:text"),
    _served(_C.GET_TOPIC_CONFIG, "broker", "topic:text"),
    _served(_C.LITE_PULL_MESSAGE, "broker", _PULL),
    RequestType(370, "RECALL_MESSAGE", ""),
    RequestType(400, "QUERY_ASSIGNMENT", ""),
    RequestType(401, "SET_MESSAGE_REQUEST_MODE", ""),
    RequestType(200_050, "POP_MESSAGE", ""),
    RequestType(200_051, "ACK_MESSAGE", ""),
    RequestType(200_052, "PEEK_MESSAGE", ""),
    RequestType(200_053, "CHANGE_MESSAGE_INVISIBLETIME", ""),
)
REQUESTS: Final[Mapping[int, RequestType]] = {row.code: row for row in _ROWS}
"""The requests by their codes."""


def markdown() -> str:
    """Return the table of requests for docs/broker-requests.md, in Markdown."""
    lines = ["| code | request | answered by |", "|---|---|---|"]
    lines += [f"| {row.code} | {row.name} | {row.where or '-'} |" for row in _ROWS]
    return "\n".join(lines)


_PARSED: Final = {row.code: tuple(map(tuple, row.fields)) for row in _ROWS}


def parse(code: int, ext_fields: Mapping[str, str]) -> dict[str, Any]:
    """Parse the header fields of a request; unknown fields are ignored.

    Raises:
        Refused: if a field is missing or invalid.
    """
    try:
        return parse_fields(_PARSED.get(code, ()), ext_fields)
    except ValueError as error:
        raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from error


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a request, a JSON object.

    Raises:
        Refused: if it is not a JSON object, or has more than 2 MiB.
    """
    if len(body) > _LARGEST_BODY:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"the body has {len(body)} bytes; a document has at most {_LARGEST_BODY}",
        )
    try:
        found = fastjson.decode(body)
    except (ValueError, RecursionError) as error:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(ResponseCode.SYSTEM_ERROR, "the body is not a JSON object")
    return found
