"""Checks the signature of each request, and the permissions of its account
(``PlainPermissionManager``).

The signature is an HMAC-SHA1 of the values of all header fields, sorted by field name, and of the
body after them. For some requests (batches, ends of transactions, offsets, searches and locks),
RocketMQ checks only the signature; this broker also checks the permission of the account. Requests
for which this module has no rule are allowed only to administrators.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import tomllib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from logquarry import arguments
from logquarry.errors import UsageError, WrongType
from logquarry.format import timer
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode, parse_body
from logquarry.store.consumer.group import DEAD_PREFIX, RETRY_PREFIX

_SIGNATURE: Final = "Signature"
_ACCESS_KEY: Final = "AccessKey"
CREDENTIALS: Final = frozenset({_SIGNATURE, _ACCESS_KEY, "SecurityToken"})
"""Fields of a signed request.

The broker removes them before it forwards the request to another client.
"""
_UNIQUE_QUERY: Final = "_UNIQUE_KEY_QUERY"
"""The signature does not cover this field, because Java's client adds the field after it has signed
the request.
"""
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
HIDDEN: Final = frozenset(
    {
        *("SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"),
        *("TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", timer.TOPIC),
    }
)
"""System topics to which clients must not send (``TopicValidator``).

RocketMQ allows sends to the topic of the timers. This broker refuses these sends. Otherwise
it would deliver the message to the topic that the message names, even if the client has no
permission for this topic.
"""
PUB: Final = "PUB"
SUB: Final = "SUB"
NOTHING: Final = frozenset[str]()
_SHARED: Final = (TRACE_TOPIC, "rmq_sys_")
_LEAST_KEY: Final = 6
_PERMISSIONS: Final = {
    "DENY": NOTHING,
    PUB: frozenset({PUB}),
    SUB: frozenset({SUB}),
    "PUB|SUB": frozenset({PUB, SUB}),
    "SUB|PUB": frozenset({PUB, SUB}),
    "ANY": frozenset({PUB, SUB}),
}

_QUOTED: Final = "text in quotes"
_RULES: Final = "a mapping of names to sets of permissions"
_SETS: Final[type[Any]] = Set
_WORDS: Final = "a set of permissions"

_C = RequestCode
_OPEN: Final = frozenset(
    {_C.GET_ROUTEINFO_BY_TOPIC, _C.GET_BROKER_CLUSTER_INFO, _C.UNREGISTER_CLIENT}
)
"""Requests that are allowed without an account."""
_LATER: Final = frozenset({_C.VIEW_MESSAGE_BY_ID, _C.END_TRANSACTION})
"""Requests that name a message instead of a topic.

The broker checks the permission when it has read the message's topic.
"""
_PUBLISHES: Final = frozenset(
    {
        *(_C.SEND_MESSAGE, _C.SEND_MESSAGE_V2, _C.SEND_BATCH_MESSAGE),
        *(_C.SEND_REPLY_MESSAGE, _C.SEND_REPLY_MESSAGE_V2),
    }
)
_CONSUMES: Final = frozenset(
    {
        *(_C.PULL_MESSAGE, _C.LITE_PULL_MESSAGE, _C.QUERY_MESSAGE),
        *(_C.QUERY_CONSUMER_OFFSET, _C.UPDATE_CONSUMER_OFFSET, _C.CONSUMER_SEND_MSG_BACK),
        *(_C.SEARCH_OFFSET_BY_TIMESTAMP, _C.GET_MAX_OFFSET, _C.GET_MIN_OFFSET),
        *(_C.GET_EARLIEST_MSG_STORETIME, _C.GET_CONSUMER_LIST_BY_GROUP),
    }
)
_IN_BODY: Final = frozenset(
    {_C.HEART_BEAT, _C.LOCK_BATCH_MQ, _C.UNLOCK_BATCH_MQ, _C.CHECK_CLIENT_CONFIG}
)


@dataclass(frozen=True, slots=True)
class Account:
    """A client's account, with its permissions for topics and consumer groups.

    The account signs its requests with ``secret_key``. With ``admin``, it may make all requests.
    The default permissions apply to the topics and groups that ``topics`` and ``groups`` do not
    list.
    """

    access_key: str
    secret_key: str
    admin: bool = False
    topics: Mapping[str, frozenset[str]] = field(default_factory=dict)
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict)
    default_topic: frozenset[str] = frozenset()
    default_group: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        arguments.text(self.access_key, "access_key")
        _require_secret(self.secret_key, "secret_key")
        # Do not convert the value: bool("false") is True, and would make the account an
        # administrator.
        arguments.flag(self.admin, "admin")
        for name, rules in (("topics", self.topics), ("groups", self.groups)):
            for words in arguments.mapping(rules, name, _RULES).values():
                arguments.instance(words, f"each value of {name}", _SETS, _WORDS)
        arguments.instance(self.default_topic, "default_topic", _SETS, _WORDS)
        arguments.instance(self.default_group, "default_group", _SETS, _WORDS)

    def require_topic(self, topic: str, permission: str) -> None:
        """Raise Refused if the account lacks a permission for a topic.

        For a retry topic or a dead letter topic, the method checks the permission for its consumer
        group instead.
        """
        for prefix in (RETRY_PREFIX, DEAD_PREFIX):
            if topic.startswith(prefix):
                self.require_group(topic.removeprefix(prefix))
                return
        # System topics hold messages of other topics, so the default permission must not give
        # access to them.
        is_shared = topic in HIDDEN or (permission == SUB and topic.startswith(_SHARED))
        default = NOTHING if is_shared else self.default_topic
        if not self.admin and permission not in self.topics.get(topic, default):
            self.refuse(f"the permission {permission} for the topic {topic[:200]}")

    def require_group(self, group: str) -> None:
        """Raise Refused if the account lacks the permission SUB for a consumer group."""
        if not self.admin and SUB not in self.groups.get(group, self.default_group):
            self.refuse(f"the permission SUB for the group {group[:200]}")

    def require_producer(self, group: str) -> None:
        """Raise Refused if the account is not allowed to be a member of a producer group."""
        # In RocketMQ, the groups of an account are consumer groups, so an account usually does not
        # list its producer groups. An unlisted producer group is allowed if the account has the
        # permission PUB for at least one topic.
        if group in self.groups:
            may_send = PUB in self.groups[group]
        else:
            may_send = any(PUB in found for found in (self.default_topic, *self.topics.values()))
        if not self.admin and not may_send:
            self.refuse(f"the permission PUB for a topic or for the producer group {group[:200]}")

    def refuse(self, lacking: str) -> None:
        """Raise Refused with NO_PERMISSION."""
        raise Refused(f"{self.access_key} lacks {lacking}", ResponseCode.NO_PERMISSION)


class AccessControl:
    """The accounts of a broker.

    Raises UsageError if two accounts have the same access key, or if a key is too short.
    """

    def __init__(self, *accounts: Account) -> None:
        self._accounts = {account.access_key: account for account in accounts}
        if len(self._accounts) != len(accounts):
            raise UsageError("two accounts have the same accessKey")
        for account in accounts:
            if min(len(account.access_key), len(account.secret_key)) < _LEAST_KEY:
                raise UsageError(
                    f"account {account.access_key!r}: accessKey and secretKey need at least "
                    f"{_LEAST_KEY} characters"
                )

    @classmethod
    def from_file(cls, path: Path) -> AccessControl:
        """Read accounts from a TOML file.

        The keys have the same names as in RocketMQ's ``plain_acl.yml``.
        """
        try:
            with path.open("rb") as file:
                document = tomllib.load(file)
            accounts = [_account(entry) for entry in document["accounts"]]
        except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{path}: no valid [[accounts]]: {error}") from error
        return cls(*accounts)

    def authenticate(self, command: RemotingCommand) -> Account:
        """Return the account that signed a request; raise Refused if the signature is invalid."""
        fields = command.ext_fields
        account = self._accounts.get(fields.get(_ACCESS_KEY, ""))
        signature = fields.get(_SIGNATURE, "")
        # Treat an unknown key like a wrong signature: give the same answer, after the same time.
        # If the answers differed, a client could find out which keys exist.
        secret = account.secret_key if account is not None else "unknown"
        is_valid = any(
            hmac.compare_digest(
                sign(fields, command.body, secret, leave), signature.encode("utf-8", "replace")
            )
            for leave in ((), (_UNIQUE_QUERY,) if _UNIQUE_QUERY in fields else ())
        )
        if account is None or not is_valid:
            raise Refused(
                "the request has no valid AccessKey and Signature", ResponseCode.NO_PERMISSION
            )
        return account

    def admit(self, command: RemotingCommand, fields: Mapping[str, Any]) -> Account | None:
        """Check and return the account of a request. Return None if it needs no account."""
        code = command.code
        try:
            account = self.authenticate(command)
        except Refused:
            # RocketMQ's name server checks no signature. If this broker refused a request for
            # a route because of a wrong key, the client would report that the topic is missing.
            if code in _OPEN:
                return None
            raise
        if account.admin or code in _OPEN or code in _LATER:
            return account
        if code in _PUBLISHES:
            account.require_topic(fields["topic"], PUB)
        elif code in _CONSUMES:
            if topic := fields.get("topic") or fields.get("originTopic"):
                account.require_topic(topic, SUB)
            if group := fields.get("consumerGroup") or fields.get("group"):
                account.require_group(group)
        elif code in _IN_BODY:
            for kind, name in _named(command.body):
                if kind == SUB:
                    account.require_topic(name, SUB)
                elif kind == PUB:
                    account.require_producer(name)
                else:
                    account.require_group(name)
        else:
            account.refuse(f"the rights of an administrator, which request {code} needs")
        return account


def sign(fields: Mapping[str, str], body: bytes, secret: str, leave: tuple[str, ...] = ()) -> bytes:
    """Compute the signature of a request (``AclUtils.calSignature``)."""
    text = "".join(
        fields[name] for name in sorted(fields) if name != _SIGNATURE and name not in leave
    )
    data = text.encode("utf-8", "replace") + body
    key = secret.encode("utf-8", "replace")
    return base64.b64encode(hmac.new(key, data, hashlib.sha1).digest())


def _named(body: bytes) -> Iterator[tuple[str, str]]:
    document = parse_body(body)
    try:
        for one in document.get("producerDataSet") or ():
            yield PUB, str(one["groupName"])
        for one in document.get("consumerDataSet") or ():
            yield "group", str(one["groupName"])
            for topic in one.get("subscriptionDataSet") or ():
                yield SUB, str(topic["topic"])
        for name in ("consumerGroup", "group"):
            if document.get(name):
                yield "group", str(document[name])
        for queue in document.get("mqSet") or ():
            yield SUB, str(queue["topic"])
        if document.get("subscriptionData"):
            yield SUB, str(document["subscriptionData"]["topic"])
    except (TypeError, KeyError, AttributeError) as error:
        raise Refused(f"the body is invalid: {error!r}") from error


def _account(entry: Mapping[str, Any]) -> Account:
    _require_secret(entry["secretKey"], "secretKey")
    return Account(
        access_key=arguments.text(entry["accessKey"], "accessKey", takes=_QUOTED),
        secret_key=entry["secretKey"],
        admin=arguments.instance(entry.get("admin", False), "admin", bool, "true or false"),
        topics=_rules(entry, "topicPerms"),
        groups=_rules(entry, "groupPerms"),
        default_topic=_default(entry, "defaultTopicPerm"),
        default_group=_default(entry, "defaultGroupPerm"),
    )


def _require_secret(value: object, field: str) -> None:
    if not isinstance(value, str):
        # The error must not show the secret.
        raise WrongType(f"{field} takes {_QUOTED}, not an object of type {type(value).__name__}")


def _rules(entry: Mapping[str, Any], field: str) -> dict[str, frozenset[str]]:
    found = {}
    for rule in arguments.instance(entry.get(field, []), field, list, "a list of NAME=PERMISSION"):
        words = arguments.text(rule, f"each entry of {field}", takes=_QUOTED)
        name, separator, permission = words.partition("=")
        if not separator:
            raise ValueError(f"{rule!r} is not NAME=PERMISSION")
        found[name.strip()] = _permissions(permission)
    return found


def _default(entry: Mapping[str, Any], field: str) -> frozenset[str]:
    return _permissions(arguments.text(entry.get(field, "DENY"), field, takes=_QUOTED))


def _permissions(words: str) -> frozenset[str]:
    found = _PERMISSIONS.get(words.strip().upper().replace(" ", ""))
    if found is None:
        raise ValueError(f"{words!r} is not a permission; use DENY, PUB, SUB or PUB|SUB")
    return found
