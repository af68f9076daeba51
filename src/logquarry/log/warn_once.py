"""Logs each warning about a store once, because readers meet its cause again and again."""

from __future__ import annotations

import logging
from functools import lru_cache

logger = logging.getLogger(__name__)


@lru_cache(256)
def _logged(about: str) -> list[str]:
    """Return a list with the warning that was logged about a thing; empty if none was logged."""
    return []


def warn_once(text: str, *, about: str | None = None) -> None:
    """Log a warning, unless the same warning was logged before.

    With ``about``, for example the path of a file, later warnings about the same thing are not
    logged, even if their texts differ.
    """
    logged = _logged(text if about is None else about)
    if not logged:
        logged.append(text)
        logger.warning("%s", text)
