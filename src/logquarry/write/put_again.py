"""Makes a new message from a frame of the log, to deliver, commit or send back the old message.

RocketMQ parses the property string into a ``HashMap``, and builds a new string in the map's order.
The new string lacks parts that the parser skips.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from logquarry.format import java
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.message import Message

_CACHED: Final = 4_096
_FALSE: Final = "false"


def remade(values: Mapping[str, str]) -> str:
    """Return the property string in the order of the ``HashMap`` that a parser made."""
    return props.encode({name: values[name] for name in _order(tuple(values))})


@lru_cache(_CACHED)
def _order(names: tuple[str, ...]) -> tuple[str, ...]:
    # The cache helps because most messages have the same property names.
    return tuple(java.hash_map_order(names))


def put_again(
    frame: Frame,
    topic: str,
    queue_id: int,
    values: Mapping[str, str],
    *,
    sys_flag: int | None = None,
    prepared_transaction_offset: int = 0,
    delays: bool = True,
    waits: bool = True,
) -> Message:
    """Make a message with the body, flags, born time and hosts of a frame.

    Args:
        values: the properties in the parser's order, with the added properties.
        prepared_transaction_offset: for a COMMIT, the physical offset of its half message.
        delays: whether the store acts on DELAY and on the properties of the timer wheel.
    """
    acts_on = dict(values)
    if not delays:
        for name in props.DELAYS:
            acts_on.pop(name, None)
    if not waits:
        acts_on[props.WAIT] = _FALSE
    return Message(
        topic,
        frame.body,
        queue_id=queue_id,
        properties=acts_on,
        properties_string=remade(values),
        flag=frame.flag,
        sys_flag=frame.sys_flag if sys_flag is None else sys_flag,
        born_timestamp=frame.born_timestamp,
        born_host=frame.born_host,
        store_host=frame.store_host,
        reconsume_times=frame.reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
    )
