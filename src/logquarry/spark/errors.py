"""Our exceptions across Spark: from a worker through the JVM to the user.

Spark hands on the text of a Python exception and nothing else, and puts the worker's traceback
before it. :func:`told_plainly` has the traceback left out where the exception is one of ours, so
that what the user reads is Spark's one line of introduction and then our text. :func:`explain`
makes the exception again from that text, and :func:`root_cause` finds in it what another exception
had to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from logquarry import errors
from logquarry.errors import CorruptStore, LogquarryError
from logquarry.format.frame import DamageKind
from logquarry.log.batches import BAD_COMPRESSION
from logquarry.log.walk import MISSING_FILE, TORN_TAIL
from logquarry.spark.tasks import LOST_END
from logquarry.spark.worker import in_worker

_HIDE = "SPARK_HIDE_TRACEBACK"

_OURS = re.compile(r"\blogquarry\.errors\.(\w+): (.*)")
_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = "Caused by: "
_PLACE = re.compile(r"(.*?): at offset (-?\d+): (.*)")
_KINDS = frozenset(
    {*(kind.label for kind in DamageKind), MISSING_FILE, TORN_TAIL, BAD_COMPRESSION, LOST_END}
)


@contextmanager
def told_plainly() -> Iterator[None]:
    """Within Spark's workers: exceptions of ours reach the user without a traceback."""
    try:
        yield
    except LogquarryError:
        # PySpark reads it when it reports an exception, as the last thing that this process does.
        if in_worker():
            os.environ[_HIDE] = "1"
        raise


def explain(error: BaseException | None) -> LogquarryError | None:
    """The exception of ours that made Spark raise ``error``; None if there was none.

    Of an exception that says where a store is damaged, path, offset, kind and reason are there
    again.
    """
    while error is not None:
        if isinstance(error, LogquarryError):
            return error
        found = _OURS.search(str(error))
        if found is not None:
            return _made_again(found[1], found[2].strip())
        error = error.__cause__ or error.__context__
    return None


def root_cause(error: BaseException) -> str:
    """The line that says why Spark failed, out of its pages.

    That is what a worker's Python raised, else the innermost cause in Java, else what Spark begins
    with.
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


def _made_again(name: str, text: str) -> LogquarryError:
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
