"""Reference and kernel make the same frames of a batch, and refuse the same batches."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from logquarry.config import StoreConfig
from logquarry.errors import LogquarryError
from logquarry.format import batch
from logquarry.format.batch import BatchItem
from logquarry.message import Message
from logquarry.testing import strategies
from logquarry.write.encode import MessageEncoder
from logquarry.write.encode_batch import encode_batch
from tests.helpers.twins import both

CONFIG = StoreConfig(max_message_size=1_000)
ENCODER = MessageEncoder(CONFIG, lambda: 7)

items = st.builds(
    BatchItem,
    body=st.binary(max_size=40),
    properties=strategies.property_strings(),
    flag=st.integers(-(2**31), 2**31 - 1),
)
wires = st.lists(items, max_size=6).map(batch.encode)


def _message(topic: str, **fields: Any) -> Message:
    # builds() would also draw the other fields, with numbers that no message may have.
    return Message(topic, **fields)


shared = st.builds(
    _message,
    st.sampled_from(["t", "\u4e3b\u9898"]),
    queue_id=st.sampled_from([0, -7, 2**31 - 1, 2**31]),
    born_timestamp=st.sampled_from([None, 5]),
    born_host=st.sampled_from(["127.0.0.1:1", "[::1]:2"]),
    store_host=st.sampled_from([None, "[fe80::1]:3"]),
    sys_flag=st.sampled_from([0, 1, 2]),
    reconsume_times=st.sampled_from([0, 3, 2**31]),
    flag=st.integers(-(2**31), 2**31),
    queue_offset=st.integers(0, 2**63 - 1),
    prepared_transaction_offset=st.integers(-(2**63), 2**63 - 1),
    properties=st.none() | strategies.properties_maps(max_size=2),
    wait_store_ok=st.booleans(),
)


def made(wire: bytes, message: Message) -> Any:
    try:
        encoded = encode_batch(ENCODER, CONFIG, wire, message)
    except LogquarryError as error:
        return type(error), str(error)
    encoded.place(9, 1 << 40, 1_700_000_000_000)
    again = bytes(encoded.data)
    encoded.place(10, 0, 3)
    said = (encoded.starts, encoded.body_size, encoded.wait, encoded.key, encoded.hosts.store_host)
    return again, bytes(encoded.data), said


@given(wires, shared)
def test_batches(wire: bytes, message: Message) -> None:
    fast, plain = both(lambda: made(wire, message))
    assert fast == plain


@given(wires, shared, st.data())
def test_wire_forms_that_are_cut_or_changed(wire: bytes, message: Message, data: Any) -> None:
    changed = bytearray(wire[: data.draw(st.integers(0, len(wire)))])
    if changed:
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    fast, plain = both(lambda: made(bytes(changed), message))
    assert fast == plain


def test_properties_that_are_too_long_together() -> None:
    config = StoreConfig()
    encoder = MessageEncoder(config, lambda: 7)
    wire = batch.encode([BatchItem(b"x", b"a\x01" + b"b" * 32_000)])
    message = Message("t", properties={"c": "d" * 900})

    def made_of_long_ones() -> str:
        try:
            return encode_batch(encoder, config, wire, message).data.hex()
        except LogquarryError as error:
            return str(error)

    fast, plain = both(made_of_long_ones)
    assert fast == plain and "32905 bytes" in fast
