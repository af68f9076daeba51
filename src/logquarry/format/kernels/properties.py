"""Kernels for property strings. These kernels split strings into properties, make strings from
properties, check UTF-8, compute tags codes, and hash keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from logquarry.format import java
from logquarry.format import properties as props
from logquarry.format.arrays import POSITION, PROPS_AT, PROPS_LENGTH, TOPIC_AT, TOPIC_LENGTH
from logquarry.format.kernels import bytes as mem
from logquarry.format.kernels.bytes import Array, kernel


def name_table(names: Sequence[str]) -> tuple[Array, Array, Array]:
    """Return one array with all names joined, and the length and the start of each name."""
    lengths = np.array([len(name.encode()) for name in names])
    data = np.frombuffer("".join(names).encode(), np.uint8).copy()
    return data, lengths, np.cumsum(lengths) - lengths


@kernel
def which_name(key: int, length: int, data: Array, lengths: Array, starts: Array) -> int:
    """Return the index of the name that is at an address; -1 if none of the names is there."""
    for name in range(lengths.shape[0]):
        if lengths[name] == length:
            same = True
            start = starts[name]
            for k in range(length):
                if mem.load_u8(key + k) != data[start + k]:
                    same = False
                    break
            if same:
                return name
    return -1


# --------------------------------------------------------------------------------------------------
# Parse property strings: find their properties, compute the tags code, and find invalid bytes.

_NAME_VALUE = ord(props.NAME_VALUE_SEPARATOR)
_PROPERTY = ord(props.PROPERTY_SEPARATOR)
TAGS, KEYS, UNIQ_KEY, DELAY = range(4)
NAME_BYTES, NAME_LENGTHS, NAME_STARTS = name_table(
    (props.TAGS, props.KEYS, props.UNIQ_KEY, props.DELAY)
)


@kernel
def bad_utf8(address: int, rows: Array, count: int) -> int:
    """Return the number of frames whose properties are not valid UTF-8."""
    bad = 0
    for i in range(count):
        start = address + rows[i, POSITION] + rows[i, PROPS_AT]
        length = rows[i, PROPS_LENGTH]
        if not mem.is_ascii(start, length) and not mem.is_utf8(start, length):
            bad += 1
    return bad


@kernel
def mark_suspects(address: int, rows: Array, count: int, marks: Array) -> None:
    """Mark the frames whose topic or properties contain a NUL byte or are not UTF-8."""
    for i in range(count):
        place = address + rows[i, POSITION]
        topic, topic_length = place + rows[i, TOPIC_AT], rows[i, TOPIC_LENGTH]
        props, props_length = place + rows[i, PROPS_AT], rows[i, PROPS_LENGTH]
        if mem.is_plain(topic, topic_length) and mem.is_plain(props, props_length):
            continue
        if (
            mem.has_zero(topic, topic_length)
            or mem.has_zero(props, props_length)
            or not mem.is_utf8(topic, topic_length)
            or not mem.is_utf8(props, props_length)
        ):
            marks[i] = 1


@kernel
def next_separator(address: int, at: int, stop: int) -> int:
    """Return the first position in ``[at, stop)`` with a separator, or ``stop``."""
    while at < stop:
        if at + 8 <= stop:
            word = mem.load_raw64(address + at)
            # The subtraction sets the high bit of each byte below 3. The separators are 1 and 2.
            low = (word - np.uint64(0x0303030303030303)) & ~word & np.uint64(0x8080808080808080)
            if low == 0:
                at += 8
                continue
            at += mem.trailing_zeros(low) >> 3
        byte = mem.load_u8(address + at)
        if byte == _NAME_VALUE or byte == _PROPERTY:
            return at
        at += 1
    return stop


@kernel
def mark_named(
    address: int, rows: Array, count: int, name: Array, shifts: Array, marks: Array
) -> None:
    """Mark the frames that have a property with a given name (Horspool's search).

    The search compares the name with an equally long piece of the property string. If the piece is
    not a property with this name, the search advances by ``shifts[b]``, where b is the last byte of
    the piece. To compute ``shifts[b]``, ignore the name's last byte, and find the last b in the
    rest: ``shifts[b]`` is its distance from the name's last byte. Without such a b, ``shifts[b]``
    is the length of the name.
    """
    size = name.shape[0]
    for i in range(count):
        start = address + rows[i, POSITION] + rows[i, PROPS_AT]
        stop = start + rows[i, PROPS_LENGTH]
        at = start
        while at + size < stop:
            last = mem.load_u8(at + size - 1)
            if last == name[size - 1] and mem.load_u8(at + size) == _NAME_VALUE:
                k = 0
                while k < size and mem.load_u8(at + k) == name[k]:
                    k += 1
                if k == size and (at == start or mem.load_u8(at - 1) == _PROPERTY):
                    marks[i] = 1
                    break
            at += shifts[last]


@kernel
def parse_properties(
    address: int,
    rows: Array,
    count: int,
    want_pairs: bool,
    starts: Array,
    lengths: Array,
    pairs: Array,
    pair_offsets: Array,
    table: Array,
    stamps: Array,
) -> int:
    """Split property strings into pairs of a key and a value, and return the number of pairs.

    For each frame, ``starts`` and ``lengths`` (int32 (4, n)) get the start and the length of the
    values of TAGS, KEYS, UNIQ_KEY and DELAY. If a frame lacks a property, its length is -1.

    With ``want_pairs``, ``pairs`` (int32 (4, m)) gets the start and the length of each key, and of
    its value. A repeated key of a frame gets only one pair, with the last value. ``pair_offsets``
    gets the index of each frame's first pair. ``table`` and ``stamps`` are int32 scratch arrays for
    a hash table. Each length must be a power of two, and at least twice the largest number of pairs
    in a frame. ``stamps`` must be filled with 0.
    """
    used = 0
    mask = table.shape[0] - 1
    if want_pairs:
        pair_offsets[0] = 0
    for i in range(count):
        for name in range(4):
            lengths[name, i] = -1
            starts[name, i] = 0
        position = rows[i, POSITION] + rows[i, PROPS_AT]
        stop = position + rows[i, PROPS_LENGTH]
        while position < stop:
            middle = -1
            at = next_separator(address, position, stop)
            while at < stop and mem.load_u8(address + at) == _NAME_VALUE:
                if middle < 0:
                    middle = at
                at = next_separator(address, at + 1, stop)
            key_length = middle - position
            value_length = at - middle - 1
            if middle > position and value_length > 0:
                name = which_name(
                    address + position, key_length, NAME_BYTES, NAME_LENGTHS, NAME_STARTS
                )
                if name >= 0:
                    starts[name, i] = middle + 1
                    lengths[name, i] = value_length
                if want_pairs:
                    slot = np.int64(
                        mem.hash_bytes(address + position, key_length) & np.uint64(mask)
                    )
                    while True:
                        if stamps[slot] != i + 1:
                            stamps[slot] = i + 1
                            table[slot] = used
                            pairs[0, used] = position
                            pairs[1, used] = key_length
                            pairs[2, used] = middle + 1
                            pairs[3, used] = value_length
                            used += 1
                            break
                        other = table[slot]
                        if pairs[1, other] == key_length and mem.same_bytes(
                            address + pairs[0, other], address + position, key_length
                        ):
                            pairs[2, other] = middle + 1
                            pairs[3, other] = value_length
                            break
                        slot = (slot + 1) & mask
            position = at + 1
        if want_pairs:
            pair_offsets[i + 1] = used
    return used


SCHEDULE_TOPIC = np.frombuffer(props.SCHEDULE_TOPIC.encode(), np.uint8).copy()


@kernel
def plain_number(address: int, digits: int) -> int:
    """Return the number that one to nine ASCII digits represent; -1 for other text."""
    if digits > 9:
        return -1
    value = 0
    for k in range(digits):
        digit = np.int64(mem.load_u8(address + k)) - 48
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return value


@kernel
def tags_codes(
    address: int,
    rows: Array,
    count: int,
    starts: Array,
    lengths: Array,
    store_times: Array,
    levels: Array,
    out: Array,
    odd: Array,
) -> int:
    """Compute the dispatcher's tags codes (``props.tags_code``) from valid UTF-8.

    The kernel needs a DELAY of one to nine ASCII digits. If a frame of the schedule topic has
    another DELAY, the kernel writes the frame's index to ``odd``, and the caller must compute this
    frame's code with the pure-Python version. Returns the number of such frames. Times are in
    milliseconds.
    """
    left_over = 0
    for i in range(count):
        length = lengths[TAGS, i]
        code = np.int64(0)
        if length > 0:
            code = mem.java_hash(address + starts[TAGS, i], length)
        digits = lengths[DELAY, i]
        if digits > 0 and rows[i, TOPIC_LENGTH] == SCHEDULE_TOPIC.shape[0]:
            topic = address + rows[i, POSITION] + rows[i, TOPIC_AT]
            if mem.same_bytes(topic, SCHEDULE_TOPIC.ctypes.data, SCHEDULE_TOPIC.shape[0]):
                level = min(plain_number(address + starts[DELAY, i], digits), levels.shape[0])
                if level < 0:
                    odd[left_over] = i
                    left_over += 1
                elif level > 0:
                    code = store_times[i] + levels[level - 1]
        out[i] = code
    return left_over


_SPACE = ord(props.KEY_SEPARATOR)


@kernel
def _add_hash(value: int, raw: bool, frame: int, hashes: Array, numbers: Array, used: int) -> int:
    """Append the hash of one key. If ``raw`` is false, first make the hash positive, as
    ``java.positive_hash_code`` does. Return the new number of hashes.
    """
    if not raw:
        value = abs(value)
        value = 0 if value > java.INT_MAX else value
    hashes[used] = value
    numbers[used] = frame
    return used + 1


@kernel
def hash_keys(
    prefix: int,
    uniq: int,
    uniq_length: int,
    keys: int,
    keys_length: int,
    raw: bool,
    frame: int,
    hashes: Array,
    numbers: Array,
    used: int,
) -> int:
    """Append the hash of a frame's UNIQ_KEY, and the hash of each word in its KEYS. Return the new
    number of hashes.
    """
    if uniq_length > 0:
        value = mem.java_hash_on(prefix, uniq, uniq_length)
        used = _add_hash(value, raw, frame, hashes, numbers, used)
    begin = np.int64(0)
    for at in range(keys_length + 1):
        if at == keys_length or mem.load_u8(keys + at) == _SPACE:
            if at > begin:
                value = mem.java_hash_on(prefix, keys + begin, at - begin)
                used = _add_hash(value, raw, frame, hashes, numbers, used)
            begin = np.int64(at + 1)
    return used


@kernel
def index_keys(
    address: int,
    count: int,
    starts: Array,
    lengths: Array,
    prefixes: Array,
    tag_prefixes: Array,
    hashes: Array,
    numbers: Array,
    raw: bool,
) -> int:
    """Hash the UNIQ_KEY, each word in KEYS, and TAGS of frames. Return the number of hashes.

    All text must be valid UTF-8. ``hashes`` (int64) gets the hash of each key; with ``raw``, a hash
    may be negative. ``numbers`` (int64) gets the index of the key's frame.

    Args:
        starts, lengths: int32 (4, n), filled by :func:`parse_properties`.
        prefixes, tag_prefixes: int64; the hashes of the texts ``<topic>#`` and ``<topic>#T#``, for
            the topic of each frame. If ``tag_prefixes`` is empty, tags are not hashed.
    """
    used = 0
    for i in range(count):
        used = hash_keys(
            prefixes[i],
            address + starts[UNIQ_KEY, i],
            lengths[UNIQ_KEY, i],
            address + starts[KEYS, i],
            lengths[KEYS, i],
            raw,
            i,
            hashes,
            numbers,
            used,
        )
        length = lengths[TAGS, i]
        if length > 0 and len(tag_prefixes) > 0:
            value = mem.java_hash_on(tag_prefixes[i], address + starts[TAGS, i], length)
            used = _add_hash(value, raw, i, hashes, numbers, used)
    return used


# --------------------------------------------------------------------------------------------------
# Make the property strings of many messages, and find properties that make the store change a
# message.

_KEYS, _TAGS, _WAIT, _OTHERS = range(4)
"""Kinds of property names. If a message has a property of kind _OTHERS, the encoder of single puts
must encode the message.
"""
_BUILT_NAMES = (
    props.KEYS,
    props.TAGS,
    props.WAIT,
    props.DELAY,
    props.INNER_MULTI_DISPATCH,
    props.TIMER_DELIVER_MS,
    props.TIMER_DELAY_MS,
    props.TIMER_DELAY_SEC,
)
_BUILT_NAME_BYTES, _BUILT_NAME_LENGTHS, _BUILT_NAME_STARTS = name_table(_BUILT_NAMES)
_TRUE = np.frombuffer(b"true", np.uint8).copy()
_MOST_PAIRS = 64


@kernel
def _is_true(address: int, length: int) -> bool:
    return length == _TRUE.shape[0] and mem.same_bytes(address, _TRUE.ctypes.data, length)


@kernel
def _put_pair(
    out: int, start: int, key: int, key_length: int, value: int, value_length: int
) -> int:
    """Append a property to the string that begins at ``start``."""
    if out > start:
        mem.store_u8(out, _PROPERTY)
        out += 1
    mem.copy_short(out, key, key_length)
    mem.store_u8(out + key_length, _NAME_VALUE)
    mem.copy_short(out + key_length + 1, value, value_length)
    return out + key_length + 1 + value_length


@kernel
def property_strings(
    count: int,
    pair_first: Array,
    pair_stop: Array,
    pair_spans: Array,
    keys_at: Array,
    keys_length: Array,
    tags_at: Array,
    tags_length: Array,
    out: int,
    out_at: Array,
    out_length: Array,
    odd: Array,
) -> None:
    """Make the property strings of messages. The properties have the order of
    ``Message.all_properties``.

    Args:
        pair_first, pair_stop: the range of each message's pairs in ``pair_spans``.
        pair_spans: int64 (4, pairs); address and length of name and value.
        keys_length, tags_length: length of KEYS and TAGS; -1 if absent.
        out: address of memory for all strings. ``out_at`` and ``out_length`` get the address and
            the length of each string.
        odd: set to 1 for each message that has DELAY or a similar property, a repeated name, or a
            name without a value. The encoder of single puts must encode such messages.
    """
    for i in range(count):
        start = out
        keys, tags = keys_length[i], tags_length[i]
        first, stop = pair_first[i], pair_stop[i]
        if stop - first > _MOST_PAIRS:
            odd[i] = 1
            continue
        for pair in range(first, stop):
            name_at, name_length = pair_spans[0, pair], pair_spans[1, pair]
            value_at, value_length = pair_spans[2, pair], pair_spans[3, pair]
            if name_length < 0 or value_length < 0:
                odd[i] = 1
                break
            for other in range(first, pair):
                if pair_spans[1, other] == name_length and mem.same_bytes(
                    pair_spans[0, other], name_at, name_length
                ):
                    odd[i] = 1
            name = which_name(
                name_at, name_length, _BUILT_NAME_BYTES, _BUILT_NAME_LENGTHS, _BUILT_NAME_STARTS
            )
            if name >= _OTHERS or (name == _WAIT and not _is_true(value_at, value_length)):
                odd[i] = 1
            # The value in the column KEYS or TAGS replaces the value of the property with this
            # name. The property keeps its place in the string.
            elif name == _KEYS and keys >= 0:
                value_at, value_length = keys_at[i], keys
                keys = -1
            elif name == _TAGS and tags >= 0:
                value_at, value_length = tags_at[i], tags
                tags = -1
            out = _put_pair(out, start, name_at, name_length, value_at, value_length)
        if keys >= 0:
            name_at = _BUILT_NAME_BYTES.ctypes.data + _BUILT_NAME_STARTS[_KEYS]
            out = _put_pair(out, start, name_at, _BUILT_NAME_LENGTHS[_KEYS], keys_at[i], keys)
        if tags >= 0:
            name_at = _BUILT_NAME_BYTES.ctypes.data + _BUILT_NAME_STARTS[_TAGS]
            out = _put_pair(out, start, name_at, _BUILT_NAME_LENGTHS[_TAGS], tags_at[i], tags)
        out_at[i] = start
        out_length[i] = out - start


@kernel
def look_into(count: int, at: Array, lengths: Array, odd: Array) -> None:
    """Set ``odd`` to 1 for each string with a property that makes the store change the message
    (``message_rules.looked_at``).

    WAIT=true is the default, so this property does not count.
    """
    for i in range(count):
        start = at[i]
        length = lengths[i]
        position = np.int64(0)
        while position < length:
            middle = next_separator(start, position, length)
            stop = middle
            while stop < length and mem.load_u8(start + stop) == _NAME_VALUE:
                stop = next_separator(start, stop + 1, length)
            name = which_name(
                start + position,
                middle - position,
                _BUILT_NAME_BYTES,
                _BUILT_NAME_LENGTHS,
                _BUILT_NAME_STARTS,
            )
            if name >= _OTHERS or (
                name == _WAIT and not _is_true(start + middle + 1, stop - middle - 1)
            ):
                odd[i] = 1
                break
            position = stop + 1
