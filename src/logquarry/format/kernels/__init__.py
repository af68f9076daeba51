"""The kernels: functions that numba compiles. They do the same work as the readable reference.

The walk writes one row per frame into a table (:mod:`logquarry.format.rows`), which the other
kernels read. All kernels take addresses and run without the GIL; the caller keeps the buffers
alive. No bytes can make a kernel crash, and a kernel's verdicts are those of the reference.

:func:`logquarry.log.codec.kernels` decides whether the kernels are used. It imports this package
only when a kernel is needed, because importing numba takes half a second.
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
