"""A walk over the log that takes what others have found, where it comes to it.

A frame names its place, so that any part of a log can be looked at apart from the rest: by another
thread, or on another machine. What is found there is only guessed, for whether a frame is part of
the log is for the walk to say (:class:`LogReader`): a guess counts if the walk comes to just where
it begins. Elsewhere, and wherever nobody has guessed, the walk looks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from logquarry.scan.walk import BlankSpan, DamagedSpan, Event, ExpiredSpan, LogEnd, LogReader, Run


class Guess(Protocol):
    """Frames one after the other that were found apart from the walk."""

    @property
    def start(self) -> int:
        """Physical offset of the first."""

    @property
    def end(self) -> int:
        """Physical offset behind the last."""


G = TypeVar("G", bound=Guess)


def _always(guess: Guess) -> bool:
    return True


def guided(
    reader: LogReader, guesses: Iterable[G], accept: Callable[[G], bool] = _always
) -> Iterator[Event | G]:
    """Everything from the log's start to its end, in order; see :meth:`LogReader.events`.

    Args:
        reader: walks. Not beside a live writer, whose files come and go.
        guesses: what was found apart from the walk, in the log's order.
        accept: whether a guess that begins where the walk is can be taken as it is.
    """
    position = reader.files.start
    for guess in guesses:
        if guess.start < position:
            continue
        if guess.start > position:
            may_guess = True
            for event in reader.events(position):
                yield event
                if isinstance(event, LogEnd):
                    return
                position = _behind(event)
                may_guess &= _may_guess_behind(reader, event)
                if may_guess and position >= guess.start:
                    break
        if guess.start == position and accept(guess):
            yield guess
            position = guess.end
    yield from reader.events(position)


def _may_guess_behind(reader: LogReader, event: Event) -> bool:
    """Whether a walk that begins behind an event says the same as one that came there."""
    if isinstance(event, DamagedSpan):
        return reader.forgets_damage and not event.is_tail
    return not isinstance(event, ExpiredSpan)


def _behind(event: Run | BlankSpan | DamagedSpan | ExpiredSpan) -> int:
    if isinstance(event, Run | BlankSpan):
        return event.end
    return event.offset + event.length
