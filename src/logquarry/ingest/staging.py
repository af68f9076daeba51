"""Stages the rows of a load: chooses each row's broker and queue, and writes frames to segments.

A task checks its rows, makes their frames and writes the frames to temporary files (segments)
before any store is locked. The commit then only copies the frames to the logs and sets their
offsets. A task writes one segment for each broker to which its rows go.

If a row has a queue id, it keeps the id, and all rows with the same topic and queue id go to the
same broker. If a row has no queue id, the hash of its key selects one of the queues of all brokers,
like RocketMQ's ``SelectMessageQueueByHash``. Rows that have neither a queue id nor a key are
distributed over the queues in turn. The choice never depends on time or chance, so a repetition of
the load puts each row into the same queue as before.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logquarry import arguments
from logquarry.arguments import Clock, now_ms
from logquarry.config import StoreConfig
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import frame, java
from logquarry.format import put_frames as r
from logquarry.format.arrays import Bytes, Int64
from logquarry.log import codec
from logquarry.log.store_files import LOADS
from logquarry.message import Message
from logquarry.store.load.ledger import DeadLetters, LoadId
from logquarry.store.load.segment import ENDING, Segment, SegmentWriter
from logquarry.write import outgoing_arrow
from logquarry.write.encode import Encoded, MessageEncoder
from logquarry.write.log_appender import require_fit
from logquarry.write.outgoing import FrameTable, Outgoing, outgoing_kernel, without_number

NO_WORD: Final = -(1 << 32)
"""The hash of a text without words. No Java hash has this value, because it does not fit into 32
bits.
"""
_SPACE: Final = " "


def place_rows(
    batch: pa.RecordBatch, *, brokers: int, queues: int, turn: int, rows: Int64
) -> tuple[pa.RecordBatch, Int64]:
    """Give every row a queue id and a broker.

    Args:
        batch: rows, each with a valid topic; ``queue_id`` and ``keys`` are optional.
        queues: number of queues of each topic in each broker.
        turn: used for rows that have neither a queue id nor a key. The row's number is added to
            ``turn``, and the sum is an index in the list of the queues of all brokers. After the
            last queue, the first queue follows.
        rows: number of each row. The numbers also count rejected rows, which `batch` lacks, so the
            queues do not depend on the sizes of Spark's batches.

    Returns:
        (batch with all queue ids, number of the broker for each row).
    """
    count = batch.num_rows
    column = batch["queue_id"] if "queue_id" in batch.schema.names else pa.nulls(count, pa.int32())
    given = column.is_valid().to_numpy(zero_copy_only=False)
    whole = outgoing_arrow.cast_column(column, "queue_id", pa.int64())
    queue_ids = pc.fill_null(whole, 0).to_numpy().copy()
    numbers = np.zeros(count, np.int64)
    if brokers > 1 and given.any():
        numbers[given] = (_topic_hashes(batch["topic"]) + queue_ids)[given] % brokers
    if not given.all():
        every = brokers * queues
        keys = batch["keys"] if "keys" in batch.schema.names else pa.nulls(count, pa.string())
        hashes = first_word_hashes(keys)
        # Use fmod, because Java's remainder has the sign of the dividend.
        chosen = np.abs(np.fmod(hashes, every))
        # Take the remainder of ``turn`` before the addition, so that the sum fits into 64 bits.
        turns = (turn % every + rows) % every
        chosen = np.where(hashes == NO_WORD, turns, chosen)
        numbers = np.where(given, numbers, chosen % brokers)
        queue_ids = np.where(given, queue_ids, chosen // brokers)
    return _with_column(batch, "queue_id", pa.array(queue_ids)), numbers


def first_word_hashes(keys: pa.Array) -> Int64:
    """Return ``String.hashCode`` of each text's first word; NO_WORD for a text without words."""
    count = len(keys)
    if pa.types.is_null(keys.type) or not count:
        return np.full(count, NO_WORD)
    kernels = codec.kernels()
    if kernels is None:
        return np.array([_first_word_hash(text) for text in keys.to_pylist()], np.int64)
    spans = outgoing_arrow.binary_spans(keys, count, "keys")
    hashes = np.empty(count, np.int64)
    kernels.first_word_hashes(spans.at, spans.length, hashes)
    return hashes


def _first_word_hash(text: Any) -> int:
    words = [word for word in (text or "").split(_SPACE) if word]
    return java.hash_code(words[0]) if words else NO_WORD


def _topic_hashes(topics: pa.Array) -> Int64:
    encoded = topics.dictionary_encode()
    hashes = [java.positive_hash_code(topic) for topic in encoded.dictionary.to_pylist()]
    found: Int64 = np.array(hashes, np.int64)[encoded.indices.to_numpy()]
    return found


def _with_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    if index < 0:
        return batch.append_column(name, column)
    return batch.set_column(index, name, column)


OnRejected = Literal["fail", "deadLetter"]

_BLANK: Final = frame.BLANK.size
_NEEDED: Final = ("topic", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Target stores and settings of a load. Picklable.

    Attributes:
        path: the store; with several brokers, the folder of their stores.
        queues: number of queues of each topic in each store, for rows without a queue id.
        config: the user's settings of the stores.
        sizes: `config`, but with the file sizes that the existing stores use.
        on_rejected: what to do with a row that no store accepts. ``fail`` ends the load;
            ``deadLetter`` writes the row to the folder `dead_letters`.
    """

    path: str
    brokers: int = 1
    queues: int = 4
    config: StoreConfig = field(default_factory=StoreConfig)
    sizes: StoreConfig = field(default_factory=StoreConfig)
    on_rejected: OnRejected = "fail"
    dead_letters: str | None = None

    @property
    def loads(self) -> Path:
        """Folder of the staged loads."""
        return Path(self.path) / LOADS

    def store(self, broker: int) -> Path:
        """Return the folder of a broker's store."""
        root = Path(self.path)
        return root if self.brokers == 1 else root / f"broker-{broker}"


@dataclass(frozen=True, slots=True)
class Staged:
    """The result of staging one task. Small and picklable.

    Attributes:
        partition: number of the task; the commit appends the segments in the order of these
            numbers.
        segments: (number of the broker, segment).
        rejected: number of rows in the dead letters.
        dead_letters: name of the staged file of dead letters; None without dead letters.
    """

    load: LoadId
    partition: int
    segments: tuple[tuple[int, Segment], ...]
    rejected: int = 0
    dead_letters: str | None = None


class Stager:
    """Stages the rows of one task."""

    def __init__(
        self,
        plan: LoadPlan,
        load: LoadId,
        partition: int,
        *,
        clock: Clock = now_ms,
    ) -> None:
        self._plan = plan
        self._load = load
        self._partition = partition
        self._clock = clock
        self._encoder = MessageEncoder(plan.sizes, clock)
        size = plan.sizes.mapped_file_size_commit_log
        assert size is not None, "the plan has the sizes"
        self._file_size = size
        self._seen = 0
        self._writers: dict[int, SegmentWriter] = {}
        self._scratch = np.empty(0, np.uint8)
        self._dead: DeadLetters | None = None
        if plan.on_rejected == "deadLetter":
            assert plan.dead_letters is not None, "the plan has a folder"
            self._dead = DeadLetters(Path(plan.dead_letters), load, partition)

    def add(self, rows: pa.RecordBatch) -> None:
        """Stage rows."""
        batch = check_rows(rows)
        numbers = np.arange(batch.num_rows)
        refused = _without_text(batch)
        batch = _with_joined_keys(batch, refused)
        if refused:
            numbers = np.delete(numbers, list(refused))
            batch = batch.take(pa.array(numbers))
        if batch.num_rows:
            version = self._load.version if self._load.is_named else 0
            turn = version + self._partition + self._seen
            plan = self._plan
            batch, brokers = place_rows(
                batch, brokers=plan.brokers, queues=plan.queues, turn=turn, rows=numbers
            )
            unfit: dict[int, str] = {}
            part = self._outgoing(batch, unfit)
            refused |= {int(numbers[number]): reason for number, reason in unfit.items()}
            if refused and self._dead is None:
                self._reject(refused)
            self._write(part, brokers, unfit)
        if refused:
            self._reject(refused, rows)
        self._seen += rows.num_rows

    def finish(self) -> Staged:
        """Sync all files, and return the result of the task."""
        segments = tuple((b, writer.finish()) for b, writer in sorted(self._writers.items()))
        name, rejected = None, 0
        if self._dead is not None:
            name, rejected = self._dead.finish(), self._dead.rows
        return Staged(self._load, self._partition, segments, rejected, name)

    def discard(self) -> None:
        """Remove all staged files."""
        for writer in self._writers.values():
            writer.discard()
        if self._dead is not None:
            self._dead.discard()

    # ---------------------------------------------------------------------------------- frames
    def _outgoing(self, batch: pa.RecordBatch, refused: dict[int, str]) -> Outgoing:
        if codec.kernels_enabled():
            return outgoing_kernel(
                outgoing_arrow.columns_of_batch(batch, self._clock),
                self._encoded,
                self._plan.sizes,
                self._file_size - _BLANK,
                refused,
            )
        return self._outgoing_reference(batch, refused)

    def _outgoing_reference(self, batch: pa.RecordBatch, refused: dict[int, str]) -> Outgoing:
        # The pure-Python version of outgoing_kernel. Tests compare the results of both versions.
        odd: dict[int, Encoded] = {}
        sizes = np.zeros(batch.num_rows, np.int64)
        for number in range(batch.num_rows):
            try:
                (message,) = outgoing_arrow.messages_of(batch.slice(number, 1), number)
                odd[number] = self._encoded(message)
                sizes[number] = len(odd[number].data)
            except (MessageRejected, UsageError) as error:
                refused[number] = without_number(error)
        nothing = np.zeros(0, np.int64)
        return Outgoing(sizes, odd, [], nothing, [], nothing)

    def _encoded(self, message: Message) -> Encoded:
        encoded = self._encoder.encode(message)
        if encoded.copies is not None:
            raise UsageError("a load does not support further queues (INNER_MULTI_DISPATCH)")
        require_fit(encoded, self._file_size)
        return encoded

    def _write(self, part: Outgoing, brokers: Int64, refused: dict[int, str]) -> None:
        fits = np.ones(part.count, np.bool_)
        fits[list(refused)] = False
        for broker in range(self._plan.brokers):
            chosen = np.flatnonzero(fits & (brokers == broker))
            if len(chosen):
                self._write_to(self._writer(broker), part, chosen)

    def _writer(self, broker: int) -> SegmentWriter:
        writer = self._writers.get(broker)
        if writer is None:
            # Each attempt needs its own file names: Spark can run two attempts of a task at the
            # same time.
            name = f"{self._partition:05d}-{broker:04d}-{uuid.uuid4().hex}{ENDING}"
            path = self._plan.loads / self._load.staged / name
            writer = self._writers[broker] = SegmentWriter(path)
        return writer

    def _write_to(self, writer: SegmentWriter, part: Outgoing, chosen: Int64) -> None:
        sizes = part.sizes[chosen]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        data = self._room(int(ends[-1]))
        odd = []
        if part.odd:
            odd = [at for at, number in enumerate(chosen.tolist()) if number in part.odd]
        counts: dict[int, int] = {}
        if len(odd) < len(chosen):
            by_kernel = np.ones(len(chosen), np.bool_)
            by_kernel[odd] = False
            table = part.frames
            assert isinstance(table, FrameTable), "its columns came from a record batch"
            rows = table.rows
            if len(chosen) < part.count:
                rows = np.ascontiguousarray(rows[:, chosen])
            used, each = np.unique(rows[r.QUEUE, by_kernel], return_counts=True)
            numbers = np.zeros(len(table.queues), np.int64)
            for queue, count in zip(used.tolist(), each.tolist(), strict=True):
                number = numbers[queue] = writer.number(table.queues[queue])
                counts[int(number)] = counts.get(int(number), 0) + count
            rows[r.QUEUE_OFFSET] = numbers[rows[r.QUEUE]]
            self._encode(table, rows, data, starts, odd)
        for at in odd:
            encoded = part.odd[int(chosen[at])]
            number = writer.number(encoded.key)
            encoded.place(number, 0, 0)
            data[starts[at] : ends[at]] = np.frombuffer(encoded.data, np.uint8)
            counts[number] = counts.get(number, 0) + 1
        writer.add(data.data, counts.items())

    def _room(self, size: int) -> Bytes:
        # Reuse one buffer, because the allocation of a buffer in each call is too slow. The content
        # of the buffer is valid until the next call.
        if len(self._scratch) < size:
            self._scratch = np.empty(size + size // 4, np.uint8)
        return self._scratch[:size]

    @staticmethod
    def _encode(
        table: FrameTable,
        rows: r.PutRows,
        data: Bytes,
        starts: Int64,
        odd: list[int],
    ) -> None:
        # Skip the rows in `odd`: they are encoded already, and the caller copies their frames.
        kernels = codec.require_kernels()
        count = len(starts)
        places = np.empty((3, count), np.int64)
        # The commit sets the queue offsets. Until then, the field QUEUEOFFSET contains the number
        # of the frame's queue. The kernel copies this number from the row, because ADVANCES is 0.
        facts, no_offsets = table.head_facts.copy(), np.zeros(0, np.int64)
        facts[:, r.ADVANCES] = 0
        at = 0
        for stop in (*odd, count):
            if at < stop:
                done, _ = kernels.encode_frames(
                    *(rows, at, stop),
                    *(table.heads, facts, table.topics, table.topic_ends),
                    *(data.ctypes.data, int(starts[at]), len(data) + _BLANK, 0, 0),
                    *(codec.crc32_address(), no_offsets, *places),
                )
                assert done == stop, "the buffer has room for all frames"
            at = stop + 1

    # ----------------------------------------------------------------------------- rejected rows
    def _reject(self, refused: dict[int, str], rows: pa.RecordBatch | None = None) -> None:
        numbers = sorted(refused)
        if self._dead is None:
            first = numbers[0]
            raise MessageRejected(
                f"row {self._seen + first + 1} of partition {self._partition}: {refused[first]}",
                status="MESSAGE_ILLEGAL",
                reason="load",
            )
        assert rows is not None
        self._dead.add(rows.take(pa.array(numbers)), [refused[number] for number in numbers])


def check_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Check that the columns of the rows describe messages; return them with lower-case names."""
    # Spark ignores case: `TOPIC` is the column `topic`.
    names = [name.lower() for name in batch.schema.names]
    for name in _NEEDED:
        if name not in names:
            raise UsageError(f"rows need a column {name}")
    batch = batch if names == batch.schema.names else batch.rename_columns(names)
    outgoing_arrow.check_columns(batch)
    # This call raises an error if a column has a wrong type.
    list(outgoing_arrow.messages_of(batch.slice(0, 0)))
    return batch


def _without_text(batch: pa.RecordBatch) -> dict[int, str]:
    # Return the refused rows: row number -> reason. Rows without topic or body, and rows with
    # invalid UTF-8, are refused.
    refused: dict[int, str] = {}
    for name in _NEEDED:
        if batch[name].null_count:
            for number in pc.indices_nonzero(batch[name].is_null()).to_pylist():
                refused.setdefault(number, f"the {name} is missing")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for number in range(batch.num_rows):
            reason = _text_fault(batch, number)
            if reason is not None:
                refused.setdefault(number, reason)
    return refused


def _with_joined_keys(batch: pa.RecordBatch, refused: dict[int, str]) -> pa.RecordBatch:
    if "keys" not in batch.schema.names or not pa.types.is_nested(batch.schema.field("keys").type):
        return batch
    try:
        joined = outgoing_arrow.joined_keys(batch["keys"])
    except UsageError:
        words: list[str | None] = []
        for number, row in enumerate(batch["keys"]):
            try:
                # Do not parse rows that are already refused: their keys may not be valid UTF-8.
                is_none = number in refused or not row.is_valid
                words.append(None if is_none else arguments.keys(row.as_py(), "the column keys"))
            except UsageError as error:
                refused.setdefault(number, str(error))
                words.append(None)
        joined = pa.array(words, pa.string())
    return _with_column(batch, "keys", joined)


def _text_fault(batch: pa.RecordBatch, number: int) -> str | None:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column[number].as_py()
        except UnicodeDecodeError as error:
            return f"{name} is not UTF-8: {error}"
        except (ValueError, OverflowError):
            # Python's datetime cannot represent every valid time.
            continue
    return None


def by_broker(tasks: Sequence[Staged]) -> dict[int, tuple[Segment, ...]]:
    """Return the segments for each broker, in the order of the tasks."""
    found: dict[int, list[Segment]] = {}
    for task in sorted(tasks, key=lambda task: task.partition):
        for broker, segment in task.segments:
            found.setdefault(broker, []).append(segment)
    return {broker: tuple(segments) for broker, segments in sorted(found.items())}
