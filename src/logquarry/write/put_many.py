"""Many messages in one call: any mix of topics and queues, in order (``put_many``).

RocketMQ has nothing like it: its batch is of one queue, and all in one file. Here what comes into
the log is, byte for byte, what single puts would have written; only the store time is that of a
chunk of about a mebibyte, for which the log is held at once. Other puts come in between.

Guarantees: every message is checked before the first is appended, so that a refusal leaves the
log as it was. Whatever ends a call in the middle tells what it has appended.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format import message_id
from logquarry.format.frame import BLANK
from logquarry.log import codec
from logquarry.message import Message
from logquarry.write.append import CommitLogWriter, end_file
from logquarry.write.outgoing import Columns, Encode, Int64, Outgoing, outgoing, plain_outgoing
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus

if TYPE_CHECKING:
    import pyarrow as pa


CHUNK_BYTES: Final = 1 << 20
"""About as much is appended while the log is held."""
_MANY_QUEUES: Final = 1 << 10
_MS: Final = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class PutManyResult:
    """Messages in the log, in the order in which they were given.

    Attributes:
        status: PUT_OK, or why flush or replica were not waited out.
        physical_offset: where each frame starts, int64.
        queue_offset: index in the consume queue of each, int64.
        store_timestamp: when the store took each, in milliseconds, int64.
        size: bytes of each frame, int64.
        elapsed_ms: how long the call took.
        topics: messages and bytes of each topic that messages named.
    """

    status: PutStatus
    physical_offset: Int64
    queue_offset: Int64
    store_timestamp: Int64
    size: Int64
    elapsed_ms: float
    topics: Mapping[str, tuple[int, int]]
    _hosts: tuple[bytes, ...] = ()
    _host_ids: Int64 | None = None

    @property
    def ok(self) -> bool:
        """Whether the messages are in the log, whatever became of flush and replica."""
        return True

    @property
    def message_count(self) -> int:
        """Messages in the log."""
        return len(self.physical_offset)

    @property
    def end_offset(self) -> int:
        """Physical offset behind the last frame: what a flush has to reach; 0 without messages."""
        return int(self.physical_offset[-1] + self.size[-1]) if self.message_count else 0

    @property
    def message_ids(self) -> tuple[str, ...]:
        """The id of each message, made when asked for."""
        if self._host_ids is None:
            return ()
        return tuple(
            message_id.encode(self._hosts[host], offset)
            for host, offset in zip(
                self._host_ids.tolist(), self.physical_offset.tolist(), strict=True
            )
        )


class ManyWriter:
    """Puts many messages at once.

    Args:
        writer: of the log.
    """

    def __init__(self, writer: CommitLogWriter) -> None:
        self._writer = writer

    def put_many(
        self, messages: Iterable[Message] | pa.RecordBatch | pa.Table, *, wait: bool = True
    ) -> PutManyResult:
        """Put messages, or the rows of Arrow columns (:mod:`logquarry.write.outgoing_arrow`).

        All of them are held in memory until the first is appended.

        Args:
            messages: the messages.
            wait: whether to wait for flush and replica, if any of them does.

        Raises:
            StoreUnavailable: if the store takes no messages, now or before the last one:
                ``appended`` tells what is in the log.
            MessageRejected: if it does not take one of them: ``index`` tells which, and nothing
                is appended.
            UsageError: if one of them makes no sense, likewise.
        """
        return self._put(lambda: list(self._parts(messages)), wait=wait)

    def put_stored(self, batch: pa.RecordBatch, least_time: int | None = None) -> PutManyResult:
        """Put messages that a store has had, as they were: an import, or what was salvaged.

        Nothing that a put does to a message is done again: topic and property string stay, be
        there a delay or further queues. Queue offsets follow on those of the queue; a message that
        takes no place in one (PREPARED, ROLLBACK) keeps its ``queue_offset``.

        Args:
            batch: the columns of ``put_many``, and ``queue_offset`` and ``store_timestamp``.
            least_time: if messages keep their store time (in milliseconds), the time that none of
                them is before: that of the log's last message. One that would be earlier than
                the message before it gets the time of that. By default the store time is now.

        Raises:
            StoreUnavailable, MessageRejected, UsageError: as :meth:`put_many`. Of further queues,
                where the store keeps them, it shows only at the append that offsets do not follow.
        """
        keeps = least_time is not None
        return self._put(lambda: list(self._stored_parts(batch, keeps)), least_time)

    def check_stored(self, batch: pa.RecordBatch) -> None:
        """Refuse what :meth:`put_stored` would refuse, and put nothing.

        Raises:
            MessageRejected, UsageError: as :meth:`put_stored`.
        """
        list(self._stored_parts(batch, keeps_times=False))

    def _put(
        self,
        parts_of: Callable[[], list[Outgoing]],
        least_time: int | None = None,
        *,
        wait: bool = True,
    ) -> PutManyResult:
        began = time.monotonic()
        writer = self._writer
        writer.check_status()
        parts = parts_of()
        put = _Put(writer, parts, began, least_time)
        status = PutStatus.PUT_OK
        try:
            put.append()
            if put.last is not None:
                waits = wait and any(part.waits for part in parts)
                status = writer.settle(put.last, waits).status
        except (StoreUnavailable, MessageRejected) as error:
            error.appended = put.result(PutStatus.PUT_OK) if put.done else None
            raise
        return put.result(status)

    # ------------------------------------------------------------------------------ what is put
    def _parts(self, messages: Any) -> Iterator[Outgoing]:
        if isinstance(messages, Message):
            raise TypeError("put_many takes several messages; one is for put")
        if hasattr(messages, "to_batches") or hasattr(messages, "schema"):
            yield from self._parts_of_arrow(messages)
            return
        writer = self._writer
        is_held = isinstance(messages, (list, tuple))
        if not self._has_kernels:
            found: Sequence[Message] = messages if is_held else list(messages)
            if found:
                yield plain_outgoing(found, writer.encoder.encode, writer.require_fit)
            return
        from logquarry.write.outgoing_messages import Taken, columns_of_messages

        found = messages if is_held else Taken(messages)
        if found:
            yield self._table(columns_of_messages(found, writer.clock))

    def _parts_of_arrow(self, messages: Any) -> Iterator[Outgoing]:
        from logquarry.write.outgoing_arrow import check_columns, columns_of_batch, messages_of

        batches = messages.to_batches() if hasattr(messages, "to_batches") else [messages]
        writer = self._writer
        first = 0
        for batch in batches:
            check_columns(batch)
            if not batch.num_rows:
                continue
            if self._has_kernels:
                yield self._table(columns_of_batch(batch, writer.clock, first))
            else:
                messages = messages_of(batch, first)
                yield plain_outgoing(messages, writer.encoder.encode, writer.require_fit, first)
            first += batch.num_rows

    def _stored_parts(self, batch: pa.RecordBatch, keeps_times: bool) -> Iterator[Outgoing]:
        from logquarry.write import outgoing_arrow

        outgoing_arrow.check_columns(batch)
        if not batch.num_rows:
            return
        if not keeps_times and "store_timestamp" in batch.schema.names:
            batch = batch.drop_columns(["store_timestamp"])
        writer = self._writer
        encode = writer.encoder.encode_stored
        if self._has_kernels:
            columns = outgoing_arrow.columns_of_batch(
                batch, writer.clock, stored=True, look=writer.config.enable_multi_dispatch
            )
            yield self._table(columns, encode)
        else:
            messages = outgoing_arrow.messages_of(batch, stored=True)
            times = outgoing_arrow.store_times_of(batch) if keeps_times else None
            yield plain_outgoing(messages, encode, writer.require_fit, times=times)

    @property
    def _has_kernels(self) -> bool:
        return self._writer.has_short_way and codec.kernels_enabled()

    def _table(self, columns: Columns, encode: Encode | None = None) -> Outgoing:
        writer = self._writer
        return outgoing(
            columns,
            encode or writer.encoder.encode,
            writer.config,
            writer.require_fit,
            writer.file_size - BLANK.size,
        )


class _Put:
    """One call: what is to be appended, and what is."""

    def __init__(
        self,
        writer: CommitLogWriter,
        parts: list[Outgoing],
        began: float,
        least_time: int | None = None,
    ) -> None:
        self.done = 0
        self.last: PutResult | None = None
        self._writer = writer
        self._parts = parts
        self._began = began
        self._least_time = least_time
        count = sum(part.count for part in parts)
        self._physical = np.empty(count, np.int64)
        self._queue = np.empty(count, np.int64)
        self._times = np.empty(count, np.int64)
        self._sizes = np.empty(count, np.int64)

    def append(self) -> None:
        """Append all of it, chunk by chunk."""
        if any(len(part.odd) < part.count for part in self._parts):
            _load_kernel()
        for part in self._parts:
            first = self.done
            odd = sorted(part.odd)
            for start, stop in _chunks(part.sizes):
                if self.done:
                    self._writer.check_status()
                alone = odd[bisect_left(odd, start) : bisect_left(odd, stop)]
                self._append_chunk(part, first, start, stop, alone)

    def _append_chunk(
        self, part: Outgoing, first: int, start: int, stop: int, alone: list[int]
    ) -> None:
        with self._writer.holding() as (now, began):
            at = start
            for number in (*alone, stop):
                while at < number:
                    at = self._append_rows(part, first, at, number, self._time(now))
                if number < stop:
                    own = None if part.times is None else int(part.times[number])
                    time_ = self._time(now, own)
                    result = self._writer.append_held(part.odd[number], time_, began)
                    self._record(first + number, result)
                    at = number + 1

    def _time(self, now: int, own: int | None = None) -> int:
        """The store time of the next message, or its earliest one; ``own`` is one it had."""
        if self._least_time is None:
            return now
        # Others may have put since the last chunk, and what was put last may be in another file.
        times = [self._least_time, self._writer.file().store_timestamp]
        times += [] if self.last is None else [self.last.store_timestamp]
        times += [] if own is None else [own]
        self._least_time = max(times)
        return self._least_time

    def _record(self, number: int, result: PutResult) -> None:
        self._physical[number] = result.physical_offset
        self._queue[number] = result.queue_offset
        self._times[number] = result.store_timestamp
        self._sizes[number] = result.size
        self.last = result
        self.done = number + 1

    def _append_rows(self, part: Outgoing, first: int, start: int, stop: int, now: int) -> int:
        """Append rows to the last file: the number of the first that found no room."""
        kernels = codec.kernels()
        assert kernels is not None
        file = self._writer.file()
        offsets = self._writer.queue_offsets
        next_offsets = np.zeros(len(part.queues), np.int64)
        used = _used(part, start, stop)
        for queue in used:
            next_offsets[queue] = offsets.setdefault(part.queues[queue], 0)
        # The view keeps the map while the kernel writes.
        view: npt.NDArray[np.uint8] = np.frombuffer(file.buffer, np.uint8)
        at, position = kernels.encode_frames(
            *(part.rows, start, stop),
            *(part.heads, part.head_facts, part.topics, part.topic_ends),
            *(view.ctypes.data, file.wrote, file.size, file.base, now, codec.crc32_address()),
            *(next_offsets, self._physical[first:], self._queue[first:], self._times[first:]),
        )
        if at > start:
            before = file.wrote
            told = {part.queues[queue]: int(next_offsets[queue]) for queue in used}
            try:
                file.advance(position - before)
                offsets.update(told)
            except BaseException:
                # Ctrl-C comes anywhere. Messages in the log have their queue offsets.
                if file.wrote > before:
                    offsets.update(told)
                raise
            now = int(self._times[first + at - 1])
            self._sizes[first + start : first + at] = part.sizes[start:at]
            self.done = first + at
            self.last = self._last(part, first, at - 1, now)
        file.store_timestamp = now
        if at < stop:
            end_file(file)
        return int(at)

    def _last(self, part: Outgoing, first: int, number: int, now: int) -> PutResult:
        return PutResult(
            PutStatus.PUT_OK,
            AppendStatus.PUT_OK,
            part.store_hosts[part.store_host_ids[number]],
            int(self._physical[first + number]),
            int(self._queue[first + number]),
            int(part.sizes[number]),
            1,
            now,
            (time.monotonic() - self._began) * _MS,
        )

    def result(self, status: PutStatus) -> PutManyResult:
        """The messages that are appended."""
        count = self.done
        hosts: dict[bytes, int] = {}
        ids = [
            np.array([hosts.setdefault(host, len(hosts)) for host in part.store_hosts], np.int64)[
                part.store_host_ids
            ]
            for part in self._parts
        ]
        return PutManyResult(
            status,
            self._physical[:count],
            self._queue[:count],
            self._times[:count],
            self._sizes[:count],
            (time.monotonic() - self._began) * _MS,
            self._topics(),
            tuple(hosts),
            np.concatenate(ids)[:count] if ids else None,
        )

    def _topics(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        first = 0
        for part in self._parts:
            sizes = self._sizes[first : min(first + part.count, self.done)]
            ids, kinds = part.named_ids[: len(sizes)], len(part.named)
            counts = np.bincount(ids, minlength=kinds).tolist()
            totals = np.bincount(ids, sizes, minlength=kinds).tolist()
            for topic, count, total in zip(part.named, counts, totals, strict=True):
                before = found.get(topic, (0, 0))
                found[topic] = before[0] + count, before[1] + int(total)
            first += part.count
        return {topic: said for topic, said in found.items() if said[0]}


@cache
def _load_kernel() -> None:
    """Load or compile the kernel, which takes a moment: not while the log is held."""
    kernels = codec.kernels()
    assert kernels is not None
    none = Outgoing(
        0, np.zeros(0, np.int64), {}, [], np.zeros(0, np.int64), [], np.zeros(0, np.int64), False
    )
    numbers = np.zeros(0, np.int64)
    kernels.encode_frames(
        *(none.rows, 0, 0),
        *(none.heads, none.head_facts, none.topics, none.topic_ends),
        *(0, 0, 0, 0, 0, 0),
        *(numbers, numbers, numbers, numbers),
    )


def _used(part: Outgoing, start: int, stop: int) -> list[int]:
    """The queues of some rows."""
    from logquarry.format.put_rows import QUEUE

    queues = part.rows[QUEUE, start:stop]
    if len(part.queues) > _MANY_QUEUES:
        found = np.unique(queues)
    else:
        found = np.flatnonzero(np.bincount(queues, minlength=len(part.queues)))
    return [int(queue) for queue in found]


def _chunks(sizes: Int64) -> Iterator[tuple[int, int]]:
    """Cuts of about CHUNK_BYTES, one message at least."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + CHUNK_BYTES, "right"))
        stop = max(stop, start + 1)
        yield start, stop
        start = stop
