"""How much of the log one batch of a stream takes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.log.batches import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.spark import stream_offset
from logquarry.spark.stream_offset import Backlog, boundary, by_bytes, by_rows, shared
from tests.helpers.store_maker import StoreMaker


def store(root: Path, count: int, *, seed: int = 1) -> tuple[StoreLayout, list[tuple[int, int]]]:
    """Make a store; return it with the start and the end of each message."""
    rng = random.Random(seed)
    maker = StoreMaker(log_file_size=3000)
    for n in range(count):
        maker.put(["a", "b", "c"][n % 3], body=rng.randbytes(rng.randrange(700)))
    maker.write(root)
    places = [(f.physical_offset, f.physical_offset + f.size) for f in maker.frames]
    return StoreLayout.open(root), places


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=6), st.integers(0, 3000))
def test_shares(wants: dict[str, int], limit: int) -> None:
    shares = shared(wants, limit)
    assert shares.keys() == wants.keys()
    assert sum(shares.values()) == min(limit, sum(wants.values()))
    for name, share in shares.items():
        assert 0 <= share <= wants[name]
        if share < wants[name]:
            # No share exceeds a share that got less than it wants, except for rounding.
            assert share >= max(shares.values()) - 1


@pytest.mark.parametrize("near", [16 << 20, 5000, 300])
def test_boundaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: int) -> None:
    monkeypatch.setattr(stream_offset, "NEAR", near)
    layout, places = store(tmp_path, 60)
    size = layout.commit_log.file_size
    ends = {0, *(end for _, end in places), *range(0, layout.commit_log.end, size)}
    # The start of a blank is the end of a frame.
    last = places[-1][1]
    for start in (0, places[20][0]):
        log = Backlog(layout, start, last)
        for upto in range(start, last + 50, 37):
            expected = max(end for end in ends if start <= end <= max(start, min(upto, last)))
            assert boundary(log, upto) == expected, upto


def test_boundary_beside_damage(tmp_path: Path) -> None:
    layout, places = store(tmp_path, 60)
    start, end = places[10]
    path = tmp_path / layout.commit_log.files[start // 3000].path
    data = bytearray(path.read_bytes())
    data[start % 3000 + 4] ^= 1
    path.write_bytes(data)
    log = Backlog(layout, 0, places[-1][1])
    assert boundary(log, (start + end) // 2) == start
    assert boundary(log, end) == end


def test_bytes_of_several_logs(tmp_path: Path) -> None:
    first, places = store(tmp_path / "one", 90)
    second, few = store(tmp_path / "two", 6, seed=2)
    logs = {"one": Backlog(first, 0, places[-1][1]), "two": Backlog(second, 0, few[-1][1])}
    whole = places[-1][1] + few[-1][1]
    for limit in (2500, 9000, whole - 10, whole, 10 * whole):
        ends = by_bytes(logs, limit)
        taken = sum(ends.values())
        assert taken <= limit
        assert taken == whole or taken > limit - 2 * 800 or ends["one"] % 3000 == 0
        assert ends["two"] == few[-1][1] or ends["two"] >= limit // 2 - 800


def test_a_frame_that_is_larger_than_the_limit_is_taken(tmp_path: Path) -> None:
    layout, places = store(tmp_path, 10)
    at = 0
    for start, end in places:
        if at != start:
            # A batch can also end after a blank.
            assert by_bytes({"b": Backlog(layout, at, places[-1][1])}, 1) == {"b": start}
        at = by_bytes({"b": Backlog(layout, start, places[-1][1])}, 1)["b"]
        assert at == end


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, places = store(tmp_path, 61)
    end = places[-1][1]
    every, some = MessageFilter(), MessageFilter(topics=frozenset({"b"}))
    for limit in (1, 7, 60):
        assert by_rows({"x": Backlog(layout, 0, end)}, limit, {"x": every}) == {
            "x": places[limit - 1][1]
        }
    assert by_rows({"x": Backlog(layout, 0, end)}, 61, {"x": every}) == {"x": end}
    # The filter takes one message of three.
    assert by_rows({"x": Backlog(layout, 0, end)}, 5, {"x": some}) == {"x": places[13][1]}
    assert by_rows({"x": Backlog(layout, 0, end)}, 500, {"x": some}) == {"x": end}
    none = MessageFilter(topics=frozenset({"absent"}))
    assert by_rows({"x": Backlog(layout, 0, end)}, 5, {"x": none}) == {"x": end}
    # A rare topic is searched in pieces of the log.
    monkeypatch.setattr(stream_offset, "MOST_COUNTED", 4000)
    (piece,) = by_rows({"x": Backlog(layout, 0, end)}, 5, {"x": none}).values()
    assert 3000 <= piece <= 4000


def test_rows_of_several_logs(tmp_path: Path) -> None:
    first, places = store(tmp_path / "one", 90)
    second, few = store(tmp_path / "two", 6, seed=2)
    logs = {"one": Backlog(first, 0, places[-1][1]), "two": Backlog(second, 0, few[-1][1])}
    wanted = {"one": MessageFilter(), "two": MessageFilter()}
    assert by_rows(logs, 20, wanted) == {"one": places[13][1], "two": few[5][1]}
    assert by_rows(logs, 4, wanted) == {"one": places[1][1], "two": few[1][1]}
    assert by_rows(logs, 1, wanted) in (
        {"one": 0, "two": few[0][1]},
        {"one": places[0][1], "two": 0},
    )
