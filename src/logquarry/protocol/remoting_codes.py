"""The codes of RocketMQ's remoting protocol, and the header fields of each request.

:class:`RequestCode` has all requests that a server or client of RocketMQ 4.9 answers. It also has
the requests of RocketMQ 5 that clients send to servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, Self

from logquarry.format import broker_json
from logquarry.protocol.remoting_header import BOOL, REQUIRED, TEXT, HeaderField, parse_fields

_KINDS: Final = {"text": TEXT, "bool": BOOL, "int": 31, "long": 63}
_DEFAULTS: Final[Mapping[str, Any]] = {"text": "", "int": 0, "long": 0, "bool": False}


def _fields(words: str, keys: str = "") -> tuple[HeaderField, ...]:
    """Parse the definitions of header fields. ``words`` has one word ``name:kind`` for each field.

    ``?`` or ``??`` after the kind marks an optional field. The value of a missing optional field is
    "", 0 or False with ``?``, and None with ``??``. If ``keys`` is given, it has one letter for
    each field. In the short form of a send request's header, this letter replaces the field's name.
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
    "topicFilterType:text? topicSysFlag:int? order:bool? attributes:text?"
)


class RequestCode(IntEnum):
    """The requests of RocketMQ, with the header fields that logquarry reads.

    ``where`` is ``broker`` if logquarry's broker answers the request, ``names`` if its name server
    does, and ``client`` if the broker sends the request to clients. If logquarry does not support
    the request, ``where`` is empty.
    """

    where: str
    fields: tuple[HeaderField, ...]

    def __new__(cls, code: int, where: str = "", words: str = "", keys: str = "") -> Self:
        """Return a new member of the enum. :func:`_fields` describes ``words`` and ``keys``."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.where = where
        member.fields = _fields(words, keys)
        return member

    SEND_MESSAGE = 10, "broker", _SEND
    PULL_MESSAGE = 11, "broker", _PULL
    QUERY_MESSAGE = (
        12,
        "broker",
        "topic:text key:text maxNum:int beginTimestamp:long endTimestamp:long "
        "_UNIQUE_KEY_QUERY:bool? indexType:text?",
    )
    QUERY_BROKER_OFFSET = 13
    QUERY_CONSUMER_OFFSET = 14, "broker", _GROUP_QUEUE
    UPDATE_CONSUMER_OFFSET = 15, "broker", f"{_GROUP_QUEUE} commitOffset:long"
    UPDATE_AND_CREATE_TOPIC = 17, "broker", _TOPIC
    UPDATE_AND_CREATE_TOPIC_LIST = 18, "broker"
    GET_ALL_TOPIC_CONFIG = 21, "broker"
    GET_TOPIC_CONFIG_LIST = 22
    GET_TOPIC_NAME_LIST = 23
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26, "broker"
    TRIGGER_DELETE_FILES = 27
    GET_BROKER_RUNTIME_INFO = 28, "broker"
    SEARCH_OFFSET_BY_TIMESTAMP = 29, "broker", f"{_QUEUE} timestamp:long"
    GET_MAX_OFFSET = 30, "broker", _QUEUE
    GET_MIN_OFFSET = 31, "broker", _QUEUE
    GET_EARLIEST_MSG_STORETIME = 32, "broker", _QUEUE
    VIEW_MESSAGE_BY_ID = 33, "broker", "offset:long"
    HEART_BEAT = 34, "broker"
    UNREGISTER_CLIENT = 35, "broker", "clientID:text producerGroup:text? consumerGroup:text?"
    CONSUMER_SEND_MSG_BACK = (
        36,
        "broker",
        "offset:long group:text delayLevel:int originMsgId:text? originTopic:text? unitMode:bool? "
        "maxReconsumeTimes:int??",
    )
    END_TRANSACTION = (
        37,
        "broker",
        "producerGroup:text tranStateTableOffset:long commitLogOffset:long commitOrRollback:int "
        "fromTransactionCheck:bool? msgId:text? transactionId:text?",
    )
    GET_CONSUMER_LIST_BY_GROUP = 38, "broker", "consumerGroup:text"
    CHECK_TRANSACTION_STATE = 39, "client"
    NOTIFY_CONSUMER_IDS_CHANGED = 40, "client"
    LOCK_BATCH_MQ = 41, "broker"
    UNLOCK_BATCH_MQ = 42, "broker"
    GET_ALL_CONSUMER_OFFSET = 43, "broker"
    GET_ALL_DELAY_OFFSET = 45, "broker"
    CHECK_CLIENT_CONFIG = 46, "broker"
    UPDATE_AND_CREATE_ACL_CONFIG = 50
    DELETE_ACL_CONFIG = 51
    GET_BROKER_CLUSTER_ACL_INFO = 52
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG = 53
    GET_BROKER_CLUSTER_ACL_CONFIG = 54
    PUT_KV_CONFIG = 100, "names", f"{_KEY} value:text"
    GET_KV_CONFIG = 101, "names", _KEY
    DELETE_KV_CONFIG = 102, "names", _KEY
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105, "names", "topic:text acceptStandardJsonOnly:bool?"
    GET_BROKER_CLUSTER_INFO = 106, "names"
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200, "broker"
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201, "broker"
    GET_TOPIC_STATS_INFO = 202, "broker", "topic:text"
    GET_CONSUMER_CONNECTION_LIST = 203, "broker", "consumerGroup:text"
    GET_PRODUCER_CONNECTION_LIST = 204, "broker", "producerGroup:text"
    WIPE_WRITE_PERM_OF_BROKER = 205, "names", "brokerName:text"
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206, "names"
    DELETE_SUBSCRIPTIONGROUP = 207, "broker", "groupName:text removeOffset:bool? cleanOffset:bool?"
    GET_CONSUME_STATS = 208, "broker", "consumerGroup:text topic:text?"
    SUSPEND_CONSUMER = 209
    RESUME_CONSUMER = 210
    ADJUST_CONSUMER_THREAD_POOL = 213
    WHO_CONSUME_THE_MESSAGE = 214
    DELETE_TOPIC_IN_BROKER = 215, "broker", "topic:text"
    DELETE_TOPIC_IN_NAMESRV = 216, "names", "topic:text"
    GET_KVLIST_BY_NAMESPACE = 219, "names", "namespace:text"
    RESET_CONSUMER_CLIENT_OFFSET = 220, "client"
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = (
        222,
        "broker",
        "topic:text group:text timestamp:long isForce:bool? queueId:int?? offset:long??",
    )
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224, "names", "cluster:text"
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225, "broker"
    QUERY_TOPIC_CONSUME_BY_WHO = 300, "broker", "topic:text"
    REGISTER_FILTER_SERVER = 301
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304, "names"
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305, "broker"
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307, "broker", "consumerGroup:text clientId:text jstackEnable:bool?"
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = (
        309,
        "broker",
        "consumerGroup:text clientId:text msgId:text? brokerName:text? topic:text?",
    )
    SEND_MESSAGE_V2 = 310, "broker", _SEND, _LETTERS
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314, "broker", "srcGroup:text destGroup:text topic:text? offline:bool?"
    VIEW_BROKER_STATS_DATA = 315, "broker", "statsName:text statsKey:text"
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317, "broker", "isOrder:bool?"
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319, "names"
    SEND_BATCH_MESSAGE = 320, "broker", _SEND, _LETTERS
    QUERY_CONSUME_QUEUE = (
        321,
        "broker",
        "topic:text queueId:int index:long count:int consumerGroup:text?",
    )
    QUERY_DATA_VERSION = 322
    RESUME_CHECK_HALF_MESSAGE = 323
    SEND_REPLY_MESSAGE = 324, "broker", _SEND
    SEND_REPLY_MESSAGE_V2 = 325, "broker", _SEND, _LETTERS
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326, "client"
    ADD_WRITE_PERM_OF_BROKER = 327, "names", "brokerName:text"
    GET_ALL_PRODUCER_INFO = 328, "broker"
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343, "broker", "group:text"
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345, "broker", "group:text topic:text"
    GET_TOPIC_CONFIG = 351, "broker", "topic:text"
    LITE_PULL_MESSAGE = 361, "broker", _PULL
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    POP_MESSAGE = 200_050
    ACK_MESSAGE = 200_051
    PEEK_MESSAGE = 200_052
    CHANGE_MESSAGE_INVISIBLETIME = 200_053


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
    """A request is refused. ``code`` is the result code of the answer; it is never SUCCESS."""

    def __init__(self, remark: str, code: int = ResponseCode.SYSTEM_ERROR) -> None:
        super().__init__(remark)
        self.code = code


_LARGEST_BODY: Final = 2 << 20
"""Maximum number of bytes of a JSON body. While the event loop parses a body, it serves no other
request, and parsing a body of 16 MiB can take seconds.
"""


def markdown() -> str:
    """Return the table of requests for docs/broker-requests.md, in Markdown."""
    lines = ["| code | request | answered by |", "|---|---|---|"]
    lines += [f"| {row:d} | {row.name} | {row.where or '-'} |" for row in RequestCode]
    return "\n".join(lines)


_PARSED: Final = {int(code): tuple(map(tuple, code.fields)) for code in RequestCode}


def parse(code: int, ext_fields: Mapping[str, str]) -> dict[str, Any]:
    """Parse the header fields of a request. Raises Refused if a field is missing or invalid."""
    try:
        return parse_fields(_PARSED.get(code, ()), ext_fields)
    except ValueError as error:
        raise Refused(str(error)) from error


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a request. Raises Refused if the body is too large or no JSON object."""
    if len(body) > _LARGEST_BODY:
        raise Refused(f"the body has {len(body)} bytes; a document has at most {_LARGEST_BODY}")
    try:
        found = broker_json.decode(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused("the body is not a JSON object")
    return found
