"""Wrong types and values in public functions and classes: an error names the argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import logquarry as lq
from logquarry.arguments import integer, names, number, seconds
from logquarry.errors import UsageError, WrongType
from logquarry.replication import (
    ConfigServer,
    ConfigServerOptions,
    ConfigSync,
    ConfigSyncOptions,
    HaMaster,
    HaSlave,
    MasterOptions,
    SlaveOptions,
    sync_config,
)
from tests.helpers.small_store import config as small_config
from tests.helpers.wrong_arguments import (
    NO_FLAG,
    NO_FUNCTION,
    NO_INT,
    NO_OBJECT,
    NO_PATH,
    NO_PORT,
    NO_TEXT,
    NUMPY,
    THING,
    Calls,
    Wrong,
    cases,
    refused,
    with_wrong,
)

RULES = lq.RetentionRules(keep_bytes=0)
PATHS: Final = (*NO_PATH, None)


OPEN: Final[Wrong] = {
    "path": PATHS,
    "mode": ("w", 5, None, THING),
    "config": NO_OBJECT,
    "clock": NO_FUNCTION,
    "broker": NO_TEXT,
    "storage_options": ("x", 5, [], THING),
}


def test_an_error_shows_no_storage_options(tmp_path: Path) -> None:
    options: Any = '{"secret_key": "hush"}'
    with pytest.raises(UsageError, match="storage_options takes") as caught:
        lq.MessageStore.open(tmp_path, storage_options=options)
    assert "hush" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wrong") / "store"
    with lq.MessageStore.open(root, mode="rw", config=small_config()) as store:
        store.put(lq.Message("t", b"body"))
    return root


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("mode", ["r", "rw"])
def test_open(folder: Path, name: str, mode: str) -> None:
    before = sorted(folder.rglob("*"))
    for value in OPEN[name]:
        refused(lq.MessageStore.open, {"path": folder, "mode": mode, name: value}, name)
    assert sorted(folder.rglob("*")) == before


# Every function that changes a store takes these.
PARTS: Final[dict[str, tuple[object, ...]]] = {
    "clock": NO_FUNCTION,
    "progress": NO_FUNCTION,
    "disk": NO_OBJECT,
}
NO_BYTES: Final = (*NO_INT, -1)

CALLS: Final[Calls] = {
    "verify": ({}, {"path": PATHS, "config": NO_OBJECT, "progress": NO_FUNCTION}),
    "salvage": (
        {},
        {"path": PATHS, "into": NO_PATH, "config": NO_OBJECT, "include_stale": NO_FLAG},
    ),
    "rebuild": (
        {},
        {"path": PATHS, "into": NO_PATH, "config": NO_OBJECT, "apply": NO_FLAG}
        | {"queues": NO_FLAG, "index": NO_FLAG}
        | PARTS,
    ),
    "recover": (
        {},
        {"path": PATHS, "config": NO_OBJECT, "apply": NO_FLAG, "mode": ("x", 5, None, THING)}
        | {"accept_loss": NO_BYTES}
        | PARTS,
    ),
    "retain": (
        {"rules": RULES},
        {"path": PATHS, "config": NO_OBJECT, "apply": NO_FLAG, "rules": (*NO_OBJECT, None)} | PARTS,
    ),
}


@pytest.mark.parametrize(("name", "argument"), cases(CALLS))
def test_calls_on_paths(folder: Path, name: str, argument: str) -> None:
    before = sorted(folder.rglob("*"))
    for arguments in with_wrong(CALLS, name, argument):
        refused(getattr(lq, name), {"path": folder} | arguments, argument)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("value", PATHS)
def test_diff(folder: Path, value: object) -> None:
    refused(lq.diff, {"a": value, "b": folder}, "a")
    refused(lq.diff, {"a": folder, "b": value}, "b")


@pytest.mark.parametrize("name", ["older_than_ms", "keep_bytes", "most_files", "max_disk_ratio"])
@pytest.mark.parametrize("value", ["1", [1], b"1", THING, True, -1])
def test_rules_of_a_retention(name: str, value: object) -> None:
    with pytest.raises(UsageError):
        lq.RetentionRules(**({"keep_bytes": 1} | {name: value}))  # type: ignore[arg-type]


def test_settings() -> None:
    for name, value in (
        ("max_message_size", "1"),
        ("max_message_size", True),
        ("flush_disk_type", None),
        ("message_index_enable", "false"),
        ("message_index_enable", 1),
        ("mapped_file_size_commit_log", 1.5),
        ("store_host", b"h"),
    ):
        refused(lq.StoreConfig, {name: value}, name)
    assert type(lq.StoreConfig(max_message_size=NUMPY.int64(5)).max_message_size) is int
    for values in ("x", 5, None, [("a", "b")], {5: "x"}):
        with pytest.raises(WrongType, match=r"values|name of a setting"):
            lq.StoreConfig.from_mapping(values)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="storeHost"):
        lq.StoreConfig.from_mapping({"storeHost": ["h"]})
    with pytest.raises(WrongType, match="path"):
        lq.StoreConfig.from_file(0)  # type: ignore[arg-type]


def test_transactions_of_dialect_3_1(tmp_path: Path) -> None:
    config = small_config(dialect="3.1")
    assert config.flush_interval_commit_log == 1_000
    assert small_config().flush_interval_commit_log == 500
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=config) as store:
        transactions = store.prepared_transactions
        for value in (*NO_OBJECT, None):
            refused(transactions.begin, {"message": value}, "begin")
        for value in NO_TEXT:
            refused(transactions.begin, {"message": lq.Message("t"), "group": value}, "group")
        for value in (*NO_INT, None, -1):
            refused(transactions.commit, {"transaction": value}, "transaction")
            refused(transactions.rollback, {"transaction": value}, "transaction")
        refused(transactions.end, {"transaction": 0, "end": "commit"}, "end")
        refused(transactions.set_listener, {"listener": 5}, "listener")
        assert store.max_offset == 0


def test_replication(tmp_path: Path, folder: Path) -> None:
    config = small_config(broker_role="SLAVE")
    with lq.MessageStore.open(tmp_path / "slave", mode="rw", config=config) as slave:
        peer = {"store": slave, "host": "127.0.0.1", "port": 9}
        for call in (HaSlave, ConfigSync, sync_config, HaMaster):
            for value in (*NO_OBJECT, None, folder):
                refused(call, peer | {"store": value}, "store")
            for value in (*NO_TEXT, None):
                refused(call, peer | {"host": value}, "host")
            for value in (*NO_PORT, None):
                refused(call, peer | {"port": value}, "port")
            for value in NO_OBJECT:
                refused(call, peer | {"options": value}, "options")
    for value in NO_PATH:
        refused(ConfigServer, {"root": value}, "root")
    for value in NO_PORT:
        refused(ConfigServer, {"root": folder, "port": value}, "port")
    for options, name, value in (
        (MasterOptions, "max_connections", "5"),
        (MasterOptions, "full_history", 1),
        (MasterOptions, "allow", 5),
        (SlaveOptions, "start", "0"),
        (SlaveOptions, "overlap", 1.5),
        (SlaveOptions, "check_crc", "no"),
        (SlaveOptions, "first_pause", "1"),
        (ConfigSyncOptions, "timeout", "1"),
        (ConfigSyncOptions, "interval", True),
        (ConfigServerOptions, "idle_ms", "1"),
        (ConfigServerOptions, "fast_port", 1),
    ):
        refused(options, {name: value}, name)


def test_a_time_to_wait_may_be_very_long() -> None:
    assert seconds(10**400) == seconds(float("inf"))


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array(["a"]), np.array([])])
def test_an_array_is_no_number(value: object) -> None:
    with pytest.raises(WrongType, match="timeout takes seconds, not an object of type ndarray"):
        seconds(value)
    with pytest.raises(WrongType, match="ratio takes a number"):
        number(value, "ratio")


def test_an_array_without_a_dimension_is_no_sequence() -> None:
    with pytest.raises(WrongType, match="topics takes a name, or a sequence of names, not an obj"):
        names(np.array("t"), "topics")


def test_numbers_that_python_refuses_to_format() -> None:
    with pytest.raises(UsageError, match="x is a longer number, and must be at most 5"):
        integer(10**5_000, "x", most=5)
    assert seconds(-(10**5_000)) < 0
