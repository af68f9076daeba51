"""Tables of big-endian fixed-width fields. Structs, field offsets, NumPy dtypes and pages of the
docs are made from these tables.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from logquarry.text import counted

if TYPE_CHECKING:
    import numpy as np

PAGE_SIZE: Final = 4096
"""Bytes of a page (``MappedFile.OS_PAGE_SIZE``). The checkpoint file has this size.
RocketMQ counts the changed pages of a file to decide whether to flush the file.
"""

_WIDTHS = {"b": 1, "h": 2, "i": 4, "I": 4, "q": 8}
_DTYPES = {"b": "i1", "h": ">i2", "i": ">i4", "I": ">u4", "q": ">i8"}


@dataclass(frozen=True, slots=True)
class Field:
    """One fixed-width big-endian field.

    ``code`` is the field's ``struct`` code (``b h i q`` are signed, ``I`` is unsigned). ``meaning``
    is a short description for the docs, with RocketMQ's name of the field if that name differs.
    """

    name: str
    code: str
    meaning: str

    @property
    def width(self) -> int:
        """Bytes of the field."""
        return _WIDTHS[self.code]


class Layout:
    """Fixed-width fields in their order on disk."""

    def __init__(self, name: str, *fields: Field) -> None:
        self.name = name
        self.fields = fields
        self.struct = struct.Struct(">" + "".join(field.code for field in fields))
        self.size = self.struct.size
        ends = list(accumulate(field.width for field in fields))
        self.offsets = dict(zip([field.name for field in fields], [0, *ends], strict=False))
        # Kernels cannot read a dictionary, so they use this named tuple of the same offsets.
        self.at: Any = namedtuple(type(self).__name__, self.offsets)(**self.offsets)

    def page(self, values: Iterable[int]) -> bytes:
        """Return the bytes of a file of one page. The file begins with the fields."""
        return self.struct.pack(*values).ljust(PAGE_SIZE, b"\0")

    def values(self, data: bytes) -> tuple[int, ...]:
        """Decode the fields at the beginning of a file. Raises ValueError if there are too few
        bytes.
        """
        if len(data) < self.size:
            raise ValueError(
                f"{counted(len(data), 'byte')} instead of the {self.size} bytes of a {self.name}"
            )
        return self.struct.unpack_from(data, 0)

    def dtype(self) -> np.dtype[np.void]:
        """The layout as a packed big-endian NumPy dtype."""
        import numpy as np

        return np.dtype([(field.name, _DTYPES[field.code]) for field in self.fields])

    def markdown(self) -> str:
        """The layout as a Markdown table for the docs."""
        lines = ["| offset | field | bytes | meaning |", "|---|---|---|---|"]
        lines += [
            f"| {self.offsets[field.name]} | {field.name} | {field.width} | {field.meaning} |"
            for field in self.fields
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Layout({self.name!r}, {self.size} bytes)"
