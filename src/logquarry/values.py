"""Parsing of sizes and times as users write them on the command line and in options."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Final

from logquarry.errors import UsageError

_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}


def byte_count(text: str) -> int:
    """Parse ``1048576``, ``1m`` or ``1.5 MB`` to bytes; units are powers of 1024, as in Spark.

    Raises:
        UsageError: if it is no size, or below one byte.
    """
    pattern = r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgtp]?)(?:i?b)?"
    match = re.fullmatch(pattern, text.strip(), re.I | re.A)
    size = int(float(match[1]) * (1 << _SHIFTS[match[2].lower()])) if match else 0
    if size < 1:
        raise UsageError(f"takes a size such as 64m, not {text!r}")
    return size


def time_ms(text: str) -> int:
    """Parse milliseconds since 1970, or an ISO 8601 time (UTC if it has no zone).

    Fractions of a millisecond are rounded up.

    Raises:
        UsageError: if it is neither.
    """
    if re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"takes milliseconds or an ISO 8601 time, not {text!r}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    whole = moment.replace(microsecond=0)
    return round(whole.timestamp()) * 1000 + math.ceil(moment.microsecond / 1000)
