"""Names in a ``broker.conf`` that are no setting of logquarry: typing errors and ignored settings.

RocketMQ ignores a name that it does not know, so a typing error has no effect there and is never
noticed. In logquarry it could cause a read with wrong sizes.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from functools import cache
from importlib.resources import files
from typing import Final

from logquarry.errors import UsageError

_TYPING_ERROR: Final = 0.9
"""Similarity from which an unknown name counts as a typing error: one or two wrong letters."""
_NEAR: Final = 0.8


@cache
def broker_names() -> frozenset[str]:
    """All settings of RocketMQ's broker, 4.9 to 5.5."""
    data = files("logquarry").joinpath("data", "broker_settings.txt")
    return frozenset(data.read_text("ascii").split())


def check_names(names: Iterable[str], used: Collection[str]) -> list[str]:
    """Check the names that are no setting of ours.

    A ``broker.conf`` is full of settings that logquarry does not use: they are accepted.

    Args:
        names: the names.
        used: the settings that logquarry uses, as RocketMQ spells them.

    Returns:
        A warning for each name that neither RocketMQ nor logquarry knows.

    Raises:
        UsageError: if a name is probably a typing error of a used setting.
    """
    warnings = []
    for name in names:
        if name in broker_names():
            continue
        meant = difflib.get_close_matches(name, used, 1, _TYPING_ERROR)
        if meant:
            raise UsageError(
                f"there is no setting {name}. Did you mean {meant[0]}? If not, remove the line"
            )
        near = difflib.get_close_matches(name, [*used, *broker_names()], 1, _NEAR)
        hint = f"; the nearest is {near[0]}" if near else ""
        warnings.append(f"neither RocketMQ nor logquarry has a setting {name}{hint}")
    return warnings
