"""A C function that makes a :class:`~logquarry.message.Message` without a call of Python code.

If this module is not compiled, it has no effect. The C function makes a message from arguments of
usual types. All other calls go to ``Message.__new__``, the pure-Python version
(tests/property/test_put_path_twins.py compares the messages of both).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

try:
    import cython
except ImportError:
    from logquarry import compiled as cython


def speed_up(kind: type, usual: Mapping[str, tuple[object, type | None]]) -> None:
    """Make calls of a class faster, if this module is compiled.

    Args:
        kind: a subclass of tuple whose ``__new__`` accepts the first two fields by position.
        usual: a pair (default, type) for each field, in the order of the fields. A value of this
            type needs no check. If the type is None, every value except the default needs a check.
            The first field has no default.
    """
    if cython.compiled:
        names = tuple(map(sys.intern, usual))
        defaults, types = zip(*usual.values(), strict=True)
        install(kind, names, defaults, types, kind.__new__)
