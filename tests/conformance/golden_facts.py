"""The golden scenarios: a store of RocketMQ, its settings, and what RocketMQ answered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from logquarry.config import StoreConfig

SOUND = (
    "single",
    "rollover",
    "batch",
    "ipv6",
    "sysflags",
    "delay",
    "delay-deliver",
    "multidispatch",
    "real-broker",
    "clean-restart/base",
    "clean-restart/retention",
)
"""Scenarios whose store is as RocketMQ closed it."""

UNCLEAN = (
    "abort-only",
    "blank-lost",
    "body-length-middle",
    "checkpoint-gone",
    "checkpoint-new",
    "checkpoint-old",
    "checkpoint-old-cq-gone",
    "checkpoint-zero",
    "cq-ahead",
    "cq-and-index-gone",
    "cq-behind",
    "cq-wrong-size",
    "crc-middle",
    "crc-third-last-file",
    "frame-head-only",
    "garbage-after-zeros",
    "garbage-tail",
    "half-frame",
    "last-log-gone",
    "log-gone",
    "log-wrong-size",
    "magic-middle",
    "noabort-cq-ahead",
    "noabort-cq-and-index-gone",
    "noabort-cq-behind",
    "noabort-crc-middle",
    "noabort-crc-third-last-file",
    "noabort-garbage-tail",
    "noabort-half-frame",
    "noabort-last-log-gone",
    "noabort-one-topic-gone",
    "one-topic-gone",
    "total-size-middle",
)
"""Stores that were harmed, and what the real store made of each when it opened it."""

LOST_FILES = ("last-log-gone", "noabort-last-log-gone")
"""Stores with a log that a safe recovery refuses without consent: files of the log are missing."""

CUT_FILES = (*LOST_FILES, "blank-lost", "crc-third-last-file", "noabort-crc-third-last-file")
"""Stores of which RocketMQ's recovery drops whole files, so that its mode needs consent too."""

ANY_LOSS = 1 << 40
"""Consent to every loss, in bytes."""

LOG_GONE = "log-gone"
WITH_LOG = tuple(name for name in UNCLEAN if name != LOG_GONE)
"""Those that have a log: a store whose queues know of messages and that has none is refused."""

OUR_NAMES = {
    "topic": "topic",
    "queueId": "queue_id",
    "queueOffset": "queue_offset",
    "physicalOffset": "physical_offset",
    "size": "size",
    "msgId": "message_id",
    "storeTimestamp": "store_timestamp",
    "bornTimestamp": "born_timestamp",
    "sysFlag": "sys_flag",
    "flag": "flag",
    "bodyCRC": "body_crc",
    "reconsumeTimes": "reconsume_times",
    "preparedTransactionOffset": "prepared_transaction_offset",
    "properties": "properties",
    "dispatchTagsCode": "tags_code",
}
"""Names in ``expected.jsonl`` of the fields that have the same values in both."""


@dataclass(frozen=True)
class Scenario:
    folder: Path
    store_name: str = "store"

    @property
    def store(self) -> Path:
        return self.folder / self.store_name

    @cached_property
    def params(self) -> dict[str, Any]:
        return self._json("params.json")

    @cached_property
    def config(self) -> StoreConfig:
        return StoreConfig.from_mapping(self.params)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return self._json("facts.json")

    @cached_property
    def expected(self) -> list[dict[str, Any]]:
        lines = (self.folder / "expected.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def _json(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / name).read_text("utf-8"))
        return document

    def __hash__(self) -> int:
        return hash(self.folder)
