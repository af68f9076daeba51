"""What a compaction came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compaction:
    """What was merged.

    Attributes:
        files_before: how many files were merged.
        files_after: how many there are instead.
        bytes_before: of those.
        bytes_after: of these.
    """

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
