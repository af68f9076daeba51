"""Files that a command writes: whole, or not there."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from logquarry import text
from logquarry.errors import UsageError
from logquarry.units import Progress

if TYPE_CHECKING:
    from rich import progress as bars
    from rich import status


def check_target(target: str | Path, stores: Iterable[str]) -> Path:
    """Where a file is to be written, with links resolved.

    Raises:
        UsageError: if it is a folder, a URL, or lies in one of the stores that are read.
    """
    if "://" in str(target):
        raise UsageError(f"{target}: a local file is written, and this is a URL")
    path = Path(target).resolve()
    if path.is_dir():
        raise UsageError(f"{target}: a folder, and a file is to be written")
    for store in stores:
        if "://" not in store and path.is_relative_to(Path(store).resolve()):
            raise UsageError(f"{target}: lies in the store {store}, which is only read")
    return path


@contextmanager
def staged(target: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place at the end of the block, and only if nothing is raised.

    What is there and no file (a pipe, a device) is written as it is.

    Raises:
        UsageError: if ``target`` is a folder.
    """
    if target.is_dir():
        raise UsageError(f"{target}: a folder, and a file is to be written")
    target = target.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp lets nobody else read it; a file that was asked for follows the umask.
        umask = os.umask(0)
        os.umask(umask)
        draft.chmod(0o666 & ~umask)
        draft.replace(target)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            # A write names no file.
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


# --------------------------------------------------------------------------------------------------
# Where a command's words go: data to stdout, everything else to stderr.
#
# JSON is UTF-8 whatever the locale says, as its readers expect; text for people follows the locale.
# Colour and progress bars appear on a terminal alone, and colour only without ``NO_COLOR``.

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

_LINES_AT_ONCE = 512
_BYTES_AT_ONCE = 1 << 20
_BAR_AFTER_SECONDS = 0.4


class Output:
    """The two streams of one command.

    Args:
        quiet: only data and errors, no notes and no progress.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        _HANDLER.setLevel(logging.ERROR if quiet else logging.WARNING)

    # -------------------------------------------------------------------------------------- data
    def line(self, line: str = "") -> None:
        """One line of data."""
        sys.stdout.write(line + "\n")

    def lines(self, lines: Iterable[str]) -> None:
        """Some lines of data, many in one write."""
        rest = iter(lines)
        while some := list(islice(rest, _LINES_AT_ONCE)):
            sys.stdout.write("\n".join([*some, ""]))

    def json(self, document: Any) -> None:
        """One JSON document, in ASCII: names from a store must do nothing to a terminal."""
        # Twice: once to see names as the text that they are.
        whole = _with_names(json.dumps(document, ensure_ascii=False))
        self.jsonl([json.dumps(json.loads(whole), indent=2)])

    def jsonl(self, lines: Iterable[str]) -> None:
        """Some lines of JSON, as bytes: the locale's encoding might have no such characters."""
        sys.stdout.flush()
        for data in encoded(lines):
            sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
        """A table with aligned columns.

        Args:
            header: names of the columns.
            rows: the cells. Text from a store must be :func:`~logquarry.text.printable`.
            right: names of the columns that are aligned to the right.
        """
        numbers = [i for i, name in enumerate(header) if name in right.split()]
        head, *lines = text.columns([[name.upper() for name in header], *rows], numbers)
        self.line(self.style(head, "bold"))
        self.lines(lines)

    def style(self, words: str, style: str) -> str:
        """Words in a style, if stdout shows any."""
        return _styled(words, style, sys.stdout)

    # ------------------------------------------------------------------------------------- notes
    def note(self, message: str) -> None:
        """Something worth knowing, on stderr; not with ``--quiet``."""
        if not self.quiet:
            sys.stdout.flush()
            sys.stderr.write(message + "\n")

    def warn(self, message: str) -> None:
        """Something that may be wrong, on stderr; not with ``--quiet``."""
        self.note(_styled("warning: ", "yellow", sys.stderr) + message)

    def status_line(self) -> StatusLine:
        """A line on stderr that changes, on a terminal; elsewhere nothing."""
        return StatusLine(not self.quiet and sys.stderr.isatty())

    @contextmanager
    def progress(
        self, what: str, *, in_bytes: bool = False, beside_data: bool = False
    ) -> Iterator[Progress | None]:
        """A progress bar on stderr while the block runs; None where there is nobody to see it.

        Args:
            what: what is done.
            in_bytes: whether bytes are counted, or things.
            beside_data: whether data comes out meanwhile: there is no bar among lines of data.
        """
        unseen = self.quiet or not sys.stderr.isatty()
        if unseen or (beside_data and sys.stdout.isatty()):
            yield None
            return
        bar = _Bar(what, in_bytes=in_bytes)
        try:
            yield bar
        finally:
            bar.close()


class StatusLine:
    """A line on stderr that changes while something goes on; only for whoever sees it.

    Args:
        is_seen: whether there is anybody.
    """

    def __init__(self, is_seen: bool) -> None:
        self._status: status.Status | None = None
        if is_seen:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("")

    def __enter__(self) -> StatusLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, line: str) -> None:
        """Show this from now on."""
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(line))


class _Bar:
    """A progress bar that appears once the work has taken a while: quick work needs none."""

    def __init__(self, what: str, *, in_bytes: bool) -> None:
        self._what = what
        self._in_bytes = in_bytes
        self._due = time.monotonic() + _BAR_AFTER_SECONDS
        self._bar: bars.Progress | None = None
        self._task: bars.TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            if time.monotonic() < self._due:
                return
            self._bar = self._made()
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)

    def _made(self) -> bars.Progress:
        from rich import progress as bars
        from rich.console import Console

        counts: bars.ProgressColumn = (
            bars.DownloadColumn(binary_units=True) if self._in_bytes else bars.MofNCompleteColumn()
        )
        return bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            counts,
            bars.TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def encoded(lines: Iterable[str]) -> Iterator[bytes]:
    """Lines of JSON as UTF-8 with their ends, about a mebibyte at a time."""
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _BYTES_AT_ONCE:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(lines: list[str]) -> bytes:
    text = "\n".join([*lines, ""])
    try:
        return text.encode()
    except UnicodeEncodeError:
        # A folder's name need not be text; JSON has an escape for what is none.
        return _with_names(text).encode("utf-8", "backslashreplace")


def _with_names(text: str) -> str:
    """Text with names of files in it that are UTF-8, which the locale has taken for bytes."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text


def error(message: str) -> None:
    """An error on stderr."""
    sys.stderr.write(_styled("error: ", "red", sys.stderr) + message + "\n")


def _styled(words: str, style: str, stream: TextIO) -> str:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return words
    return f"\x1b[{_STYLES[style]}m{words}\x1b[0m"


class _Handler(logging.Handler):
    """Log records as lines on what is stderr at the time. Names in them may be hostile."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        colour = "red" if record.levelno >= logging.ERROR else "yellow"
        message = text.printable(record.getMessage())
        sys.stderr.write(f"{_styled(f'{level}: ', colour, sys.stderr)}{message}\n")


_HANDLER = _Handler()


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Have the package's log on stderr while the block runs."""
    logger = logging.getLogger("logquarry")
    logger.addHandler(_HANDLER)
    try:
        yield
    finally:
        logger.removeHandler(_HANDLER)
