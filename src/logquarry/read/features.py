"""Detects the features of a store (RocketMQ 5: batch queues, RocksDB, timers) and its version.

:mod:`.fence` uses the features to decide which calls a store allows. Detection reads names of
files, ``config/topics.json``, the checkpoint and up to 64 frames. It also reads the last entries of
index files (256 of the newest file, 32 of an older file), and the frames of these entries. To find
out whether timer messages are pending, it reads the used pages of the file ``timerwheel``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final, Literal

from logquarry.format import broker_json, sys_flag
from logquarry.format import properties as props
from logquarry.format.broker_json import CONFIG_FOLDERS
from logquarry.format.epochs import BACKUP_FILE, EPOCH_FILE
from logquarry.format.frame import MAGIC_V2, Frame
from logquarry.log import log_place
from logquarry.log.earlier_writers import ROCKSDB_STORE as INDEX_TAGS_SINCE
from logquarry.log.earlier_writers import Writer, topic_attributes
from logquarry.log.filesystem import Entry
from logquarry.log.layout import StoreLayout
from logquarry.log.log_place import LogPlace, is_on, setting
from logquarry.log.open_files import OpenFiles
from logquarry.log.rocksdb import CURRENT, lost_files
from logquarry.log.store_files import BATCH_QUEUE as BATCH_FOLDER
from logquarry.log.store_files import COMPACTED_LOG as COMPACTION_FOLDER
from logquarry.log.store_files import CONFIG, CONSUME_QUEUE, INDEX, REBUILD
from logquarry.read import timers
from logquarry.read.commit_log import CommitLog
from logquarry.read.index import find_tag_entries
from logquarry.read.log_queues import LMQ_PREFIX
from logquarry.read.queue import ConsumeQueue
from logquarry.read.rocksdb_queue import rocksdb_folders
from logquarry.text import document, listed

QueueKind = Literal["simple", "batch", "rocksdb"]

BATCH_QUEUES: Final = "batch_queues"
INNER_BATCHES: Final = "inner_batches"
ROCKSDB_QUEUES: Final = "rocksdb_queues"
ROCKSDB_CONFIG: Final = "rocksdb_config"
ROCKSDB_STORE: Final = "rocksdb_store"
INDEX_TAGS: Final = "index_tags"
TIMERS: Final = "timers"
COMPACTION: Final = "compaction"
TIERED: Final = "tiered"
PROPERTY_CRC: Final = "property_crc"
QUEUE_EXT: Final = "queue_ext"
MULTI_DISPATCH: Final = "multi_dispatch"
POP_RECORDS: Final = "pop_records"
CONTROLLER: Final = "controller"
NO_MMAP: Final = "write_without_mmap"
LOG_PATH: Final = "log_path"
DLEDGER: Final = log_place.DLEDGER
SEVERAL_LOG_PATHS: Final = log_place.SEVERAL_LOG_PATHS
LOG_ELSEWHERE: Final = log_place.LOG_ELSEWHERE
UNKNOWN: Final = "unknown"

EXT_FOLDER: Final = "consumequeue_ext"

CLEANUP: Final = "cleanup.policy"
COMPACTION_POLICY: Final = "COMPACTION"
_MOST_FRAMES: Final = 64
_MOST_NAMES: Final = 8
_KNOWN: Final = frozenset(
    {
        *("abort", "abort.bak", "checkpoint", "commitlog", "config", "consumequeue", "index"),
        *("lock", "lost+found", "transaction", ".logquarry", ".salvage", "consumequeue_ext"),
        *("batchconsumequeue", "consumequeue_rocksdb", "timerlog", "compaction"),
        *("rocksdbstore", "kvStore", "tiered", "brokerIdentity"),
        *("brokerIdentity.bak", EPOCH_FILE, BACKUP_FILE),
    }
)
_KNOWN_PREFIXES: Final = ("dledger-", "timerwheel")
_KNOWN_CONFIG: Final = frozenset(
    {
        *("topics.json", "consumerOffset.json", "delayOffset.json", "subscriptionGroup.json"),
        *("consumerFilter.json", "consumerOrderInfo.json", "messageRequestMode.json"),
        *("topicQueueMapping.json", "lmqConsumerOffset.json", "transactionMetrics"),
        *("timermetrics", "timercheck", "tieredStoreMetadata.json"),
        *CONFIG_FOLDERS,
    }
)


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of a store. ``evidence`` lists the files, folders or settings that show the
    feature.
    """

    name: str
    evidence: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class StoreFeatures:
    """The features of a store, in a fixed order.

    ``queue_kinds`` has only topics whose kind of queue is known. ``unknown`` lists the files and
    folders, in the root and in ``config/``, that no version known to logquarry writes.
    """

    features: tuple[Feature, ...]
    queue_kinds: Mapping[str, QueueKind]
    writer: Writer
    unknown: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        return any(feature.name == name for feature in self.features)

    def get(self, name: str) -> Feature | None:
        """The feature with a name; None if the store does not have the feature."""
        return next((feature for feature in self.features if feature.name == name), None)

    def topics_of(self, kind: QueueKind) -> tuple[str, ...]:
        """The topics whose queues are of one kind, sorted."""
        return tuple(sorted(name for name, found in self.queue_kinds.items() if found == kind))

    def to_json(self) -> dict[str, Any]:
        """Return the object for ``info --json``."""
        return {
            "found": [document(feature) for feature in self.features],
            "queue_kinds": dict(sorted(self.queue_kinds.items())),
            "writer": document(self.writer),
            "unknown": list(self.unknown),
        }


def find_features(layout: StoreLayout, *, index: bool = True) -> StoreFeatures:
    """Determine the features of a store. If ``index`` is false, INDEX_TAGS is not detected.

    Raises StoreNotFound for a file or folder that exists but cannot be read.
    """
    return _Finder(layout).find(index=index)


@dataclass(frozen=True, slots=True)
class OtherQueues:
    """The queues of a store that are not in files of 20-byte entries.

    The topics in ``batch`` have batch queues. With ``has_rocksdb``, there are queues in RocksDB.
    """

    batch: frozenset[str]
    has_rocksdb: bool

    def __bool__(self) -> bool:
        return self.has_rocksdb or bool(self.batch)


def other_queues(layout: StoreLayout) -> OtherQueues:
    """Find the queues that are not in files of 20-byte entries.

    Reads only names and the attributes of topics (from ``config/topics.json`` or RocksDB). If the
    queues of a topic are only in RocksDB, the function finds the topic only by its attributes.
    """
    finder = _Finder(layout)
    kinds = finder.queue_kinds()
    batch = frozenset(topic for topic, kind in kinds.items() if kind == "batch")
    return OtherQueues(batch, finder.has(ROCKSDB_QUEUES))


def rocksdb_config(layout: StoreLayout) -> Feature | None:
    """Return the feature ROCKSDB_CONFIG; None if the store lacks it. Reads only names."""
    there = {entry.name for entry in layout.filesystem.list(CONFIG) if entry.is_dir}
    evidence = tuple(f"{CONFIG}/{name}/" for name in CONFIG_FOLDERS if name in there)
    if not evidence:
        return None
    return Feature(ROCKSDB_CONFIG, evidence, "topics, groups and consumer offsets are in RocksDB")


def lacks_files(feature: Feature) -> bool:
    """Whether the tables of RocksDB are lost, and only ``CURRENT`` or a manifest shows the feature.

    ``feature`` is ROCKSDB_STORE.
    """
    return any(path.endswith(f"/{CURRENT}") or "/MANIFEST-" in path for path in feature.evidence)


class _Finder:
    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        self._config = layout.config
        self._root = {entry.name: entry for entry in layout.filesystem.list("")}
        self._settings = {entry.name: entry for entry in layout.filesystem.list(CONFIG)}
        self._features: list[Feature] = []
        self._has_v2_at: str | None = None

    def find(self, *, index: bool) -> StoreFeatures:
        kinds = self.queue_kinds()
        self._rocksdb()
        if index:
            self._index()
        self._log_places()
        self._timers()
        self._add_topics(COMPACTION, COMPACTION_FOLDER, CLEANUP, COMPACTION_POLICY)
        self._frames()
        self._others()
        unknown = self._unknown()
        if unknown:
            self._add(UNKNOWN, unknown, "files that no known version of RocketMQ writes")
        return StoreFeatures(tuple(self._features), kinds, self._writer(), unknown)

    def has(self, name: str) -> bool:
        return any(feature.name == name for feature in self._features)

    def _add(self, name: str, evidence: tuple[str, ...], detail: str) -> None:
        self._features.append(Feature(name, evidence, detail))

    def _list(self, folder: str) -> list[Entry]:
        top = self._root.get(folder.partition("/")[0])
        return self._layout.filesystem.list(folder) if top is not None and top.is_dir else []

    # -------------------------------------------------------------------------------- queues
    def queue_kinds(self) -> dict[str, QueueKind]:
        """Return the kind of each topic's queues, and add the features that the kinds imply."""
        kinds: dict[str, QueueKind] = {topic: "simple" for topic, _ in self._layout.queue_names}
        # A rebuild makes the queues in its own folder, and then renames them. If the rebuild was
        # interrupted before it renamed the queues, they are still in that folder.
        found = rocksdb_folders(self._layout) or rocksdb_folders(self._layout, f"{REBUILD}/")
        in_rocksdb = tuple(f"{folder}/{CURRENT}" for folder in found)
        if in_rocksdb:
            where = "RocksDB and in files" if kinds else "RocksDB"
            self._add(ROCKSDB_QUEUES, in_rocksdb, f"the queues are in {where}")
            # A topic may have queues both in RocksDB and in files (rocksdbCQDoubleWriteEnable).
            # Then the files determine the kind of its queues.
            kinds.update({topic: "rocksdb" for topic in self._topics if topic not in kinds})
        elif setting(self._config, "storeType") == "defaultRocksDB":
            self._add(ROCKSDB_QUEUES, ("storeType",), "the queues are in RocksDB")
        batch_type = broker_json.QUEUE_TYPE, broker_json.BATCH_TYPE
        batch_topics = self._add_topics(BATCH_QUEUES, BATCH_FOLDER, *batch_type)
        kinds.update(dict.fromkeys(batch_topics, "batch"))
        if (there := self._list(EXT_FOLDER)) or is_on(self._config, "enableConsumeQueueExt"):
            evidence = (f"{EXT_FOLDER}/",) if there else ("enableConsumeQueueExt",)
            self._add(QUEUE_EXT, evidence, "entries of queues point to extension units")
        return kinds

    def _add_topics(self, name: str, folder: str, attribute: str, value: str) -> set[str]:
        there = {entry.name for entry in self._list(folder) if entry.is_dir}
        stated = {topic for topic, found in self._topics.items() if found.get(attribute) == value}
        if there or stated:
            evidence: tuple[str, ...] = (f"{folder}/",) if there else ()
            evidence += (f"{CONFIG}/{broker_json.TOPICS_FILE}",) if stated else ()
            self._add(name, evidence, f"topics: {_names(there | stated)}")
        return there | stated

    @cached_property
    def _other_log(self) -> LogPlace | None:
        return self._layout.other_log

    @cached_property
    def _topics(self) -> Mapping[str, Mapping[str, Any]]:
        return topic_attributes(self._layout.filesystem)

    # -------------------------------------------------------------------------------- RocksDB
    def _rocksdb(self) -> None:
        config = rocksdb_config(self._layout)
        if config is not None:
            self._features.append(config)
        folder = "rocksdbstore"
        # Every store of RocketMQ 5.4 has this folder, even if it is unused. An unused folder
        # contains no table, and its write-ahead log is empty.
        used = [entry for entry in self._list(folder) if holds_data(entry)]
        on = tuple(
            name
            for name in ("indexRocksDBEnable", "timerRocksDBEnable", "transRocksDBEnable")
            if is_on(self._config, name)
        )
        # If all tables were lost, their names are still in the manifest.
        lost = (
            None
            if used or folder not in self._root
            else lost_files(self._layout.filesystem, folder)
        )
        if used or on or lost is not None:
            evidence = ((f"{folder}/{used[0].name}",) if used else ()) + on
            detail = "index, timers or transactions are in RocksDB"
            if lost is not None:
                evidence = (f"{folder}/{lost.namer}", *on)
                # Only the manifest shows whether there were tables.
                known = detail.replace("are", "may be") if lost.namer == CURRENT else detail
                detail = f"{known}, and {lost}"
            self._add(ROCKSDB_STORE, evidence, detail)
        if any(holds_data(entry) for entry in self._list("kvStore")):
            detail = "pop records: messages that consumers have and did not acknowledge"
            self._add(POP_RECORDS, ("kvStore/",), detail)

    # -------------------------------------------------------------------------------- index
    def _index(self) -> None:
        if self._other_log is not None or not self._layout.index_files:
            return
        found = find_tag_entries(self._layout, OpenFiles(self._layout))
        if found is None and INDEX_TAGS_SINCE in self._root:
            detail = "the version that wrote it (5.4 or later) puts tags into its index"
            self._add(INDEX_TAGS, ("rocksdbstore/",), detail)
        elif found is not None and found.has_tags:
            self._add(INDEX_TAGS, (found.path,), "the index has an entry for each message's tag")

    # -------------------------------------------------------------------------------- log
    def _log_places(self) -> None:
        other = self._other_log
        if other is not None:
            self._add(other.feature, other.evidence, other.reason)
        found = self._layout.log_folders
        if found.feature is not None:
            place = "lies in several folders" if len(found.paths) > 1 else "lies elsewhere"
            what = "is a DLedger log" if found.has_heads else place
            evidence = tuple(f"{path}/" for path in found.paths)
            self._add(found.feature, evidence, f"the log {what}")
        plugin = setting(self._config, "messageStorePlugIn")
        folders = tuple(f"{name}/" for name in sorted(self._root) if name.startswith("tiered"))
        metadata = tuple(f"{CONFIG}/{n}" for n in sorted(self._settings) if n.startswith("tiered"))
        if folders or metadata or "Tiered" in plugin:
            evidence = folders + metadata or ("messageStorePlugIn",)
            detail = "messages that expired here are in the tiered storage, which is not read"
            self._add(TIERED, evidence, detail)

    def _timers(self) -> None:
        if self._other_log is not None or self.has(ROCKSDB_STORE):
            return
        pending = timers.pending(self._layout)
        if pending:
            self._add(TIMERS, pending.evidence, pending.detail)

    # -------------------------------------------------------------------------------- frames
    def _frames(self) -> None:
        copies: set[str] = {t for t, _ in self._layout.queue_names if t.startswith(LMQ_PREFIX)}
        crc = is_on(self._config, "enabledAppendPropCRC")
        evidence = "enabledAppendPropCRC"
        batches = ""
        for topic, found in islice(self._sample(), _MOST_FRAMES):
            place = self._layout.log_file(found.physical_offset)
            if self._has_v2_at is None and found.magic == MAGIC_V2:
                self._has_v2_at = place
            if not crc and found.properties[-props.CRC_SIZE :].startswith(props.CRC_PREFIX):
                crc, evidence = True, place
            if found.sys_flag & (sys_flag.INNER_BATCH | sys_flag.NEED_UNWRAP):
                batches = place
            if topic is not None and found.is_copied_to(topic):
                copies.add(topic)
        if crc:
            self._add(PROPERTY_CRC, (evidence,), "frames carry a CRC over all their bytes")
        if batches or self.has(BATCH_QUEUES):
            detail = "a frame may hold several messages"
            self._add(INNER_BATCHES, (batches or f"{BATCH_FOLDER}/",), detail)
        if copies:
            folder = f"{CONSUME_QUEUE}/{min(copies)}/"
            self._add(MULTI_DISPATCH, (folder,), f"queues of other topics: {_names(copies)}")

    def _sample(self) -> Iterator[tuple[str | None, Frame]]:
        """Yield pairs of a topic and a sample frame. The first pair is None and the log's first
        frame. For each queue, there follows a pair of the queue's topic and the frame to which its
        last entry points.
        """
        if self._other_log is not None or not self._layout.commit_log.files:
            return
        files = OpenFiles(self._layout)
        log = CommitLog(self._layout, files=files)
        first = log.outcome_at(log.min_offset, check_crc=False)
        if isinstance(first, Frame):
            yield None, first
        # Read queues of topics that are not in topics.json first: multi-dispatch usually fills such
        # queues, and the number of samples is limited.
        names = dict(sorted(self._layout.queue_names, key=lambda key: key[0] in self._topics))
        for topic, queue_id in names.items():
            queue = ConsumeQueue(self._layout, topic, queue_id, files=files)
            entry = queue.last_entry
            if entry is not None:
                found = log.outcome_at(entry.physical_offset, check_crc=False)
                if isinstance(found, Frame):
                    yield topic, found

    # -------------------------------------------------------------------------------- the rest
    def _others(self) -> None:
        if EPOCH_FILE in self._root or is_on(self._config, "enableControllerMode"):
            evidence = (EPOCH_FILE,) if EPOCH_FILE in self._root else ("enableControllerMode",)
            self._add(CONTROLLER, evidence, "a controller elects the master; epochs cut the log")
        if is_on(self._config, "writeWithoutMmap"):
            self._add(NO_MMAP, ("writeWithoutMmap",), "the log is written without maps")
        path = setting(self._config, "storePathCommitLog").rstrip("/")
        is_found = self._layout.log_folders.feature is not None
        if path and "," not in path and not is_found and not self._is_own_log(path):
            self._add(LOG_PATH, ("storePathCommitLog",), f"the broker keeps the log in {path}")

    def _is_own_log(self, path: str) -> bool:
        """Whether a configured path is the path of this store's ``commitlog/``.

        The store may have been copied, so its configuration may have the original path. A path in
        another place is accepted if it ends with the name of the store's folder and ``/commitlog``.
        """
        root = setting(self._config, "storePathRootDir").rstrip("/")
        folder = self._layout.root.rstrip("/").rpartition("/")[2]
        return path in (
            f"{root}/commitlog",
            self._layout.filesystem.full_path("commitlog"),
        ) or f"/{path}".endswith(f"/{folder}/commitlog")

    def _unknown(self) -> tuple[str, ...]:
        other = () if self._other_log is None else self._other_log.evidence
        other += tuple(f"{path}/" for path in self._layout.log_folders.paths)
        found = [
            name
            for name in sorted(self._root)
            if name not in _KNOWN
            and not name.startswith((*_KNOWN_PREFIXES, "tiered"))
            and f"{name}/" not in other
        ]
        for name in sorted(self._settings):
            if name.removesuffix(".bak") not in _KNOWN_CONFIG:
                found.append(f"{CONFIG}/{name}")
        return tuple(found)

    # -------------------------------------------------------------------------------- version
    def _writer(self) -> Writer:
        found = self._layout.writer
        if found.is_5 and found.before is None:
            return found
        if self.has(INDEX_TAGS):
            return Writer("5.4.0", None, (f"{INDEX}/",))
        if self._has_v2_at is None:
            return found
        signs = found.evidence if found.is_5 else ()
        return Writer("5.0.0", "5.4.0", (*signs, self._has_v2_at))


def holds_data(entry: Entry) -> bool:
    """Whether a file of a RocksDB folder contains records. Tables contain records, and so do
    write-ahead logs that are not empty.
    """
    if entry.is_dir:
        return False
    return entry.name.endswith(".sst") or (entry.name.endswith(".log") and entry.size > 0)


def _names(topics: set[str]) -> str:
    return listed(sorted(topics), _MOST_NAMES)
