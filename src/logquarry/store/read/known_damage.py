"""The damage that a recovery has found in a log and left there: readers of queues pass it over."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable

from logquarry.files.layout import DAMAGE, StoreLayout

logger = logging.getLogger(__name__)


class KnownDamage:
    """Places of a log that are known to be damaged.

    Args:
        spans: physical offset and bytes of each.
    """

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._spans = sorted(spans)
        self._starts = [start for start, _ in self._spans]

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, offset: object) -> bool:
        if not isinstance(offset, int):
            return False
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._starts[at] + self._spans[at][1]


def known_damage(layout: StoreLayout) -> KnownDamage:
    """What the last recovery of a store noted; none where it was none of ours."""
    try:
        document = json.loads(layout.filesystem.read(DAMAGE))
        spans = [(int(span["offset"]), int(span["length"])) for span in document["damage"]]
    except FileNotFoundError:
        return KnownDamage()
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        logger.warning("%s: %s: %s", layout.root, DAMAGE, error)
        return KnownDamage()
    # Another program that opened the store since may have cut the log, and gone on otherwise.
    return KnownDamage(spans if layout.read_durable() is not None else ())
