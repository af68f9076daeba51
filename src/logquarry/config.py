"""Settings of a store (``MessageStoreConfig``, ``broker.conf``): file sizes, formats, tuning.

The fields have RocketMQ's names in snake_case. Functions of this module also accept RocketMQ's own
spelling.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

from logquarry import arguments
from logquarry.errors import UsageError, reason_of
from logquarry.format import properties as props
from logquarry.layout_config import LayoutConfig

logger = logging.getLogger(__name__)

TOPIC_CHECKS: Final = ("store", "rocketmq-broker")
BROKER_ROLES: Final = ("ASYNC_MASTER", "SYNC_MASTER", "SLAVE")
RECOVERIES: Final = ("safe", "rocketmq")
DIALECTS: Final = ("4.9", "3.1")
IndexKeys = Literal["3.1", "4.9", "5.4"]
"""Which keys of a message the index contains, named after the RocketMQ version that introduced
them: ``"3.1"`` means the words of KEYS with signed hashes, ``"4.9"`` the words of KEYS and
UNIQ_KEY, ``"5.4"`` the words of KEYS, UNIQ_KEY and the tag.
"""
FLUSH_DISK_TYPES: Final = ("ASYNC_FLUSH", "SYNC_FLUSH")

DEFAULT_COMMIT_LOG_FILE: Final = 1 << 30
"""Assumed size of a commit log file in bytes, if it can be read neither from the files nor from the
settings.
"""

_BY_DIALECT: Final[Mapping[str, Mapping[str, Any]]] = {
    "max_message_size": {"4.9": 4 << 20, "3.1": 512 << 10},
    "message_delay_level": {"4.9": props.DEFAULT_LEVELS, "3.1": props.LEVELS_3},
    "flush_interval_commit_log": {"4.9": 500, "3.1": 1_000},
}

STORE_SETTINGS: Final = frozenset(
    {
        "storePathRootDir",
        "storePathCommitLog",
        "readOnlyCommitLogStorePaths",
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
"""The settings of RocketMQ that determine which files a store consists of (``broker_settings``)."""

_NOT_STATED: Final = ("broker_settings", "batch_topics")
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
    "timer_max_delay_sec",
    "transaction_check_interval",
    "check_transaction_message_timer_interval",
)
_FROM_ZERO: Final = ("sync_flush_timeout", "file_reserved_time", "delete_commit_log_files_interval")
_TYPING_ERROR: Final = 0.9
"""If an unknown name is at least this similar (0 to 1) to a known name, it is treated as a
misspelling of the known name.
"""
_NEAR: Final = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig(LayoutConfig):
    """The settings of a store. Defaults are RocketMQ 4.9.3's. Times are in milliseconds.

    Attributes:
        dialect: the format that a writer writes: ``"4.9"``, or ``"3.1"`` for RocketMQ 3.1.3
            (docs/dialect-3.1.md). ``None`` means the dialect of the existing store, or 4.9 for a
            new store. Readers recognise both formats.
        message_delay_level: delays of the delay levels, beginning with level 1. By default there
            are 18 levels, or 16 levels in dialect 3.1.
        max_msgs_num_batch: maximum number of frames that one query by key returns.
        max_transfer_count_on_message_in_memory: maximum number of messages of one ``get``.
        max_transfer_bytes_on_message_in_memory: maximum bytes of one ``get``.
        max_transfer_count_on_message_in_disk: maximum number of messages of one ``get``, if the
            messages are on disk. The store assumes that a message is on disk, and not in the page
            cache, if it is far from the log's end: by more bytes than
            ``access_message_in_memory_max_ratio`` percent of the machine's memory.
        max_transfer_bytes_on_message_in_disk: maximum bytes of one ``get``, if the messages are on
            disk.
        access_message_in_memory_max_ratio: the percentage of the machine's memory that is assumed
            to be page cache.
        decompress_limit: maximum bytes of one decompressed body.
        recovery: how to recover a store that was not shut down cleanly. The recovery ``"safe"``
            loses no sound frame of the log. The recovery ``"rocketmq"`` does exactly what
            RocketMQ's recovery does, even if that loses messages; it also runs after a clean
            shutdown.
        check_crc_on_recover: whether an opening for writing compares bodies with their CRCs. After
            a clean shutdown, only the last three log files are checked. The recovery ``"rocketmq"``
            checks all files that it reads. The recovery ``"safe"`` checks all bodies, even if
            this setting is False.
        message_index_safe: whether the recovery ``"rocketmq"`` starts reading the log early enough
            that no message is missing in the index afterwards.
        max_message_size: maximum bytes of a frame, and of the wire form of a batch. Default (0):
            4 MiB, or 512 KiB in dialect 3.1.
        store_host: the store host (``ip:port``) of messages whose ``store_host`` is None.
        topic_check: which topics a put accepts. ``"store"`` accepts any name that is safe as a
            folder name. ``"rocketmq-broker"`` accepts only the characters that RocketMQ's broker
            accepts.
        broker_role: ``ASYNC_MASTER``, ``SYNC_MASTER`` or ``SLAVE``. A slave accepts no messages.
        os_page_cache_busy_time_out_mills: if a put holds the log's lock for longer than this time,
            the store refuses other puts until the lock is free.
        flush_disk_type: ``ASYNC_FLUSH`` or ``SYNC_FLUSH``; with ``SYNC_FLUSH``, each put waits for
            its flush.
        sync_flush_timeout: maximum time that a put waits for its flush.
        flush_interval_commit_log: pause between two background flushes of the log. Default (0):
            500, or 1,000 in dialect 3.1.
        flush_commit_log_timed: whether background flushes always wait for the whole interval; if
            False, a put can start a flush earlier.
        flush_commit_log_least_pages: a background flush writes nothing until this many new pages of
            4 KiB are in the log.
        flush_commit_log_thorough_interval: pause between two background flushes that
            ignore ``flush_commit_log_least_pages``.
        commit_interval_commit_log: pause between two commits of the transient store pool.
        commit_commit_log_least_pages: a commit copies nothing until this many pages of 4 KiB are in
            the buffer.
        commit_commit_log_thorough_interval: pause between two commits that ignore
            ``commit_commit_log_least_pages``.
        transient_store_pool_enable: whether puts write messages to memory first, and a commit
            copies them to the log's files. The setting needs ASYNC_FLUSH, and has no effect on a
            slave.
        transient_store_pool_size: number of buffers, each as large as a log file.
        fast_fail_if_no_buffer_in_store_pool: whether puts are refused while no buffer is free.
        warm_mapped_file_enable: whether to load all pages of a new log file into memory before
            messages are written to it.
        flush_least_pages_when_warm_mapped_file: has no effect, because warming syncs no pages.
        flush_interval_consume_queue: pause between two flushes of the queues.
        flush_consume_queue_least_pages: a queue is not flushed until it has this many new pages of
            4 KiB.
        flush_consume_queue_thorough_interval: pause between two queue flushes that ignore
            ``flush_consume_queue_least_pages``, and that write the checkpoint.
        slave_timeout: the time that a put on a ``SYNC_MASTER`` waits for a slave.
        ha_slave_fallbehind_max: a put waits for a slave only if fewer than this many bytes of the
            log have no acknowledgement yet.
        ha_send_heartbeat_interval: time without traffic after which master and slave send a
            heartbeat.
        ha_housekeeping_interval: time without traffic after which master and slave close their
            connection.
        ha_transfer_batch_size: maximum bytes of the log that a master sends at once.
        clean_expired_files: whether an open writer deletes expired files. RocketMQ always deletes
            expired files (docs/retention.md).
        file_reserved_time: hours from the store time of a log file's last message until the file
            expires. A half message that is older than this time is abandoned: the producer is not
            asked about it any more.
        delete_when: hours of the day, separated by ``;``, in which expired files are deleted.
        disk_max_used_space_ratio: above this percentage of disk use, expired files are deleted at
            any hour.
        clean_file_forcibly_enable: whether the writer also deletes files that have not expired, if
            the disk is more than 85 % full. RocketMQ's default is true.
        clean_resource_interval: time between two searches of the writer for expired files.
        delete_commit_log_files_interval: pause between the deletion of two log files.
        delete_files_batch_max: maximum number of log files that one search deletes.
        flush_consumer_offset_interval: how often consumer offsets are written.
        deliver_delayed: whether a writer delivers delayed messages from its opening on. If False,
            :meth:`~logquarry.store.message_store.StoreWriter.start_delivery` starts the delivery.
        flush_delay_offset_interval: how often the progress of the delivery is written.
        timer_max_delay_sec: the longest delay, in seconds, of a timer message (``deliver_at``,
            ``delay_ms``).
        transaction_time_out: if a half message is older than this time, the broker asks the
            producer about it (a check).
        transaction_check_max: maximum number of checks of a half message before it is abandoned.
        transaction_check_interval: time between two rounds in which all half messages are checked.
        check_transaction_message_timer_interval: pause between two rounds of checks in dialect 3.1.
        check_transaction_message_atleast_interval: age from which a transaction is checked, in
            dialect 3.1.
        broker_settings: (name, value) of broker settings that logquarry itself does not use, but
            that determine the kinds of the store's files. ``from_mapping`` and ``from_file`` fill
            the field; the store's features depend on the values.
    """

    dialect: str | None = None
    message_delay_level: str = ""
    max_msgs_num_batch: int = 64
    max_transfer_count_on_message_in_memory: int = 32
    max_transfer_bytes_on_message_in_memory: int = 256 * 1024
    max_transfer_count_on_message_in_disk: int = 8
    max_transfer_bytes_on_message_in_disk: int = 64 * 1024
    access_message_in_memory_max_ratio: int = 40
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
    flush_interval_commit_log: int = 0
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
    timer_max_delay_sec: int = 3 * 24 * 3_600
    transaction_time_out: int = 6_000
    transaction_check_max: int = 15
    transaction_check_interval: int = 60_000
    check_transaction_message_timer_interval: int = 60_000
    check_transaction_message_atleast_interval: int = 60_000
    broker_settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        LayoutConfig.__post_init__(self)
        for name, known in _CHOICES.items():
            arguments.optional(arguments.choice, getattr(self, name), name, known=known)
        for name, defaults in _BY_DIALECT.items():
            if not getattr(self, name):
                object.__setattr__(self, name, defaults[self._known_dialect])
        for name in _ABOVE_ZERO:
            arguments.count(getattr(self, name), name)
        if self.is_3_1:
            self._check_3_1()
        for name in _FROM_ZERO:
            arguments.count(getattr(self, name), name, least=0)
        percent, name = self.disk_max_used_space_ratio, "disk_max_used_space_ratio"
        arguments.integer(percent, name, least=1, most=100)

    def _check_3_1(self) -> None:
        for name in ("enable_multi_dispatch", "enable_lmq", "transient_store_pool_enable"):
            if getattr(self, name):
                raise UsageError(f"{name}: dialect 3.1 does not support it")
        if self.recovery == "rocketmq":
            raise UsageError(
                "recovery 'rocketmq' is not possible in dialect 3.1: it follows RocketMQ 4.9.3, "
                "which has no state table. Use 'safe'"
            )

    @property
    def _known_dialect(self) -> str:
        return self.dialect or DIALECTS[0]

    def in_dialect(self, dialect: str | None) -> StoreConfig:
        """Return the settings for a dialect, with the default values of this dialect."""
        if dialect == self.dialect:
            return self
        unset = {
            name: type(getattr(self, name))()
            for name, defaults in _BY_DIALECT.items()
            if getattr(self, name) == defaults[self._known_dialect]
        }
        return replace(self, dialect=dialect, **unset)

    @property
    def is_3_1(self) -> bool:
        """Whether a writer writes the format of RocketMQ 3.1.3."""
        return self.dialect == "3.1"

    @property
    def index_keys(self) -> IndexKeys:
        """The keys that the index has for each message."""
        if self.is_3_1:
            return "3.1"
        return "5.4" if self.index_tags else "4.9"

    @property
    def uses_transient_pool(self) -> bool:
        """Whether puts write to a buffer in memory first (``isTransientStorePoolEnable``)."""
        return (
            self.transient_store_pool_enable
            and self.flush_disk_type == "ASYNC_FLUSH"
            and self.broker_role != "SLAVE"
        )

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of each level in milliseconds, level 1 first."""
        return props.parse_levels(self.message_delay_level)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StoreConfig:
        """Make settings from a mapping with RocketMQ's or logquarry's names.

        Settings of RocketMQ that logquarry does not use are skipped. For an unknown name, the
        method logs a warning.

        Raises:
            UsageError: if a value has the wrong type, or if an unknown name is probably a
                misspelling of a setting that logquarry uses.
        """
        arguments.mapping(values, "values", "a mapping of names to values")
        for name in values:
            arguments.text(name, "the name of a setting")
        known = {field.name: field for field in fields(cls) if field.name not in _NOT_STATED}
        settings: dict[str, Any] = {}
        others: list[str] = []
        for name, value in values.items():
            ours = _snake_case(name)
            if ours in known:
                settings[ours] = _converted(name, str(known[ours].type), value)
            elif name not in STORE_SETTINGS:
                others.append(name)
        for warning in check_names(others, [*map(_camel_case, known), *STORE_SETTINGS]):
            logger.warning("%s", warning)
        settings["broker_settings"] = tuple(
            (name, _text(name, values[name], str))
            for name in sorted(STORE_SETTINGS & values.keys())
        )
        return cls(**settings)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> StoreConfig:
        """Read settings from a ``broker.conf`` (lines ``name=value``) or a JSON object.

        Raises:
            UsageError: if the file cannot be read or parsed.
        """
        path = arguments.path(path)
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else error
            raise UsageError(f"{path}: cannot be read: {reason}") from error
        if text.startswith("\ufeff"):
            # RocketMQ reads the byte order mark as a part of the first setting's name, and so
            # ignores this setting.
            raise UsageError(
                f"{path}: begins with a byte order mark, which hides the first setting from "
                "RocketMQ: save the file as UTF-8 without a byte order mark"
            )
        values: Any = {}
        if text.lstrip().startswith("{"):
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}: not JSON: {error}") from error
            if not isinstance(values, dict):
                raise UsageError(f"{path}: not a JSON object")
        else:
            for number, line in enumerate(text.splitlines(), 1):
                entry = line.strip()
                if not entry or entry[0] in "#!":
                    continue
                name, separator, value = entry.partition("=")
                if not separator:
                    raise UsageError(f"{path}: line {number} is not name=value: {entry!r}")
                values[name.strip()] = value.strip()
        try:
            return cls.from_mapping(values)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def settings_of(config: object) -> StoreConfig:
    """Return the given settings, or the defaults for None. Raise WrongType for other objects."""
    if config is None:
        return StoreConfig()
    takes = "a StoreConfig (from other names: StoreConfig.from_mapping)"
    return arguments.instance(config, "config", StoreConfig, takes)


def _snake_case(name: str) -> str:
    # Older versions of RocketMQ write "maped" instead of "mapped" in the names of settings.
    name = re.sub(r"(^m|M)aped", r"\1apped", name)
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return name.lower()


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


def _converted(name: str, kind: str, value: Any) -> Any:
    if kind.startswith("int"):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is None and kind.endswith("None"):
            return None
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                pass
        raise UsageError(f"{name} takes a whole number, not {_text(name, value)}")
    if kind.startswith("bool"):
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise UsageError(f"{name} takes true or false, not {_text(name, value)}")
    if isinstance(value, (bool, int, float, str)):
        return _text(name, value, str)
    raise UsageError(f"{name} takes text, not {_text(name, value)}")


def _text(name: str, value: Any, convert: Callable[[Any], str] = repr) -> str:
    try:
        return convert(value)
    except ValueError:
        # Python refuses to convert an int with more than 4,300 digits to text.
        raise UsageError(f"{name}: the number is too large") from None


@cache
def broker_names() -> frozenset[str]:
    """Return the names of all settings of RocketMQ's broker, 4.9 to 5.5."""
    data = files("logquarry").joinpath("data", "broker_settings.txt")
    return frozenset(data.read_text("ascii").split())


def check_names(names: Iterable[str], used: Collection[str]) -> list[str]:
    """Return a warning for each name that is neither a setting of RocketMQ nor one of logquarry.

    RocketMQ ignores an unknown name. If logquarry ignored the misspelled name of a file size, it
    could read the files with a wrong size.

    ``used`` holds the settings that logquarry uses, in RocketMQ's spelling.

    Raises:
        UsageError: if a name is probably a misspelling of a setting in ``used``.
    """
    warnings = []
    for name in names:
        if name in broker_names():
            continue
        meant = difflib.get_close_matches(name, used, 1, _TYPING_ERROR)
        if meant:
            raise UsageError(
                f"there is no setting {name}. Did you mean {meant[0]}? If not, remove the line"
            )
        near = difflib.get_close_matches(name, [*used, *broker_names()], 1, _NEAR)
        hint = f"; the nearest is {near[0]}" if near else ""
        warnings.append(f"neither RocketMQ nor logquarry has a setting {name}{hint}")
    return warnings
