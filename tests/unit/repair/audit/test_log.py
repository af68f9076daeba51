"""Where a log ends, and what is damage: each rule of ``audit.log`` alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.log.layout import StoreLayout
from logquarry.repair.audit.log import KnownBounds, LogAudit, torn_end
from logquarry.testing.builder import StoreBuilder

TIME = 1_700_000_000_000
FILE_SIZE = 4_096
COUNT = 10
BROKEN = 5


def look(root: Path, bounds: KnownBounds) -> LogAudit:
    config = StoreConfig(mapped_file_size_commit_log=FILE_SIZE)
    found = LogAudit(StoreLayout.open(root, config), bounds)
    for _ in found.runs():
        pass
    return found


def bounds(
    *,
    durable: int | None = None,
    queued: int | None = None,
    is_closed: bool = False,
    dispatched: int | None = None,
) -> KnownBounds:
    return KnownBounds(
        durable=durable, queued=queued, is_closed=is_closed, dispatched_timestamp=dispatched
    )


def broken_log(root: Path, *, behind: int = 0, breaks: int | None = 4) -> list[int]:
    """Ten messages, the sixth broken, later times shifted: their offsets, and the end."""
    places = []
    with StoreBuilder(root, file_size=FILE_SIZE) as builder:
        for number in range(COUNT):
            places.append(builder.offset)
            later = behind if number > BROKEN else 0
            builder.put("t", b"body %d" % number, store_timestamp=TIME + number + later)
        places.append(builder.offset)
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    if breaks is None:
        data = data.replace(b"body 5", b"rotten")
    else:
        data[places[BROKEN] + breaks] ^= 1
    path.write_bytes(data)
    return places


def test_what_stands_behind_damage_is_kept(tmp_path: Path) -> None:
    places = broken_log(tmp_path)
    found = look(tmp_path, bounds())
    assert (found.end, found.count) == (places[-1], COUNT - 1)
    assert [(span.offset, span.length) for span in found.damage] == [
        (places[BROKEN], places[BROKEN + 1] - places[BROKEN])
    ]
    assert found.last_timestamp == TIME + COUNT - 1


def test_a_frame_whose_body_alone_is_bad_keeps_its_place(tmp_path: Path) -> None:
    places = broken_log(tmp_path, breaks=None)
    found = LogAudit(
        StoreLayout.open(tmp_path, StoreConfig(mapped_file_size_commit_log=FILE_SIZE)), bounds()
    )
    starts = [run.window.base + int(row[0]) for run in found.runs() for row in run.rows]
    assert starts == places[:-1] and len(found.damage) == 1


@pytest.mark.parametrize(
    ("known", "ends"),
    [
        (lambda at: bounds(durable=at[5]), 5),
        (lambda at: bounds(durable=at[6]), COUNT),
        (lambda at: bounds(durable=at[10]), COUNT),
        (lambda at: bounds(queued=at[5]), COUNT),
        (lambda at: bounds(queued=at[5], is_closed=True), 5),
        (lambda at: bounds(queued=at[10], is_closed=True), COUNT),
        (lambda at: bounds(queued=at[10], is_closed=True, dispatched=TIME + 4), 5),
        (lambda at: bounds(queued=at[10], is_closed=True, dispatched=TIME + 3), COUNT),
        (lambda at: bounds(queued=at[10], is_closed=True, dispatched=-1), COUNT),
        (lambda at: bounds(durable=at[10], is_closed=True, dispatched=TIME + 4), COUNT),
    ],
)
def test_where_the_log_ends(
    tmp_path: Path, known: Callable[[list[int]], KnownBounds], ends: int
) -> None:
    places = broken_log(tmp_path)
    found = look(tmp_path, known(places))
    assert found.end == places[ends]
    assert bool(found.damage) is (ends == COUNT)


def test_older_frames_behind_a_break_are_stale(tmp_path: Path) -> None:
    places = broken_log(tmp_path, behind=-1_000)
    assert look(tmp_path, bounds()).end == places[BROKEN]
    # Unless they were on the disk when the durable offset was written.
    assert look(tmp_path, bounds(durable=places[-1])).end == places[-1]


@pytest.mark.parametrize("reached", [6, 7])
@pytest.mark.parametrize(
    "known",
    [
        lambda durable: bounds(durable=durable),
        # The queues of a crashed store, or entries for stale frames, do not show the log's end.
        lambda durable: bounds(durable=durable, queued=durable + 300),
        lambda durable: bounds(durable=durable, queued=durable + 300, is_closed=True),
        lambda durable: bounds(queued=durable, is_closed=True),
    ],
)
def test_damage_before_stale_frames_reaches_the_least_end(
    tmp_path: Path, known: Callable[[int], KnownBounds], reached: int
) -> None:
    places = broken_log(tmp_path, behind=-1_000)
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[places[6] : places[7]] = b"\1" * (places[7] - places[6])
    path.write_bytes(data)
    found = look(tmp_path, known(places[reached]))
    assert (found.end, found.count) == (places[reached], BROKEN)
    assert [(span.offset, span.length) for span in found.damage] == [
        (places[BROKEN], places[reached] - places[BROKEN])
    ]
    assert found.words[-1].startswith(f"the log ends at {found.end}: the frames from {places[7]}")


def test_queued_stale_frames_do_not_extend_the_log(tmp_path: Path) -> None:
    places = broken_log(tmp_path, behind=-1_000)
    found = look(tmp_path, bounds(queued=places[8], is_closed=True))
    assert found.end == places[BROKEN] and not found.damage


def test_a_torn_tail_ends_the_log_unless_it_was_on_the_disk(tmp_path: Path) -> None:
    places = broken_log(tmp_path)
    path = tmp_path / "commitlog" / f"{0:020d}"
    whole = path.read_bytes()
    path.write_bytes(whole[: places[6]].ljust(FILE_SIZE, b"\0"))
    found = look(tmp_path, bounds())
    assert found.end == places[BROKEN] and not found.damage
    found = look(tmp_path, bounds(durable=places[8]))
    assert found.end == places[8]
    assert [span.offset for span in found.damage] == [places[BROKEN]]
    # Only zeros: the durable offset shows that messages were there.
    path.write_bytes(whole[: places[BROKEN]].ljust(FILE_SIZE, b"\0"))
    found = look(tmp_path, bounds(durable=places[8]))
    assert found.end == places[8]
    assert [(span.offset, span.kind) for span in found.damage] == [(places[BROKEN], "zeroed")]
    found = look(tmp_path, bounds(queued=places[8], is_closed=True))
    assert found.end == places[BROKEN] and "bytes are lost" in found.words[-1]
    found = look(tmp_path, bounds(durable=places[8] + 10 * FILE_SIZE))
    assert found.end == FILE_SIZE and "bytes are lost" in found.words[-1]


def test_a_clock_set_back_makes_nothing_stale(tmp_path: Path) -> None:
    """The frames after a break are compared with the frame right before it, in any kind of read."""
    with StoreBuilder(tmp_path, file_size=FILE_SIZE) as builder:
        while builder.offset < FILE_SIZE:
            builder.put("t", b"before" * 50, store_timestamp=TIME + 3_600_000)
        places = []
        for number in range(COUNT):
            places.append(builder.offset)
            builder.put("t", b"body %d" % number, store_timestamp=TIME + number)
        places.append(builder.offset)
    path = tmp_path / "commitlog" / f"{FILE_SIZE:020d}"
    data = bytearray(path.read_bytes())
    data[places[BROKEN] - FILE_SIZE + 4] ^= 1
    path.write_bytes(data)
    found = look(tmp_path, bounds())
    assert found.end == places[-1]
    assert [span.offset for span in found.damage] == [places[BROKEN]]
    assert found.last_timestamp == TIME + COUNT - 1


@pytest.mark.parametrize("harm", ["topic", "properties"])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_last_message_that_ends_in_zeros(tmp_path: Path, harm: str, is_queued: bool) -> None:
    """A queue entry may reach the disk before its message, so it proves no topic of zero bytes."""
    with StoreBuilder(tmp_path, file_size=FILE_SIZE) as builder:
        builder.put("orders", b"first")
        torn = builder.offset
        builder.put(
            "orders", b"last", properties_string="A\x01zeros\x02" if harm == "properties" else ""
        )
        end = builder.offset
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    text = b"orders" if harm == "topic" else b"zeros"
    at = data.rfind(text, torn, end)
    data[at : at + len(text) + (harm == "properties")] = bytes(len(text) + (harm == "properties"))
    path.write_bytes(data)
    layout = StoreLayout.open(tmp_path, StoreConfig(mapped_file_size_commit_log=FILE_SIZE))
    known = bounds(durable=torn, queued=end if is_queued else torn)
    # Zeros in queued properties may be their text.
    expected = None if harm == "properties" and is_queued else torn
    assert torn_end(layout, known) == expected
    assert torn_end(layout, bounds(durable=end, queued=end)) is None


@pytest.mark.parametrize("place", ["exact", "later", "earlier"])
@pytest.mark.parametrize("lost", ["end", "middle"])
def test_a_lost_sector_in_the_properties_of_a_queued_message(
    tmp_path: Path, lost: str, place: str
) -> None:
    """The entry reached the disk before the sector. Zeros elsewhere may be part of the text."""
    with StoreBuilder(tmp_path, file_size=FILE_SIZE) as builder:
        builder.put("orders", b"first")
        torn = builder.offset
        values = "A\x01" + "text" * 300
        builder.put("orders", b"last", properties_string=values)
        end = builder.offset
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    start = end - end % 512 if lost == "end" else end - end % 512 - 512
    stop = end if lost == "end" else start + 512
    start += {"exact": 0, "later": 1, "earlier": -1}[place]
    assert torn < end - len(values) < start < stop <= end
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    layout = StoreLayout.open(tmp_path, StoreConfig(mapped_file_size_commit_log=FILE_SIZE))
    expected = torn if place == "exact" else None
    assert torn_end(layout, bounds(durable=torn, queued=end)) == expected
