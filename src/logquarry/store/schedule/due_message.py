"""What becomes of a delayed message when its time has come (``messageTimeup``).

It goes to the topic and queue that REAL_TOPIC and REAL_QID name, with body, flags, born time,
hosts and all of its properties, DELAY among them. That it is not delayed once more is a matter of
the put, not of the string. So a frame in the log tells whether it was delivered, and what it is
the delivery of (:mod:`logquarry.store.schedule.delivered`).
"""

from __future__ import annotations

from logquarry.format import delay
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.store.put.put_again import put_again
from logquarry.store.transaction.half import HALF_TOPIC


class Undeliverable(ValueError):
    """A message of the schedule topic that nothing can be made of; the text says why."""


def due_message(frame: Frame) -> Message:
    """The message to be put for one of the schedule topic.

    Raises:
        Undeliverable: if it does not say where it belongs, or may not go there.
    """
    values = props.decode_bytes(frame.properties)
    topic = values.get(props.REAL_TOPIC)
    if topic is None:
        raise Undeliverable("it has no property REAL_TOPIC")
    if topic == HALF_TOPIC:
        raise Undeliverable(f"its topic is {topic}: half messages are not delayed")
    queue_id = delay.parse_int(values.get(props.REAL_QUEUE_ID, ""))
    if queue_id is None:
        raise Undeliverable(f"its property REAL_QID is {values.get(props.REAL_QUEUE_ID)!r}")
    return put_again(frame, topic, queue_id, values, delays=False)
