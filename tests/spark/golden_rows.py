"""Rows of DataFrames in the form of the golden files."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conformance.golden_facts import LOG_GONE, OUR_NAMES, SOUND

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Message = dict[str, Any]

SAME = OUR_NAMES | {"bornHost": "born_host", "storeHost": "store_host"}
"""Golden name: our column with the same values."""

MIDDLE, OLD, LAST, LAST_FILE = 78237, 36796, 82623, 73728
"""Places in the `unclean` stores; see tests/conformance/test_verify.py."""

_ONE_GONE = {
    MIDDLE: ["body-length-middle", "crc-middle", "magic-middle", "total-size-middle"],
    OLD: ["crc-third-last-file", "noabort-crc-third-last-file"],
    LAST: ["frame-head-only", "half-frame", "noabort-half-frame"],
}
_ALL_GONE_FROM = {
    # In a closed store, the break in the last file is the log's end; cq-ahead lost the bytes.
    MIDDLE: ["cq-ahead", "noabort-cq-ahead", "noabort-crc-middle"],
    LAST_FILE: ["last-log-gone", "noabort-last-log-gone"],
}


def sound_stores(golden: Path) -> dict[str, Path]:
    """The stores that RocketMQ shut down cleanly, by broker name when all are read at once."""
    return {name.rpartition("/")[2]: golden / name / "store" for name in SOUND}


def harmed_stores(golden: Path) -> dict[str, Path]:
    """The damaged `unclean` stores, by scenario."""
    stores = {path.parent.name: path for path in sorted(golden.glob("unclean/*/store"))}
    # A store without its log is refused.
    del stores[LOG_GONE]
    return stores


def whole_messages(golden: Path, scenario: str) -> list[Message]:
    """Return the whole messages before the log's end of a damaged `unclean` store."""
    messages = golden_messages(golden / "unclean" / "before-harm-expected.jsonl")
    for offset, scenarios in _ONE_GONE.items():
        if scenario in scenarios:
            return [m for m in messages if m["physical_offset"] != offset]
    for offset, scenarios in _ALL_GONE_FROM.items():
        if scenario in scenarios:
            return [m for m in messages if m["physical_offset"] < offset]
    return messages


def golden_messages(path: Path) -> list[Message]:
    """Return the messages of an `expected.jsonl`, under our names."""
    found = []
    for line in path.read_text("utf-8").splitlines():
        golden = json.loads(line)
        message = {ours: golden[theirs] for theirs, ours in SAME.items()}
        properties = golden["properties"]
        # Java returns '' for a missing property.
        message["keys"] = properties.get("KEYS")
        message["tags"] = properties.get("TAGS")
        message["uniq_key"] = properties.get("UNIQ_KEY")
        message["body"] = base64.b64decode(golden["body"])
        found.append(message)
    return found


def rows_by_broker(df: DataFrame) -> dict[str, list[Message]]:
    """Return the rows of a DataFrame with all columns: by broker, in physical order."""
    timestamps = {
        name: f"unix_millis({name}) AS {name}" for name in df.columns if "_timesta" in name
    }
    rows = df.selectExpr(*(timestamps.get(name, name) for name in df.columns)).collect()
    found: defaultdict[str, list[Message]] = defaultdict(list)
    for row in rows:
        message = row.asDict()
        message["body"] = bytes(message["body"])
        found[message.pop("broker")].append(message)
    for messages in found.values():
        messages.sort(key=lambda message: message["physical_offset"])
    return dict(found)


def offsets_of(df: DataFrame) -> list[int]:
    """Return the physical offsets of a DataFrame's rows, in order."""
    return sorted(row[0] for row in df.select("physical_offset").collect())
