"""A C function that makes a :class:`~logquarry.message.Message` without calling a Python function.
Works only if this module is compiled.

:func:`speed_up` puts the C function in front of ``Message.__new__``, the readable reference. The C
function makes the message if the arguments have usual types, and passes every other call to the
reference (tests/property/test_put_path_twins.py compares the two).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython


def speed_up(kind: type, usual: Mapping[str, tuple[object, type | None]]) -> None:
    """Make calls of a class faster, if this module is compiled.

    Args:
        kind: a subclass of tuple whose ``__new__`` accepts the first two fields by position.
        usual: for each field, in order, its default and the type whose values need no check. The
            type is None if every value except the default needs a check. The first field has no
            default.
    """
    if cython.compiled:
        names = tuple(map(sys.intern, usual))
        defaults, types = zip(*usual.values(), strict=True)
        install(kind, names, defaults, types, kind.__new__)
