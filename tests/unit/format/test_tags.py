"""Are subscriptions understood as RocketMQ's FilterAPI understands them?"""

from __future__ import annotations

import pytest

from logquarry.format import tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("*", None),
        ("", None),
        (" ", None),
        ("paid", {"paid"}),
        (" paid || sent ", {"paid", "sent"}),
        ("\tpaid\x01||", {"paid"}),
        ("paid || *", {"paid", "*"}),
        (" * ", {"*"}),
        ("||", None),
        (" || ", None),
        ("a|b", {"a|b"}),
        ("\u00a0", {"\u00a0"}),
    ],
)
def test_subscriptions(text: str | None, expected: set[str] | None) -> None:
    assert tags.parse(text) == expected
