"""Values that Java and RocketMQ 4.9.3 computed: tests/data/java_vectors.jsonl.

JavaVectors.java beside that file wrote it, with the jars of RocketMQ 4.9.3 on JDK 17.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parents[1] / "data" / "java_vectors.jsonl"


@cache
def vectors(kind: str) -> list[list[Any]]:
    """The rows of one kind: the input, and Java's result."""
    rows = [json.loads(line) for line in _PATH.read_text("utf-8").splitlines()]
    found = [row[1:] for row in rows if row[0] == kind]
    assert found, kind
    return found
