"""Replaces the module ``cython`` if a module runs interpreted and Cython is not installed."""

from __future__ import annotations

from typing import Final

compiled: Final = False
