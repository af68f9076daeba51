"""Property strings that a map cannot hold: both twins find them, and an export keeps them."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import properties as props
from logquarry.log import columns, exported
from logquarry.log.codec import Window
from logquarry.log.columns import Decoding
from logquarry.log.exported import ExactProperties
from logquarry.log.schema import EXACT_PROPERTIES
from tests.helpers.store_maker import StoreMaker
from tests.helpers.twins import both, sound_rows

NAMES = ("properties", EXACT_PROPERTIES.name)

pieces = st.sampled_from(
    [b"a", b"KEYS", "Ü".encode(), b"\x01", b"\x02", b"\x02", b"\xff", b"\xe2\x82", b"k\x01v", b" "]
)
strings = st.lists(pieces, max_size=12).map(b"".join)
usual = st.dictionaries(
    st.sampled_from(["KEYS", "TAGS", "x"]), st.sampled_from(["1", "Ü", "a\x01b"]), max_size=3
).map(lambda found: props.encode(found).encode())


def batch_of(found: list[bytes]) -> pa.RecordBatch:
    maker = StoreMaker(log_file_size=1 << 20)
    for data in found:
        maker.put(properties=data)
    window = Window.of(bytes(maker.log), 0)
    fast, plain = both(
        lambda: columns.record_batch(window, sound_rows(window), Decoding(columns=NAMES))
    )
    fast.validate(full=True)
    assert fast.equals(plain)
    return fast


@given(st.lists(strings | usual | usual.map(lambda data: data + b"\x02"), min_size=1, max_size=8))
def test_what_a_map_cannot_say_is_there(found: list[bytes]) -> None:
    batch = batch_of(found)
    for data, pairs, exact in zip(found, *(batch[name].to_pylist() for name in NAMES), strict=True):
        made = props.encode(dict(pairs)).encode()
        assert exact == (None if made == data else data)


@given(
    st.lists(strings | usual | usual.map(lambda data: data + b"\x02"), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_there_and_back(found: list[bytes], step: int, start: int, stop: int) -> None:
    batch = batch_of(found)
    kept = ExactProperties()
    for first in range(0, len(found), step):
        kept.add(pa.Table.from_batches([batch[first : first + step]]))
    metadata = {name.encode(): value.encode() for name, value in kept.metadata().items()}
    exact = exported.read_exact(metadata)
    assert (exact is None) == (batch[EXACT_PROPERTIES.name].null_count == len(found))
    if exact is not None:
        maps = batch["properties"][start:stop]
        strings = exported.exact_strings(exact, maps, start).to_pylist()
        assert (
            strings
            == [
                None if kept is None else data
                for data, kept in zip(found, batch[EXACT_PROPERTIES.name].to_pylist(), strict=True)
            ][start:stop]
        )


def test_the_separator_of_older_clients_takes_no_room() -> None:
    strings = [b"KEYS\x01k%d\x02" % number for number in range(2_000)]
    kept = ExactProperties()
    kept.add(pa.Table.from_batches([batch_of(strings)]))
    assert kept.size == 0
    assert sum(map(len, kept.metadata().values())) < 1_000
