"""The kernels: functions that numba compiles, with the same results as the readable reference.

The walk writes one row per frame into a table (:mod:`logquarry.format.arrays`), which the other
kernels read. Kernels take addresses and run without the GIL; the caller keeps the buffers alive. No
bytes can crash a kernel. :func:`logquarry.log.codec.kernels` imports this package only when needed,
because the import of numba takes half a second.
"""

# ruff: noqa: F401
# mypy: implicit-reexport

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
from logquarry.format.kernels.gets import (
    frame_rows,
    frame_rows_address,
    get_frames,
    get_frames_address,
)
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
