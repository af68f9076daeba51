"""Stores whose first messages expire, and retention with the time after their last message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.testing.clock import FakeClock
from tests.helpers.small_store import NOW, config

COUNT = 300
STEP = 1_000
END = NOW + COUNT * STEP
FILE = 16_384
Message = tuple[int, str, int, int, bytes]


def put_all(store: lq.StoreWriter, clock: FakeClock, count: int = COUNT) -> None:
    """Put a message each second, in two topics; those of a third topic end soon."""
    for number in range(count):
        clock.advance(STEP)
        topic = "early" if number < 20 else "t" if number % 3 else "u"
        body = b"%04d " % number * 60
        store.put(lq.Message(topic, body, queue_id=number % 2, keys=f"k{number}"))
    store.wait_dispatched()


def messages(root: Path) -> list[Message]:
    with lq.MessageStore.open(root, config=config()) as store:
        return [
            (m.physical_offset, m.topic, m.queue_id, m.queue_offset, m.body) for m in store.scan()
        ]


def queued(root: Path) -> dict[tuple[str, int], list[bytes]]:
    """The messages that a consumer gets from each queue from its min offset on."""
    found: dict[tuple[str, int], list[bytes]] = {}
    with lq.MessageStore.open(root, config=config()) as store:
        for key in store.queues():
            offset, end = store.queue_offsets(*key)
            bodies = found[key] = []
            while offset < end:
                answer = store.get(*key, offset)
                bodies += [message.body for message in answer.messages]
                offset = max(answer.next_offset, offset + 1)
    return found


def retain(
    root: Path, *, now: int = END, apply: bool = False, disk: Disk | None = None, **rules: Any
) -> lq.RetentionPlan:
    """Plan a retention by some rules, or run it."""
    wanted = lq.RetentionRules(**rules)
    return lq.retain(root, wanted, apply=apply, config=config(), clock=lambda: now, disk=disk)


def check_cut(root: Path, before: list[Message], plan: lq.RetentionPlan) -> None:
    """Check that every way to read gives all messages from the new begin on, without damage."""
    after = messages(root)
    assert after == [one for one in before if one[0] >= plan.new_min_offset]
    kept: dict[tuple[str, int], list[bytes]] = {}
    for _, topic, queue_id, _, body in after:
        kept.setdefault((topic, queue_id), []).append(body)
    assert {key: bodies for key, bodies in queued(root).items() if bodies} == kept
    report = verify_store(StoreLayout.open(root, config()))
    assert not report.has_damage, report.findings
    with lq.MessageStore.open(root, config=config()) as store:
        assert store.min_offset == plan.new_min_offset
        number = int(after[0][4][:4])
        topic = after[0][1]
        assert [m.body for m in store.query(topic, key=f"k{number}")] == [after[0][4]]
        assert not store.query("early", key="k3")
