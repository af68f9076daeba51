"""The producers and consumers that are connected (``ProducerManager``, ``ConsumerManager``).

A heartbeat adds a client to the groups that the heartbeat names. The client stays in these groups
until the client unregisters or its connection ends. When a consumer joins or leaves a group, the
broker notifies the consumers of the group, so that the consumers distribute the queues again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Final

from logquarry.broker.acl import PUB, Account
from logquarry.broker.connection import Connection
from logquarry.errors import BadFilter
from logquarry.format.properties import ANY_TAG, parse_tags
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from logquarry.store.consumer.sql_filter import SqlFilter, parse

TAG: Final = "TAG"
SQL92: Final = "SQL92"
BROADCASTING: Final = "BROADCASTING"
_MOST_GROUPS: Final = 10_000
"""Maximum number of producer groups of one connection, and also of consumer groups."""
_MOST_IDS: Final = 100
"""Maximum number of client ids that one connection with an account may use.

RocketMQ's clients use one id for each connection.
"""
_LONGEST_FILTER: Final = 8_192
"""Maximum length in characters of a tag expression or an SQL92 filter: the event loop parses it,
and must not be blocked for long.
"""
_CACHED_FILTERS: Final = 256
_LONGEST_NAME: Final = 512
"""Maximum length in characters of a client id or of a group's name."""
_NO_GROUPS: Final = set[str](), set[str]()


@dataclass
class TopicFilter:
    """A consumer's subscription to a topic: RocketMQ's ``SubscriptionData``, as received."""

    document: Mapping[str, Any]

    @property
    def version(self) -> int:
        """``subVersion`` of the subscription, or 0.

        A subscription with a higher version replaces one with a lower version.
        """
        version = self.document.get("subVersion")
        return version if isinstance(version, int) else 0

    @cached_property
    def expression(self) -> tuple[str | None, SqlFilter | None]:
        """The tag expression, or the SQL92 filter. The text is parsed at the first use."""
        # A heartbeat may contain thousands of subscriptions, of which only few are ever used.
        return parse_expression(
            str(self.document.get("subString") or ""), self.document.get("expressionType")
        )


def parse_expression(text: str, kind: object) -> tuple[str | None, SqlFilter | None]:
    """Parse a subscription.

    Return (tag expression, None) or (None, SQL92 filter); (None, None) if the subscription matches
    all messages.

    Raises:
        Refused: if the expression is invalid or too long.
    """
    if len(text) > _LONGEST_FILTER:
        raise Refused(_TOO_LONG, ResponseCode.SUBSCRIPTION_PARSE_FAILED)
    if kind == SQL92:
        found = _compiled(text)
        if isinstance(found, str):
            raise Refused(found, ResponseCode.SUBSCRIPTION_PARSE_FAILED)
        return None, found
    if kind not in (None, "", TAG):
        raise Refused(
            f"unknown type of expression: {str(kind)[:80]!r}",
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        )
    if parse_tags(text) is None or text.strip() in ("", ANY_TAG):
        return None, None
    return text, None


_TOO_LONG: Final = f"a filter has at most {_LONGEST_FILTER} characters"


@lru_cache(_CACHED_FILTERS)
def _compiled(text: str) -> SqlFilter | str:
    # For an invalid filter, return the reason instead of raising an error. Clients send the same
    # invalid filter again and again, and the cache keeps only returned values.
    try:
        return parse(text)
    except BadFilter as error:
        return str(error)


@dataclass(slots=True, eq=False, frozen=True)
class Client:
    """A client, as its last heartbeat described it.

    Attributes:
        version: the number that RocketMQ gives to the version of the client (``MQVersion``).
        seen: time of the heartbeat in seconds, by ``time.monotonic``.
    """

    client_id: str
    connection: Connection
    language: str
    version: int
    seen: float
    account: Account | None = None

    def may_publish(self, topic: str) -> bool:
        """Whether the client's account may send to a topic."""
        try:
            if self.account is not None:
                self.account.require_topic(topic, PUB)
        except Refused:
            return False
        return True

    def document(self) -> dict[str, Any]:
        """Return the client as RocketMQ's document ``Connection``; mqadmin requests it."""
        return {
            "clientAddr": self.connection.address,
            "clientId": self.client_id,
            "language": self.language,
            "version": self.version,
        }


@dataclass(slots=True)
class ConsumerGroup:
    """The consumers of a group and their subscriptions.

    ``consume_type``, ``model`` and ``start`` are names of RocketMQ's constants.
    """

    clients: dict[Connection, Client] = field(default_factory=dict)
    filters: dict[str, TopicFilter] = field(default_factory=dict)
    consume_type: str = "CONSUME_PASSIVELY"
    model: str = "CLUSTERING"
    start: str = "CONSUME_FROM_LAST_OFFSET"


class Clients:
    """All connected clients. Only the event loop uses this object.

    ``notifies`` returns whether the broker notifies the consumers of a group when a consumer joins
    or leaves.
    """

    def __init__(self, notifies: Callable[[str], bool]) -> None:
        self._notifies = notifies
        self.producers: dict[str, dict[Connection, Client]] = {}
        self.consumers: dict[str, ConsumerGroup] = {}
        self._groups: dict[Connection, tuple[set[str], set[str]]] = {}
        """For each connection, its producer groups and its consumer groups."""
        self._next: dict[str, int] = {}
        self._owners: dict[str, tuple[Account, set[Connection]]] = {}
        """For each client id, the account that uses it, and the connections of clients with this
        id.
        """
        self._ids: dict[Connection, set[str]] = {}

    def heartbeat(
        self,
        client: Client,
        producers: Iterable[str],
        consumers: Iterable[Mapping[str, Any]],
    ) -> None:
        """Add a client to the groups in its heartbeat, and update these groups' subscriptions."""
        connection = client.connection
        _require_short(client.client_id)
        if client.account is not None:
            self._claim(client, client.account)
        of_producers, of_consumers = self._groups.setdefault(connection, (set(), set()))
        for producer in producers:
            _add_group(of_producers, producer)
            self.producers.setdefault(producer, {})[connection] = client
        for document in consumers:
            name = str(document["groupName"])
            _add_group(of_consumers, name)
            filters = {
                str(one.get("topic")): TopicFilter(one)
                for one in objects(document, "subscriptionDataSet")
            }
            group = self.consumers.setdefault(name, ConsumerGroup())
            is_new = connection not in group.clients
            group.clients[connection] = client
            group.consume_type = str(document.get("consumeType") or group.consume_type)
            group.model = str(document.get("messageModel") or group.model)
            group.start = str(document.get("consumeFromWhere") or group.start)
            if self._subscribe(group, filters) or is_new:
                self._changed(name)

    def _claim(self, client: Client, account: Account) -> None:
        # The broker forwards replies, and some requests of mqadmin, to the client with a certain
        # id. So clients of two accounts must not have the same id at the same time.
        self.require_owner(client.client_id, account)
        ids = self._ids.setdefault(client.connection, set())
        if len(ids) >= _MOST_IDS and client.client_id not in ids:
            raise Refused(f"a connection has at most {_MOST_IDS} clients")
        ids.add(client.client_id)
        self._owners.setdefault(client.client_id, (account, set()))[1].add(client.connection)

    def require_owner(self, client_id: str, account: Account | None) -> None:
        """Raise Refused if a client of another account has this client id."""
        owner, _ = self._owners.get(client_id, (account, None))
        if owner is not account:
            raise Refused(
                f"a client of another account has the id {client_id[:200]}: set another "
                "instanceName",
                ResponseCode.NO_PERMISSION,
            )

    def _subscribe(self, group: ConsumerGroup, filters: Mapping[str, TopicFilter]) -> bool:
        has_changed = False
        for topic, found in filters.items():
            known = group.filters.get(topic)
            if known is None:
                has_changed = True
            if known is None or found.version > known.version:
                group.filters[topic] = found
        for topic in group.filters.keys() - filters.keys():
            del group.filters[topic]
            has_changed = True
        return has_changed

    def unregister(self, connection: Connection, producer: str, consumer: str) -> None:
        """Remove a client from a producer group and a consumer group; "" means no group."""
        self._leave_producers(connection, producer)
        self._leave_consumers(connection, consumer)

    def disconnected(self, connection: Connection) -> None:
        """Remove a connection's clients from all groups."""
        for client_id in self._ids.pop(connection, ()):
            users = self._owners[client_id][1]
            users.discard(connection)
            if not users:
                del self._owners[client_id]
        producers, consumers = self._groups.pop(connection, _NO_GROUPS)
        for group in list(producers):
            self._leave_producers(connection, group)
        for group in list(consumers):
            self._leave_consumers(connection, group)

    def _leave_producers(self, connection: Connection, group: str) -> None:
        self._groups.get(connection, _NO_GROUPS)[0].discard(group)
        members = self.producers.get(group)
        if members is not None:
            members.pop(connection, None)
            if not members:
                del self.producers[group]
                self._next.pop(group, None)

    def _leave_consumers(self, connection: Connection, group: str) -> None:
        self._groups.get(connection, _NO_GROUPS)[1].discard(group)
        members = self.consumers.get(group)
        if members is None or members.clients.pop(connection, None) is None:
            return
        if members.clients:
            self._changed(group)
        else:
            del self.consumers[group]

    def expire(self, before: float) -> list[Connection]:
        """Return the connections with a client whose last heartbeat is older than ``before``."""
        groups = *self.producers.values(), *(group.clients for group in self.consumers.values())
        clients = chain.from_iterable(members.values() for members in groups)
        return list({client.connection: None for client in clients if client.seen < before})

    def _changed(self, group: str) -> None:
        if self._notifies(group):
            for client in self.consumers[group].clients.values():
                client.connection.tell(
                    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group}
                )

    # ------------------------------------------------------------------------------------- queries
    def consumer_ids(self, group: str) -> list[str]:
        """Return the client ids of a group's consumers."""
        found = self.consumers.get(group, ConsumerGroup())
        return [client.client_id for client in found.clients.values()]

    def consumer(self, group: str, client_id: str) -> Client | None:
        """Return a group's consumer with a client id; None if no such consumer is connected."""
        members = self.consumers.get(group, ConsumerGroup()).clients.values()
        return next((client for client in members if client.client_id == client_id), None)

    def producer_of(self, group: str, topic: str) -> Client | None:
        """Return a producer of a group that may send to the topic; None if there is none.

        If there are several such producers, the calls return them in turn.
        """
        found = self.producers.get(group, {}).values()
        members = [client for client in found if client.may_publish(topic)]
        if not members:
            return None
        number = self._next[group] = self._next.get(group, -1) + 1
        return members[number % len(members)]

    def client(self, client_id: str) -> Client | None:
        """Return the producer with a client id; None if no such producer is connected."""
        clients = chain.from_iterable(members.values() for members in self.producers.values())
        return next((client for client in clients if client.client_id == client_id), None)

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups whose consumers subscribe to a topic."""
        return [name for name, group in self.consumers.items() if topic in group.filters]


def objects(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a list of the document, without the list's other values."""
    found = document.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _require_short(name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise Refused(f"{name[:80]}... has more than {_LONGEST_NAME} characters")


def _add_group(groups: set[str], name: str) -> None:
    _require_short(name)
    if len(groups) >= _MOST_GROUPS and name not in groups:
        raise Refused(f"a client is in at most {_MOST_GROUPS} groups")
    groups.add(name)
