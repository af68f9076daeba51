"""Measures puts, gets and a consumer; ``oracle/bench`` measures RocketMQ in the same way.

A benchmark makes a store with RocketMQ's file sizes, puts some messages to warm up, measures, and
deletes the store. For puts, the benchmark measures two durations: until the last put returns, and
until all messages are dispatched.

=========  ==================================================================================
put        single puts; the time includes making each message and its property string
put-batch  batches, each for one topic and queue, from at most 256 prepared wire forms
put-many   prepared record batches; with ``as_messages`` the time includes making the messages
get        gets of 32 messages that read body, queue offset, store time and tags; then gets that
           only read the frames
consume    one consumer of all topics with a tag filter, which reads the same four fields; then
           the CPU time of the waiting consumer
=========  ==================================================================================
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from logquarry.bench.peers import bench_peer, prime
from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.format import batch
from logquarry.format.batch import BatchItem
from logquarry.message import Message
from logquarry.store.message_store import MessageStore, StoreWriter
from logquarry.text import plural
from logquarry.write.put_result import PutStatus
from logquarry.write.settling import PutFuture

BORN_HOST: Final = "127.0.0.1:40000"
FIRST_BORN: Final = 1_700_000_000_000
LARGEST_BATCH: Final = 1 << 26
"""Maximum bytes of the bodies in one call."""
_MOST_PREPARED: Final = 1 << 29
"""Maximum bytes of the bodies in all prepared batches. A single batch may be larger."""
_WIRES: Final = 256
_MOST_BATCHES: Final = 64
_AT_ONCE: Final = 32
_PASSES: Final = 3
_TAGS: Final = "TagA || TagB"
_LONGEST_IDLE: Final = 5.0
_IDLE_PER_MESSAGE: Final = 1e-5
_SETTLE_SECONDS: Final = 0.5
_LEAST_WARMUP: Final = 200_000
_LEAST_WARMUP_BYTES: Final = 1 << 30
_SYNC_WARMUP: Final = 2_000
# Kept as a constant, because in Python 3.11 it takes 0.15 us to look up a member of an enum.
_PUT_OK: Final = PutStatus.PUT_OK


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The settings of a benchmark: which messages it puts, and how.

    Attributes:
        n: number of measured messages.
        keys: number of index keys of a message: 0, 1 (KEYS) or 2 (also UNIQ_KEY).
        outstanding: only for ``put``: the number of ``put_async`` calls that each thread starts
            before it waits for the first of these. With 0, a thread waits for each message.
        is_sync: whether a put waits until its message is on the disk (SYNC_FLUSH).
        is_transient: whether to write through a pool of buffers (``transientStorePoolEnable``).
        as_messages: only for ``put-many``: whether to put Message objects instead of record
            batches.
        warmup: number of messages that are put before the measurement. None means a quarter of
            ``n``, but at least 200,000 messages, or 1 GiB of bodies if these are fewer messages.
            With ``is_sync``, None means ``n``, but at most 2,000.
        prime: only for puts: GiB of memory to use and free just before the measurement
            (:func:`logquarry.bench.peers.prime`).

    Raises:
        UsageError: if a batch has more bytes than LARGEST_BATCH.
    """

    n: int = 1_000_000
    body: int = 256
    topics: int = 4
    queues: int = 4
    keys: int = 1
    threads: int = 1
    outstanding: int = 0
    batch: int = 32
    is_sync: bool = False
    is_transient: bool = False
    as_messages: bool = False
    warmup: int | None = None
    prime: int = 0

    def __post_init__(self) -> None:
        length = self.batch * self.body
        if length > LARGEST_BATCH:
            raise UsageError(
                f"a batch of {plural(self.batch, 'body', 'bodies')} of {plural(self.body, 'byte')} "
                f"has {plural(length, 'byte')}; the maximum is {LARGEST_BATCH:,}: use a smaller "
                "--batch or --body"
            )

    @property
    def warmup_count(self) -> int:
        """Number of messages that are put before the measurement."""
        if self.warmup is not None:
            return self.warmup
        if self.is_sync:
            return min(self.n, _SYNC_WARMUP)
        least = min(_LEAST_WARMUP, _LEAST_WARMUP_BYTES // max(1, self.body))
        return max(least, self.n // 4)

    def prepared(self, most: int) -> int:
        """Return the number of batches to prepare before the measurement, at most ``most``."""
        return max(1, min(most, _MOST_PREPARED // max(1, self.batch * self.body)))


class Bench:
    """Puts the messages of a :class:`Load` into a store; measures the puts, gets, or a consumer."""

    def __init__(self, store: StoreWriter, load: Load) -> None:
        self._store = store
        self._load = load
        self._body = random.Random(1).randbytes(load.body)

    # ------------------------------------------------------------------------------- messages
    def _properties(self, number: int) -> str:
        text = "TAGS\x01TagA"
        if self._load.keys > 1:
            text = f"UNIQ_KEY\x010A0A0A0A0000000000000000{10_000_000 + number}\x02{text}"
        return f"KEYS\x01key{number}\x02{text}" if self._load.keys else text

    def _places(self, start: int, step: int) -> Iterator[tuple[str, int]]:
        topics = [f"BenchTopic{topic}" for topic in range(self._load.topics)]
        count, queues = len(topics), self._load.queues
        numbers = range(start, start + count * queues * step, step)
        return itertools.cycle([(topics[i % count], i // count % queues) for i in numbers])

    def _messages(self, start: int, stop: int, step: int) -> Iterator[Message]:
        body, numbers = self._body, range(start, stop, step)
        if self._load.keys == 1:
            # Make each message with the call that a user's program would make.
            for i, (topic, queue_id) in zip(numbers, self._places(start, step), strict=False):
                yield Message(
                    topic,
                    body,
                    queue_id=queue_id,
                    keys=f"key{i}",
                    tags="TagA",
                    born_timestamp=FIRST_BORN + i,
                    born_host=BORN_HOST,
                )
            return
        for i, (topic, queue_id) in zip(numbers, self._places(start, step), strict=False):
            yield Message(
                topic,
                body,
                queue_id=queue_id,
                born_timestamp=FIRST_BORN + i,
                born_host=BORN_HOST,
                properties_string=self._properties(i),
            )

    def _record_batch(self, start: int) -> pa.RecordBatch:
        load, numbers = self._load, range(start, start + self._load.batch)
        columns: dict[str, Any] = {
            "topic": [f"BenchTopic{i % load.topics}" for i in numbers],
            "queue_id": pa.array([i // load.topics % load.queues for i in numbers], pa.int32()),
            "body": pa.array([self._body] * load.batch, pa.binary()),
            "born_timestamp": pa.array([FIRST_BORN + i for i in numbers], pa.int64()),
            "born_host": [BORN_HOST] * load.batch,
            "tags": ["TagA"] * load.batch,
        }
        if load.keys:
            columns["keys"] = [f"key{i}" for i in numbers]
        return pa.record_batch(columns)

    # ------------------------------------------------------------------------------------ puts
    def putter(self, kind: str) -> Callable[[int, int, int], None]:
        """Return a function ``put(start, stop, step)`` that puts this range of messages."""
        if kind == "put":
            return self._put_outstanding if self._load.outstanding else self._put
        if kind == "put-batch":
            return self._batch_putter()
        if self._load.as_messages:
            return self._put_many_messages
        return self._many_putter()

    def _put(self, start: int, stop: int, step: int) -> None:
        put = self._store.put
        for message in self._messages(start, stop, step):
            result = put(message)
            if result.status is not _PUT_OK:
                _require(result)

    def _put_outstanding(self, start: int, stop: int, step: int) -> None:
        put, pending = self._store.put_async, deque[PutFuture]()
        for message in self._messages(start, stop, step):
            if len(pending) >= self._load.outstanding:
                _require(pending.popleft().result())
            pending.append(put(message))
        for future in pending:
            _require(future.result())

    def _batch_putter(self) -> Callable[[int, int, int], None]:
        load = self._load
        wires = [
            batch.encode(
                BatchItem(self._body, self._properties(wire * load.batch + number).encode())
                for number in range(load.batch)
            )
            for wire in range(load.prepared(_WIRES))
        ]

        def put(start: int, stop: int, step: int) -> None:
            put_batch = self._store.put_batch
            for i in range(start, stop, step):
                number = i // load.batch
                shared = Message(
                    f"BenchTopic{number % load.topics}",
                    queue_id=number // load.topics % load.queues,
                    born_timestamp=FIRST_BORN + i,
                    born_host=BORN_HOST,
                )
                _require(put_batch(wire=wires[number % len(wires)], message=shared))

        return put

    def _many_putter(self) -> Callable[[int, int, int], None]:
        load = self._load
        wanted = (load.n + load.warmup_count) // load.batch + 1
        batches = [
            self._record_batch(number * load.batch)
            for number in range(min(wanted, load.prepared(_MOST_BATCHES)))
        ]

        def put(start: int, stop: int, step: int) -> None:
            for i in range(start, stop, step):
                _require(self._store.put_many(batches[i // load.batch % len(batches)]))

        return put

    def _put_many_messages(self, start: int, stop: int, step: int) -> None:
        for i in range(start, stop, step):
            messages = self._messages(i, i + self._load.batch, 1)
            _require(self._store.put_many(messages))

    # ------------------------------------------------------------------------------ measurements
    def timed(self, kind: str) -> dict[str, float]:
        """Put messages to warm up, then ``Load.n`` messages. Return the durations and rates of the
        puts after the warm-up.
        """
        load = self._load
        each = 1 if kind == "put" else load.batch
        put = self.putter(kind)
        warmup = load.warmup_count // each * each
        count = max(load.n // each, 1) * each
        self._run(put, 0, warmup, each)
        self._store.wait_dispatched()
        time.sleep(_SETTLE_SECONDS)
        prime(Path(self._store.root).parent, load.prime)
        before = self._store.max_offset
        began, used = time.perf_counter(), time.thread_time()
        self._run(put, warmup, warmup + count, each)
        seconds, used = time.perf_counter() - began, time.thread_time() - used
        self._store.wait_dispatched()
        dispatched = time.perf_counter() - began
        size = self._store.max_offset - before
        return {
            "n": count,
            "seconds": seconds,
            "messages_per_s": count / seconds,
            "bytes_per_s": size / seconds,
            # Measure the processor time of the thread that puts, because other programs do not
            # affect it.
            **({"cpu_us_per_message": used / count * 1e6} if load.threads == 1 else {}),
            "seconds_until_dispatched": dispatched,
            "messages_per_s_until_dispatched": count / dispatched,
        }

    def _run(self, put: Callable[[int, int, int], None], start: int, stop: int, each: int) -> None:
        threads = self._load.threads
        if threads == 1:
            put(start, stop, each)
            return
        firsts = range(start, start + threads * each, each)
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(put, first, stop, each * threads) for first in firsts]:
                done.result()

    def timed_gets(self) -> dict[str, float]:
        """Get all messages of all queues several times, with and without reading their fields.
        Return the fastest times.
        """
        best: dict[str, float] = {}
        count = 0
        for name, decoded in itertools.product(("raw", "decoded"), range(_PASSES)):
            began = time.perf_counter()
            count = sum(
                self._get_queue(topic, queue_id, decode=name == "decoded")
                for topic, queue_id in self._store.queues()
                if topic.startswith("BenchTopic")
            )
            seconds = time.perf_counter() - began
            best[name] = seconds if decoded == 0 else min(best[name], seconds)
        size = self._store.max_offset - self._store.min_offset
        return {
            "n": count,
            "seconds": best["decoded"],
            "messages_per_s": count / best["decoded"],
            "bytes_per_s": size / best["decoded"],
            "raw_seconds": best["raw"],
            "raw_messages_per_s": count / best["raw"],
        }

    def timed_consumer(self) -> dict[str, float]:
        """Consume all messages in one thread, three times, each time under the name of a new
        consumer group. Return the result of the fastest pass.
        """
        topics = sorted(topic for topic in self._store.topics if topic.startswith("BenchTopic"))
        best, cpu, count = math.inf, math.inf, 0
        for number in range(_PASSES):
            with self._store.consumer(f"bench{number}", topics, tags=_TAGS, timeout=0) as consumer:
                began, used = time.perf_counter(), time.thread_time()
                count = 0
                for message in consumer:
                    _ = message.body, message.queue_offset, message.store_timestamp, message.tags
                    count += 1
                best = min(best, time.perf_counter() - began)
                cpu = min(cpu, time.thread_time() - used)
        with self._store.consumer("bench", topics, tags=_TAGS, start="latest") as consumer:
            consumer.poll()
            idle = min(_LONGEST_IDLE, _IDLE_PER_MESSAGE * self._load.n)
            used = time.process_time()
            consumer.poll(timeout=idle)
            used = time.process_time() - used
        size = self._store.max_offset - self._store.min_offset
        return {
            "n": count,
            "seconds": best,
            "messages_per_s": count / best,
            "bytes_per_s": size / best,
            "cpu_seconds": cpu,
            "idle_cpu_percent": 100 * used / idle,
        }

    def _get_queue(self, topic: str, queue_id: int, *, decode: bool) -> int:
        get = self._store.get
        offset = count = 0
        while True:
            found = get(topic, queue_id, offset, _AT_ONCE)
            if not found.messages:
                return count
            count += len(found.messages)
            offset = found.next_offset
            if decode:
                for message in found.messages:
                    _ = message.body, message.queue_offset, message.store_timestamp, message.tags


def bench_store(
    kind: str, folder: Path, load: Load, beside: Sequence[str] = ()
) -> dict[str, float]:
    """Measure one kind of work (``put``, ``get`` ...) on a new store, and delete the store."""
    folder.mkdir(parents=True, exist_ok=True)
    if beside:
        found = bench_store(kind, folder, load)
        for name in beside:
            other = bench_peer(
                name,
                folder,
                random.Random(1).randbytes(load.body),
                n=load.n,
                warmup=load.warmup_count,
                each=1 if kind == "put" else load.batch,
                primed=load.prime,
            )
            found |= {f"{name}_{what}": value for what, value in other.items()}
            found[f"ratio_to_{name}"] = found["messages_per_s"] / other["messages_per_s"]
            used = other["cpu_us_per_message"] / found["cpu_us_per_message"]
            found[f"cpu_ratio_to_{name}"] = used
        return found
    config = StoreConfig(
        flush_disk_type="SYNC_FLUSH" if load.is_sync else "ASYNC_FLUSH",
        transient_store_pool_enable=load.is_transient,
    )
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=folder))
    try:
        with MessageStore.open(root / "store", mode="rw", config=config) as store:
            bench = Bench(store, load)
            if kind not in ("get", "consume"):
                return bench.timed(kind)
            put = bench.putter("put-many")
            put(0, max(load.n // load.batch, 1) * load.batch, load.batch)
            store.wait_dispatched()
            return bench.timed_gets() if kind == "get" else bench.timed_consumer()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _require(result: Any) -> None:
    if result.status is not _PUT_OK:
        raise RuntimeError(f"a put failed: {result}")
