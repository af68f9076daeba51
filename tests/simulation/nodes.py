"""Real masters and slaves, driven step by step, on model logs."""

from __future__ import annotations

import selectors
import struct
from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from logquarry.disk.service import Flag
from logquarry.errors import StoreUnavailable
from logquarry.format import frame
from logquarry.replication import HaMaster, HaSlave, MasterOptions, SlaveOptions
from logquarry.replication.wire import Waits
from logquarry.write.flush import GroupCommitService
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus, ReplicaWait
from logquarry.write.settling import LogGrowth
from tests.simulation.checks import Checks
from tests.simulation.model_log import ModelLog
from tests.simulation.network import Network, NodeSurroundings, Selector, SimSocket
from tests.simulation.world import MS, SECOND, NodeClock, World


class Driven:
    """A driven process, which continues some time after the event that it waits for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = NodeClock(world)
        self.is_up = False
        self.is_stalled = False
        self.failing_syncs = 0
        self.log = ModelLog("", 1)
        self._life = 0
        self._waits: Waits | None = None
        self._selector: Selector | None = None
        self._deadline = 0
        self._is_poked = False
        self._is_in_step = False

    def begin(self, waits: Waits) -> None:
        """Begin a life."""
        self._life += 1
        self.is_up = True
        self._waits, self._selector, self._is_poked = waits, None, False
        self.poke()

    def end(self) -> None:
        """End it, at once."""
        self.is_up = False
        self._life += 1
        waits, self._waits = self._waits, None
        if waits is not None:
            waits.close()

    def poke(self) -> None:
        """Check the awaited event soon."""
        if not self._is_poked and self.is_up:
            self._is_poked = True
            life = self._life
            self.world.after(self.world.rng.randint(5, 200), lambda: self._poked(life))

    def stall(self, pause: int) -> None:
        """Stop the process for a while, while its clock runs."""
        if not self.is_stalled and self.is_up:
            self.is_stalled = True
            self.world.after(pause, self._goes_on)

    def _goes_on(self) -> None:
        self.is_stalled = False
        self.poke()

    def _poked(self, life: int) -> None:
        if life == self._life:
            self._is_poked = False
            self.step()

    def step(self) -> None:
        """Continue if the awaited event has come."""
        if not self.is_up or self.is_stalled or self._is_in_step or self._waits is None:
            return
        self._is_in_step = True
        life = self._life
        try:
            if self._selector is None:
                waiting = next(self._waits)
            else:
                found = self._selector.ready()
                if not found and self.world.now < self._deadline:
                    return
                waiting = self._waits.send(found)
        except StopIteration:
            self.is_up = False
            self.stopped()
            return
        finally:
            self._is_in_step = False
        self._wait(waiting, life)
        self.stepped()

    def _wait(self, waiting: tuple[selectors.BaseSelector, float], life: int) -> None:
        selector, seconds = waiting
        assert isinstance(selector, Selector)
        self._selector = selector
        self._deadline = self.world.now + round(seconds * SECOND)
        if selector.ready() or not seconds:
            self.poke()
        else:
            self.world.at(self._deadline, lambda: self.step() if life == self._life else None)

    def expire_first(self) -> None:
        """Let retention delete the log's first file."""
        self.log.expire_first()

    def fails_sync(self) -> bool:
        """Whether its disk fails the next sync."""
        if self.failing_syncs:
            self.failing_syncs -= 1
            return True
        return False

    def stepped(self) -> None:
        """The process waits again."""

    def stopped(self) -> None:
        """The process has ended without a kill."""


class MasterNode(Driven):
    """A store that takes puts, and its master."""

    def __init__(self, world: World, network: Network, checks: Checks, plan: MasterPlan) -> None:
        super().__init__(world)
        self.network = network
        self.checks = checks
        self.plan = plan
        self.log = ModelLog("master", plan.file_size)
        self.surroundings = NodeSurroundings(network, self.clock, self.poke)
        self.master: HaMaster | None = None
        self.group: GroupCommitService | None = None
        self.growth: LogGrowth | None = None

    @property
    def replicas(self) -> ReplicaWait:
        assert self.log.replicas is not None
        return self.log.replicas

    def start(self) -> None:
        """Open the store, and serve."""
        log, clock = self.log, self.clock.now_ms
        log.replicas = ReplicaWait(
            log.health, timeout_ms=3_000, fall_behind_max=self.plan.fall_behind_max, clock=clock
        )
        log.fails_sync = self.fails_sync
        self.group = (
            GroupCommitService(cast(Any, log), log.health, clock=clock)
            if self.plan.is_sync_flush
            else None
        )
        idle = cast(Any, SimpleNamespace(flag=None, wakeup=lambda: None))
        self.growth = LogGrowth(idle, idle, self.group, log.replicas)
        self.checks.new_era(log)
        self.master = HaMaster(
            cast(Any, log), options=self.plan.options, surroundings=self.surroundings
        )
        self.begin(self.master.serving())
        self._flush_now_and_then(self._life)

    def stop(self, *, power: bool) -> None:
        """Die."""
        rng = self.world.rng
        if power or rng.random() < 0.3:
            for near, far in self.network.connections:
                self.network.cut(near, far, silently=power and rng.random() < 0.5)
        self.network.listener = None
        self.end()
        before = self.log
        self.log = before.after_power_cut(rng) if power else before.reopened()
        before.health.poison("it was reopened")

    def put(self) -> None:
        """Put a message, and settle its put."""
        if not self.is_up or self.is_stalled or self.log.health.reason is not None:
            return
        rng = self.world.rng
        item = frame.Frame(
            topic=b"t%d" % rng.randrange(3),
            body=rng.randbytes(rng.choice((0, 10, 100, rng.randint(1, self.plan.largest_body)))),
            properties=rng.randbytes(8).hex().encode(),
            physical_offset=self.log.wrote_offset,
            store_timestamp=self.clock.wall_ms(),
        ).with_crc()
        left = self.plan.file_size - self.log.wrote_offset % self.plan.file_size
        if item.size + frame.BLANK.size > left:
            self._append(frame.encode_blank(left).ljust(left, b"\0"))
            item = replace(item, physical_offset=self.log.wrote_offset)
        start = self.log.wrote_offset
        self._append(frame.encode(item))
        # Another thread may be quicker than the putting thread.
        life = self._life
        pause = 0 if rng.random() < 0.7 else rng.randint(0, 20 * MS)
        self.world.after(pause, lambda: self._settle(life, start, item.size))

    def _append(self, data: bytes) -> None:
        self.checks.appended(data)
        self.log.put(data)

    def _settle(self, life: int, start: int, size: int) -> None:
        if life != self._life or self.log.health.reason is not None:
            return
        assert self.growth is not None
        result = PutResult(
            PutStatus.PUT_OK, AppendStatus.PUT_OK, bytes(8), start, 0, size, 1, 0, 0.0
        )
        log = self.log
        self.checks.waiting += 1

        def done(settled: PutResult) -> None:
            self.checks.waiting -= 1
            if life == self._life:
                self.checks.settled(settled, log, is_sync_flush=self.plan.is_sync_flush)

        def failed() -> None:
            self.checks.waiting -= 1

        self.growth.settle_later(result, True, done, failed)
        world = self.world
        if self.group is not None:
            world.after(world.rng.randint(100, 30 * MS), lambda: self._flush(life))
        world.after(3 * SECOND + MS, lambda: self._expire(life))

    def _flush_now_and_then(self, life: int) -> None:
        if life == self._life:
            self._flush(life)
            self.world.after(self.plan.flush_interval, lambda: self._flush_now_and_then(life))

    def _flush(self, life: int) -> None:
        if life != self._life or self.log.health.reason is not None:
            return
        try:
            if self.group is not None:
                self.group.run_once()
            else:
                self.log.sync()
        except StoreUnavailable:
            if self.group is not None:
                self.group.ended()
            # A store that takes no more writes is reopened.
            self.world.tell("the master's disk failed")

    def _expire(self, life: int) -> None:
        if life == self._life:
            self.replicas.expire()
            if self.group is not None:
                self.group.expire()

    def stepped(self) -> None:
        assert self.master is not None
        self.checks.master_stepped(self.master, self.log)

    def stopped(self) -> None:
        assert self.master is not None
        self.checks.master_ended(self.master)


class MasterPlan:
    """A master's settings, chosen at random."""

    def __init__(self, world: World) -> None:
        rng = world.rng
        self.file_size = rng.choice((2_048, 4_096, 16_384))
        self.largest_body = min(1_500, self.file_size // 2)
        self.is_sync_flush = rng.random() < 0.3
        # RocketMQ lets few pages wait for ten seconds.
        self.flush_interval = rng.choice((SECOND // 2, 5 * SECOND))
        self.fall_behind_max = rng.choice((1 << 28, 1 << 28, 5_000))
        self.options = MasterOptions(full_history=rng.random() < 0.5, max_connections=8)


class SlaveNode(Driven):
    """A slave with its log."""

    def __init__(
        self, name: str, world: World, network: Network, checks: Checks, options: SlaveOptions
    ) -> None:
        super().__init__(world)
        self.name = name
        self.network = network
        self.checks = checks
        self.options = options
        self.file_size = checks.file_size
        self.log = ModelLog(name, self.file_size)
        self.surroundings = NodeSurroundings(network, self.clock, self.poke)
        self.surroundings.connected = self._connected
        self.slave: HaSlave | None = None
        self.failing_appends = 0
        self.connection: SimSocket | None = None
        self._syncing: Generator[Flag, None, None] | None = None
        self._flag: Flag | None = None
        self._is_syncing = self._sync_thread = False

    @property
    def received_is_enough(self) -> bool:
        return self.options.acknowledge == "received"

    @property
    def checked(self) -> int:
        assert self.slave is not None
        return self.slave._replica.checked

    def start(self) -> None:
        """Open the store, and follow."""
        log = self.log
        log.fails_sync = self.fails_sync
        log.fails_append = self._fails_append
        log.during_sync = self._during_sync
        log.vouched = lambda: self.checks.vouched(self)
        self.connection = None
        self.slave = HaSlave(
            cast(Any, log), "master", 1, options=self.options, surroundings=self.surroundings
        )
        self._syncing = self.slave.syncing()
        self._flag = next(self._syncing)
        self._is_syncing = False
        self.begin(self.slave.following())

    def stop(self, *, power: bool) -> None:
        """Die."""
        if power and self.connection is not None and self.connection.other is not None:
            silently = self.world.rng.random() < 0.5
            self.network.cut(self.connection, self.connection.other, silently=silently)
        self._forget()
        before = self.log
        rng = self.world.rng
        self.log = before.after_power_cut(rng) if power else before.reopened()
        before.health.poison("it was reopened")
        self.checks.reopened(self, before)

    def _forget(self) -> None:
        self.end()
        if self._syncing is not None:
            self._syncing.close()
        self._syncing = None

    def cut_back(self) -> None:
        """Replace the store by an older copy."""
        self._forget()
        low = self.log.min_offset
        before, at = self.log, self.world.rng.randint(low, max(low, self.log.wrote_offset))
        self.log = before.reopened(cut_at=at)
        before.health.poison("it was reopened")
        self.checks.cut_back(self, before)

    def expire_first(self) -> None:
        """Let retention delete the log's first file, whose acknowledgement may be under way."""
        self.checks.expired(self.log.copy())
        super().expire_first()

    def wipe(self) -> None:
        """Begin with an empty folder."""
        self._forget()
        before = self.log
        before.health.poison("it was reopened")
        self.log = ModelLog(self.name, self.file_size)
        self.checks.cut_back(self, before)

    def stepped(self) -> None:
        if self._flag is not None and not self._flag.is_unset() and not self._is_syncing:
            self._is_syncing = True
            life = self._life
            pause = self.world.rng.choice((100, 5 * MS, 100 * MS))
            self.world.after(pause, lambda: self._sync(life))

    def _sync(self, life: int) -> None:
        if life != self._life or self._syncing is None or self._flag is None:
            return
        if self.is_stalled:
            self.world.after(50 * MS, lambda: self._sync(life))
            return
        self._flag.take(0)
        self._sync_thread = True
        try:
            next(self._syncing)
        except StopIteration:
            self._syncing = None
        finally:
            self._sync_thread = False
            self._is_syncing = False
        if self.is_up:
            self.stepped()

    def _during_sync(self) -> None:
        """What the receiving thread does while the other thread waits for the disk."""
        if self._sync_thread and not self._is_in_step:
            for _ in range(self.world.rng.randrange(3)):
                self.step()

    def stopped(self) -> None:
        self.checks.ended(self)

    def _connected(self, connection: SimSocket) -> None:
        self.connection = connection
        said = bytearray()
        self.checks.connected(self)
        count = 0

        def heard(part: bytes) -> None:
            nonlocal count
            said.extend(part)
            while len(said) >= 8:
                (offset,) = struct.unpack(">q", said[:8])
                del said[:8]
                self.checks.reported(self, offset, is_first=not count)
                count += 1

        connection.listeners.append(heard)

    def _fails_append(self) -> bool:
        if self.failing_appends:
            self.failing_appends -= 1
            return True
        return False
