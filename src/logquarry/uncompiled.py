"""Replaces the module ``cython`` if Cython is not installed and the modules run interpreted."""

from __future__ import annotations

from typing import Final

compiled: Final = False
