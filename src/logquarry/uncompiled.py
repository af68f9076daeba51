"""Used in place of the module ``cython`` by modules that run interpreted without Cython."""

from __future__ import annotations

from typing import Final

compiled: Final = False
