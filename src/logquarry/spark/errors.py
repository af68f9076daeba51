"""Finds the error behind an exception of Spark.

Spark carries the text of a Python exception from a worker to the driver, not its type. `explain`
makes our exception again from that text; `root_cause` finds the line that names the cause of any
other failure.
"""

from __future__ import annotations

import re

from logquarry import errors
from logquarry.errors import CorruptStore, LogquarryError
from logquarry.format.frame import DamageKind
from logquarry.log.batches import BAD_COMPRESSION
from logquarry.log.walk import MISSING_FILE, TORN_TAIL
from logquarry.spark.tasks import LOST_END

_OURS = re.compile(r"\blogquarry\.errors\.(\w+): (.*)")
_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = "Caused by: "
_PLACE = re.compile(r"(.*?): at offset (-?\d+): (.*)")
_KINDS = frozenset(
    {*(kind.label for kind in DamageKind), MISSING_FILE, TORN_TAIL, BAD_COMPRESSION, LOST_END}
)


def explain(error: BaseException | None) -> LogquarryError | None:
    """Return the exception of logquarry that made Spark raise `error`; None if there is none.

    A CorruptStore has its path, offset, kind and reason again.
    """
    while error is not None:
        if isinstance(error, LogquarryError):
            return error
        found = _OURS.search(str(error))
        if found is not None:
            return _remade(found[1], found[2].strip())
        error = error.__cause__ or error.__context__
    return None


def root_cause(error: BaseException) -> str:
    """Return the line of Spark's text that names the cause.

    It is the exception that a worker's Python raised, else the innermost cause in Java, else the
    first two lines.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    raised: str | None = None
    in_traceback = False
    for line in lines:
        if _TRACEBACK in line:
            in_traceback = True
        elif in_traceback and not line[0].isspace():
            raised, in_traceback = line, False
    if raised is not None:
        return raised
    causes = [line.strip() for line in lines if line.startswith(_CAUSE)]
    return causes[-1].removeprefix(_CAUSE) if causes else " ".join(lines[:2])


def _remade(name: str, text: str) -> LogquarryError:
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, LogquarryError)):
        return LogquarryError(text)
    if issubclass(kind, CorruptStore):
        place = _PLACE.fullmatch(text)
        if place is None:
            return errors.StoreError(text)
        word = place[3].partition(":")[0]
        path, offset, reason = place[1], int(place[2]), place[3]
        return kind(path, offset, reason, kind=word if word in _KINDS else "corrupt")
    if issubclass(kind, errors.MessageRejected):
        return errors.StoreError(text)
    return kind(text)
