"""The table from which the bulk encoder makes frames: one column of int64 per message.

==  ===============  ==========================================================
 #  name             content
==  ===============  ==========================================================
 0  SIZE             TOTALSIZE
 1  TOPIC            index of the topic: TOPICLEN and its bytes
 2  HEAD             index of the head: hosts and SYSFLAG (:data:`HEAD_SIZE`...)
 3  QUEUE            index of the queue that gives the message its queue offset
 4  QUEUE_ID
 5  FLAG
 6  BORN_TIMESTAMP
 7  RECONSUME_TIMES
 8  PREPARED_OFFSET  PREPAREDTRANSACTIONOFFSET
 9  BODY_AT          address of the body
10  BODY_LENGTH
11  PROPS_AT         address of the property string
12  PROPS_LENGTH
13  QUEUE_OFFSET     of a message that takes no offset: 0, or its previous one
14  STORE_TIMESTAMP  earliest store time, of a message that was stored before
==  ===============  ==========================================================
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
"""Facts of a head: its size, the position of STORETIMESTAMP, whether the queue advances."""

PutRows = Int64
Array = npt.NDArray[Any]


def empty_put_rows(count: int) -> PutRows:
    """Make an uninitialised table for ``count`` messages."""
    return np.empty((FIELD_COUNT, count), np.int64)
