"""The damage of a log: what a walk finds, and what a recovery has noted and left there.

Readers of queues pass over what was noted.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from logquarry.files.layout import DAMAGE, StoreLayout

logger = logging.getLogger(__name__)


class Span(Protocol):
    """A stretch of the log, by its first byte and how many there are."""

    @property
    def offset(self) -> int:
        """Physical offset."""

    @property
    def length(self) -> int:
        """Bytes."""


class Noted(NamedTuple):
    """A stretch of the log that a recovery has noted."""

    offset: int
    length: int


class DamageMap:
    """Which places of a log are damaged.

    Args:
        spans: the damage, in order. A list that a walk adds to is followed.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self._spans = spans
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, offset: object) -> bool:
        if not isinstance(offset, int):
            return False
        for number in range(len(self._starts), len(self._spans)):
            self._starts.append(self._spans[number].offset)
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._starts[at] + self._spans[at].length


def known_damage(layout: StoreLayout) -> DamageMap:
    """What the last recovery of a store noted; none where it was none of ours."""
    try:
        document = json.loads(layout.filesystem.read(DAMAGE))
        spans = [Noted(int(span["offset"]), int(span["length"])) for span in document["damage"]]
    except FileNotFoundError:
        return DamageMap()
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        logger.warning("%s: %s: %s", layout.root, DAMAGE, error)
        return DamageMap()
    # Another program that opened the store since may have cut the log, and gone on otherwise.
    return DamageMap(sorted(spans) if layout.durable_end is not None else ())
