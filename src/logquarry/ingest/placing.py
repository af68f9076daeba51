"""Where the rows of a load go that do not say it: which broker, and which queue.

As a producer's ``SelectMessageQueueByHash`` does it over the queues that all brokers have of a
topic: rows of one key go to one queue. Rows without a key take turns. A row that names its queue
stays with it, and all of one topic and queue go to one broker.

Nothing of it depends on the time or on chance: what is loaded again goes where it went.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from logquarry.format import java
from logquarry.scan import codec
from logquarry.store.put.outgoing_arrow import binary_spans, cast_column

Int64 = npt.NDArray[np.int64]

NO_WORD: Final = -(1 << 32)
"""What a text without words has instead of a hash."""
_SPACE: Final = " "


def place_rows(
    batch: pa.RecordBatch, *, brokers: int, queues: int, turn: int
) -> tuple[pa.RecordBatch, Int64]:
    """Give every row a queue and a broker.

    Args:
        batch: rows with a topic, all valid; ``queue_id`` and ``keys`` where they have them.
        brokers: how many there are.
        queues: how many queues each broker has of a topic.
        turn: whose turn it is, of all queues, at the first row.

    Returns:
        (the batch with all queue ids, number of each row's broker).

    Raises:
        UsageError: if a queue id is none that 64 bits have.
    """
    count = batch.num_rows
    column = batch["queue_id"] if "queue_id" in batch.schema.names else pa.nulls(count, pa.int32())
    given = column.is_valid().to_numpy(zero_copy_only=False)
    whole = cast_column(column, "queue_id", pa.int64())
    queue_ids = pc.fill_null(whole, 0).to_numpy().copy()
    numbers = np.zeros(count, np.int64)
    if brokers > 1 and given.any():
        numbers[given] = (_topic_hashes(batch["topic"]) + queue_ids)[given] % brokers
    if not given.all():
        every = brokers * queues
        keys = batch["keys"] if "keys" in batch.schema.names else pa.nulls(count, pa.string())
        hashes = first_word_hashes(keys)
        # As Java divides: towards 0.
        chosen = np.abs(np.fmod(hashes, every))
        turns = (turn + np.arange(count)) % every
        chosen = np.where(hashes == NO_WORD, turns, chosen)
        numbers = np.where(given, numbers, chosen % brokers)
        queue_ids = np.where(given, queue_ids, chosen // brokers)
    return _with_column(batch, "queue_id", pa.array(queue_ids)), numbers


def first_word_hashes(keys: pa.Array) -> Int64:
    """``String.hashCode`` of each text's first word; :data:`NO_WORD` where it has none."""
    count = len(keys)
    if pa.types.is_null(keys.type) or not count:
        return np.full(count, NO_WORD)
    kernels = codec.kernels()
    if kernels is None:
        return np.array([_first_word_hash(text) for text in keys.to_pylist()], np.int64)
    spans = binary_spans(keys, count, "keys")
    hashes = np.empty(count, np.int64)
    kernels.first_word_hashes(spans.at, spans.length, hashes)
    return hashes


def _first_word_hash(text: Any) -> int:
    """The reference."""
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
