"""Writes the log of a salvaged store.

The writer changes these fields of a frame: PHYSICALOFFSET, the offset of a half message that was
moved, a store time that is before that of the previous frame, and a queue offset that the plan
replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from logquarry.disk.disk import Disk
from logquarry.errors import CorruptStore
from logquarry.format import frame, message_id, property_crc, sys_flag
from logquarry.format.rows import BODY_AT, POSITION, SIZE
from logquarry.log import columns
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import COMMIT_LOG, NAME_DIGITS
from logquarry.log.walk import LogReader, Run
from logquarry.repair.salvage.plan import NewPlaces, Piece, SalvagePlan
from logquarry.repair.salvage.store_times import raised_from
from logquarry.units import Progress

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Pause = Callable[[], None]

_LONG = np.arange(8)
_QUEUE_OFFSET_AT = frame.HEAD.offsets["queue_offset"]
_PHYSICAL_OFFSET_AT = frame.HEAD.offsets["physical_offset"]
_FIELDS = ("sys_flag", "store_timestamp", "prepared_transaction_offset")
_BODY_LENGTH_SIZE = 4
_V6_MORE = message_id.HOST_SIZE_V6 - message_id.HOST_SIZE_V4


class LogWriter:
    """Writes the log of one plan.

    Args:
        layout: the files of the damaged store.
        plan: the plan.
        disk: disk of the new store.
        root: folder of the new store.
    """

    def __init__(self, layout: StoreLayout, plan: SalvagePlan, disk: Disk, root: Path) -> None:
        self._layout = layout
        self._plan = plan
        self._disk = disk
        self._root = root
        # The planner has checked the CRCs.
        self._reader = LogReader(layout, check_crc=False)
        self._places = NewPlaces(plan.pieces)
        size = plan.config.mapped_file_size_commit_log
        assert size is not None
        self._size = size
        self._file: int | None = None
        self._path = root
        self._base = 0
        self._end = 0
        self._last_time = 0

    def write(self, progress: Progress | None = None, pause: Pause = lambda: None) -> None:
        """Write the whole log, durably.

        Args:
            progress: gets the bytes that are written, and their total.
            pause: called at safe points; raise to cancel.

        Raises:
            StoreUnavailable: if the disk fails or is full.
            CorruptStore: if the store has changed since the plan was made.
        """
        done, total = 0, self._plan.bytes
        try:
            for piece in self._plan.pieces:
                for run in self._runs(piece):
                    pause()
                    self._write_run(run, piece.to - piece.start)
                    done += run.end - run.start
                    if progress is not None:
                        progress(done, total)
            if self._file is None:
                # Even without a message the store needs a log folder.
                self._disk.make_folders(self._root / COMMIT_LOG)
        finally:
            self._close(is_last=True)

    def _runs(self, piece: Piece) -> Iterator[Run]:
        position = piece.start
        for event in self._reader.events(piece.start, piece.stop):
            if position >= piece.stop or not isinstance(event, Run) or event.start != position:
                break
            yield event
            position = event.end
        if position != piece.stop:
            path = self._layout.log_path(position)
            raise CorruptStore(
                path, position, "the log was changed while it was read", kind="changed"
            )

    def _write_run(self, run: Run, move: int) -> None:
        to = run.start + move
        if self._file is None or to >= self._base + self._size:
            self._close()
            self._open(to)
        assert self._file is not None
        first = int(run.rows[0, POSITION])
        data = run.window.data[first : first + run.end - run.start]
        patched = self._patched(run, data, move)
        try:
            self._disk.write_all(self._file, patched.data.cast("B"), to - self._base)
        except OSError as error:
            raise self._disk.refused(self._path, error) from error
        self._end = to - self._base + len(data)

    def _patched(self, run: Run, data: Bytes, move: int) -> Bytes:
        """The bytes of a run's frames in the new log."""
        rows = run.rows
        at = rows[:, POSITION].astype(np.int64) - int(rows[0, POSITION])
        fields = columns.fixed_fields(run.window, rows, _FIELDS)
        patches: list[tuple[Int64, Int64]] = []
        places = rows[:, POSITION].astype(np.int64) + run.window.base
        if move:
            patches.append((at + _PHYSICAL_OFFSET_AT, places + move))
        times = fields["store_timestamp"].astype(np.int64)
        wanted = times.copy()
        for row in np.flatnonzero(np.isin(places, list(self._plan.lowered_times))).tolist():
            wanted[row] = self._plan.lowered_times[int(places[row])]
        raised = raised_from(self._last_time, wanted)
        self._last_time = int(raised[-1])
        late = np.flatnonzero(raised != times)
        flags = fields["sys_flag"].astype(np.int64)
        # RECONSUMETIMES, PREPAREDTRANSACTIONOFFSET, BODYLEN and the body follow the hosts.
        prepared_at = at + rows[:, BODY_AT] - _BODY_LENGTH_SIZE - len(_LONG)
        if len(late):
            v6 = (flags[late] & sys_flag.BORN_HOST_V6) != 0
            time_at = at[late] + frame.HEAD.size + message_id.HOST_SIZE_V4 + v6 * _V6_MORE
            patches.append((time_at, raised[late]))
        kinds = flags & sys_flag.TRANSACTION_MASK
        is_end = (kinds == sys_flag.TRANSACTION_COMMIT) | (kinds == sys_flag.TRANSACTION_ROLLBACK)
        ends = np.flatnonzero(is_end)
        if len(ends):
            halves = self._places.of(fields["prepared_transaction_offset"][ends].astype(np.int64))
            known = halves >= 0
            patches.append((prepared_at[ends[known]], halves[known]))
        if self._plan.queue_offsets:
            changed = np.flatnonzero(np.isin(places, list(self._plan.queue_offsets)))
            if len(changed):
                offsets = [self._plan.queue_offsets[place] for place in places[changed].tolist()]
                patches.append((at[changed] + _QUEUE_OFFSET_AT, np.array(offsets, np.int64)))
        if not patches:
            return data
        copy = data.copy()
        for where, values in patches:
            copy[where[:, None] + _LONG] = values.astype(">i8").view(np.uint8).reshape(-1, 8)
        sizes = rows[:, SIZE].astype(np.int64)
        _renew_crcs(copy, at, sizes, columns.wrong_property_crcs(run.window, rows))
        return copy

    # -------------------------------------------------------------------------------------- files
    def _open(self, place: int) -> None:
        self._base = place - (place - self._plan.start) % self._size
        self._path = self._root / COMMIT_LOG / f"{self._base:0{NAME_DIGITS}d}"
        self._file = self._disk.make_file(self._path, self._size)
        self._end = 0

    def _close(self, *, is_last: bool = False) -> None:
        file = self._file
        if file is None:
            return
        self._file = None
        left = self._size - self._end
        try:
            if not is_last and left >= frame.BLANK.size:
                self._disk.write_all(file, frame.encode_blank(left), self._end)
            self._disk.sync(file, self._path)
        except OSError as error:
            raise self._disk.refused(self._path, error) from error
        finally:
            self._disk.close(file)


def _renew_crcs(data: Bytes, starts: Int64, sizes: Int64, wrong: list[int]) -> None:
    """Write the property CRCs of changed frames again, computed from their bytes.

    A CRC that was wrong stays wrong: a new one would hide the damage from verify and from the
    broker.
    """
    carriers = property_crc.carriers(data, starts, sizes)
    for number in np.setdiff1d(carriers, np.array(wrong, np.int64)).tolist():
        start = int(starts[number])
        tail = start + int(sizes[number]) - property_crc.SIZE
        crc = property_crc.encode(data[start:tail].tobytes())
        data[tail : tail + property_crc.SIZE] = np.frombuffer(crc, np.uint8)
