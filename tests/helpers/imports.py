"""Writes files of JSON Lines for imports, and has the settings of the stores of these imports."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.small_store import SMALL

SETTINGS = {
    "mappedFileSizeCommitLog": 65_536,
    "mappedFileSizeConsumeQueue": SMALL["mapped_file_size_consume_queue"],
    "maxHashSlotNum": SMALL["max_hash_slot_num"],
    "maxIndexNum": SMALL["max_index_num"],
}

Document = dict[str, Any]
Import = Callable[..., Any]


def line(**fields: Any) -> Document:
    body = fields.pop("content", b"text")
    return {"topic": "orders", "body": base64.b64encode(body).decode()} | fields


def write(path: Path, *documents: Document | str) -> Path:
    texts = [doc if isinstance(doc, str) else json.dumps(doc) for doc in documents]
    path.write_text("".join(text + "\n" for text in texts), "utf-8")
    return path
