"""Which names a topic may have before a folder is made of it (CVE-2019-17572).

RocketMQ's store takes any name (``../../../x`` made folders); its broker only the letters of
:data:`_BROKER_NAME`. Here the store has a rule of its own, and the broker's on request.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST_TOPIC: Final = 127
"""Bytes, and for RocketMQ UTF-16 characters: the length is one signed byte of the frame."""
LONGEST_NAME: Final = 255
"""Bytes of a folder's name, which bound the further queues of multi-dispatch."""
BROKER_CHECK: Final = "rocketmq-broker"

_UNSAFE: Final = re.compile("[/\x00-\x1f\x7f-\x9f]")
_BROKER_NAME: Final = re.compile("[%|a-zA-Z0-9_-]+")


def name_fault(name: str, check: str, *, longest: int = LONGEST_TOPIC) -> str | None:
    """What is wrong with a name, None if it may be a topic's.

    Args:
        name: the topic, or the name of a further queue.
        check: ``StoreConfig.topic_check``.
        longest: bytes that it may take.
    """
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "it holds half a surrogate pair, which UTF-8 has no bytes for"
    if not size:
        return "it is empty"
    if size > longest:
        return f"it takes {size} bytes, and {longest} are the most"
    if name in (".", ".."):
        return "it is the name of a folder that is there already"
    if _UNSAFE.search(name):
        return "it holds a slash or a control character"
    if check == BROKER_CHECK and not _BROKER_NAME.fullmatch(name):
        return "the broker's rule allows letters, digits, %, |, - and _"
    return None
