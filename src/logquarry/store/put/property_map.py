"""The properties of a message to be put: what the store looks up in them, and writes anew.

RocketMQ keeps a string, which is written as it came, and a ``HashMap``. Where the store adds a
property it makes the string anew, in the iteration order of that map. Which order that is depends
on how the map came to be: a copy of another map is sized by it, one parsed from a string starts
with 16 buckets and grows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from logquarry.format import java
from logquarry.format import properties as props
from logquarry.message import Message

_FRESH_TABLE: Final = 16
_LOOKED_AT: Final = "|".join((props.DELAY, props.WAIT, props.INNER_MULTI_DISPATCH))
_LOOKED_AT_TEXT: Final = re.compile(_LOOKED_AT).search
_LOOKED_AT_BYTES: Final = re.compile(_LOOKED_AT.encode()).search
_NOTHING: Final[Mapping[str, str]] = {}


class PropertyMap:
    """The map of one message, with the order that Java's would have.

    Attributes:
        values: the properties, in insertion order.
    """

    __slots__ = ("_table_size", "values")

    def __init__(self, message: Message) -> None:
        self.values = message.all_properties()
        parsed = message.properties is None and message.properties_string is not None
        # An empty copy has no table yet, and starts as a fresh map does.
        self._table_size = (
            _FRESH_TABLE if parsed or not self.values else java.table_size_for(len(self.values))
        )

    def text(self, *, without: str | None = None, is_closed: bool = False) -> str:
        """The string, in the map's order (``messageProperties2String``)."""
        if not self.values:
            return ""
        order = java.hash_map_order(self.values, self._table_size)
        kept = {name: self.values[name] for name in order if name != without}
        return props.encode(kept, is_closed=is_closed)


def looked_at(message: Message) -> Mapping[str, str]:
    """The properties of a message that the store looks at; none where it need not look.

    Most messages have none of them, and none of those has its string parsed.
    """
    if message.properties is None and not message.delay_level and message.wait_store_ok:
        string = message.properties_string
        if string is None:
            return _NOTHING
        if not acts_on(string):
            return _NOTHING
    return message.all_properties()


def acts_on(string: str | bytes) -> bool:
    """Whether a property string may hold one of the properties that the store looks at."""
    if isinstance(string, str):
        return _LOOKED_AT_TEXT(string) is not None
    return _LOOKED_AT_BYTES(string) is not None
