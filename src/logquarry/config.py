"""Settings of a store: what fixes its bytes, and what only tunes the work on it.

Names are ``MessageStoreConfig``'s in snake_case. RocketMQ's own spellings (``broker.conf``,
JSON) are parsed here, at the edge, and nowhere else. Configurations are frozen; a change is a new
object (:func:`dataclasses.replace`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from logquarry.errors import UsageError
from logquarry.format import delay, index, java, queue_entry, state_table

logger = logging.getLogger(__name__)

TOPIC_CHECKS: Final = ("store", "rocketmq-broker")
BROKER_ROLES: Final = ("ASYNC_MASTER", "SYNC_MASTER", "SLAVE")
RECOVERIES: Final = ("safe", "rocketmq")
DIALECTS: Final = ("4.9", "3.1")
IndexKeys = Literal["3.1", "4.9", "5.4"]
"""The keys that an index takes, by the version that began with it: the words of KEYS, hashed with
their sign; UNIQ_KEY and those words; these and the tag."""
FLUSH_DISK_TYPES: Final = ("ASYNC_FLUSH", "SYNC_FLUSH")

DEFAULT_COMMIT_LOG_FILE: Final = 1 << 30
"""Bytes of a commit log file where neither files nor settings say (``mappedFileSizeCommitLog``)."""

_MOST_MESSAGE_BYTES: Final = {"4.9": 4 << 20, "3.1": 512 << 10}
_DELAY_LEVELS: Final = {"4.9": delay.DEFAULT_LEVELS, "3.1": delay.LEVELS_3}
"""What the two dialects have where the settings do not say."""

STORE_SETTINGS: Final = frozenset(
    {
        "storePathRootDir",
        "storePathCommitLog",
        "storePathDLedgerCommitLog",
        "enableDLegerCommitLog",
        "storeType",
        "configManagerVersion",
        "enabledAppendPropCRC",
        "enableConsumeQueueExt",
        "enableControllerMode",
        "messageStorePlugIn",
        "writeWithoutMmap",
        "indexRocksDBEnable",
        "timerRocksDBEnable",
        "transRocksDBEnable",
    }
)
"""RocketMQ's settings that decide which files a store consists of (``broker_settings``)."""

_CHOICES: Final = {
    "dialect": DIALECTS,
    "topic_check": TOPIC_CHECKS,
    "recovery": RECOVERIES,
    "broker_role": BROKER_ROLES,
    "flush_disk_type": FLUSH_DISK_TYPES,
}
_ABOVE_ZERO: Final = (
    "flush_interval_commit_log",
    "commit_interval_commit_log",
    "transient_store_pool_size",
    "flush_interval_consume_queue",
    "slave_timeout",
    "ha_slave_fallbehind_max",
    "clean_resource_interval",
    "delete_files_batch_max",
    "flush_consumer_offset_interval",
    "flush_delay_offset_interval",
    "transaction_check_interval",
    "check_transaction_message_timer_interval",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """What fixes the bytes. ``None`` means: as the files that are there say.

    Attributes:
        mapped_file_size_commit_log: bytes of a commit log file (RocketMQ: 1 GiB).
        mapped_file_size_consume_queue: bytes of a queue file, rounded up to whole units
            (RocketMQ: 6,000,000).
        max_hash_slot_num: slots of an index file (RocketMQ: 5,000,000).
        max_index_num: entries of an index file, the unused entry 0 included
            (RocketMQ: 20,000,000).
        tran_state_table_mapped_file_size: bytes of a file of the 3.x state table
            (RocketMQ: 48,000,000).
        tran_redo_log_mapped_file_size: bytes of a file of its redo log (RocketMQ: 40,000,000).
        index_tags: whether the index has an entry for each message's tag, as RocketMQ 5.4 and
            later write it. A new store has none.
    """

    mapped_file_size_commit_log: int | None = None
    mapped_file_size_consume_queue: int | None = None
    max_hash_slot_num: int | None = None
    max_index_num: int | None = None
    tran_state_table_mapped_file_size: int | None = None
    tran_redo_log_mapped_file_size: int | None = None
    index_tags: bool | None = None

    def __post_init__(self) -> None:
        for field in fields(LayoutConfig):
            value = getattr(self, field.name)
            if field.name == "index_tags":
                continue
            if value is not None and value <= 0:
                raise UsageError(f"{field.name} is {value}, and must be above 0")
            # RocketMQ's are ints, and what is reckoned from one is to stay within 64 bits.
            if value is not None and value > java.INT_MAX:
                raise UsageError(f"{field.name} is {value}, and must not be above {java.INT_MAX}")

    @property
    def queue_file_size(self) -> int | None:
        """Bytes of a queue file in whole units (``getMappedFileSizeConsumeQueue``)."""
        return _whole_units(self.mapped_file_size_consume_queue, queue_entry.UNIT_SIZE)

    @property
    def state_table_file_size(self) -> int | None:
        """Bytes of a file of the state table in whole units."""
        return _whole_units(self.tran_state_table_mapped_file_size, state_table.UNIT_SIZE)

    @property
    def redo_log_file_size(self) -> int | None:
        """Bytes of a file of the redo log in whole units."""
        return _whole_units(self.tran_redo_log_mapped_file_size, queue_entry.UNIT_SIZE)

    @property
    def index_shape(self) -> index.IndexShape | None:
        """The shape of index files where both numbers are stated."""
        if self.max_hash_slot_num is None and self.max_index_num is None:
            return None
        return index.IndexShape(
            self.max_hash_slot_num or index.DEFAULT_SLOTS,
            self.max_index_num or index.DEFAULT_ENTRIES,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig(LayoutConfig):
    """The settings of a store. Defaults are RocketMQ 4.9.3's.

    Attributes:
        dialect: what a writer writes: ``"4.9"``, or ``"3.1"`` for the store of RocketMQ 3.1.3 with
            its transaction state table (docs/dialect-3.1.md). Readers know both without it.
        message_delay_level: delay of each level, level 1 first; where it is not stated, the 18
            levels of 4.9.3, or the 16 of 3.1.3.
        max_msgs_num_batch: most messages that one index query gives.
        max_transfer_count_on_message_in_memory: most messages of one ``get``.
        max_transfer_bytes_on_message_in_memory: most bytes of one ``get``.
        max_transfer_count_on_message_in_disk: the same further back in the log than
            ``access_message_in_memory_max_ratio`` percent of the machine's memory.
        max_transfer_bytes_on_message_in_disk: likewise.
        access_message_in_memory_max_ratio: percent of memory taken for page cache.
        enable_multi_dispatch: whether INNER_MULTI_DISPATCH puts a message into further queues.
        enable_lmq: whether those of them that start with ``%LMQ%`` all have the queue id 0.
        decompress_limit: bytes that one compressed body may turn into.
        recovery: what is done to a store that was not closed in order: ``"safe"`` loses nothing
            that stands whole in the log, ``"rocketmq"`` does what RocketMQ would, and as it does
            also to one that was.
        check_crc_on_recover: whether the last three files of the log are compared with the CRCs of
            their bodies when a store is opened that was closed in order, and whatever
            ``"rocketmq"`` reads when it recovers.
        message_index_safe: whether ``"rocketmq"`` goes back as far as the index may lack messages.
        max_message_size: most bytes of a frame, and of the wire form of a batch; where it is not
            stated (0), 4 MiB, and 512 KiB in dialect 3.1.
        store_host: what a message without a store host of its own gets.
        topic_check: what a topic to be written may be: ``"store"`` for any name that is safe as
            a folder's, ``"rocketmq-broker"`` for the letters that RocketMQ's broker takes.
        broker_role: ``ASYNC_MASTER``, ``SYNC_MASTER`` or ``SLAVE``, which takes no messages.
        os_page_cache_busy_time_out_mills: how long one put may hold the log before others are
            refused.
        flush_disk_type: ``ASYNC_FLUSH``, or ``SYNC_FLUSH``: a put waits until it is on the disk.
        sync_flush_timeout: how long it waits for that, in milliseconds as all times here.
        flush_interval_commit_log: pause between two flushes of the log that nobody waits for.
        flush_commit_log_timed: whether such a flush keeps to the interval also when puts come.
        flush_commit_log_least_pages: least pages of 4 KiB that such a flush is for.
        flush_commit_log_thorough_interval: how often one takes whatever there is.
        commit_interval_commit_log: the same for commits of the transient store pool.
        commit_commit_log_least_pages: likewise.
        commit_commit_log_thorough_interval: likewise.
        transient_store_pool_enable: write to memory first, and to the log's files from there.
            Only with ASYNC_FLUSH, and not on a slave.
        transient_store_pool_size: buffers, each as large as a file of the log.
        fast_fail_if_no_buffer_in_store_pool: refuse puts while no buffer is free.
        warm_mapped_file_enable: bring all pages of a file into memory when it is made.
        flush_least_pages_when_warm_mapped_file: has no use here: a warm file is populated, not
            written.
        flush_interval_consume_queue: pause between two flushes of the queues.
        flush_consume_queue_least_pages: as for the log.
        flush_consume_queue_thorough_interval: likewise; then the checkpoint is written too.
        message_index_enable: whether keys are put into an index.
        slave_timeout: how long a put on a ``SYNC_MASTER`` waits for a slave.
        ha_slave_fallbehind_max: bytes that a slave may be behind to be waited for.
        ha_send_heartbeat_interval: after how long without a word master and slave say one.
        ha_housekeeping_interval: after how long without a word the other side counts as gone.
        ha_transfer_batch_size: most bytes of the log that a master sends at once.
        clean_expired_files: whether a store that is open to be written deletes what has expired.
            RocketMQ always does; here nothing goes that nobody asked for (docs/retention.md).
        file_reserved_time: hours after which a file of the log has expired, counted from the store
            time of its last message; older half messages are given up.
        delete_when: the hours of the day, with ``;`` between them, in which expired files go.
        disk_max_used_space_ratio: percent of the disk: where it is fuller, expired files go at any
            hour.
        clean_file_forcibly_enable: whether files go that have not expired, where the disk is more
            than 85 % full. (RocketMQ: true.)
        clean_resource_interval: pause between two looks at what has expired.
        delete_commit_log_files_interval: pause between two files of the log.
        delete_files_batch_max: most files of the log that one look deletes.
        flush_consumer_offset_interval: how often the offsets of consumers are written.
        deliver_delayed: whether a store that is opened to be written delivers delayed messages
            from then on. Otherwise it does when it is told to
            (:meth:`~logquarry.store.write_api.WriteApi.start_delivery`).
        flush_delay_offset_interval: how often it is saved how far that has come.
        transaction_time_out: age of a half message from which on a check asks for it.
        transaction_check_max: how often it is asked for before it is given up.
        transaction_check_interval: pause between two checks.
        check_transaction_message_timer_interval: pause between two checks of open transactions,
            in dialect 3.1.
        check_transaction_message_atleast_interval: how old a transaction is at least that is
            checked.
        broker_settings: (name, value) of the broker's settings that logquarry does not act on but
            that decide which files the store consists of; ``from_mapping`` and ``from_file`` fill
            it. The store's features are determined from it.
    """

    dialect: str = DIALECTS[0]
    message_delay_level: str = ""
    max_msgs_num_batch: int = 64
    max_transfer_count_on_message_in_memory: int = 32
    max_transfer_bytes_on_message_in_memory: int = 256 * 1024
    max_transfer_count_on_message_in_disk: int = 8
    max_transfer_bytes_on_message_in_disk: int = 64 * 1024
    access_message_in_memory_max_ratio: int = 40
    enable_multi_dispatch: bool = False
    enable_lmq: bool = False
    decompress_limit: int = 64 << 20
    max_message_size: int = 0
    store_host: str = "127.0.0.1:10911"
    topic_check: str = TOPIC_CHECKS[0]
    recovery: str = RECOVERIES[0]
    check_crc_on_recover: bool = True
    message_index_safe: bool = False
    broker_role: str = BROKER_ROLES[0]
    os_page_cache_busy_time_out_mills: int = 1_000
    flush_disk_type: str = FLUSH_DISK_TYPES[0]
    sync_flush_timeout: int = 5_000
    flush_interval_commit_log: int = 500
    flush_commit_log_timed: bool = True
    flush_commit_log_least_pages: int = 4
    flush_commit_log_thorough_interval: int = 10_000
    commit_interval_commit_log: int = 200
    commit_commit_log_least_pages: int = 4
    commit_commit_log_thorough_interval: int = 200
    transient_store_pool_enable: bool = False
    transient_store_pool_size: int = 5
    fast_fail_if_no_buffer_in_store_pool: bool = False
    warm_mapped_file_enable: bool = False
    flush_least_pages_when_warm_mapped_file: int = 4_096
    flush_interval_consume_queue: int = 1_000
    flush_consume_queue_least_pages: int = 2
    flush_consume_queue_thorough_interval: int = 60_000
    message_index_enable: bool = True
    slave_timeout: int = 3_000
    ha_slave_fallbehind_max: int = 256 << 20
    ha_send_heartbeat_interval: int = 5_000
    ha_housekeeping_interval: int = 20_000
    ha_transfer_batch_size: int = 32 * 1024
    clean_expired_files: bool = False
    file_reserved_time: int = 72
    delete_when: str = "04"
    disk_max_used_space_ratio: int = 75
    clean_file_forcibly_enable: bool = False
    clean_resource_interval: int = 10_000
    delete_commit_log_files_interval: int = 100
    delete_files_batch_max: int = 10
    flush_consumer_offset_interval: int = 5_000
    deliver_delayed: bool = False
    flush_delay_offset_interval: int = 10_000
    transaction_time_out: int = 6_000
    transaction_check_max: int = 15
    transaction_check_interval: int = 60_000
    check_transaction_message_timer_interval: int = 60_000
    check_transaction_message_atleast_interval: int = 60_000
    broker_settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        LayoutConfig.__post_init__(self)
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"{name} is {value!r}, and must be one of {', '.join(known)}")
        for name in _ABOVE_ZERO:
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, and must be above 0")
        if not self.message_delay_level:
            object.__setattr__(self, "message_delay_level", _DELAY_LEVELS[self.dialect])
        if not self.max_message_size:
            object.__setattr__(self, "max_message_size", _MOST_MESSAGE_BYTES[self.dialect])
        if self.is_3_1:
            self._check_3_1()
        if self.sync_flush_timeout < 0:
            raise UsageError(f"sync_flush_timeout is {self.sync_flush_timeout}, below 0")
        for name in ("file_reserved_time", "delete_commit_log_files_interval"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}, below 0")
        if not 0 < self.disk_max_used_space_ratio <= 100:
            ratio = self.disk_max_used_space_ratio
            raise UsageError(f"disk_max_used_space_ratio is {ratio}, and must be from 1 to 100")

    def _check_3_1(self) -> None:
        """Refuse what RocketMQ 3.1.3 does not have.

        Raises:
            UsageError: if a setting asks for it.
        """
        lacking = {
            "enable_multi_dispatch": self.enable_multi_dispatch,
            "enable_lmq": self.enable_lmq,
            "transient_store_pool_enable": self.transient_store_pool_enable,
        }
        for name, is_wanted in lacking.items():
            if is_wanted:
                raise UsageError(f"{name}: dialect 3.1 has no such thing")
        if self.recovery == "rocketmq":
            raise UsageError(
                "recovery 'rocketmq' is that of 4.9.3, which knows nothing of the state table of "
                "dialect 3.1"
            )

    @property
    def is_3_1(self) -> bool:
        """Whether a writer writes as RocketMQ 3.1.3 did."""
        return self.dialect == "3.1"

    @property
    def index_keys(self) -> IndexKeys:
        """Which keys of a message the index takes."""
        if self.is_3_1:
            return "3.1"
        return "5.4" if self.index_tags else "4.9"

    @property
    def uses_transient_pool(self) -> bool:
        """Whether the log is written to memory first (``isTransientStorePoolEnable``)."""
        return (
            self.transient_store_pool_enable
            and self.flush_disk_type == "ASYNC_FLUSH"
            and self.broker_role != "SLAVE"
        )

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of each level in milliseconds, level 1 first."""
        return delay.parse_levels(self.message_delay_level)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StoreConfig:
        """Settings by RocketMQ's names or ours.

        Names that this version has no use for are skipped (a ``broker.conf`` is full of them) and
        logged.

        Raises:
            UsageError: if a value is not what its setting takes.
        """
        known = {field.name: field for field in fields(cls) if field.name != "broker_settings"}
        settings: dict[str, Any] = {}
        for name, value in values.items():
            ours = _snake_case(name)
            if ours in known:
                settings[ours] = _converted(name, str(known[ours].type), value)
            elif name not in STORE_SETTINGS:
                logger.debug("setting %s is not used", name)
        settings["broker_settings"] = tuple(
            (name, str(values[name])) for name in sorted(STORE_SETTINGS & values.keys())
        )
        return cls(**settings)

    @classmethod
    def from_file(cls, path: str | Path) -> StoreConfig:
        """Settings from a ``broker.conf`` (lines ``name=value``) or a JSON object.

        Raises:
            UsageError: if the file cannot be read or understood.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from error
        if text.lstrip().startswith("{"):
            try:
                document = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}: not JSON: {error}") from error
            return cls.from_mapping(document)
        values: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            entry = line.strip()
            if not entry or entry[0] in "#!":
                continue
            name, separator, value = entry.partition("=")
            if not separator:
                raise UsageError(f"{path}: line {number} is not name=value: {entry!r}")
            values[name.strip()] = value.strip()
        return cls.from_mapping(values)


def _whole_units(size: int | None, unit: int) -> int | None:
    return None if size is None else -(-size // unit) * unit


def _snake_case(name: str) -> str:
    # RocketMQ wrote "maped" for years; both spellings are in use.
    name = re.sub(r"(^m|M)aped", r"\1apped", name)
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return name.lower()


def _converted(name: str, kind: str, value: Any) -> Any:
    if kind.startswith("int"):
        # bool is an int to Python, but true is no size.
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is None and kind.endswith("None"):
            return None
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                pass
        raise UsageError(f"{name} takes a whole number, not {value!r}")
    if kind.startswith("bool"):
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise UsageError(f"{name} takes true or false, not {value!r}")
    return str(value)
