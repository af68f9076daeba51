"""Are batches bounded, whatever bodies decompress to?"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from unittest import mock

import pyarrow as pa
import pytest

from logquarry.errors import LogquarryError
from logquarry.format import java
from logquarry.format.frame import Frame
from logquarry.log import batches, codec, columns, exported, schema
from logquarry.log.batches import MessageFilter
from logquarry.log.codec import Window
from logquarry.log.columns import Decoding
from logquarry.log.walk import Run
from logquarry.testing import strategies
from tests.helpers.twins import both, plain_python, sound_rows

KIB = 1 << 10
SIZES = (40, 40, 30, 0, 300, 1, 99, 1)
"""KiB of content; a zero stands for a body that is not compressed."""


def bombs(sizes: tuple[int, ...] = SIZES) -> Run:
    items = [
        Frame(topic=b"t", body=zlib.compress(bytes(size * KIB)), sys_flag=1)
        if size
        else Frame(topic=b"t", body=b"plain")
        for size in sizes
    ]
    log = strategies.place([item.with_crc() for item in items], file_size=1 << 16)
    window = Window.of(log.files[0], 0)
    return Run(window, sound_rows(window), "log")


def read(run: Run, decoding: Decoding) -> list[pa.RecordBatch]:
    with mock.patch.object(batches, "MOST_CONTENT", 100 * KIB):
        return list(batches.record_batches([run], decoding))


def test_contents_bound_a_batch() -> None:
    run = bombs()
    fast, plain = both(lambda: read(run, Decoding(decompress=True)))
    assert [batch.num_rows for batch in fast] == [2, 2, 1, 2, 1]
    for batch, other in zip(fast, plain, strict=True):
        batch.validate(full=True)
        assert batch.equals(other)
    whole = columns.record_batch(run.window, run.rows, Decoding(decompress=True))
    assert pa.Table.from_batches(fast).combine_chunks().to_batches() == [whole]
    assert [len(body) for body in whole["body"].to_pylist()] == [
        size * KIB if size else len(b"plain") for size in SIZES
    ]


@pytest.mark.parametrize(
    "decoding", [Decoding(), Decoding(columns=schema.NAMES[:3], decompress=True)]
)
def test_other_reads_are_one_batch(decoding: Decoding) -> None:
    assert len(read(bombs(), decoding)) == 1


def test_nothing_compressed_is_one_batch() -> None:
    (batch,) = read(bombs((0, 0, 0)), Decoding(decompress=True))
    assert batch["body"].to_pylist() == [b"plain"] * 3


def test_a_body_is_told_bad_once() -> None:
    items = [Frame(topic=b"t", body=b"no zlib" * KIB, sys_flag=1).with_crc()] * 20
    log = strategies.place(items, file_size=1 << 18)
    window = Window.of(log.files[0], 0)
    run = Run(window, sound_rows(window), "log")
    told: list[int] = []
    decoding = Decoding(decompress=True, on_bad_body=lambda offset, reason: told.append(offset))
    found = read(run, decoding)
    assert [batch.num_rows for batch in found] == [14, 6]
    assert told == [item.physical_offset for item in log.frames]


def test_a_column_that_arrow_cannot_hold_is_an_error_of_ours() -> None:
    run = bombs()
    if codec.kernels_enabled():  # the reference leaves it to Arrow
        with (
            mock.patch.object(java, "INT_MAX", 300 * KIB),
            pytest.raises(LogquarryError, match="more than 2 GiB"),
        ):
            columns.record_batch(run.window, run.rows, Decoding(decompress=True))
    chunked = pa.chunked_array([[b"x"], [b"y"]])
    with (
        plain_python(),
        mock.patch.object(pa, "array", lambda values, kind: chunked),
        pytest.raises(LogquarryError, match="more than 2 GiB"),
    ):
        columns.record_batch(run.window, run.rows, Decoding(columns=["body"], decompress=True))


def test_contents_bound_lines_and_searches() -> None:
    run = bombs()
    decoding = Decoding(decompress=True, broker="b")
    largest: list[int] = []
    make = columns.contents

    def watched(*arguments: object) -> Iterator[pa.Array]:
        for bodies in make(*arguments):  # type: ignore[arg-type]
            largest.append(bodies.nbytes)
            yield bodies

    def lines() -> list[str]:
        parts = exported.line_parts(run.window, run.rows, decoding)
        return [line for _, found in parts for line in found]

    whole = lines()
    with (
        mock.patch.object(columns, "MOST_CONTENT", 100 * KIB),
        mock.patch.object(columns, "contents", watched),
    ):
        assert lines() == whole
        assert len(largest) == 5
        found = MessageFilter(grep="plain").select(run.window, run.rows, decoding)
        assert len(largest) == 10
    assert max(largest) < 301 * KIB
    assert [json.loads(line)["broker"] for line in whole] == ["b"] * len(SIZES)
    assert found.tolist() == [run.rows[SIZES.index(0)].tolist()]
