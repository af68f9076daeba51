"""Conditions that must hold at every moment of a simulation.

A master that loses its log's end in a power cut begins another *era*: from there on its log is a
different one. At any time, a slave's log is the beginning of the log of some era. Once the slave
has received new bytes, it is the beginning of the log of the era that it is connected to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from logquarry.errors import LogsDiverged, ReplicationError, StoreUnavailable
from logquarry.replication import HaMaster
from logquarry.replication.replica import SpoiltReplica
from logquarry.write.put_result import PutResult, PutStatus
from tests.simulation.model_log import ModelLog
from tests.simulation.world import SECOND, World, Wrong

if TYPE_CHECKING:
    from tests.simulation.nodes import SlaveNode


class Held(NamedTuple):
    """An acknowledged message, which must keep its offset."""

    start: int
    data: bytes


class Checks:
    """Watches the run, and raises :class:`.world.Wrong`.

    Args:
        world: tells what happened.
        file_size: bytes of a log file.

    Attributes:
        eras: the bytes of the master's log from 0 on, in each era.
        statuses: number of settled puts of each status.
        waiting: puts that are not settled.
    """

    def __init__(self, world: World, file_size: int) -> None:
        self.world = world
        self.file_size = file_size
        self.eras: list[bytearray] = [bytearray()]
        self.slaves: list[SlaveNode] = []
        self.statuses: dict[PutStatus, int] = {}
        self.waiting = 0
        self.refusals: list[str] = []
        self._held: dict[str, list[Held]] = {}
        self._era_of: dict[str, int] = {}
        self._had: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._taken: list[tuple[int, ModelLog]] = []

    # ------------------------------------------------------------------------------ the master
    def new_era(self, log: ModelLog) -> None:
        """The master was opened."""
        self.waiting = 0
        self.eras.append(self.eras[-1][: log.wrote_offset])
        self.world.tell(f"the master begins with {log.min_offset}..{log.wrote_offset}")

    def appended(self, data: bytes) -> None:
        """The master put something."""
        self.eras[-1] += data

    def master_stepped(self, master: HaMaster, log: ModelLog) -> None:
        """No slave has more than its master had."""
        assert log.replicas is not None
        if log.replicas.acknowledged > log.wrote_offset:
            raise Wrong(
                f"{log.replicas.acknowledged} is acknowledged, and the log ends at "
                f"{log.wrote_offset}"
            )
        slaves = master._peers
        for slave in slaves:
            machine = slave.machine
            known = machine.acknowledged
            if known is not None and not known <= machine.next_offset <= log.wrote_offset:
                raise Wrong(f"the log ends at {log.wrote_offset}, but {master.status()}")
        if log.replicas.connected != len(slaves):
            raise Wrong(f"{log.replicas.connected} are counted, but {master.status()}")

    def master_ended(self, master: HaMaster) -> None:
        """A master has ended, although its log can always be read."""
        raise Wrong(f"the master ended: {master.error}")

    def settled(self, result: PutResult, log: ModelLog, *, is_sync_flush: bool) -> None:
        """A put was answered."""
        status = result.status
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status is not PutStatus.PUT_OK:
            return
        start, end = result.physical_offset, result.end_offset
        if is_sync_flush and log.flushed_offset < end:
            raise Wrong(f"{start}..{end} is acknowledged, and not on the master's disk")
        held = Held(start, bytes(self.eras[-1][start:end]))
        holders = [slave for slave in self.slaves if self._holds(slave.log, held)]
        if not holders and not self._was_held(held):
            raise Wrong(
                f"{start}..{end} is acknowledged, and on no slave's disk: "
                + ", ".join(
                    f"{slave.name} has {slave.log.min_offset}..{slave.log.flushed_offset} of "
                    f"{slave.log.wrote_offset}"
                    for slave in self.slaves
                )
            )
        for slave in holders:
            self._held.setdefault(slave.name, []).append(held)

    @staticmethod
    def _holds(log: ModelLog, held: Held) -> bool:
        end = held.start + len(held.data)
        is_there = log.min_offset <= held.start and end <= log.flushed_offset
        is_vouched = end <= log.dispatched_offset
        return is_there and is_vouched and log.bytes_of(held.start, end) == held.data

    # ------------------------------------------------------------------------------- the slaves
    def connected(self, slave: SlaveNode) -> None:
        """A slave has connected to the current master."""
        self._era_of[slave.name] = len(self.eras) - 1
        self._had[slave.name] = slave.log.wrote_offset

    def reported(self, slave: SlaveNode, offset: int, *, is_first: bool) -> None:
        """A slave has reported that it has the bytes before an offset."""
        log = slave.log
        if slave.received_is_enough:
            limit = log.wrote_offset
        else:
            limit = min(log.flushed_offset, slave.checked)
        if is_first:
            self._asked[slave.name] = offset
        # A slave with an empty log reports where it wants to begin, more than once.
        is_empty = not log.wrote_offset and offset == self._asked[slave.name]
        # A slave cannot ask for byte 0: 0 lets the master choose the start.
        if offset > max(1, limit) and not is_empty:
            raise Wrong(
                f"{slave.name} reports {offset}, and has {limit} for sure, of {log.wrote_offset}"
            )

    def vouched(self, slave: SlaveNode) -> None:
        """A slave counts received bytes as its log."""
        log = slave.log
        name = slave.name
        if name not in self._era_of:
            return
        start, end = log.min_offset, log.dispatched_offset
        own = log.bytes_of(start, end)
        if end > self._had[name]:
            era = self.eras[self._era_of[name]]
            if era[start:end] != own:
                raise Wrong(
                    f"{name} took more of a master that its log {start}..{end} is no beginning of"
                )
        elif not any(era[start:end] == own for era in self.eras):
            raise Wrong(f"{name} has {start}..{end}, which is of no master's log")

    def reopened(self, slave: SlaveNode, before: ModelLog) -> None:
        """A slave's store was reopened: every acknowledged message is there."""
        log = slave.log
        kept = [h for h in self._held.get(slave.name, ()) if h.start >= before.min_offset]
        self._held[slave.name] = kept
        for held in kept:
            if not self._holds(log, held):
                raise Wrong(
                    f"{slave.name} has lost {held.start}, which was acknowledged: it has "
                    f"{log.min_offset}..{log.wrote_offset} now"
                )
        self._any_era(slave)

    def _was_held(self, held: Held) -> bool:
        """Whether a slave had the message, and lost its log while its report was under way."""
        recent = self.world.now - 10 * SECOND
        self._taken = [(at, log) for at, log in self._taken if at >= recent]
        return any(self._holds(log, held) for _, log in self._taken)

    def cut_back(self, slave: SlaveNode, before: ModelLog) -> None:
        """Part of a slave's log was removed."""
        log = slave.log
        self._taken.append((self.world.now, before))
        self._held[slave.name] = [h for h in self._held.get(slave.name, ()) if self._holds(log, h)]
        self._any_era(slave)

    def expired(self, before: ModelLog) -> None:
        """A slave's retention is about to delete a file."""
        self._taken.append((self.world.now, before))

    def _any_era(self, slave: SlaveNode) -> None:
        log = slave.log
        start, end = log.min_offset, log.wrote_offset
        own = log.bytes_of(start, end)
        if not any(era[start:end] == own for era in self.eras):
            raise Wrong(f"{slave.name} has {start}..{end}, which is of no master's log")

    def ended(self, slave: SlaveNode) -> None:
        """A slave has ended for good, which needs a reason."""
        assert slave.slave is not None
        error = slave.slave.error
        self.world.tell(f"{slave.name} ends: {error}")
        log = slave.log
        own = log.bytes_of(log.min_offset, log.wrote_offset)
        if error is None or isinstance(error, SpoiltReplica):
            raise Wrong(f"{slave.name} ended without a reason: {error}")
        self.refusals.append(type(error).__name__)
        if isinstance(error, LogsDiverged):
            era = self.eras[self._era_of[slave.name]]
            if era[log.min_offset : log.wrote_offset] == own:
                raise Wrong(f"{slave.name} refuses a master that it is a beginning of: {error}")
        elif isinstance(error, ReplicationError):
            if "the master has deleted the" not in str(error):
                raise Wrong(f"{slave.name} fails: {error}")
        elif not isinstance(error, StoreUnavailable) or log.health.reason is None:
            raise Wrong(f"{slave.name} fails: {error}")

    # ----------------------------------------------------------------------------------- the end
    def at_rest(self, log: ModelLog) -> None:
        """After a long time without faults, each slave has the whole log, or a reason why not."""
        if self.waiting:
            raise Wrong(f"{self.waiting} puts were never answered")
        era = self.eras[-1]
        assert log.replicas is not None
        connected = sum(s.is_up and s.connection is not None for s in self.slaves)
        if log.replicas.connected > connected:
            # A peer that did not notice a cut was silent for long.
            raise Wrong(f"{log.replicas.connected} slaves are counted, and {connected} are there")
        for slave in self.slaves:
            assert slave.slave is not None
            own = slave.log.bytes_of(slave.log.min_offset, slave.log.wrote_offset)
            if not slave.is_up:
                continue
            if not slave.log.wrote_offset and slave.slave.status().has_all:
                # The slave has to begin with the next file, which is still empty.
                machine = slave.slave._machine
                if machine is not None and machine.received == len(era):
                    continue
            if own != era[slave.log.min_offset :] or slave.slave._replica.checked != len(era):
                raise Wrong(
                    f"{slave.name} has {slave.log.min_offset}..{slave.log.wrote_offset}, and the "
                    f"master {log.min_offset}..{len(era)}: {slave.slave.status()}"
                )
            if slave.log.wrote_offset and slave.slave.status().acknowledged != len(era):
                raise Wrong(f"{slave.name} does not say that it has all: {slave.slave.status()}")
