"""Replaces the module ``cython`` for interpreted modules, if Cython is not installed."""

from __future__ import annotations

from typing import Final

compiled: Final = False
