"""The kernel's JSON lines are those of the single messages."""

from __future__ import annotations

import json
from functools import partial

from hypothesis import given

from logquarry.log import columns, exported
from logquarry.log.codec import Rows, Window
from logquarry.log.columns import Decoding
from logquarry.testing import strategies
from tests.helpers.twins import both, sound_rows


def _lines(window: Window, rows: Rows, decoding: Decoding) -> list[str]:
    return [line for _, found in exported.line_parts(window, rows, decoding) for line in found]


@given(strategies.logs())
def test_lines_of_any_messages(log: strategies.Log) -> None:
    decoding = Decoding(broker='b"\n')
    for base, data in zip(log.bases(), log.files, strict=True):
        window = Window.of(data, base)
        rows = sound_rows(window)
        fast, plain = both(partial(_lines, window, rows, decoding))
        messages = columns.messages(window, rows, decoding)
        assert fast == plain == [exported.line(message.to_json()) for message in messages]
        assert [json.loads(text) for text in fast] == [message.to_json() for message in messages]
        assert not any("\n" in text for text in fast)
