"""Property CRCs: each frame that is put or moved has a right one, and verify finds a wrong one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.errors import UnsupportedStore
from logquarry.format import properties as props
from logquarry.ingest.load import plan_load
from logquarry.ingest.staging import LoadPlan
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.conformance.rocketmq5 import Copied
from tests.helpers.files import flip, zero
from tests.helpers.golden_data import copy_store

_END = "\x02"


@pytest.fixture
def root(rocketmq5: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("timerwheel")
    return copy_store(rocketmq5 / "5.5.0-propcrc" / "store", tmp_path / "store", ignore=ignored)


def frames(root: Path) -> Iterator[bytes]:
    layout = StoreLayout.open(root)
    with lq.MessageStore.open(root) as store:
        for message in store.scan():
            file = layout.commit_log.at(message.physical_offset)
            assert file is not None
            at = message.physical_offset - file.base
            # Not the whole file: by default it has a gigabyte.
            with (root / file.path).open("rb") as log:
                log.seek(at)
                yield log.read(message.size)


def are_sound(root: Path) -> list[bool | None]:
    """Whether the property CRC of each frame is right; None for a frame without one."""
    return [props.matches_crc(frame) for frame in frames(root)]


def messages() -> list[lq.Message]:
    own = f"a\x01b{_END}"
    stale = f"__CRC32#\x010123456789{_END}"
    return [
        lq.Message("Orders", b"tags and keys", keys="k", tags="t"),
        lq.Message("Orders", b"no properties"),
        lq.Message("Orders", b"", properties_string=own),
        lq.Message("Orders", b"open", properties_string=own[:-1]),
        lq.Message("Orders", b"a CRC of another place", properties_string=own + stale),
        lq.Message("Orders", b"only a CRC", properties_string=stale),
        lq.Message("Orders", b"delayed", delay_level=3, keys="d"),
        lq.Message("Orders", b"not waiting", wait_store_ok=False),
    ]


def put_all(store: lq.StoreWriter) -> int:
    for message in messages():
        store.put(message)
    store.put_batch([lq.Message("Orders", b"%d" % n, keys=str(n)) for n in range(5)])
    store.put_many(messages())
    rows = [{"topic": "Orders", "body": b"arrow", "keys": f"a{n}"} for n in range(40)]
    store.put_many(pa.Table.from_pylist(rows))
    return 2 * len(messages()) + 5 + 40


@pytest.mark.parametrize("kernels", ["kernels", "none"])
def test_each_frame_has_a_right_crc(
    root: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "none":
        monkeypatch.setenv("LOGQUARRY_KERNELS", "off")
    before = len(list(frames(root)))
    with lq.MessageStore.open(root, mode="rw") as store:
        count = put_all(store)
    found = list(frames(root))
    assert len(found) == before + count
    assert all(props.matches_crc(frame) for frame in found)
    assert all(frame.count(props.CRC_PREFIX) == 1 for frame in found)
    assert not verify_store(StoreLayout.open(root)).has_damage
    with lq.MessageStore.open(root) as store:
        assert [m.body for m in store.query("Orders", "k")] == [b"tags and keys"] * 2


def test_a_new_store_by_its_configuration(tmp_path: Path) -> None:
    config = StoreConfig.from_mapping({"enabledAppendPropCRC": "true"})
    with lq.MessageStore.open(tmp_path / "new", mode="rw", config=config) as store:
        put_all(store)
    # Later the configuration is not needed: the frames show the setting.
    with lq.MessageStore.open(tmp_path / "new", mode="rw") as store:
        store.put(lq.Message("Orders", b"more"))
    assert all(are_sound(tmp_path / "new"))


def test_other_stores_get_none(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path / "new", mode="rw") as store:
        store.put(lq.Message("Orders", b"plain", tags="t"))
    assert are_sound(tmp_path / "new") == [None]


def test_too_long_with_the_crc(root: Path) -> None:
    text = "a\x01" + "b" * (32_767 - 2 - 1)
    message = lq.Message("Orders", b"x", properties_string=text + _END)
    with (
        lq.MessageStore.open(root, mode="rw") as store,
        pytest.raises(lq.errors.MessageRejected, match="32787 bytes"),
    ):
        store.put(message)


def test_loads_of_spark_are_refused(root: Path) -> None:
    with pytest.raises(UnsupportedStore, match="logquarry import"):
        plan_load(LoadPlan(path=str(root)))


def test_property_crcs_of_frames_that_moved_are_renewed(copied: Copied, tmp_path: Path) -> None:
    root, into = copied("5.5.0-propcrc"), tmp_path / "new"
    assert set(are_sound(root)) == {True}
    with lq.MessageStore.open(root) as store:
        second = list(store.scan())[1].physical_offset
    zero(root / "commitlog" / ("0" * 20), 0, second)
    salvage_store(StoreLayout.open(root), into)
    assert set(are_sound(into)) == {True}


def test_a_rotten_property_crc_is_found_and_stays_visible(copied: Copied, tmp_path: Path) -> None:
    root, into = copied("5.5.0-propcrc"), tmp_path / "new"
    log = root / "commitlog" / ("0" * 20)
    with lq.MessageStore.open(root) as store:
        first, rotten, *_ = [message for message in store.scan() if message.tags]
    # The damage is one letter of the topic: the body and its CRC stay right.
    topic = rotten.topic.encode()
    flip(log, log.read_bytes().index(topic, rotten.physical_offset + len(rotten.body)))
    report = verify_store(StoreLayout.open(root))
    found = {f.offset: f.severity for f in report.findings if f.kind == "bad_property_crc"}
    assert found == {rotten.physical_offset: "damage"}
    # All frames move. The new store's verify still finds the frame.
    zero(log, 0, first.physical_offset + first.size)
    plan = salvage_store(StoreLayout.open(root), into).plan
    assert plan.wrong_crcs == [rotten.physical_offset]
    assert are_sound(into).count(False) == 1
    assert verify_store(StoreLayout.open(into)).by_kind["bad_property_crc"] == 1
