"""The kernels: functions that numba compiles. Each kernel has the same results as a pure-Python
version, the reference.

The kernel ``walk`` reads the log frame by frame, and writes one row per frame into a table
(:mod:`logquarry.format.arrays`), which the other kernels read. The arguments of a kernel are memory
addresses, and a kernel runs without the GIL. So the caller must keep the buffers alive. A kernel
checks every length that it reads, so damaged frames cannot make it crash.
:func:`logquarry.log.codec.kernels` imports this package only when needed, because the import of
numba takes half a second.
"""

# ruff: noqa: F401
# mypy: implicit-reexport

from logquarry.format.kernels.columns import (
    HOST_TEXT_SIZE,
    copy_spans,
    gather,
    host_texts,
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
    place_staged,
    same_staged,
)
from logquarry.format.kernels.follow import check_chains, follow, group_units, put_index_keys
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
    index_keys,
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
    last_nonzero,
    walk,
)
