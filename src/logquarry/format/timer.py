"""The files of RocketMQ 5's timer wheel (``TimerWheel``, ``TimerLog``, ``TimerCheckpoint``).

The timer wheel is the file ``timerwheel``, an array of slots. The time since 1970 is divided into
spans of ``timerPrecisionMs`` milliseconds. If a message's delivery time is in span n, the message
is in slot n modulo the number of slots. A slot points to its first and its last entry in the timer
log, and each entry points to the previous entry of the same slot.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from logquarry.format.fields import Field, Layout

TOPIC: Final = "rmq_sys_wheel_timer"
WHEEL: Final = "timerwheel"
LOG: Final = "timerlog"
CHECK_FILE: Final = "timercheck"

SLOT = Layout(
    "timer wheel slot",
    Field("time", "q", "time of the slot, in units of timerPrecisionMs; 0: never used"),
    Field("first", "q", "position of the slot's first entry in the timer log"),
    Field("last", "q", "position of the slot's last entry in the timer log"),
    Field("count", "i", "number of ordinary entries minus number of entries that delete a message"),
    Field("magic", "i", "0"),
)
ENTRY = Layout(
    "timer log entry",
    Field("size", "i", "52"),
    Field("previous", "q", "position of the previous entry of the same slot; -1: none"),
    Field(
        "magic",
        "i",
        "1; plus 2 for a roll (when the slot is due, the broker puts the message back into "
        "its queue); plus 4 if the message deletes another message",
    ),
    Field("write_time", "q", "time of the write, ms, rounded down to timerPrecisionMs"),
    Field("delay", "i", "time of the slot minus write_time, ms"),
    Field("physical_offset", "q", "physical offset of the frame"),
    Field("frame_size", "i", "bytes of the frame"),
    Field("topic_hash", "i", "Java hash code of the message's real topic"),
    Field("reserved", "q", "0"),
)
BLANK = Layout(
    "timer log blank",
    Field("size", "i", "bytes from here to the end of the file"),
    Field("previous", "q", "0"),
    Field("magic", "I", "cbd43194"),
)
CHECK = Layout(
    "timercheck",
    Field("read_time", "q", "time of the next slot to deliver, ms"),
    Field("log_end", "q", "position up to which the timer log is flushed"),
    Field(
        "queue_offset", "q", "first queue offset of rmq_sys_wheel_timer that is not in the wheel"
    ),
    Field("master_queue_offset", "q", "queue_offset of the master"),
    Field("state_version", "q", "data version: state"),
    Field("timestamp", "q", "data version: time, ms"),
    Field("counter", "q", "data version: counter"),
)
assert SLOT.size == 32
assert ENTRY.size == 52
assert CHECK.size == 56

SLOTS: Final = 2 * 7 * 24 * 3600
WHEEL_SIZE: Final = SLOTS * SLOT.size
LOG_FILE_SIZE: Final = 100 << 20
"""Bytes of a file of the timer log (``mappedFileSizeTimerLog``)."""
NONE: Final = -1

MAGIC_DEFAULT: Final = 1
MAGIC_ROLL: Final = 2
MAGIC_DELETE: Final = 4
MAGIC_BLANK: Final = 0xCBD43194

PRECISION_MS: Final = 1000
"""``timerPrecisionMs``."""
ROLL_SLOTS: Final = 2 * 24 * 3600
"""Number of slots (``timerRollWindowSlot``). If a message is due only after this number of slots or
more, the broker first places the message in an earlier slot of the wheel. When this slot is due,
the broker returns the message to the timer queue, and then places it in the wheel again.
"""
WHEEL_MS: Final = 7 * 24 * 3600 * 1000
"""Milliseconds that the wheel covers (``TIMER_WHEEL_TTL_DAY``). If a broker was down longer than
this time, the broker skips slots whose delivery time has passed.
"""


class TimerCheck(NamedTuple):
    """The values of ``config/timercheck``."""

    read_time: int = 0
    log_end: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0

    @property
    def enqueued(self) -> int:
        """The next queue offset that a broker reads (``TimerMessageStore.recover``)."""
        return min(self.queue_offset, self.master_queue_offset)


def encode_check(check: TimerCheck) -> bytes:
    """Encode the whole file."""
    return CHECK.page(check)


def decode_check(data: bytes) -> TimerCheck:
    """Decode the values. Raises ValueError if there are fewer than 56 bytes."""
    return TimerCheck(*CHECK.values(data))


def slot_time(deliver_at: int, precision_ms: int = PRECISION_MS) -> int:
    """Return the time, in ms, at which the slot of a delivery time begins
    (``HookUtils.transformTimerMessage``).

    A broker delivers the messages of a slot at the end of the slot's time: at the delivery time or
    up to ``timerPrecisionMs`` later.
    """
    return (deliver_at - 1) // precision_ms * precision_ms


def delete_key(topic: str, uniq_key: str) -> str:
    """Return the value of TIMER_DEL_UNIQKEY in RocketMQ 5.3 (``buildDeleteKey``). In 5.1 and 5.4,
    the value is only the UNIQ_KEY.
    """
    return f"{topic}+{uniq_key}"
