"""The remoting codec on random frames: one exception for damage, and nothing lost in either header.

``make crash RUNG=remoting_fuzz N=10000000`` tries ten million frames.
"""

from __future__ import annotations

import contextlib
import random

import pytest

from logquarry.errors import ProtocolViolation
from logquarry.protocol import remoting, remoting_codes
from logquarry.protocol.remoting import LANGUAGES, RemotingCommand, RemotingReader
from tests.crash.ladder import IS_BY_HAND, count, seeds, told

EACH = 50_000
_TEXTS = ("", "0", "-1", "true", "99999999999999999999", "name\x01k\x02", '"\\', "é\u2028", "𝄞")
_NAMES = ("a", "b", "e", "g", "i", "topic", "queueId", "consumerGroup", "", "é")
_BYTES = (0, 1, 0x7F, 0x80, 0xFF, *b'"{}[]:,\\')


def command_of(rng: random.Random) -> RemotingCommand:
    return RemotingCommand(
        code=rng.choice((10, 11, 34, 310, rng.randrange(-(1 << 15), 1 << 15))),
        opaque=rng.randrange(-(1 << 31), 1 << 31),
        flag=rng.randrange(4),
        language=rng.choice(LANGUAGES),
        version=rng.randrange(500),
        remark=rng.choice((None, "remark", "é")),
        ext_fields={rng.choice(_NAMES): rng.choice(_TEXTS) for _ in range(rng.randrange(6))},
        body=rng.randbytes(rng.randrange(20)),
        is_binary=rng.random() < 0.5,
    )


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.slow] if number and not IS_BY_HAND else [])
        for number, seed in enumerate(seeds(count(20 * EACH), EACH))
    ],
)
def test_frames(seed: int) -> None:
    rng = random.Random(seed)
    with told(seed, "remoting frames"):
        for _ in range(EACH // 10):
            command = command_of(rng)
            frame = remoting.encode(command)
            assert RemotingReader().receive_data(frame) == [command]
            for _ in range(9):
                damaged = bytearray(frame)
                for _ in range(rng.randrange(1, 5)):
                    byte = rng.choice(_BYTES) if rng.random() < 0.7 else rng.randrange(256)
                    # Most changes are after the lengths: changed lengths end the frame at once.
                    least = 0 if rng.random() < 0.1 else min(8, len(frame) - 1)
                    damaged[rng.randrange(least, len(frame))] = byte
                with contextlib.suppress(ProtocolViolation):
                    for found in RemotingReader().receive_data(damaged):
                        with contextlib.suppress(remoting_codes.Refused):
                            remoting_codes.parse(found.code, found.ext_fields)
                        remoting.encode(found.answer(0, remark=found.remark))
