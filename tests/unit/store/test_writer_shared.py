"""A writable store with several processes and threads: kinds of ends, many writers, a reader."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreError, StoreUnavailable
from logquarry.read.get_message import GetMessageStatus
from logquarry.repair.verification import verify_store
from tests.helpers.python_process import run
from tests.helpers.small_store import bodies, config, opened
from tests.helpers.waiting import eventually

# ------------------------------------------------------------------------------------ processes
OPEN = """
    import os, signal, sys, threading
    import logquarry as lq
    config = lq.StoreConfig(
        mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=400,
        max_hash_slot_num=50, max_index_num=200,
    )
    store = lq.MessageStore.open(sys.argv[1], mode="rw", config=config)
    result = store.put(lq.Message("t", b"first", keys="k"))
"""


def test_the_interpreters_end_closes_the_store(tmp_path: Path) -> None:
    done = run(OPEN, tmp_path, timeout=120)
    # A busy machine may add warnings about slow syncs.
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
    assert not (tmp_path / "abort").exists()
    with opened(tmp_path) as store:
        assert store.queue_offsets("t", 0) == (0, 1)


def test_a_kill_leaves_abort(tmp_path: Path) -> None:
    done = run(OPEN + "    os.kill(os.getpid(), signal.SIGKILL)", tmp_path, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "abort").exists()
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == [b"first"]
    with opened(tmp_path) as store:
        assert bodies(store) == [b"first"]


def test_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    code = (
        OPEN
        + """
    import warnings
    warnings.simplefilter("ignore")
    store.wait_dispatched()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: store.put(lq.Message("t")),
            lambda: store.put_async(lq.Message("t")).result(),
            lambda: store.get("t", 0),
            lambda: store.wait_dispatched(),
            lambda: store.flush(),
            lambda: list(store.scan()),
            lambda: store.append_data(result.end_offset, b"x"),
        ):
            try:
                call()
            except lq.errors.StoreUnavailable:
                refused += 1
        store.close()
        sys.exit(refused)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), os.path.exists(os.path.join(sys.argv[1], "abort")))
    print(store.put(lq.Message("t", b"second")).queue_offset)
    store.close()
    """
    )
    done = run(code, tmp_path, timeout=120)
    assert done.stdout.split() == ["7", "True", "1"], done.stderr
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == [b"first", b"second"] and not reader.has_abort


# -------------------------------------------------------------------------------------- threads
def many_writers(root: Path, each: int, settings: lq.StoreConfig, threads: int = 8) -> None:
    """Threads put while one reads all queues; then the files are checked."""
    queues = 4
    offsets: list[list[tuple[int, int]]] = [[] for _ in range(threads)]
    seen: Counter[bytes] = Counter()
    writing = threading.Event()
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for count in range(each):
                body = b"%d-%d" % (number, count)
                result = store.put(lq.Message("t", body, queue_id=(number + count) % queues))
                offsets[number].append(((number + count) % queues, result.queue_offset))
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        at = dict.fromkeys(range(queues), 0)
        try:
            while True:
                was_writing = writing.is_set()
                before = dict(at)
                for queue_id in at:
                    answer = store.get("t", queue_id, at[queue_id])
                    for place, message in enumerate(answer.messages):
                        assert message.queue_offset == at[queue_id] + place
                        seen[message.body] += 1
                    if answer.messages:
                        at[queue_id] = answer.next_offset
                if at == before:
                    if not was_writing:
                        return
                    time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    with lq.MessageStore.open(root, mode="rw", config=settings) as store:
        writing.set()
        writers = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
        reader = threading.Thread(target=read)
        for thread in (*writers, reader):
            thread.start()
        for thread in writers:
            thread.join()
        assert store.wait_dispatched(timeout=120)
        writing.clear()
        reader.join()
        assert failures == []
    total = threads * each
    assert len(seen) == total and set(seen.values()) == {1}
    given = sorted(place for found in offsets for place in found)
    for queue_id in range(queues):
        numbers = [offset for queue, offset in given if queue == queue_id]
        assert numbers == list(range(len(numbers))), "gaps, or one given twice"
    with lq.MessageStore.open(root) as reread:
        counted = sum(len(batch) for batch in reread.to_arrow(columns=["body"]))
        assert counted == total
        report = verify_store(reread.layout)
        assert not report.has_damage, report.findings[:3]


def test_eight_writers_and_a_reader(tmp_path: Path) -> None:
    many_writers(tmp_path, 500, config())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_writers_and_a_reader_for_two_million_messages(tmp_path: Path) -> None:
    many_writers(
        tmp_path,
        250_000,
        lq.StoreConfig(
            mapped_file_size_commit_log=64 << 20, max_hash_slot_num=5_000, max_index_num=20_000
        ),
    )


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 14),
    reason="in Python 3.14, an interrupt can leave a lock taken (python/cpython#148874)",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("waits", [False, True])
def test_interrupted_puts(waits: bool, tmp_path: Path) -> None:
    """Ctrl-C comes at any point, and a program may go on after it."""

    class InterruptedHere(BaseException):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedHere

    # Another signal than the alarm of pytest's timeout.
    before = signal.signal(signal.SIGVTALRM, interrupt)
    rng = random.Random(1)
    acked = interrupted = 0
    store = opened(
        tmp_path,
        mapped_file_size_commit_log=65_536,
        mapped_file_size_consume_queue=20_000,
        max_index_num=10 if waits else 5_000,
    )

    # In a function: if a signal arrives while Python jumps back to the start of a loop, Python can
    # skip the except clauses of the loop's own function (python/cpython#130279).
    def put_until_interrupted() -> None:
        nonlocal acked
        while True:
            store.put(lq.Message("t", bytes(40), keys="k"))
            acked += 1
            if waits:
                store.wait_dispatched(timeout=0.002)
                if acked % 5 == 0:
                    store.flush()

    try:
        while interrupted < 80:
            try:
                # A second signal follows: Hypothesis has a callback in the garbage collector, which
                # swallows signals.
                signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(0.0003, 0.003), 0.1)
                put_until_interrupted()
            except InterruptedHere:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert store.wait_dispatched(timeout=60)
    store.close()
    with lq.MessageStore.open(tmp_path) as reader:
        assert not reader.has_abort
        offsets = [message.queue_offset for message in reader.scan()]
        # The message of an interrupted put may still be in the log.
        assert acked <= len(offsets) <= acked + interrupted
        assert offsets == list(range(len(offsets)))
        assert reader.queue_offsets("t", 0) == (0, len(offsets))
        assert not verify_store(reader.layout).has_damage


def test_closing_while_others_put(tmp_path: Path) -> None:
    """Acknowledged messages are there, and refused ones are not."""
    store = opened(tmp_path)
    acked: list[bytes] = []
    change = threading.Lock()

    def write(number: int) -> None:
        for count in range(100_000):
            body = b"%d-%d" % (number, count)
            try:
                store.put(lq.Message("t", body))
            except StoreError:
                return
            with change:
                acked.append(body)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(acked) > 100)
    store.close()
    for thread in threads:
        thread.join()
    with lq.MessageStore.open(tmp_path) as reader:
        assert sorted(bodies(reader)) == sorted(acked)
        assert reader.queue_offsets("t", 0) == (0, len(acked))
        assert not reader.has_abort


def test_closing_while_others_flush_and_read(tmp_path: Path) -> None:
    """Each call gets an answer or a refusal, and the store is cleanly closed."""
    for round_ in range(12):
        store = opened(tmp_path, max_index_num=5, flush_interval_consume_queue=1)
        store.put_many([lq.Message("t", keys=f"k{n}") for n in range(30)])
        store.wait_dispatched()
        count = 30 * (round_ + 1)

        def until_refused(act: Callable[[], object]) -> None:
            with pytest.raises(StoreUnavailable):
                while True:
                    act()

        def read(store: lq.MessageStore = store, count: int = count) -> None:
            # The queue's last file is closed first.
            found = store.get("t", 0, count - 1)
            assert (found.status, len(found.messages)) == (GetMessageStatus.FOUND, 1)

        with ThreadPoolExecutor(4) as pool:
            acts: list[Callable[[], object]] = [store.flush, read] * 2
            acting = [pool.submit(until_refused, act) for act in acts]
            time.sleep(0.02)
            store.close()
            for done in acting:
                done.result(60)
        assert not (tmp_path / "abort").exists()


def test_several_flush(tmp_path: Path) -> None:
    """Small index files fill all the time, and each thread finds the same files to sync."""
    with opened(tmp_path, max_index_num=5, flush_interval_consume_queue=1) as store:
        stop = threading.Event()

        def flush() -> None:
            while not stop.is_set():
                store.flush()

        with ThreadPoolExecutor(3) as pool:
            flushing = [pool.submit(flush) for _ in range(3)]
            try:
                for number in range(400):
                    store.put(lq.Message("t", keys=f"k{number}"))
                assert store.wait_dispatched(timeout=60)
            finally:
                stop.set()
            for done in flushing:
                done.result()
    assert not (tmp_path / "abort").exists()
    with lq.MessageStore.open(tmp_path) as reader:
        assert len(reader.query("t", "k399")) == 1
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings


def test_reading_beside_the_writer(tmp_path: Path) -> None:
    """Scans of a growing log see a growing prefix."""
    with opened(tmp_path) as store:
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set() and number < 6_000:
                store.put(lq.Message("t", b"%d" % number + bytes(number % 300)))
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        seen = 0
        for _ in range(6):
            found = [message.physical_offset for message in store.scan()]
            assert len(found) >= seen and found == sorted(set(found))
            seen = len(found)
            with lq.MessageStore.open(tmp_path) as other:
                assert len(list(other.scan())) >= seen
        stop.set()
        writer.join()
