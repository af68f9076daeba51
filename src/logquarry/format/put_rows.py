"""The table from which the bulk encoder makes frames: one column of int64 per message.

- SIZE is TOTALSIZE, and PREPARED_OFFSET is PREPAREDTRANSACTIONOFFSET.
- TOPIC, HEAD and QUEUE are indexes. A topic is TOPICLEN and its bytes; a head has the hosts and
  SYSFLAG; the queue gives the message its queue offset.
- BODY_AT and PROPS_AT are addresses of the body and of the property string.
- QUEUE_OFFSET is only for a message that takes no new queue offset: it is 0, or the message's
  previous queue offset.
- STORE_TIMESTAMP is the earliest allowed store time, for a message that was stored before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from logquarry.format.arrays import Int64

(
    SIZE,
    TOPIC,
    HEAD,
    QUEUE,
    QUEUE_ID,
    FLAG,
    BORN_TIMESTAMP,
    RECONSUME_TIMES,
    PREPARED_OFFSET,
    BODY_AT,
    BODY_LENGTH,
    PROPS_AT,
    PROPS_LENGTH,
    QUEUE_OFFSET,
    STORE_TIMESTAMP,
) = range(15)
FIELD_COUNT = 15

ANY_TIME = np.iinfo(np.int64).min
"""The STORE_TIMESTAMP of a message without an earliest store time."""

HEAD_SIZE, TIME_AT, ADVANCES, HEAD_FACTS = range(4)
"""Columns of a head's facts: size, position of STORETIMESTAMP, whether the queue advances."""

PutRows = Int64
Array = npt.NDArray[Any]


def empty_put_rows(count: int) -> PutRows:
    """Make an uninitialised table for ``count`` messages."""
    return np.empty((FIELD_COUNT, count), np.int64)
