"""Reads everything in a store that may be damaged, and checks exceptions, time and memory."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from logquarry.errors import LogquarryError
from logquarry.format import broker_json
from logquarry.log import batches
from logquarry.log.batches import MessageFilter
from logquarry.log.columns import Decoding
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import log_extent, plan_splits, split_events
from logquarry.log.walk import LogReader
from logquarry.read import selection
from logquarry.read.log_end import log_bound
from logquarry.read.selection import Selection
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import MessageStore

DECODERS = {
    broker_json.DELAY_OFFSET_FILE: broker_json.decode_delay_offsets,
    broker_json.CONSUMER_OFFSET_FILE: broker_json.decode_consumer_offsets,
    broker_json.TOPICS_FILE: broker_json.decode_topics,
}


class TooSlow(Exception):
    """A case took longer than it may."""


@contextmanager
def time_bound(seconds: float) -> Iterator[None]:
    """Limit the time of a read. Kernels cannot be interrupted: pytest's timeout covers them."""

    def too_slow(number: int, place: FrameType | None) -> None:
        raise TooSlow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_everything(root: Path, rng: random.Random) -> None:
    """Call every reading method of a store.

    Only documented errors may be raised, and none if bytes alone are wrong and damage is skipped.
    """
    with suppress(LogquarryError):
        layout = StoreLayout.open(root)
        _config(layout)
        _walk(layout)
        _splits(layout, rng)
        _selection(layout, rng)
        verify_store(layout)
        _store(root, rng)


def _config(layout: StoreLayout) -> None:
    layout.read_topics()
    for name, decode in DECODERS.items():
        with suppress(ValueError, FileNotFoundError, IsADirectoryError):
            decode(layout.filesystem.read(f"config/{name}"))


def _walk(layout: StoreLayout) -> None:
    bound = log_bound(layout)
    decoding = Decoding(decompress=True, delay_levels_ms=layout.delay_levels_ms)
    runs = batches.sound_runs(LogReader(layout, bound=bound).events(), "skip")
    for batch in batches.record_batches(runs, decoding):
        batch.validate()
    for _ in LogReader(layout, check_crc=False, batch_bytes=1000).events():
        pass


def _splits(layout: StoreLayout, rng: random.Random) -> None:
    bound = log_bound(layout)
    extent = log_extent(layout, bound, bound)
    size = rng.choice((4_000, 20_000, 1 << 20))
    for split in plan_splits(layout, extent, split_size=size)[:40]:
        for _ in split_events(LogReader(layout, bound=extent.bound), split):
            pass


def _selection(layout: StoreLayout, rng: random.Random) -> None:
    topics = [topic for topic, _ in layout.queue_names] or ["none"]
    wanted = MessageFilter(
        topics=frozenset(rng.sample(topics, 1)) if rng.random() < 0.6 else None,
        keys=frozenset({"user1"}) if rng.random() < 0.3 else None,
        queue_offsets=(rng.randrange(5), 1 << 40) if rng.random() < 0.2 else None,
        since_ms=1_795_174_758_700 if rng.random() < 0.2 else None,
    )
    before, selection.WORTHWHILE = selection.WORTHWHILE, rng.choice((0.5, 1e9))
    try:
        plan = selection.plan_read(
            layout, Selection(wanted=wanted), split_size=50_000, skip_damage=True
        )
        events = selection.read_in_order(layout, plan)
        for _ in batches.messages(batches.sound_runs(events, "skip"), Decoding(), wanted):
            pass
        for part in list(plan.parts)[:10]:
            runs = batches.sound_runs(selection.read_part(layout, plan, part), "skip")
            for _ in batches.record_batches(runs, Decoding(), selection.filter_of(plan, part)):
                pass
    finally:
        selection.WORTHWHILE = before


def _store(root: Path, rng: random.Random) -> None:
    with MessageStore.open(root) as store:
        for question in _questions(store, rng):
            # One may be refused and the next one answered.
            with suppress(LogquarryError):
                question()


def _questions(store: MessageStore, rng: random.Random) -> Iterator[Callable[[], object]]:
    yield lambda: (store.min_offset, store.max_offset, store.topics, store.bound)
    yield lambda: store.checkpoint
    names: list[tuple[str, int]] = []
    yield lambda: names.extend(store.queues())
    for name in rng.sample(names, min(4, len(names))):
        for offset in (0, rng.randrange(40), 1 << 33):
            yield partial(_get, store, *name, offset)
        yield partial(store.queue_offsets, *name)
        yield partial(store.offset_by_time, *name, 1_795_174_758_649 + rng.randrange(100))
    topic = names[0][0] if names else "none"
    yield partial(store.query, topic, "user1")
    yield partial(store.query, topic, "order7", since=1_795_174_758_649, exact=True)
    for offset in (0, rng.randrange(1 << 18)):
        yield partial(store.message_at, offset)
    yield partial(store.message_by_id, "C0A8070900002A9F0000000000000000")
    # What is not there yet, or is built on what was read above.
    for method in ("scan", "to_arrow"):
        whole = getattr(store, method, None)
        if whole is not None:
            yield partial(_count, whole)


def _get(store: MessageStore, topic: str, queue_id: int, offset: int) -> None:
    for message in store.get(topic, queue_id, offset).messages:
        message.to_json()


def _count(whole: Callable[[], Iterable[object]]) -> int:
    return sum(1 for _ in whole())
