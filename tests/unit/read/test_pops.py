"""Unacknowledged pops in stores whose check points, orders or records are invalid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logquarry.log.layout import StoreLayout
from logquarry.read.pops import Unacknowledged, unacknowledged_pops
from tests.helpers.store_maker import StoreMaker

REVIVE = "rmq_sys_REVIVE_LOG_c"
POINT = {"c": "g", "t": "orders", "q": 0, "pt": 1_000, "so": 5, "bm": 0, "n": 2}
FOUND = (Unacknowledged("g", "orders", 0, 2, 1_000),)


def point(**changes: Any) -> bytes:
    return json.dumps(POINT | changes).encode()


def pops_of(root: Path, *bodies: bytes) -> tuple[Unacknowledged, ...]:
    maker = StoreMaker(log_file_size=1 << 20, queue_file_units=100)
    for body in bodies:
        maker.put(REVIVE, body=body, tags="ck")
    return unacknowledged_pops(StoreLayout.open(maker.write(root))).queues


@pytest.mark.parametrize(
    "body",
    [
        *(point(pt=float("inf")), point(so=float("nan")), point(bm=1.5), point(q=True)),
        *(point(c=[]), point(c=1), point(t=None), point(d=[{}]), point(d=7)),
        *(point(n=128), point(n=20_000_000), point(n=-1), point(so=1 << 63)),
        *(b"[" * 100_000, b"[]", b"7", b"\xff", b""),
    ],
)
def test_an_invalid_check_point_does_not_count(tmp_path: Path, body: bytes) -> None:
    assert pops_of(tmp_path, point(), body) == FOUND


def test_steps_and_bits(tmp_path: Path) -> None:
    found = pops_of(tmp_path, point(d=[0, 3, 4], bm=0b10), point(q=1, n=127))
    assert [one.messages for one in found] == [2, 127]


ORDER = {"popTime": 1_000, "o": [5, 1]}


@pytest.mark.parametrize(
    "table",
    [
        *([], 7, None, {"a@b": []}, {"a@b": 7}, {"a@b": {"0": []}}, {"a@b": {"0": {"o": []}}}),
        *({"a@b": {"0": ORDER | {"popTime": float("nan")}}}, {"a@b": {"x": ORDER}}),
        *({"a@b": {"0": ORDER | {"o": [1, None]}}}, {"a@b": {"0": ORDER | {"cm": "?"}}}),
    ],
)
def test_an_invalid_order_does_not_count(tmp_path: Path, table: Any) -> None:
    if isinstance(table, dict):
        table |= {"orders@g": {"0": ORDER}}
    path = tmp_path / "config" / "consumerOrderInfo.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"table": table}))
    assert pops_of(tmp_path, b"") == (FOUND if isinstance(table, dict) else ())
    path.write_text(json.dumps(table))
    assert pops_of(tmp_path, b"") == ()


@pytest.mark.parametrize(
    "bad", [{"popTime": float("inf")}, {"groupId": 1, "popTime": 1}, {"topicId": []}]
)
def test_invalid_records_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: dict[str, Any]
) -> None:
    good = {"groupId": "g", "topicId": "orders", "queueId": 0, "offset": 1, "popTime": 1_000}

    def items(*_: object) -> Iterator[tuple[bytes, bytes]]:
        yield b"", json.dumps(good).encode()
        yield b"", json.dumps(good | bad).encode()

    monkeypatch.setattr("logquarry.read.pops.is_there", lambda *_: True)
    monkeypatch.setattr("logquarry.read.pops.RocksDb.__init__", lambda *_: None)
    monkeypatch.setattr("logquarry.read.pops.RocksDb.items", items)
    maker = StoreMaker()
    maker.put()
    pops = unacknowledged_pops(StoreLayout.open(maker.write(tmp_path)))
    assert [one.messages for one in pops.queues] == [1]
    assert "kvStore/ cannot be read" in (pops.hint or "")
