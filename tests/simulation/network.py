"""Simulated sockets: delays, loss, cuts that an end notices late or never, overtaking connections.

As with TCP, the bytes of one connection arrive in order and complete, but possibly late. A cut may
be visible to both sides, or to neither. A connection attempt may reach the master late, after a
later one, or twice: the second connection then repeats the slave's first bytes, and has no slave.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from logquarry.replication.wire import Found, Surroundings, Wake
from tests.simulation.world import MS, SECOND, NodeClock, World


class Watched(Protocol):
    """A socket that a selector watches."""

    number: int

    def can_read(self) -> bool: ...

    def can_write(self) -> bool: ...


class Selector(selectors.BaseSelector):
    """Finds the sockets that are ready; it never waits."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj.fileno()
        assert number not in self._keys
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[number] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj.fileno())

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> Found:
        raise AssertionError("a simulation does not wait")

    def ready(self) -> Found:
        """The sockets that are ready now."""
        found = []
        watched = self._network.watched
        for number, key in self._keys.items():
            thing = watched.get(number)
            if thing is None:
                continue
            mask = selectors.EVENT_READ if thing.can_read() else 0
            if key.events & selectors.EVENT_WRITE and thing.can_write():
                mask |= selectors.EVENT_WRITE
            if mask:
                found.append((key, mask))
        return found

    def close(self) -> None:
        self._keys.clear()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class SimWake(Wake):
    """A wake-up without a descriptor."""

    def __init__(self, network: Network, poke: Callable[[], None]) -> None:
        self._is_armed = False
        self._is_set = False
        self._poke = poke
        self._network = network
        self.number = network.watch(self)

    def fileno(self) -> int:
        return self.number

    def take(self) -> None:
        self._is_armed = self._is_set = False

    def force(self) -> None:
        self._is_set = True
        self._poke()

    def close(self) -> None:
        self._network.watched.pop(self.number, None)

    def can_read(self) -> bool:
        return self._is_set

    def can_write(self) -> bool:
        return False


class SimSocket:
    """One end of a connection.

    Attributes:
        other: the other end.
        listeners: called with all bytes that are sent, before they leave.
    """

    def __init__(self, network: Network, poke: Callable[[], None], room: int) -> None:
        self._network = network
        self._poke = poke
        self.number = network.watch(self)
        self.other: SimSocket | None = None
        self.listeners: list[Callable[[bytes], None]] = []
        self._room = room
        # Bytes that the other end sent and this end has not read. They limit what it may send.
        self.unread = 0
        self._inbox: deque[bytes] = deque()
        self._has_ended = False
        self._is_broken = False
        self._is_closed = False
        # Bytes arrive in the order in which they were sent.
        self._last_arrival = 0
        self.is_lost = False

    # ------------------------------------------------------------------ the calls of a socket
    def fileno(self) -> int:
        return self.number

    def getpeername(self) -> tuple[str, int]:
        return ("10.0.0.1", self.number)

    def setblocking(self, _: bool) -> None:
        pass

    def setsockopt(self, *_: int) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        self._check()
        if not self._inbox:
            if self._has_ended:
                return 0
            raise BlockingIOError
        rng = self._network.world.rng
        first = self._inbox.popleft()
        most = min(len(first), len(buffer))
        if rng.random() < 0.2:
            most = rng.randint(1, most)
        buffer[:most] = first[:most]
        if most < len(first):
            self._inbox.appendleft(first[most:])
        self.unread -= most
        if self.other is not None:
            self.other._poke()
        return most

    def sendmsg(self, parts: list[Any]) -> int:
        return self.send(b"".join(bytes(part) for part in parts))

    def send(self, data: Any) -> int:
        self._check()
        assert self.other is not None
        room = self._room - self.other.unread
        if room <= 0:
            raise BlockingIOError
        part = bytes(data[:room])
        for heard in self.listeners:
            heard(part)
        self.other.unread += len(part)
        if not self.is_lost:
            self._later(lambda: self._arrived(part))
        return len(part)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._network.forget(self)
        if not self.is_lost:
            self._later(self._ended)

    # -------------------------------------------------------------------------------- events
    @property
    def is_open(self) -> bool:
        """Whether it was neither closed nor cut."""
        return not self._is_closed and not self._is_broken

    def can_read(self) -> bool:
        return bool(self._inbox) or self._has_ended or self._is_broken

    def can_write(self) -> bool:
        assert self.other is not None
        return self._is_broken or self.other.unread < self._room

    def _check(self) -> None:
        if self._is_closed:
            raise OSError("the socket is closed")
        if self._is_broken:
            raise ConnectionResetError("the connection was cut")

    def _later(self, happens: Callable[[], None]) -> None:
        world = self._network.world
        self._last_arrival = max(self._last_arrival, world.now + self._network.delay())
        world.at(self._last_arrival, happens)

    def _arrived(self, part: bytes) -> None:
        other = self.other
        if other is not None and not other._is_closed and not self.is_lost:
            other._inbox.append(part)
            other._poke()

    def _ended(self) -> None:
        other = self.other
        if other is not None and not self.is_lost:
            other._has_ended = True
            other._poke()

    def break_(self) -> None:
        """Let this end notice that the connection is cut."""
        if not self._is_closed:
            if self._network.world.rng.random() < 0.5:
                self._inbox.clear()
            self._is_broken = True
            self._poke()


class SimListener:
    """The listening socket of a master."""

    def __init__(self, network: Network, poke: Callable[[], None]) -> None:
        self._network = network
        self.poke = poke
        self.number = network.watch(self)
        self.waiting: deque[SimSocket] = deque()
        self.is_open = True

    def fileno(self) -> int:
        return self.number

    def getsockname(self) -> tuple[str, int]:
        return ("10.0.0.2", 10912)

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        connection = self.waiting.popleft()
        return connection, connection.getpeername()

    def close(self) -> None:
        self.is_open = False
        self._network.watched.pop(self.number, None)
        for connection in self.waiting:
            connection.close()

    def can_read(self) -> bool:
        return bool(self.waiting)

    def can_write(self) -> bool:
        return False


class Network:
    """Connections between slaves and the single listening master.

    Attributes:
        world: time and chance.
        watched: the watched sockets, by number.
        listener: the master's listener, None while the master is down.
        is_calm: whether faults have ended.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.watched: dict[int, Watched] = {}
        self.listener: SimListener | None = None
        self.is_calm = False
        self.connections: list[tuple[SimSocket, SimSocket]] = []
        self._numbers = 0
        self._typical = world.rng.choice((100, 1_000, 20 * MS, 200 * MS))

    def watch(self, thing: Watched) -> int:
        """A new descriptor number, for a socket or a wake-up."""
        self._numbers += 1
        self.watched[self._numbers] = thing
        return self._numbers

    def forget(self, end: SimSocket) -> None:
        """Forget an end that was closed."""
        self.watched.pop(end.number, None)
        self.connections = [pair for pair in self.connections if end not in pair]

    def delay(self) -> int:
        """The delay of bytes from one end to the other."""
        rng = self.world.rng
        delay = rng.randint(10, min(self._typical, MS) if self.is_calm else self._typical)
        if not self.is_calm and rng.random() < 0.02:
            # The bytes are lost and sent again, several times.
            delay += rng.choice((200 * MS, 400 * MS, 3 * SECOND))
        return delay

    def connect(self, poke: Callable[[], None]) -> SimSocket:
        """A slave's end of a connection to the master; it may be refused."""
        rng = self.world.rng
        if self.listener is None or (not self.is_calm and rng.random() < 0.05):
            raise ConnectionRefusedError("no listener")
        room = rng.choice((500, 4_000, 64_000))
        near = SimSocket(self, poke, room)
        self._reach(near, room)
        if not self.is_calm and rng.random() < 0.1:
            self._twice(near, room)
        return near

    def _reach(self, near: SimSocket, room: int) -> None:
        listener = self.listener
        assert listener is not None
        far = SimSocket(self, listener.poke, room)
        near.other, far.other = far, near
        self.connections.append((near, far))

        def arrived() -> None:
            if far.is_lost or far.number not in self.watched:
                return
            if listener.is_open:
                listener.waiting.append(far)
                listener.poke()
            else:
                far.close()

        near._later(arrived)

    def _twice(self, near: SimSocket, room: int) -> None:
        """Connect twice: the second connection repeats the first bytes of the first one."""
        ghost = SimSocket(self, lambda: None, room)
        self._reach(ghost, room)
        first = bytearray()

        def repeat(part: bytes) -> None:
            again = part[: 8 - len(first)]
            first.extend(again)
            if again and ghost.is_open:
                ghost.send(again)

        near.listeners.append(repeat)
        self.world.after(self.world.rng.randint(MS, 5 * SECOND), ghost.close)

    def cut(self, near: SimSocket, far: SimSocket, *, silently: bool) -> None:
        """Cut a connection: most ends soon get an error, but none if ``silently``."""
        rng = self.world.rng
        near.is_lost = far.is_lost = True
        if silently:
            return
        for end in (near, far):
            if rng.random() < 0.8:
                self.world.after(rng.randint(0, 100 * MS), end.break_)


class NodeSurroundings(Surroundings):
    """The network and clock of one node."""

    def __init__(self, network: Network, clock: NodeClock, poke: Callable[[], None]) -> None:
        self._network = network
        self._clock = clock
        self._poke = poke
        self.connected: Callable[[SimSocket], None] = lambda _: None

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def listen(self, host: str, port: int) -> Any:
        self._network.listener = SimListener(self._network, self._poke)
        return self._network.listener

    def connect(self, host: str, port: int, timeout_s: float) -> Any:
        connection = self._network.connect(self._poke)
        self.connected(connection)
        return connection

    def selector(self) -> Selector:
        return Selector(self._network)

    def wake(self) -> SimWake:
        return SimWake(self._network, self._poke)
