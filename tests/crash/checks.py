"""Checks of a crash image, before and after its recovery."""

from __future__ import annotations

import random
from pathlib import Path

import logquarry as lq
from logquarry.format import checkpoint, queue_entry
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from logquarry.testing.model_store import Mark, ModelStore, Put, Seen, Violation, Wrong, explain
from tests.crash.workload import Workload


def is_store(root: Path) -> bool:
    """Whether the folder has any part of a store."""
    return (root / "commitlog").is_dir() or (root / "consumequeue").is_dir()


def check_image(
    root: Path,
    config: lq.StoreConfig,
    model: ModelStore,
    mark: Mark,
    *,
    is_killed: bool = False,
    is_exact: bool = True,
) -> list[str]:
    """What is wrong with an image; the check does not change it.

    Args:
        root: the store in it.
        config: of the store.
        model: the puts of the whole run.
        mark: the model when the power went.
        is_killed: whether only the process died, so that all acknowledged messages are there.
        is_exact: whether a cleanly closed store has no other message: after failed calls, a refused
            message may be there.
    """
    must = mark.acked if is_killed else mark.durable
    if not is_store(root):
        return [f"there is no store: {len(must)} messages lost"] if must else []
    if not (root / "abort").exists():
        return check_closed(root, config, model, mark, is_exact=is_exact)
    with lq.MessageStore.open(root, config=config) as store:
        seen = Seen.of(store, queues=False, on_damage="stop").before_torn(model.torn)
        wrong = [str(found) for found in model.check(seen, must=must)]
        wrong += _check_checkpoint(root, store, model, seen)
        return wrong + _check_mark(store, model, seen)


def note_what_is_there(store: StoreWriter, work: Workload, mark: Mark) -> None:
    """Compare a store opened after a crash with the model, which continues from its messages.

    A message that is not there must never come back.
    """
    assert store.wait_dispatched(timeout=60)
    seen = Seen.of(store, keys=work.config.message_index_enable is not False)
    wrong = [
        found
        for found in work.model.check(seen, must=mark.durable)
        # Text with bytes of 0 is a finding, and never a reason to drop a frame (reliability.md,
        # fault 6): a torn frame after the durable offset is kept as it is if its body is whole.
        if found.kind is not Wrong.TORN
    ]
    assert not wrong, explain(wrong)
    work.model.survived(seen)


def recovered(root: Path, config: lq.StoreConfig, model: ModelStore) -> None:
    """Open a store after a crash, and close it; see :func:`note_what_is_there`."""
    work = Workload(root.parent, random.Random(0), config, model)
    with StoreWriter.start(root, config=config) as store:
        note_what_is_there(store, work, model.mark())


def check_closed(
    root: Path, config: lq.StoreConfig, model: ModelStore, mark: Mark, *, is_exact: bool = True
) -> list[str]:
    """Violations in a store that was shut down cleanly; there may be none."""
    with lq.MessageStore.open(root, config=config) as store:
        if not store.layout.commit_log.files and not mark.acked:
            return []
        seen = Seen.of(store, keys=config.message_index_enable is not False)
        wrong = model.check(seen, must=mark.acked)
        wrong += [
            Violation(Wrong.UNKNOWN, f"{message}: it was not there when the store was closed")
            for message in seen.log
            if is_exact and message.body not in mark.acked
        ]
        report = verify_store(store.layout)
        damage = [f"verify: {f}" for f in report.findings if f.severity == "damage"]
        return [str(found) for found in wrong] + damage


def _check_checkpoint(
    root: Path, store: lq.MessageStore, model: ModelStore, seen: Seen
) -> list[str]:
    """The checkpoint never covers more than the disk has.

    Messages of the checkpoint's own millisecond do not count: more of them may come after a flush.
    """
    path = root / "checkpoint"
    data = path.read_bytes() if path.exists() else b""
    if len(data) < checkpoint.LAYOUT.struct.size:
        return []
    times = checkpoint.decode(data)
    present = {message.body for message in seen.log}
    wrong = []
    for put in model.puts:
        time = put.store_timestamp
        if time is None or put.body in model.absent:
            continue
        if time < times.physic_timestamp and put.body not in present:
            wrong.append(f"{times} is ahead of the log: {put}")
        if time < times.logics_timestamp and not _is_queued(root, store.config, put):
            wrong.append(f"{times} is ahead of the queue: {put}")
        key = (put.message.keys or "").partition(" ")[0]
        if time < times.index_timestamp and key:
            found = store.query(put.message.topic, key, exact=True)
            if put.body not in {bytes(message.body or b"") for message in found}:
                wrong.append(f"{times} is ahead of the index: {put}")
    return wrong


def _is_queued(root: Path, config: lq.StoreConfig, put: Put) -> bool:
    """Whether the queue has the message's entry."""
    assert put.queue_offset is not None
    size = config.queue_file_size
    assert size is not None
    position = put.queue_offset * queue_entry.UNIT_SIZE
    folder = root / "consumequeue" / put.message.topic / str(put.message.queue_id)
    path = folder / f"{position // size * size:020d}"
    if not path.exists():
        return False
    data = path.read_bytes()[position % size :][: queue_entry.UNIT_SIZE]
    if len(data) < queue_entry.UNIT_SIZE:
        return False
    unit = queue_entry.decode_at(data, 0)
    return unit.is_written and unit.physical_offset == put.physical_offset


def _check_mark(store: lq.MessageStore, model: ModelStore, seen: Seen) -> list[str]:
    """The durable offset, if it belongs to this log, is never above what the disk has."""
    mark = store.layout.durable_end
    present = {message.body for message in seen.log}
    return [
        f"the durable mark {mark} is ahead of the log: {put}"
        for put in model.puts
        if mark is not None and put.physical_offset is not None and put.physical_offset < mark
        if put.body not in present and put.body not in model.absent
    ]
