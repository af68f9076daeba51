"""The keys of a run of frames, hashed as the index takes them, in two twins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from logquarry.format import index, java
from logquarry.format import properties as props
from logquarry.scan import codec, columns
from logquarry.scan.codec import Rows, Window
from logquarry.scan.columns import Decoding

Int64 = npt.NDArray[np.int64]

_SHORTEST_KEY = 2
"""Bytes of the shortest key with the space behind it."""


def index_keys(
    window: Window, rows: Rows, *, raw: bool = False, only_keys: bool = False
) -> tuple[Int64, Int64]:
    """The hash of each key of some frames, and the number of its frame.

    In the order in which ``IndexService.buildIndex`` takes them: frame by frame, UNIQ_KEY before
    the words of KEYS.

    Args:
        window: the frames' bytes.
        rows: where they are.
        raw: give the hashes with their sign, as 3.x stored them, and not as 4.9.3 does.
        only_keys: leave out UNIQ_KEY, which 3.x did not have.
    """
    fast = codec.kernels()
    if fast is None or fast.bad_utf8(window.address, rows, len(rows)):
        return _plain(window, rows, raw, only_keys)
    rows = np.ascontiguousarray(rows)
    count = len(rows)
    starts, lengths = columns.property_spans(window, rows)
    if only_keys:
        lengths = lengths.copy()
        lengths[fast.UNIQ_KEY] = -1
    ids, topics = columns.topic_ids(window, rows)
    by_topic = [java.hash_code(index.key_text(topic, "")) for topic in topics]
    prefixes = np.array(by_topic, np.int64)[ids] if count else np.empty(0, np.int64)
    most = count + int((np.maximum(lengths[fast.KEYS], 0) // _SHORTEST_KEY + 1).sum())
    hashes, numbers = np.empty(most, np.int64), np.empty(most, np.int64)
    used = fast.index_keys(window.address, count, starts, lengths, prefixes, hashes, numbers, raw)
    return hashes[:used], numbers[:used]


def _plain(window: Window, rows: Rows, raw: bool, only_keys: bool) -> tuple[Int64, Int64]:
    hash_of = java.hash_code if raw else java.positive_hash_code
    found: list[tuple[int, int]] = []
    for number, message in enumerate(columns.messages(window, rows, Decoding())):
        keys = [] if message.uniq_key is None or only_keys else [message.uniq_key]
        keys += props.split_keys(message.keys or "")
        found += [(hash_of(index.key_text(message.topic, key)), number) for key in keys]
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
