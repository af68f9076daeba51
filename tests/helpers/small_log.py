"""A log of five frames, one of each kind, small enough to flip every bit of it."""

from __future__ import annotations

from logquarry.format import frame, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.testing import strategies

V4 = frame.host_bytes("10.1.2.3:10911")
V6 = frame.host_bytes("[2001:db8::7]:10911")
TIME = 1_700_000_000_000

FRAMES = (
    Frame(
        topic=b"orders",
        body=b"first",
        properties=b"TAGS\x01TagA\x02KEYS\x01k1 k2\x02empty\x01\x02city\x01Z\xc3\xbcrich",
        queue_id=3,
        queue_offset=7,
        store_timestamp=TIME,
        born_host=V4,
        store_host=V4,
    ),
    Frame(
        topic="主题".encode(),
        body=b"second",
        properties=b"UNIQ_KEY\x01u-2\x02\x02TAGS\x01a\x02TAGS\x01\xf0\x9f\x98\x80\x02",
        sys_flag=sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6,
        store_timestamp=TIME + 1,
        born_host=V6,
        store_host=V6,
    ),
    Frame(topic=b"t", sys_flag=sys_flag.STORE_HOST_V6, born_host=V4, store_host=V6),
    Frame(
        topic=b"long topics are for 5.x",
        body=b"third",
        magic=frame.MAGIC_V2,
        sys_flag=sys_flag.TRANSACTION_COMMIT,
        born_host=V4,
        store_host=V4,
        prepared_transaction_offset=12,
    ),
    Frame(
        topic=props.SCHEDULE_TOPIC.encode(),
        body=b"\0" * 9,
        properties=b"DELAY\x013\x02TAGS\x01TagA\x02REAL_TOPIC\x01orders",
        queue_id=2,
        store_timestamp=TIME + 2,
        born_host=V4,
        store_host=V4,
    ),
)
assert not any(sys_flag.is_compressed(item.sys_flag) for item in FRAMES)


def small_log(*, start: int = 0) -> strategies.Log:
    """Two files: four frames and a blank, then one frame and zeros. ``start`` in files."""
    items = [item.with_crc() for item in FRAMES]
    file_size = sum(item.size for item in items[:4]) + 24
    return strategies.place(items, file_size=file_size, start=start * file_size, fill=b"\xda\xa3")
