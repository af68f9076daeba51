"""The options of a write, from text to values. Knows nothing of Spark.

Names are case-insensitive. Whatever cannot be meant is a :class:`~logquarry.errors.UsageError` that
begins with the option's name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.ingest.dead_letters import dead_letter_folder
from logquarry.ingest.staging import LoadPlan, OnRejected
from logquarry.log.filesystem import local_folder

T = TypeVar("T")

DEFAULT_QUEUES: Final = 4
_OURS: Final = (
    *("path", "brokers", "queues", "txnAppId", "txnVersion", "onRejected", "deadLetterPath"),
    "config",
)
_SPELLING: Final = {name.lower(): name for name in _OURS}
_SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
"""What a stream's options bring along that are Spark's own."""
_MOST_BROKERS: Final = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Where to write, and how.

    Attributes:
        plan: where rows go; the stores were not looked at yet.
        app: the application that the user named, None without one.
        version: which of its loads it is.
        remarks: what the user should be told, once: options that have no effect.
    """

    plan: LoadPlan
    app: str | None = None
    version: int | None = None
    remarks: tuple[str, ...] = ()


def parse_write_options(options: Mapping[str, str], *, is_stream: bool) -> WriteOptions:
    """The options of a write.

    Files are read only for ``config``; no store is looked at.

    Args:
        options: as the user gave them.
        is_stream: whether a stream is written, whose batches have numbers already.

    Raises:
        UsageError: if an option's value cannot be meant, or the path is missing.
    """
    given = {name.lower(): value for name, value in options.items()}
    app = _parsed(given, "txnAppId", _some)
    version = _parsed(given, "txnVersion", _version)
    if not is_stream and (app is None) is not (version is None):
        raise UsageError("txnAppId: goes with txnVersion: give both of them, or none")
    on_rejected = _parsed(given, "onRejected", _on_rejected) or "fail"
    dead_letters = _parsed(given, "deadLetterPath", _dead_letters)
    if on_rejected == "deadLetter" and dead_letters is None:
        raise UsageError("onRejected: deadLetter wants a folder: give deadLetterPath, too")
    plan = LoadPlan(
        path=_path(given),
        brokers=_parsed(given, "brokers", _brokers) or 1,
        queues=_parsed(given, "queues", _positive) or DEFAULT_QUEUES,
        config=_parsed(given, "config", _config) or StoreConfig(),
        on_rejected=on_rejected,
        dead_letters=dead_letters if on_rejected == "deadLetter" else None,
    )
    return WriteOptions(
        plan=plan, app=app, version=version, remarks=tuple(_remarks(options, is_stream))
    )


def _parsed(given: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    text = given.get(name.lower())
    if text is None:
        return None
    try:
        return parse(text.strip())
    except ValueError as error:
        # UsageError is one too.
        raise UsageError(f"{name}: {error}") from error


def _remarks(options: Mapping[str, str], is_stream: bool) -> list[str]:
    found = []
    names = sorted(options, key=str.lower)
    kafka = [name for name in names if name.lower().startswith("kafka.")]
    if kafka:
        found.append(f"options of Kafka's client have no effect here: {', '.join(kafka)}")
    for name in names:
        key = name.lower()
        if key not in _SPELLING and key not in _SPARKS and name not in kafka:
            near = difflib.get_close_matches(key, _SPELLING, n=1)
            meant = f" (is {_SPELLING[near[0]]} meant?)" if near else ""
            found.append(f"there is no option {name}{meant}: it has no effect")
    lower = {name.lower() for name in names}
    if is_stream and "txnversion" in lower:
        found.append("txnVersion has no effect on a stream: its batches have numbers of their own")
    if "deadletterpath" in lower and "onrejected" not in lower:
        found.append("deadLetterPath has no effect without onRejected=deadLetter")
    return found


def _path(given: Mapping[str, str]) -> str:
    text = given.get("path", "")
    if not text:
        raise UsageError("path: there is no store to write to: say save(path), or option path")
    try:
        return str(local_folder(text, "only a local store can be written"))
    except UsageError as error:
        raise UsageError(f"path: {error}") from None


def _some(text: str) -> str:
    if not text:
        raise UsageError("names nothing")
    return text


def _number(text: str, least: int) -> int:
    if re.fullmatch(r"\d+", text, re.ASCII) is None or int(text) < least:
        raise UsageError(f"takes a whole number from {least} on, not {text!r}")
    return int(text)


def _version(text: str) -> int:
    return _number(text, 0)


def _positive(text: str) -> int:
    return _number(text, 1)


def _brokers(text: str) -> int:
    number = _number(text, 1)
    if number > _MOST_BROKERS:
        raise UsageError(f"takes {_MOST_BROKERS} at the most, not {number}")
    return number


def _on_rejected(text: str) -> OnRejected:
    if text.lower() == "fail":
        return "fail"
    if text.lower() == "deadletter":
        return "deadLetter"
    raise UsageError(f"takes fail or deadLetter, not {text!r}")


def _dead_letters(text: str) -> str:
    return str(dead_letter_folder(_some(text)))


def _config(text: str) -> StoreConfig:
    if not text.startswith("{"):
        return StoreConfig.from_file(text)
    try:
        return StoreConfig.from_mapping(json.loads(text))
    except ValueError as error:
        raise UsageError(f"takes a file or a JSON object: {error}") from error
