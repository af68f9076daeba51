"""The table for the dispatcher: one column of int64 per frame.

==  ==================  ==============================================================
 #  name                content
==  ==================  ==============================================================
 0  TOPIC_ID            index of the topic
 1  QUEUE_ID
 2  QUEUE_OFFSET        index in the consume queue
 3  PHYSICAL_OFFSET     physical offset of the frame
 4  FRAME_SIZE          TOTALSIZE
 5  SYS_FLAG
 6  STORE_TIMESTAMP     in milliseconds
 7  TAGS_CODE           for the queue's entry
 8  HAS_KEY             whether there are KEYS or a UNIQ_KEY, and it is not a ROLLBACK
 9  QUEUE               index of the queue; -1 if the frame takes no queue offset
==  ==================  ==============================================================
"""

from __future__ import annotations

(
    TOPIC_ID,
    QUEUE_ID,
    QUEUE_OFFSET,
    PHYSICAL_OFFSET,
    FRAME_SIZE,
    SYS_FLAG,
    STORE_TIMESTAMP,
    TAGS_CODE,
    HAS_KEY,
    QUEUE,
) = range(10)
FIELD_COUNT = 10
