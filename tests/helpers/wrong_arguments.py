"""Values of wrong types for each kind of argument, and the check of the error that they raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest

from logquarry.errors import UsageError

NUMPY: Any = np
THING: Final = object()
HUGE: Final = 1 << 70
NO_INT: Final = ("0", 1.0, True, [0], b"0", THING, HUGE, -HUGE, np.bool_(True), np.float64(1))
NO_TEXT: Final = (b"t", 5, ["t"], ("t",), True, THING)
NO_NAMES: Final = (b"t", 5, [5], [b"t"], {"t": 1}, True, THING)
NO_FLAG: Final[tuple[object, ...]] = ("false", 1, 0, b"", [], THING)
NO_TIME: Final = ("yesterday", "", 1.5, True, b"0", [0], THING, HUGE)
NO_SECONDS: Final = ("1", True, [1], b"1", THING, float("nan"))
NO_OBJECT: Final[tuple[object, ...]] = ("x", 5, {}, [], b"x", True, THING)
NO_FUNCTION: Final = ("x", 5, {"a": 1}, b"x", True, THING)
NO_PATH: Final = (5, bytearray(b"/tmp"), ["/tmp"], True, THING, "a\0b", "a\ud800", "", "x" * 256)
NO_BYTES: Final = ("text", 5, [1, 2], True, THING)
NO_PORT: Final = (*NO_INT, -1, 65_536)

Wrong = Mapping[str, tuple[object, ...]]
"""By argument, its wrong values."""
Calls = Mapping[str, tuple[dict[str, Any], Wrong]]
"""By call, valid arguments, and wrong values of single ones."""


def cases(table: Calls) -> list[Any]:
    """A test case for each call and argument."""
    return [
        pytest.param(name, argument, id=f"{name}-{argument}")
        for name, (_, wrong) in table.items()
        for argument in wrong
    ]


def with_wrong(table: Calls, name: str, argument: str) -> list[dict[str, Any]]:
    """The arguments of a call, once with each wrong value of one of them."""
    given, wrong = table[name]
    return [given | {argument: value} for value in wrong[argument]]


def refused(call: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """Check that a call raises an error that names an argument."""
    with pytest.raises(UsageError) as caught:
        result = call(**arguments)
        # A future has the error of its put.
        getattr(result, "result", lambda: None)()
    text = str(caught.value).lower()
    words = (name, name.rstrip("s"), name.replace("_", " "))
    assert any(word in text for word in words), text
    assert "\n" not in text and "object has no attribute" not in text
