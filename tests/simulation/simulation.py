"""One run of the simulator: a master, its slaves, and the faults that a seed chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from unittest import mock

from logquarry.protocol.ha_messages import HaTimes, TransferLimits
from logquarry.replication import SlaveOptions
from logquarry.replication import master as master_module
from logquarry.replication import slave as slave_module
from tests.simulation.checks import Checks
from tests.simulation.network import Network
from tests.simulation.nodes import MasterNode, MasterPlan, SlaveNode
from tests.simulation.world import MS, SECOND, Violation, World, Wrong

TROUBLE_SECONDS: Final = 12
REST_SECONDS: Final = 60


class Simulation:
    """A run.

    Args:
        seed: determines all events.
        acknowledge: what slaves acknowledge (:class:`SlaveOptions`).
    """

    def __init__(self, seed: int, *, acknowledge: str = "flushed") -> None:
        self.world = world = World(seed)
        rng = world.rng
        self.network = Network(world)
        plan = MasterPlan(world)
        size, rate = rng.choice(
            (
                (37, None),
                (1_000, None),
                (1_000, 20_000),
                (8_000, 10_000),
                (8_000, 10_000),
                (32 << 10, None),
            )
        )
        limits = TransferLimits(transfer_size=size, bytes_per_second=rate)
        if size < 100:
            plan.largest_body = 100
        quick = HaTimes(heartbeat_ms=300, housekeeping_ms=3_000)
        self._times = rng.choice((HaTimes(), quick, quick))
        plan.options = replace(plan.options, limits=limits, times=self._times)
        self.checks = Checks(world, plan.file_size)
        self.master = MasterNode(world, self.network, self.checks, plan)
        self.slaves = [
            SlaveNode(
                f"slave-{number}", world, self.network, self.checks, self._options(acknowledge)
            )
            for number in range(rng.choice((1, 2, 2, 3)))
        ]
        self.checks.slaves = self.slaves
        self.is_over = False
        self._pause = rng.choice((100 * MS, SECOND, 2 * SECOND))
        self._trouble = rng.choice((SECOND // 4, SECOND, 3 * SECOND))

    def _options(self, acknowledge: str) -> SlaveOptions:
        rng = self.world.rng
        return SlaveOptions(
            start=rng.choice((None, None, 0)),
            acknowledge=acknowledge,
            overlap=rng.choice((0, 64, 1_000, 64 << 10)),
            times=self._times,
        )

    def run(self) -> None:
        """Run all events.

        Raises:
            Wrong: if something happened that must not.
        """
        world = self.world
        self.master.start()
        for slave in self.slaves:
            world.after(world.rng.randint(0, SECOND), slave.start)
        self._put()
        self._harm()
        world.run_until(TROUBLE_SECONDS * SECOND)
        self._rest()
        world.run_until((TROUBLE_SECONDS + REST_SECONDS) * SECOND)
        self.checks.at_rest(self.master.log)

    def close(self) -> None:
        """Release all connections and processes."""
        for node in (self.master, *self.slaves):
            node.end()

    def _put(self) -> None:
        if self.is_over:
            return
        rng = self.world.rng
        for _ in range(rng.choice((1, 1, 1, 5, 20))):
            self.master.put()
        self.world.after(rng.choice((5 * MS, self._pause, SECOND)), self._put)

    def _rest(self) -> None:
        """Inject no more faults."""
        self.is_over = self.network.is_calm = True
        self.master.failing_syncs = 0
        rng = self.world.rng
        if not self.master.is_up or self.master.log.health.reason is not None or rng.random() < 0.5:
            # The last fault may leave slaves ahead of the master.
            self._restart_master(power=rng.random() < 0.8, pause=0)
        for slave in self.slaves:
            slave.failing_syncs = slave.failing_appends = 0
            if not slave.is_up and slave.slave is not None:
                slave.stop(power=False)
                slave.start()
        if rng.random() < 0.5:
            self.world.after((REST_SECONDS - 20) * SECOND, self.master.put)

    # --------------------------------------------------------------------------------- trouble
    def _harm(self) -> None:
        if self.is_over:
            return
        rng = self.world.rng
        harms: tuple[tuple[int, Callable[[], None]], ...] = (
            (6, self._cut_connection),
            (3, self._restart_slave),
            (4, self._restart_a_master),
            (3, self._stall),
            (1, self._fail_disk),
            (1, self._jump),
            (1, self._cut_back),
            (1, self._wipe),
            (1, self._expire),
        )
        chosen = rng.choices([harm for _, harm in harms], [weight for weight, _ in harms])[0]
        chosen()
        if self.master.log.health.reason is not None and self.master.is_up:
            self._restart_master(power=rng.random() < 0.5, pause=rng.randint(0, SECOND))
        for slave in self.slaves:
            if not slave.is_up and slave.slave is not None and rng.random() < 0.3:
                # The operator checks why the slave has ended.
                slave.wipe() if rng.random() < 0.5 else slave.stop(power=False)
                slave.start()
        self.world.after(rng.randint(1, 2 * self._trouble), self._harm)

    def _a_slave(self) -> SlaveNode | None:
        running = [slave for slave in self.slaves if slave.is_up]
        return self.world.rng.choice(running) if running else None

    def _cut_connection(self) -> None:
        if self.network.connections:
            rng = self.world.rng
            near, far = rng.choice(self.network.connections)
            self.network.cut(near, far, silently=rng.random() < 0.3)

    def _restart_slave(self) -> None:
        if slave := self._a_slave():
            rng = self.world.rng
            power = rng.random() < 0.6
            self.world.tell(f"{slave.name} {'loses its power' if power else 'is killed'}")
            slave.stop(power=power)
            self._start_later(slave)

    def _start_later(self, slave: SlaveNode) -> None:
        life = slave._life
        pause = self.world.rng.choice((0, 100 * MS, 3 * SECOND))
        self.world.after(pause, lambda: slave.start() if life == slave._life else None)

    def _restart_a_master(self) -> None:
        if self.master.is_up:
            rng = self.world.rng
            pause = rng.choice((0, 200 * MS, 4 * SECOND))
            self._restart_master(power=rng.random() < 0.6, pause=pause)

    def _restart_master(self, *, power: bool, pause: int) -> None:
        master = self.master
        self.world.tell(f"the master {'loses its power' if power else 'is killed'}")
        master.stop(power=power)
        life = master._life
        self.world.after(pause, lambda: master.start() if life == master._life else None)

    def _stall(self) -> None:
        rng = self.world.rng
        node = rng.choice((self.master, *self.slaves))
        node.stall(rng.choice((100 * MS, 3 * SECOND, 8 * SECOND, 25 * SECOND)))

    def _jump(self) -> None:
        rng = self.world.rng
        node = rng.choice((self.master, *self.slaves))
        node.clock.jump(rng.choice((SECOND, 6 * SECOND, 3_600 * SECOND)))
        node.clock.set_wall(rng.choice((-86_400, -5, 5, 86_400)) * SECOND)
        node.poke()

    def _fail_disk(self) -> None:
        rng = self.world.rng
        node = rng.choice((self.master, *self.slaves))
        if isinstance(node, SlaveNode) and rng.random() < 0.5:
            node.failing_appends = 1
        else:
            node.failing_syncs = 1
        self.world.tell("a disk is to fail")

    def _cut_back(self) -> None:
        if slave := self._a_slave():
            self.world.tell(f"{slave.name} is cut back")
            slave.cut_back()
            self._start_later(slave)

    def _wipe(self) -> None:
        if slave := self._a_slave():
            self.world.tell(f"{slave.name} is wiped")
            slave.wipe()
            self._start_later(slave)

    def _expire(self) -> None:
        self.world.rng.choice((self.master, *self.slaves)).expire_first()


@contextmanager
def small_buffers() -> Iterator[None]:
    """Logs are small here, so each read takes few bytes, to use the same code paths."""
    with (
        mock.patch.object(slave_module, "_RECEIVE", 4_096),
        mock.patch.object(slave_module, "_LARGE", 1_024),
        mock.patch.object(master_module, "_TURN", 128 << 10),
    ):
        yield


def run(seed: int, *, acknowledge: str = "flushed") -> Simulation:
    """Run a seed.

    Raises:
        Violation: with the seed and what happened, if something happened that must not.
    """
    with small_buffers():
        simulation = Simulation(seed, acknowledge=acknowledge)
        try:
            simulation.run()
        except (Wrong, Exception) as error:
            story = "\n".join(simulation.world.story[-30:])
            at = simulation.world.now / SECOND
            raise Violation(f"seed {seed} at {at:.6f}: {error!r}\n{story}") from error
        finally:
            simulation.close()
    return simulation


def silence() -> None:
    """Turn logging off: thousands of slaves end here for good reasons."""
    logging.getLogger("logquarry").setLevel(logging.CRITICAL + 1)
