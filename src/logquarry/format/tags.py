"""What a consumer says of the tags it wants: ``paid || sent``, or ``*``."""

from __future__ import annotations

from typing import Final

SEPARATOR: Final = "||"
ANY: Final = "*"

_BLANKS: Final = "".join(map(chr, range(0x21)))
"""What Java's ``trim`` takes off."""


def parse(expression: str | None) -> frozenset[str] | None:
    """The tags of a subscription; None for any (``FilterAPI.buildSubscriptionData``).

    Only as the whole expression does ``*`` mean any; among others it is a tag like them. Where
    RocketMQ finds nothing between separators, and refuses, any is what is meant here.
    """
    if expression is None or expression == ANY:
        return None
    words = (word.strip(_BLANKS) for word in expression.split(SEPARATOR))
    return frozenset(word for word in words if word) or None
