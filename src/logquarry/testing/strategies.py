"""Hypothesis strategies: sound frames, property strings and commit logs, common and unusual.

A reader must accept all results; change the bytes for damaged logs. The module needs the package
``hypothesis``, which is not installed together with logquarry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st

from logquarry.format import frame, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import BLANK, MAGIC_V1, MAGIC_V2, Frame
from logquarry.log.store_files import COMMIT_LOG, NAME_DIGITS

MOST_TOPIC_BYTES = 0x7F
"""Maximum bytes of a topic: TOPICLEN is a signed byte."""

_NUMBERS = struct.Struct(">iiqqqiq")
"""Queue id, flag, queue offset, born and store time, reconsume times, prepared offset."""
_TOPICS = [
    "a",
    "orders",
    "payments",
    "%RETRY%group",
    props.SCHEDULE_TOPIC,
    "主题-ü",
    "😀",
    "x" * 127,
]
_NAMES = [
    props.TAGS,
    props.KEYS,
    props.UNIQ_KEY,
    props.DELAY,
    props.WAIT,
    props.REAL_TOPIC,
    props.REAL_QUEUE_ID,
    "city",
    "ключ",
    "😀",
]
_VALUES = [
    "TagA",
    "true",
    "key1 key2  key3",
    "3",
    "18",
    "99",
    "-1",
    "+2",
    "Zürich",
    "polygenelubricants",
]
_ODD_PIECES = [
    *(name.encode() for name in _NAMES[:4]),
    *(name.encode() + b"\x01" for name in _NAMES[:4]),
    *(value.encode() for value in _VALUES),
    "😀".encode(),
    "١".encode(),
    b"\x00",
    b"\xff",
    b"\xe2\x82",
    b"\xed\xa0\x80",
]


# ---------------------------------------------------------------------------------- single fields
def hosts(*, v6: bool) -> st.SearchStrategy[bytes]:
    """BORNHOST or STOREHOSTADDRESS: address and port, in 8 or 20 bytes. Ports can be negative."""
    if not v6:
        known = [bytes(8), b"\x7f\0\0\x01\0\0\x2a\x9f", b"\xff" * 8]
        return st.one_of(st.sampled_from(known), st.binary(min_size=8, max_size=8))
    mapped = b"\xff\xff\x0a\x01\x02\x03\0\0\x2a\x9f"
    known = [bytes(10) + mapped, bytes(15) + b"\x01\0\0\x2a\x9f", b"\x20\x01" + bytes(18)]
    return st.one_of(st.sampled_from(known), st.binary(min_size=20, max_size=20))


def sys_flags() -> st.SearchStrategy[int]:
    """SYSFLAG: any mix of the bits that RocketMQ 4.9 and 5.x define, and any other integer."""
    known = sys_flag.INNER_BATCH * 2 + sys_flag.COMPRESSION_MASK
    return st.one_of(st.integers(0, known), st.integers(java.INT_MIN, java.INT_MAX))


def topics() -> st.SearchStrategy[bytes]:
    """Topics of 0 to 127 bytes: names, any Unicode, and bytes that are not UTF-8."""
    return st.one_of(
        st.sampled_from(_TOPICS).map(str.encode),
        st.text(max_size=8).map(str.encode),
        st.binary(max_size=MOST_TOPIC_BYTES),
    )


def properties_maps(*, max_size: int = 6) -> st.SearchStrategy[dict[str, str]]:
    """Properties of a property string: no separators, no empty names or values."""
    text = st.text(
        st.characters(
            exclude_categories=["Cs"],
            exclude_characters=props.NAME_VALUE_SEPARATOR + props.PROPERTY_SEPARATOR,
        ),
        min_size=1,
        max_size=6,
    )
    names, values = st.sampled_from(_NAMES), st.sampled_from(_VALUES)
    return st.dictionaries(names | text, values | text, max_size=max_size)


def property_strings() -> st.SearchStrategy[bytes]:
    """Property strings of sound frames, well-formed and odd.

    Odd strings have empty names or values, missing, doubled or trailing separators, duplicate
    names, characters beyond the BMP, or bytes that are not UTF-8.
    """
    separators = st.sampled_from([b"\x01", b"\x02", b"\x01\x01", b"\x02\x02"])
    piece = st.one_of(separators, st.sampled_from(_ODD_PIECES), st.binary(max_size=3))
    sane = properties_maps().map(lambda pairs: props.encode(pairs).encode())
    trailing = sane.map(lambda text: text + b"\x02")
    return st.one_of(sane, trailing, st.lists(piece, max_size=12).map(b"".join))


def _numbers() -> st.SearchStrategy[tuple[int, ...]]:
    odd = st.binary(min_size=_NUMBERS.size, max_size=_NUMBERS.size).map(_NUMBERS.unpack)
    sane = st.integers(0, 1000).map(
        lambda n: (n % 4, 0, n, 1_700_000_000_000 + n, 1_700_000_000_003 + n, 0, 0)
    )
    return st.one_of(sane, odd)


# ----------------------------------------------------------------------------------------- frames
@st.composite
def frames(
    draw: st.DrawFn,
    *,
    max_body: int = 64,
    magics: Sequence[int] = (MAGIC_V1, MAGIC_V1, MAGIC_V2),
    topic: st.SearchStrategy[bytes] | None = None,
    property_string: st.SearchStrategy[bytes] | None = None,
    flags: st.SearchStrategy[int] | None = None,
    numbers: st.SearchStrategy[tuple[int, ...]] | None = None,
) -> Frame:
    """Frames of all forms that a sound log can contain; the body CRCs are correct.

    Args:
        flags: SYSFLAG; its bits decide between IPv4 and IPv6 hosts.
        numbers: queue id, flag, queue offset, born and store timestamp, reconsume times and
            prepared transaction offset. The default generates usual numbers, and any numbers that
            fit the fields.
    """
    magic = draw(st.sampled_from(magics))
    flag_bits = draw(sys_flags() if flags is None else flags)
    if topic is None:
        # The second magic of RocketMQ 5 has two bytes for the length of a topic.
        topic = topics() if magic == MAGIC_V1 else topics() | st.binary(max_size=400)
    queue_id, flag, queue_offset, born, stored, reconsume_times, prepared = draw(
        _numbers() if numbers is None else numbers
    )
    return Frame(
        topic=draw(topic),
        body=draw(st.binary(max_size=max_body)),
        properties=draw(property_strings() if property_string is None else property_string),
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        sys_flag=flag_bits,
        born_timestamp=born,
        born_host=draw(hosts(v6=bool(flag_bits & sys_flag.BORN_HOST_V6))),
        store_timestamp=stored,
        store_host=draw(hosts(v6=bool(flag_bits & sys_flag.STORE_HOST_V6))),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared,
        magic=magic,
    ).with_crc()


@st.composite
def plain_frames(draw: st.DrawFn) -> Frame:
    """Frames that a 4.9.3 broker with IPv4 hosts writes for common clients."""
    item = draw(
        frames(
            magics=(MAGIC_V1,),
            topic=st.sampled_from([b"orders", b"payments", "主题-ü".encode()]),
            property_string=properties_maps().map(lambda pairs: props.encode(pairs).encode()),
            flags=st.sampled_from(
                [0, 0, 0, sys_flag.TRANSACTION_PREPARED, sys_flag.TRANSACTION_COMMIT]
            ),
            numbers=st.integers(0, 1000).map(
                lambda n: (n % 3, n, 0, 1_700_000_000_000 + n, 1_700_000_000_003 + n, 0, 0)
            ),
        )
    )
    return item


# ------------------------------------------------------------------------------------ whole logs
@dataclass(frozen=True, slots=True)
class Log:
    """A commit log in memory.

    Attributes:
        frames: the messages with their physical offsets.
        blanks: (physical offset, length) of the blanks that end files.
        files: the bytes of each file, ``file_size`` each.
    """

    start: int
    file_size: int
    frames: tuple[Frame, ...]
    blanks: tuple[tuple[int, int], ...]
    files: tuple[bytes, ...]

    @property
    def end(self) -> int:
        """Physical offset after the last frame or blank."""
        ends = [item.physical_offset + item.size for item in self.frames[-1:]]
        ends += [offset + length for offset, length in self.blanks[-1:]]
        return max(ends, default=self.start)

    def bases(self) -> range:
        """Return the physical offset of each file's start."""
        stop = self.start + len(self.files) * self.file_size
        return range(self.start, stop, self.file_size)

    def named_files(self) -> dict[str, bytes]:
        """Return the bytes of each file by its path below the store's root."""
        return {
            f"{COMMIT_LOG}/{base:0{NAME_DIGITS}d}": data
            for base, data in zip(self.bases(), self.files, strict=True)
        }

    def write(self, root: Path) -> None:
        """Write the files below the root of a store."""
        (root / COMMIT_LOG).mkdir(parents=True, exist_ok=True)
        for path, data in self.named_files().items():
            (root / path).write_bytes(data)


def place(items: Iterable[Frame], *, file_size: int, start: int = 0, fill: bytes = b"\0") -> Log:
    """Place frames one after the other in the files of a log, as RocketMQ does.

    Args:
        items: the frames; their PHYSICALOFFSET is ignored.
        start: physical offset of the first file.
        fill: bytes for the rest of a blank, repeated.

    Raises:
        ValueError: if a frame does not fit into a file.
    """
    placed: list[Frame] = []
    blanks: list[tuple[int, int]] = []
    files = [bytearray()]
    for item in items:
        if item.size + BLANK.size > file_size:
            raise ValueError(
                f"a frame of {item.size} bytes does not fit into a file of {file_size}"
            )
        left = file_size - len(files[-1])
        if item.size + BLANK.size > left:
            blanks.append((start + len(files) * file_size - left, left))
            files[-1] += (frame.encode_blank(left) + fill * (left // len(fill) + 1))[:left]
            files.append(bytearray())
        offset = start + (len(files) - 1) * file_size + len(files[-1])
        placed.append(replace(item, physical_offset=offset))
        files[-1] += frame.encode(placed[-1])
    whole = tuple(bytes(data).ljust(file_size, b"\0") for data in files)
    return Log(start, file_size, tuple(placed), tuple(blanks), whole)


@st.composite
def logs(
    draw: st.DrawFn,
    *,
    items: st.SearchStrategy[Frame] | None = None,
    min_frames: int = 0,
) -> Log:
    """Whole logs: files that end with blanks, and a last file that is not full."""
    found = draw(st.lists(frames() if items is None else items, min_size=min_frames, max_size=8))
    largest = max((item.size for item in found), default=frame.FIXED_SIZE_V1)
    file_size = largest + BLANK.size + draw(st.integers(0, 3 * largest))
    start = draw(st.sampled_from([0, 0, 1, 3, 1 << 20])) * file_size
    stale = frame.encode(found[0]) if found else b"\xa5"
    fill = draw(st.sampled_from([b"\0", b"\xff", stale]))
    return place(found, file_size=file_size, start=start, fill=fill)
