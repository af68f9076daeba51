"""Compares a store recovered in mode ``rocketmq`` with the one that RocketMQ recovered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.errors import StoreUnavailable
from logquarry.format import checkpoint, index
from logquarry.read.index import Index
from logquarry.repair.recover.rocketmq import plan_rocketmq
from tests.helpers.files import bytes_of


def differences(
    store: Path, recovered: Path, facts: dict[str, Any] | None, config: StoreConfig
) -> Iterator[str]:
    """Open ``store`` with RocketMQ's rules, and yield each difference from ``recovered``.

    Args:
        store: a copy of what was before; is changed.
        recovered: what RocketMQ left.
        facts: what it said while it was open (`oracle/run dump`); None where the dump failed then.
        config: the settings of both.
    """
    config = dataclasses.replace(config, recovery="rocketmq")
    before = bytes_of(store)
    plan = plan_rocketmq(store, config)
    if bytes_of(store) != before:
        yield "planning changes files"
    loads = facts is None or facts["load"]
    if (plan.refused is None) != loads:
        yield f"refused: {plan.refused}, and Java loads: {loads}"
    if not loads or plan.refused is not None:
        try:
            lq.MessageStore.open(store, mode="rw", config=config, accept_loss=1 << 40)
        except StoreUnavailable as error:
            if plan.refused is not None and plan.refused not in str(error):
                yield f"the plan says {plan.refused}, and opening says {error}"
        else:
            yield "it opens"
        return
    with lq.MessageStore.open(store, mode="rw", config=config, accept_loss=1 << 40) as opened:
        opened.wait_dispatched()
        if facts is not None:
            yield from _reads(opened, facts)
        if plan.log_end != opened.max_offset:
            yield f"planned: the log ends at {plan.log_end}"
    yield from _same_files(store, recovered)
    if facts is not None:
        log = facts["commitLog"]
        if (plan.log_start, plan.log_end) != (max(0, log["minOffset"]), log["maxOffset"]):
            yield f"the log: {plan.log_start} to {plan.log_end}, and in Java {log}"
        yield from _checkpoint(store, recovered)


def _reads(opened: lq.MessageStore, facts: dict[str, Any]) -> Iterator[str]:
    known = set()
    for fact in facts["queues"]:
        key = fact["topic"], fact["queueId"]
        known.add(key)
        queue = opened.queue(*key)
        limits = opened.queue_offsets(*key)
        # The number of entries is not compared: Java counts an entry of zeros.
        found = [
            [offset + number, *unit]
            for offset, units in (queue.runs(*limits) if queue is not None else ())
            for number, unit in enumerate(units.tolist())
        ]
        if (limits.min, limits.max) != (fact["minOffset"], fact["maxOffset"]):
            yield f"{key}: {limits}, and in Java {fact['minOffset']}, {fact['maxOffset']}"
        if found != fact["entries"]:
            yield f"{key}: entries {found[-3:]}, and in Java {fact['entries'][-3:]}"
    if extra := set(opened.queues()) - known:
        yield f"queues that Java has not: {extra}"
    found_index = Index(opened.layout)
    for fact in facts["indexQueries"]:
        asked = (fact["topic"], fact["key"], fact["maxNum"], fact["begin"], fact["end"])
        offsets = found_index.query_offsets(*asked)
        if offsets != fact["indexPhyOffsets"]:
            yield f"index {asked}: {offsets}, and in Java {fact['indexPhyOffsets']}"


def _same_files(store: Path, recovered: Path) -> Iterator[str]:
    for folder in ("commitlog", "consumequeue"):
        ours, theirs = bytes_of(store / folder), bytes_of(recovered / folder)
        if missing := sorted(set(theirs) - set(ours)):
            yield f"{folder}: Java has {missing}"
        if extra := sorted(set(ours) - set(theirs)):
            yield f"{folder}: Java has not {extra}"
        for name in sorted(set(ours) & set(theirs)):
            if ours[name] != theirs[name]:
                pairs = zip(ours[name], theirs[name], strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
                yield f"{folder}/{name} differs at {at}"
    ours, theirs = bytes_of(store / "index"), bytes_of(recovered / "index")
    if [ours[name] for name in sorted(ours)] != [theirs[name] for name in sorted(theirs)]:
        yield f"the index: {_headers(ours)}, and in Java {_headers(theirs)}"


def _checkpoint(store: Path, recovered: Path) -> Iterator[str]:
    theirs = bytes_of(recovered / "index")
    mine = checkpoint.decode((store / "checkpoint").read_bytes())
    java = checkpoint.decode((recovered / "checkpoint").read_bytes())
    # Of Java's threads that flush index files, any may write last.
    ends = {index.decode_header(data.ljust(40, b"\0")).end_timestamp for data in theirs.values()}
    if mine[:2] != java[:2] or (mine[2] != java[2] and not {mine[2], java[2]} <= ends):
        yield f"{mine}, and in Java {java}"


def _headers(files: dict[str, bytes]) -> list[Any]:
    return [(len(files[n]), index.decode_header(files[n].ljust(40, b"\0"))) for n in sorted(files)]
