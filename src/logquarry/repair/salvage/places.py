"""The places of saved frames in the old and the new log of a salvage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from logquarry.format.arrays import Int64


@dataclass(frozen=True, slots=True)
class Piece:
    """Frames between two physical offsets of the old log; ``to`` is their new physical offset."""

    start: int
    stop: int
    to: int


class NewPlaces:
    """Maps the physical offsets of frames in the old log to those in the new log."""

    def __init__(self, pieces: list[Piece]) -> None:
        ordered = sorted(pieces, key=lambda piece: piece.start)
        self._starts = np.array([piece.start for piece in ordered], np.int64)
        self._stops = np.array([piece.stop for piece in ordered], np.int64)
        self._moves = np.array([piece.to - piece.start for piece in ordered], np.int64)

    def of(self, places: Int64) -> Int64:
        """Return the new physical offset of each frame; -1 if the frame is not saved."""
        if not len(self._starts):
            return np.full(len(places), -1, np.int64)
        at = np.maximum(np.searchsorted(self._starts, places, "right") - 1, 0)
        inside = (places >= self._starts[at]) & (places < self._stops[at])
        return np.where(inside, places + self._moves[at], -1)
