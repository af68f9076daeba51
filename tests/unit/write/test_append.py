"""The log's writer: places, rolls, refusals, threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Refusal, RunningFlags
from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format import batch, frame, sys_flag
from logquarry.format.batch import BatchItem
from logquarry.format.frame import Blank, Frame
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.write import log_appender
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.put_result import OUTCOMES, AppendStatus, PutResult, PutStatus, refusal

FILE_SIZE = 1000
NOW = 1_700_000_000_000


class Log:
    def __init__(self, root: Path, file_size: int = FILE_SIZE, **settings: object) -> None:
        self.disk = Disk()
        self.files = MappedFileQueue(self.disk, root / "commitlog", file_size)
        self.flags = RunningFlags()
        self.offsets: dict[QueueKey, int] = {}
        self.writer = CommitLogWriter(
            self.files,
            # Otherwise a put fails if another thread stops for a second while it holds the log.
            StoreConfig.from_mapping({"osPageCacheBusyTimeOutMills": 60_000} | settings),
            clock=lambda: NOW,
            queue_offsets=self.offsets,
            flags=self.flags,
            health=self.disk.health,
        )

    def outcomes(self) -> list[Frame | Blank]:
        found: list[Frame | Blank] = []
        for base in self.files.bases:
            data = self.files.select(base)
            position = 0
            while data is not None and position < len(data):
                outcome = frame.decode_at(data, position, base=base, end=self.files.file_size)
                assert isinstance(outcome, (Frame, Blank)), outcome
                found.append(outcome)
                position += outcome.size
        return found

    def frames(self) -> list[Frame]:
        return [outcome for outcome in self.outcomes() if isinstance(outcome, Frame)]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def sized(size: int, **fields: object) -> Message:
    return Message("t", bytes(size - 92), **fields)  # type: ignore[arg-type]


def test_a_frame_fits_if_eight_bytes_are_left(log: Log) -> None:
    log.writer.put(sized(500))
    log.writer.put(sized(492))
    assert (log.files.bases, log.files.max_offset) == ((0,), 992)
    result = log.writer.put(sized(100))
    assert (result.physical_offset, result.queue_offset) == (1000, 2)
    assert log.outcomes()[2] == Blank(8)


def test_a_file_is_ended_and_the_next_one_begun(log: Log) -> None:
    log.writer.put(sized(500))
    result = log.writer.put(sized(493))
    assert result.ok and result.physical_offset == 1000
    assert [type(outcome) for outcome in log.outcomes()] == [Frame, Blank, Frame]
    assert [f.queue_offset for f in log.frames()] == [0, 1]


def test_a_result_tells_where_the_message_is(log: Log) -> None:
    log.writer.put(sized(300))
    result = log.writer.put(sized(200, store_host="1.2.3.4:5"))
    assert result.status is PutStatus.PUT_OK and result.append_status is AppendStatus.PUT_OK
    assert result.message_id == "01020304000000050000" + "00000000012C"
    assert result.message_ids == (result.message_id,)
    assert (result.size, result.message_count, result.end_offset) == (200, 1, 500)
    assert result.store_timestamp == NOW and result.elapsed_ms >= 0


def test_a_batch_is_all_or_nothing(log: Log) -> None:
    log.writer.put(sized(600))
    result = log.writer.put_batch([sized(150), sized(150), sized(150)])
    assert result.physical_offset == 1000 and result.message_count == 3
    assert [type(outcome) for outcome in log.outcomes()] == [Frame, Blank, *[Frame] * 3]
    assert len(result.message_ids) == 3 and result.message_id.count(",") == 2
    assert log.offsets["t", 0] == 4
    wire = batch.encode([BatchItem(b"x")])
    assert log.writer.put_batch(wire=wire, message=Message("t")).queue_offset == 4
    with pytest.raises(TypeError):
        log.writer.put_batch([Message("t")], wire=wire)


def test_nothing_larger_than_a_file(log: Log) -> None:
    log.writer.put(sized(992))
    with pytest.raises(MessageRejected) as error:
        log.writer.put(sized(993))
    assert error.value.reason == "larger_than_file"
    with pytest.raises(MessageRejected) as error:
        log.writer.put_batch([sized(500), sized(493)])
    assert error.value.reason == "larger_than_file"
    assert (log.files.max_offset, log.offsets["t", 0]) == (992, 1)


def test_nothing_larger_than_a_file_by_multi_dispatch(tmp_path: Path) -> None:
    log = Log(tmp_path, enableMultiDispatch=True)
    properties = {"INNER_MULTI_DISPATCH": "a", "k": "x" * 900}
    with pytest.raises(MessageRejected) as error:
        log.writer.put(Message("t", properties=properties))
    assert error.value.reason == "larger_than_file"
    assert log.files.max_offset == 0


@pytest.mark.parametrize("kind", [sys_flag.TRANSACTION_PREPARED, sys_flag.TRANSACTION_ROLLBACK])
def test_open_transactions_take_no_place(log: Log, kind: int) -> None:
    log.writer.put(sized(100))
    assert log.writer.put(sized(100, sys_flag=kind)).queue_offset == 0
    assert log.writer.put(sized(100, sys_flag=kind, queue_id=5)).queue_offset == 0
    assert log.offsets == {("t", 0): 1, ("t", 5): 0}


def test_multi_dispatch_over_a_files_end(tmp_path: Path) -> None:
    log = Log(tmp_path, enableMultiDispatch=True, enableLmq=True)
    log.offsets["%LMQ%a", 0] = 9
    log.writer.put(sized(800))
    properties = {"INNER_MULTI_DISPATCH": "%LMQ%a,b"}
    for _ in range(2):
        log.writer.put(Message("t", queue_id=2, properties=properties))
    assert log.offsets == {("t", 0): 1, ("t", 2): 2, ("%LMQ%a", 0): 11, ("b", 2): 2}
    assert [
        b"INNER_MULTI_QUEUE_OFFSET\x01" + n in f.properties
        for n, f in zip((b"9,0", b"10,1"), log.frames()[1:], strict=True)
    ] == [True, True]
    # A message that is not dispatched names its queues, and takes no place in them.
    rollback = Message("t", properties=properties, sys_flag=sys_flag.TRANSACTION_ROLLBACK)
    log.writer.put(rollback)
    assert log.offsets["b", 2] == 2 and log.offsets["%LMQ%a", 0] == 11


@pytest.mark.parametrize("refused", Refusal)
def test_a_store_that_takes_no_messages(log: Log, refused: Refusal) -> None:
    log.flags.set(refused)
    with pytest.raises(StoreUnavailable, match=refused.value) as error:
        log.writer.put(Message("/"))
    assert error.value.status == "SERVICE_NOT_AVAILABLE"
    with pytest.raises(StoreUnavailable, match=refused.value):
        log.writer.put_batch([])
    log.flags.clear(refused)
    assert log.writer.put(sized(100)).ok


def test_a_poisoned_store(log: Log) -> None:
    log.writer.put(sized(100))
    log.disk.health.poison("the disk is broken")
    with pytest.raises(StoreUnavailable, match="broken") as error:
        log.writer.put(sized(100))
    assert error.value.status == "SERVICE_NOT_AVAILABLE"
    assert len(log.frames()) == 1


def test_a_file_that_cannot_be_made(log: Log, tmp_path: Path) -> None:
    log.writer.put(sized(500))
    taken = tmp_path / f"commitlog/{FILE_SIZE:020d}"
    taken.mkdir()
    for _ in range(2):
        with pytest.raises(StoreUnavailable) as error:
            log.writer.put(sized(500))
        assert error.value.status == "CREATE_MAPEDFILE_FAILED"
        assert log.files.max_offset == FILE_SIZE
    taken.rmdir()
    assert log.writer.put(sized(500)).queue_offset == 1


def test_a_put_that_holds_the_log_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(tmp_path, osPageCacheBusyTimeOutMills=20)
    inside, go_on = threading.Event(), threading.Event()

    def clock() -> int:
        inside.set()
        assert go_on.wait(60)
        return NOW

    log.writer.clock = clock
    slow = threading.Thread(target=log.writer.put, args=[sized(100, born_timestamp=1)])
    slow.start()
    assert inside.wait(60)
    time.sleep(0.05)
    with pytest.raises(StoreUnavailable, match="held the log") as error:
        log.writer.put(sized(100))
    assert error.value.status == "OS_PAGECACHE_BUSY"
    go_on.set()
    slow.join()
    assert log.writer.put(sized(100)).ok


def test_slow_puts_are_logged(
    log: Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_appender, "SLOW_PUT", -1.0)
    log.writer.put(sized(100))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1  # how long it held the log; a store also logs how long the put took
    assert all("8 bytes of body" in text and "physical_offset=0" in text for text in texts)


def test_raw_bytes(log: Log, tmp_path: Path) -> None:
    for _ in range(3):
        log.writer.put(sized(500))
    data = b"".join(bytes(log.files.select(base) or b"") for base in log.files.bases)
    other = Log(tmp_path / "slave")
    assert not other.writer.append_data(7, b"x")
    for at in range(0, len(data), 333):
        assert other.writer.append_data(at, data[at : at + 333])
        assert not other.writer.append_data(at, data[at : at + 333])
    assert other.outcomes() == log.outcomes()
    begun_late = Log(tmp_path / "late")
    assert begun_late.writer.append_data(3000, b"x")
    assert begun_late.files.min_offset == 3000


def test_too_few_bytes_for_a_blank(log: Log) -> None:
    log.writer.append_data(0, frame.encode(Frame(b"t", bytes(903)).with_crc()))
    log.writer.append_data(995, bytes(2))
    log.writer.adopt(997, dict)
    assert log.writer.put(sized(100)).physical_offset == 1000


def test_settling(tmp_path: Path) -> None:
    seen: list[bool] = []

    def settle(result: PutResult, wait: bool) -> PutResult:
        seen.append(wait)
        return result.settled(flush=PutStatus.FLUSH_DISK_TIMEOUT)

    log = Log(tmp_path)
    log.writer.settle = settle
    result = log.writer.put(Message("t"))
    assert result.ok and result.status is PutStatus.FLUSH_DISK_TIMEOUT
    log.writer.put(Message("t", wait_store_ok=False))
    assert seen == [True, False]


def test_the_replicas_status_overrides_the_flushs(log: Log) -> None:
    result = log.writer.put(Message("t"))
    late, alone = PutStatus.FLUSH_DISK_TIMEOUT, PutStatus.SLAVE_NOT_AVAILABLE
    assert result.settled() is result
    assert result.settled(flush=late).status is late
    assert result.settled(replica=alone).status is alone
    assert result.settled(flush=late, replica=alone).status is alone


def test_every_status_has_its_outcome() -> None:
    assert set(OUTCOMES) == set(PutStatus)
    for status, kind in OUTCOMES.items():
        if kind is not None:
            error = refusal(status, "why", reason="r")
            assert type(error) is kind and getattr(error, "status") == status.value  # noqa: B009


def test_many_threads(tmp_path: Path) -> None:
    log = Log(tmp_path, file_size=50_000)
    threads, each = 8, 200
    results: list[list[PutResult]] = [[] for _ in range(threads)]

    def put(number: int) -> None:
        for count in range(each):
            if count % 10 == 0:
                messages = [Message("t", b"%d %d" % (number, count))] * 3
                results[number].append(log.writer.put_batch(messages))
            else:
                message = Message("t", b"%d %d" % (number, count), queue_id=number % 3)
                results[number].append(log.writer.put(message))

    workers = [threading.Thread(target=put, args=[number]) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    frames = {f.physical_offset: f for f in log.frames()}
    assert len(frames) == sum(r.message_count for part in results for r in part)
    for number, part in enumerate(results):
        for count, result in enumerate(part):
            found = frames[result.physical_offset]
            assert found.body == b"%d %d" % (number, count)
            assert found.queue_offset == result.queue_offset
    for queue_id in range(3):
        offsets = [f.queue_offset for f in log.frames() if f.queue_id == queue_id]
        assert offsets == list(range(len(offsets)))
