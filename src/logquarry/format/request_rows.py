"""The table of what the dispatcher wants to know: a column of int64 a frame.

==  ==================  ==============================================================
 #  name                says
==  ==================  ==============================================================
 0  TOPIC_ID            number of the topic
 1  QUEUE_ID
 2  QUEUE_OFFSET        index in the consume queue
 3  PHYSICAL_OFFSET     where the frame starts in the log
 4  FRAME_SIZE          TOTALSIZE
 5  SYS_FLAG
 6  STORE_TIMESTAMP     in milliseconds
 7  TAGS_CODE           what goes into the queue's unit
 8  HAS_KEY             whether there are KEYS or a UNIQ_KEY, and it is no ROLLBACK
 9  QUEUE               number of topic and queue id; -1 where it takes no place in a queue
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
