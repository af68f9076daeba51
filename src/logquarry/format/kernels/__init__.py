"""The kernels: functions that numba compiles. They do the same work as the readable reference.

The kernel for the walk writes one row per frame into a table (:mod:`logquarry.format.rows`), which
the other kernels read. All kernels take addresses and run without the GIL; the caller must keep the
buffers alive meanwhile. Kernels are safe on any bytes, and accept and reject the same bytes as the
reference.

:func:`logquarry.log.codec.kernels` decides whether kernels are used. It imports this package only
when a kernel is needed, because importing numba takes half a second.
"""

from logquarry.format.kernels.columns import (
    HOST_TEXT_SIZE,
    copy_spans,
    gather,
    host_texts,
    intern_topics,
    measure_inner,
    message_ids,
    offsets_of,
    spans_of,
    topic_spans,
    unwrap_frames,
)
from logquarry.format.kernels.encode import (
    batch_frames,
    encode_frames,
    first_word_hashes,
    first_wrong_crc,
    intern_numbers,
    intern_spans,
    number_frames,
    place_staged,
    same_staged,
)
from logquarry.format.kernels.entries import check_chains, group_units, index_keys, put_index_keys
from logquarry.format.kernels.follow import follow
from logquarry.format.kernels.gets import get_frames
from logquarry.format.kernels.properties import (
    DELAY,
    KEYS,
    TAGS,
    UNIQ_KEY,
    bad_utf8,
    look_into,
    mark_named,
    mark_suspects,
    parse_properties,
    property_strings,
    tags_codes,
)
from logquarry.format.kernels.walk import (
    check_frame,
    check_places,
    find_frame,
    first_nonzero,
    last_nonzero,
    walk,
)

__all__ = [
    "DELAY",
    "HOST_TEXT_SIZE",
    "KEYS",
    "TAGS",
    "UNIQ_KEY",
    "bad_utf8",
    "batch_frames",
    "check_chains",
    "check_frame",
    "check_places",
    "copy_spans",
    "encode_frames",
    "find_frame",
    "first_nonzero",
    "first_word_hashes",
    "first_wrong_crc",
    "follow",
    "gather",
    "get_frames",
    "group_units",
    "host_texts",
    "index_keys",
    "intern_numbers",
    "intern_spans",
    "intern_topics",
    "last_nonzero",
    "look_into",
    "mark_named",
    "mark_suspects",
    "measure_inner",
    "message_ids",
    "number_frames",
    "offsets_of",
    "parse_properties",
    "place_staged",
    "property_strings",
    "put_index_keys",
    "same_staged",
    "spans_of",
    "tags_codes",
    "topic_spans",
    "unwrap_frames",
    "walk",
]
