"""Are the numbers of the timer wheel those of RocketMQ 5?"""

from __future__ import annotations

import pytest

from logquarry.format import timer
from logquarry.format.timer import TimerCheck


@pytest.mark.parametrize(
    ("deliver_at", "slot"), [(5_300, 5_000), (5_001, 5_000), (5_000, 4_000), (1_000, 0)]
)
def test_the_slot_of_a_time(deliver_at: int, slot: int) -> None:
    """``transformTimerMessage``: a broker delivers a slot when its second is over."""
    assert timer.slot_time(deliver_at) == slot
    assert slot + timer.PRECISION_MS >= deliver_at


def test_timercheck() -> None:
    check = TimerCheck(1_795_361_272_000, 2_340, 45, 44, 0, 1_795_361_272_170, 22)
    data = timer.encode_check(check)
    assert len(data) == 4_096 and timer.decode_check(data) == check
    assert check.enqueued == 44, "the broker continues at the smaller one"
    assert data[:8].hex() == "000001a203def0" + "c0"
    with pytest.raises(ValueError, match="55 bytes instead of the 56"):
        timer.decode_check(data[:55])
