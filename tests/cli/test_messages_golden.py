"""``messages --jsonl`` gives what real RocketMQ wrote, field by field."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.golden_facts import SOUND
from tests.helpers.command import jsonl, same_as_golden

RECOVERED = [
    "clean-restart/prepad",
    "unclean/abort-only",
    "unclean/blank-lost",
    "unclean/body-length-middle",
    "unclean/checkpoint-gone",
    "unclean/checkpoint-new",
    "unclean/checkpoint-old",
    "unclean/checkpoint-old-cq-gone",
    "unclean/checkpoint-zero",
    "unclean/cq-ahead",
    "unclean/cq-and-index-gone",
    "unclean/cq-behind",
    "unclean/crc-middle",
    "unclean/crc-third-last-file",
    "unclean/frame-head-only",
    "unclean/garbage-after-zeros",
    "unclean/garbage-tail",
    "unclean/half-frame",
    "unclean/last-log-gone",
    "unclean/magic-middle",
    "unclean/noabort-cq-ahead",
    "unclean/noabort-cq-and-index-gone",
    "unclean/noabort-cq-behind",
    "unclean/noabort-crc-middle",
    "unclean/noabort-crc-third-last-file",
    "unclean/noabort-garbage-tail",
    "unclean/noabort-half-frame",
    "unclean/noabort-last-log-gone",
    "unclean/noabort-one-topic-gone",
    "unclean/one-topic-gone",
    "unclean/total-size-middle",
]


@pytest.mark.parametrize("name", SOUND)
def test_sound_store(golden: Path, name: str) -> None:
    scenario = golden / name
    same_as_golden(jsonl(scenario / "store", "--config", scenario / "params.json"), scenario)


@pytest.mark.parametrize("name", SOUND)
def test_sound_store_without_config(golden: Path, name: str) -> None:
    scenario = golden / name
    same_as_golden(jsonl(scenario / "store"), scenario)


@pytest.mark.parametrize("name", RECOVERED)
def test_recovered_store(golden: Path, name: str) -> None:
    scenario = golden / name
    same_as_golden(jsonl(scenario / "store-recovered", "--on-damage=skip"), scenario)
