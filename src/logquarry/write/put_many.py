"""``put_many`` puts messages of any topics and queues in the given order.

``put_many`` writes the same bytes as single puts, but the messages of a chunk share one store time.
A chunk has about 1 MiB. The call holds the log's lock while it appends a chunk; between two chunks,
other threads can put. All messages are checked before the first append, so if this check rejects a
message, the log stays unchanged. If an error occurs later, the exception contains the result of
the messages that were appended.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format.arrays import Int64
from logquarry.format.frame import BLANK, encode_id
from logquarry.log import codec
from logquarry.message import Message, require_iterable, require_messages
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.common_frames import IS_COMPILED, CommonFrames
from logquarry.write.encode import Encoded
from logquarry.write.log_appender import end_file, require_fit
from logquarry.write.outgoing import (
    Columns,
    Encode,
    FrameTable,
    Outgoing,
    load_kernel,
    outgoing_frames,
    outgoing_kernel,
    outgoing_reference,
)
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus

if TYPE_CHECKING:
    import pyarrow as pa
CHUNK_BYTES: Final = 1 << 20
"""Approximate bytes of a chunk. A put takes the log's lock once for each chunk."""
_FEW: Final = 64
"""Up to this number of messages, ``put_many`` encodes the messages one by one. For so few messages,
making columns would take longer.
"""
_ARROW: Final = ("__arrow_c_stream__", "__arrow_c_array__")
_TAKES: Final = "put_many"
_MS: Final = 1_000
_COLUMNS: Final = 4


class ArrowStream(Protocol):
    """An object that exports columns as Arrow data, for example from pyarrow, pandas, Polars or
    DuckDB.
    """

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Export the data as an Arrow stream, by the Arrow PyCapsule protocol."""


@dataclass(frozen=True, slots=True, eq=False)
class PutManyResult:
    """The result of a ``put_many``. The int64 arrays in the result have one element for each
    message in the log, in the order of the call.

    Attributes:
        status: PUT_OK, or the reason why the wait for flush or replica was not successful.
        physical_offset: physical offset of each frame.
        queue_offset: queue offset of each message.
        store_timestamp: store time of each message, in milliseconds.
        size: bytes of each frame.
        elapsed_ms: duration of the call.
        topics: for each topic, as the caller gave it, the number of messages and the number of
            bytes.
        page_cache_ms: total time for copying the bytes into the page cache.
    """

    status: PutStatus
    physical_offset: Int64
    queue_offset: Int64
    store_timestamp: Int64
    size: Int64
    elapsed_ms: float
    topics: Mapping[str, tuple[int, int]]
    page_cache_ms: float
    _hosts: tuple[bytes, ...] = ()
    _host_ids: Int64 | None = None

    @property
    def ok(self) -> bool:
        """Whether the messages are in the log; always True."""
        return True

    @property
    def message_count(self) -> int:
        """The number of messages in the log."""
        return len(self.physical_offset)

    @property
    def end_offset(self) -> int:
        """Physical offset after the last frame; 0 if there are no messages."""
        return int(self.physical_offset[-1] + self.size[-1]) if self.message_count else 0

    @property
    def message_ids(self) -> tuple[str, ...]:
        """The id of each message."""
        if self._host_ids is None:
            return ()
        return tuple(
            encode_id(self._hosts[host], offset)
            for host, offset in zip(
                self._host_ids.tolist(), self.physical_offset.tolist(), strict=True
            )
        )


class ManyWriter:
    """Puts many messages at once."""

    def __init__(self, writer: CommitLogWriter) -> None:
        self._writer = writer

    def put_many(
        self,
        messages: Iterable[Message] | ArrowStream | pa.RecordBatch,
        *,
        wait: bool = True,
    ) -> PutManyResult:
        """Put messages, or the rows of Arrow columns (:mod:`logquarry.write.outgoing_arrow`).

        All messages are in memory before the first message is appended. With ``wait``, the call
        waits for flush and replica if at least one message requests it.
        """
        began = time.monotonic()
        self._writer.check_status()
        return self._append(self._parts(messages), began, wait=wait)

    def put_stored(self, batch: pa.RecordBatch, least_time: int | None = None) -> PutManyResult:
        """Put messages that come from another store, without changing them. Used by import.

        Topic and property string stay unchanged, even with a delay or further queues. The messages
        get the next queue offsets of their queue, but a PREPARED or ROLLBACK message keeps its
        ``queue_offset``. If the property string has a wrong offset for a further queue, the error
        is raised only when the message is appended. Raises the errors of :meth:`put_many`.

        Args:
            batch: the columns of ``put_many``, and ``queue_offset`` and ``store_timestamp``.
            least_time: None to set all store times to the current time. To keep the messages' store
                times, pass the store time of the log's last message, in milliseconds. Earlier store
                times are raised to this time, because store times must not decrease in the log.
        """
        began = time.monotonic()
        self._writer.check_status()
        parts = self._stored_parts(batch, least_time is not None)
        return self._append(parts, began, least_time)

    def check_stored(self, batch: pa.RecordBatch) -> None:
        """Raise the errors of :meth:`put_stored` without putting messages."""
        self._stored_parts(batch, keeps_times=False)

    def _append(
        self,
        parts: list[Outgoing],
        began: float,
        least_time: int | None = None,
        *,
        wait: bool = True,
    ) -> PutManyResult:
        put = _Put(self._writer, parts, began, least_time)
        status = PutStatus.PUT_OK
        try:
            put.append()
            if put.done:
                waits = wait and any(part.waits for part in parts)
                status = self._writer.settle(put.last, waits).status
        except (StoreUnavailable, MessageRejected) as error:
            error.appended = put.result(PutStatus.PUT_OK) if put.done else None
            raise
        return put.result(status)

    # ------------------------------------------------------------------------------ checked parts
    def _parts(self, messages: Any) -> list[Outgoing]:
        if any(hasattr(messages, name) for name in _ARROW):
            return list(self._parts_of_arrow(messages))
        writer = self._writer
        if IS_COMPILED and writer.takes_kernels:
            frames = CommonFrames(writer)
            frames.take(require_iterable(messages, _TAKES), _TAKES)
            if not frames.count:
                return []
            return [outgoing_frames(frames, self._encode)]
        found = require_messages(messages, _TAKES)
        if len(found) > _FEW and self._has_kernels:
            from logquarry.write import outgoing_arrow

            columns = outgoing_arrow.columns_of_messages(found, writer.clock)
            if columns is not None:
                return [self._table(columns, self._encode)]
        return [outgoing_reference(found, self._encode)] if found else []

    def _encode(self, message: Message, *, is_stored: bool = False) -> Encoded:
        encoder = self._writer.encoder
        encoded = encoder.encode_stored(message) if is_stored else encoder.encode(message)
        require_fit(encoded, self._writer.file_size)
        return encoded

    def _parts_of_arrow(self, messages: Any) -> Iterator[Outgoing]:
        from logquarry.write import outgoing_arrow

        first = 0
        for batch in outgoing_arrow.batches_of(messages):
            outgoing_arrow.check_columns(batch)
            if batch.num_rows:
                yield self._part(batch, first)
            first += batch.num_rows

    def _stored_parts(self, batch: pa.RecordBatch, keeps_times: bool) -> list[Outgoing]:
        from logquarry.write import outgoing_arrow

        outgoing_arrow.check_columns(batch)
        if not batch.num_rows:
            return []
        if keeps_times:
            batch = outgoing_arrow.with_store_times(batch, self._writer.clock())
        elif "store_timestamp" in batch.schema.names:
            batch = batch.drop_columns(["store_timestamp"])
        return [self._part(batch, is_stored=True)]

    def _part(self, batch: pa.RecordBatch, first: int = 0, *, is_stored: bool = False) -> Outgoing:
        from logquarry.write import outgoing_arrow

        writer = self._writer
        encode = partial(self._encode, is_stored=is_stored)
        if not self._has_kernels:
            messages = outgoing_arrow.messages_of(batch, first, stored=is_stored)
            times = outgoing_arrow.store_times_of(batch) if is_stored else None
            return outgoing_reference(messages, encode, first, times)
        look = not is_stored or bool(writer.config.enable_multi_dispatch)
        columns = outgoing_arrow.columns_of_batch(
            batch, writer.clock, first, stored=is_stored, look=look
        )
        return self._table(columns, encode)

    @property
    def _has_kernels(self) -> bool:
        return self._writer.takes_kernels and codec.kernels_enabled()

    def _table(self, columns: Columns, encode: Encode) -> Outgoing:
        writer = self._writer
        return outgoing_kernel(columns, encode, writer.config, writer.file_size - BLANK.size)


class _Put:
    def __init__(
        self,
        writer: CommitLogWriter,
        parts: list[Outgoing],
        began: float,
        least_time: int | None = None,
    ) -> None:
        self.done = 0
        self._writer = writer
        self._parts = parts
        self._began = began
        self._least_time = least_time
        self._page_cache_ms = 0.0
        count = sum(part.count for part in parts)
        self._columns = np.empty((_COLUMNS, count), np.int64)
        self._physical, self._queue, self._times, self._sizes = self._columns

    def append(self) -> None:
        if any(isinstance(part.frames, FrameTable) for part in self._parts):
            load_kernel()
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
        if self._least_time is None:
            return now
        # Read the last file's store time again, because other threads may have put messages since
        # the last chunk.
        times = [self._least_time, self._writer.file().store_timestamp]
        times += [int(self._times[self.done - 1])] if self.done else []
        times += [] if own is None else [own]
        self._least_time = max(times)
        return self._least_time

    def _record(self, number: int, result: PutResult) -> None:
        self._physical[number] = result.physical_offset
        self._queue[number] = result.queue_offset
        self._times[number] = result.store_timestamp
        self._sizes[number] = result.size
        self._page_cache_ms += result.page_cache_ms
        self.done = number + 1

    def _append_rows(self, part: Outgoing, first: int, start: int, stop: int, now: int) -> int:
        """Append the frames of messages ``start`` to ``stop`` to the last file. Return the number
        of the first message that did not fit, or ``stop``.
        """
        assert part.frames is not None, "all messages of the part are odd"
        file, offsets = self._writer.file(), self._writer.queue_offsets
        self._writer.claim(part.frames.queues)
        copying = time.monotonic()
        at = part.frames.append(file, offsets, start, stop, now, self._columns[:, first:])
        self._page_cache_ms += (time.monotonic() - copying) * _MS
        if at > start:
            now = int(self._times[first + at - 1])
            self.done = first + at
        file.store_timestamp = now
        if at < stop:
            end_file(file)
        return at

    @property
    def last(self) -> PutResult:
        """The last appended message, for the waits of the put."""
        physical, queue, now, size = self._columns[:, self.done - 1].tolist()
        elapsed = (time.monotonic() - self._began) * _MS
        ok = PutStatus.PUT_OK, AppendStatus.PUT_OK
        return PutResult(*ok, b"", physical, queue, size, 1, now, elapsed)

    def result(self, status: PutStatus) -> PutManyResult:
        count = self.done
        hosts: dict[bytes, int] = {}
        ids = [_host_ids(part, hosts) for part in self._parts]
        return PutManyResult(
            status,
            self._physical[:count],
            self._queue[:count],
            self._times[:count],
            self._sizes[:count],
            (time.monotonic() - self._began) * _MS,
            self._topics(),
            self._page_cache_ms,
            tuple(hosts),
            (ids[0] if len(ids) == 1 else np.concatenate(ids))[:count] if ids else None,
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


def _host_ids(part: Outgoing, hosts: dict[bytes, int]) -> Int64:
    numbers = [hosts.setdefault(host, len(hosts)) for host in part.store_hosts]
    ids = part.store_host_ids
    return ids if numbers == list(range(len(numbers))) else np.array(numbers, np.int64)[ids]


def _chunks(sizes: Int64) -> Iterator[tuple[int, int]]:
    """Yield ranges of message numbers. The messages of a range have at most CHUNK_BYTES in total,
    or the range is a single larger message.
    """
    start = 0
    if sizes.sum() <= CHUNK_BYTES:
        yield start, len(sizes)
        return
    ends = np.cumsum(sizes)
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + CHUNK_BYTES, "right"))
        stop = max(stop, start + 1)
        yield start, stop
        start = stop
