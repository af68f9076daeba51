"""Tag expressions of consumers: ``paid || sent``, or ``*``."""

from __future__ import annotations

from typing import Final

SEPARATOR: Final = "||"
ANY: Final = "*"

_BLANKS: Final = "".join(map(chr, range(0x21)))
"""The characters that Java's ``trim`` removes."""


def parse(expression: str | None) -> frozenset[str] | None:
    """Parse a tag expression; None means any tag (``FilterAPI.buildSubscriptionData``).

    ``*`` means any tag only as the whole expression; between separators it is an ordinary tag. An
    expression without any tag, which RocketMQ rejects, means any tag here.
    """
    if expression is None or expression == ANY:
        return None
    words = (word.strip(_BLANKS) for word in expression.split(SEPARATOR))
    return frozenset(word for word in words if word) or None
