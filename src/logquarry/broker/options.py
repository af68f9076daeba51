"""The settings of a broker. The names in parentheses are those in RocketMQ's ``BrokerConfig``."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logquarry import arguments
from logquarry.broker.acl import AccessControl
from logquarry.errors import UsageError
from logquarry.log.location import lies_in_store
from logquarry.log.store_files import CONFIG

_LONGEST_NAME: Final = 127
"""Maximum length of a topic's name in RocketMQ, in characters."""
_AT_LEAST_0: Final = (
    *("poll_ms", "max_connections", "idle_s", "expire_s"),
    *("most_created", "most_offsets", "most_counts", "most_waiting", "most_waiting_bytes"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerOptions:
    """How a broker serves a store.

    Attributes:
        host: the address on which the broker and the name server listen.
        port: the port of the broker (``listenPort``); 0 for a port that the system chooses.
        name_port: the port of the name server; 0 for a port that the system chooses.
        advertise: the host to which the name server sends clients. By default, it is ``host``; if
            ``host`` is 0.0.0.0 or ::, it is an address of this machine.
        name: name of the broker (``brokerName``).
        cluster: name of the cluster (``brokerClusterName``).
        create_topics: whether a send to a topic that does not exist creates the topic
            (``autoCreateTopicEnable``).
        create_groups: whether the first request of a consumer creates its group
            (``autoCreateSubscriptionGroup``).
        queues: if a send creates a topic, the topic gets at most this many queues
            (``defaultTopicQueueNums``).
        read_only: whether the broker opens the store only for reading. The broker then refuses
            sends, and writes no offsets to the store.
        offsets: folder in which a ``read_only`` broker saves the offsets of groups; None to keep
            them only in memory.
        poll_ms: milliseconds between two searches of a ``read_only`` broker for new messages.
        tls: the context for TLS; None for connections without TLS.
        acl: the accounts; None to accept requests of any client.
        insecure: whether the broker may listen on addresses that other machines can reach, even
            without TLS and accounts.
        max_connections: maximum number of connections at each port.
        idle_s: if a client sends no byte for this many seconds, the broker closes the connection
            (``serverChannelMaxIdleTimeSeconds``).
        expire_s: if a client sends no heartbeat for this many seconds, the broker closes its
            connection.
        most_created: if the broker has this many topics (including retry topics), clients cannot
            create another topic. The same number limits groups. mqadmin has no limit.
        most_offsets: if the broker has this many consumer offsets (one for each queue of a group),
            clients cannot commit an offset for another queue.
        most_counts: maximum number of topics, and of pairs of a topic and a group, for which the
            broker has separate counts of messages. All further topics share one count, and so do
            all further pairs.
        most_waiting: maximum number of sends that wait for the disk
            (``sendThreadPoolQueueCapacity``).
        most_waiting_bytes: maximum total size of the message bodies that wait for the disk; the
            same limit applies to the replies that wait for producers.
    """

    host: str = "127.0.0.1"
    port: int = 0
    name_port: int = 0
    advertise: str | None = None
    name: str = "broker-a"
    cluster: str = "DefaultCluster"
    create_topics: bool = True
    create_groups: bool = True
    queues: int = 8
    read_only: bool = False
    offsets: Path | None = None
    poll_ms: int = 200
    tls: ssl.SSLContext | None = None
    acl: AccessControl | None = None
    insecure: bool = False
    max_connections: int = 4_096
    idle_s: float = 120.0
    expire_s: float = 120.0
    most_created: int = 20_000
    most_offsets: int = 200_000
    most_counts: int = 50_000
    most_waiting: int = 10_000
    most_waiting_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        for name in ("port", "name_port"):
            arguments.port(getattr(self, name), name)
        for name in _AT_LEAST_0:
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, and must be at least 0")
        for name in ("name", "cluster"):
            # Limit both names, because each name is also the name of a topic, and because each
            # message gets the cluster's name as a property.
            given = getattr(self, name)
            if not given.isprintable() or not given.strip() or len(given) > _LONGEST_NAME:
                option = "--cluster" if name == "cluster" else "--broker-name"
                raise UsageError(
                    f"{name} is {given[:80]!r}; give 1 to {_LONGEST_NAME} printable characters "
                    f"({option})"
                )
        if self.offsets is not None:
            if not self.read_only:
                raise UsageError("offsets needs read_only: other brokers save offsets in the store")
            object.__setattr__(self, "offsets", Path(arguments.path(self.offsets, "offsets")))
        if self.tls is not None:
            arguments.instance(self.tls, "tls", ssl.SSLContext, "an ssl.SSLContext")
        if self.acl is not None:
            arguments.instance(self.acl, "acl", AccessControl, "an AccessControl")
        if not 1 <= self.queues <= 1_024:
            raise UsageError(f"queues is {self.queues}; a topic has 1 to 1024 queues")
        if not (is_loopback(self.host) or self.insecure or (self.tls and self.acl)):
            raise UsageError(
                f"{self.host} is reachable from other machines: use TLS together with accounts, "
                "or insecure (--insecure) to serve every client unencrypted"
            )

    def advertised(self) -> str:
        """Return the host to which the name server sends clients."""
        host = self.advertise or self.host
        if not is_wildcard(host):
            return host
        found = None if self.advertise else _address_of_machine(host)
        if found is None:
            raise UsageError(
                f"clients cannot connect to {host}: give the address at which clients reach this "
                "machine (--advertise)"
            )
        return found


def make_offsets_folder(offsets: Path, store: str | Path) -> None:
    """Create the folder in which a read-only broker saves offsets. The folder must be outside the
    store.
    """
    if lies_in_store(offsets, store):
        raise UsageError(
            f"{offsets} lies in the store, which a read-only broker does not change: give a folder "
            "outside of the store (--offsets)"
        )
    folder = offsets / CONFIG
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return
        reason = "the folder is not writable"
    raise UsageError(f"{folder}: {reason}; give another folder for the offsets (--offsets)")


def is_wildcard(host: str) -> bool:
    """Whether a host means all addresses of the machine."""
    address = _ip_address(host)
    return not host or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host."""
    address = _ip_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def address_text(host: str, port: int) -> str:
    """Format a host and a port as host:port. An IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address_of_machine(wildcard: str) -> str | None:
    """Return the address that this machine uses to reach other networks; None without a network."""
    is_six = ":" in wildcard
    family = socket.AF_INET6 if is_six else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # connect() of a datagram socket sends no packet. The addresses 2001:db8::1 and
            # 192.0.2.1 are reserved for documentation, so they belong to no machine.
            probe.connect(("2001:db8::1" if is_six else "192.0.2.1", 9))
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if is_loopback(found) or is_wildcard(found) else found


def listen_error(error: OSError, host: str, port: int, option: str) -> UsageError:
    """Return the error for an address on which the broker cannot listen, with cause and remedy."""
    if isinstance(error, socket.gaierror):
        reason = f"the host {host} is unknown; give an address of this machine ({option})"
    elif error.errno == errno.EADDRINUSE:
        reason = f"the port is in use; end the process that uses it, or give another ({option})"
    elif error.errno == errno.EADDRNOTAVAIL:
        reason = f"this machine has no such address; give an address of this machine ({option})"
    else:
        text = os.strerror(error.errno) if error.errno else str(error)
        reason = f"{text}; give another address ({option})"
    return UsageError(f"cannot listen on {address_text(host, port)}: {reason}")
