"""Output of commands: stdout, stderr, progress bars and files.

A file appears under its name only when it is complete.

Data goes to stdout, everything else to stderr. JSON is UTF-8 in every locale. Only a terminal shows
progress bars and colours; ``NO_COLOR`` disables the colours.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TextIO

from logquarry import text
from logquarry.arguments import Progress
from logquarry.errors import StoreUnavailable, UsageError, write_reason

if TYPE_CHECKING:
    from rich import progress as rich_progress

    from logquarry.config import StoreConfig

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

_LINES_AT_ONCE = 512
_SURROGATE: Final = "\\ud"
"""The start of an escaped surrogate in JSON."""
_BYTES_AT_ONCE = 1 << 20
_PROGRESS_AFTER_SECONDS = 0.4
_DRAFT = ".logquarry-"
"""Start of the name of a temporary file."""
_READER_SECONDS = 10.0
"""Maximum time to wait for a program that reads a pipe."""
_READER_PAUSE = 0.02
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, of an exhausted quota, and of the limit of a file's size."""
UNWRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers if the user may not write a file, or if the disk is mounted read-only."""
MOST_LISTED = 40
"""Maximum number of printed lines of a list; ``--json`` prints all."""


# ------------------------------------------------------------------------------------------- files
def check_target(
    target: str | Path, stores: Iterable[str], config: StoreConfig | None = None
) -> Path:
    """Check that a command may write a file. Return the path with all links resolved. The path of a
    pipe or a device is returned unchanged.
    """
    from logquarry import arguments
    from logquarry.log.location import lies_in_store, local_folder, path_or_url

    name = path_or_url(arguments.path(target, "output file", may_be_long=True))
    if "://" in name:
        raise UsageError(f"{target} is a URL; give the path of a local file")
    path = Path(name)
    with writing_to(target):
        _refuse_folder(target, path)
        if not _is_special(path):
            path = local_folder(path).resolve()
    for store in map(path_or_url, stores):
        if "://" not in store and lies_in_store(path, store, config):
            raise UsageError(f"{target} lies in the store {store}; give a path outside of it")
    return path


def _refuse_folder(target: str | Path, path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{target} is a folder; give the path of a file")


def _is_special(path: Path) -> bool:
    # The path may be a link to a pipe without a name, for example /dev/stdout or /dev/fd/63. Such a
    # path cannot be resolved.
    return path.exists() and not path.is_file() and not path.is_dir()


def _open_special(path: Path) -> BinaryIO:
    """Open a pipe or a device. Raise UsageError if no program opens the other end of a pipe."""
    if not path.is_fifo():
        return path.open("wb")
    end = time.monotonic() + _READER_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        else:
            os.set_blocking(descriptor, True)
            return os.fdopen(descriptor, "wb")
        if time.monotonic() > end:
            raise UsageError(
                f"{path} is a pipe, and no program reads it: start the program that reads it, or "
                "give the path of a file"
            )
        time.sleep(_READER_PAUSE)


@contextmanager
def staged(target: Path) -> Iterator[BinaryIO]:
    """Context manager: write a file under a temporary name; rename it at the end of the block.

    If the block raises an error, the target does not change. If the target is a pipe or a device,
    the data is written to it directly.

    Raises:
        UsageError: if the target is a pipe, and no program opens it for reading within 10 s.
        StoreUnavailable: if the user may not write the target.
    """
    _refuse_folder(target, target)
    with writing_to(target):
        if _is_special(target):
            with _open_special(target) as file:
                yield file
        else:
            with _draft_of(target.resolve()) as file:
                yield file


@contextmanager
def _draft_of(target: Path) -> Iterator[BinaryIO]:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor, name = tempfile.mkstemp(prefix=_DRAFT, dir=target.parent)
    except OSError as error:
        # Name the file that the user knows, not the temporary file.
        raise OSError(error.errno, error.strerror, str(target)) from error
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a file that only its owner can read. Set the usual mode of new files.
        umask = os.umask(0)
        os.umask(umask)
        draft.chmod(0o666 & ~umask)
        draft.replace(target)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename = str(target)
        raise


@contextmanager
def writing_to(target: str | Path) -> Iterator[None]:
    """Context manager: name the output ``target`` in errors of its writes.

    If the user may not write ``target``, raise StoreUnavailable. An error about a full disk stays
    an OSError, and gets the path ``target`` if it has no path.
    """
    try:
        yield
    except OSError as error:
        if error.errno in UNWRITABLE and _is_at(target, error.filename):
            where, reason = error.filename or target, os.strerror(error.errno)
            step = write_reason(OSError(error.errno, reason))
            raise StoreUnavailable(f"{os.fsdecode(where)}: {step}") from error
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(target)) from error


def _is_at(target: str | Path, name: Any) -> bool:
    """Whether a failed write was to the output, or to one of the folders that contain it."""
    if not isinstance(name, (str, bytes)):
        return True
    output, path = Path(target).absolute(), Path(os.fsdecode(name)).absolute()
    return output.is_relative_to(path) or path.is_relative_to(output)


# ----------------------------------------------------------------------------------------- streams
class Output:
    """The two streams of one command. ``quiet`` suppresses notes, warnings and progress."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        _HANDLER.setLevel(logging.ERROR if quiet else logging.WARNING)

    # -------------------------------------------------------------------------------------- data
    def line(self, line: str = "") -> None:
        """Write one line of data."""
        sys.stdout.write(line + "\n")

    def lines(self, lines: Iterable[str]) -> None:
        """Write lines of data; one call of ``write`` writes many lines."""
        rest = iter(lines)
        while some := list(islice(rest, _LINES_AT_ONCE)):
            sys.stdout.write("\n".join([*some, ""]))

    def json(self, document: Any) -> None:
        """Write one JSON document in ASCII, so that its content cannot control a terminal."""
        found = json.dumps(document, indent=2)
        if _SURROGATE in found:
            # `_with_names` decodes UTF-8 file names that Python left undecoded. The last json.dumps
            # escapes all characters that are not ASCII.
            whole = _with_names(json.dumps(document, ensure_ascii=False))
            found = json.dumps(json.loads(whole), indent=2)
        self.jsonl([found])

    def jsonl(self, lines: Iterable[str]) -> None:
        """Write lines of JSON as UTF-8, because the locale's encoding may lack characters."""
        sys.stdout.flush()
        for data in encoded(lines):
            sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def table(
        self, header: Sequence[str], rows: Iterable[Iterable[object]], right: str = ""
    ) -> None:
        """Write a table with aligned columns; escape the cells.

        If stdout is a terminal, long texts are shortened to its width.

        Args:
            right: names of the columns to align right, separated by spaces.
        """
        numbers = [i for i, name in enumerate(header) if name in right.split()]
        most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        cells = [_printable(column) for column in zip(*rows, strict=True)]
        titles = tuple(name.upper() for name in header)
        head, *lines = text.columns([titles, *zip(*cells, strict=True)], numbers, most)
        self.line(self.style(head, "bold"))
        self.lines(lines)

    def more(self, count: int, words: str = "more", *, indent: str = "") -> None:
        """Print how many items a shortened list omits, if it omits any."""
        if count > 0:
            self.line(f"{indent}and {count} {words}; --json lists all")

    def section(self, title: str, lines: Sequence[str], most: int = MOST_LISTED) -> None:
        """Write an empty line, a title and a list, if the list has any lines."""
        if lines:
            self.title(title)
            self.lines(f"  {text.printable(line)}" for line in lines[:most])
            self.more(len(lines) - most, indent="  ")

    def title(self, title: str) -> None:
        """Write an empty line and a title."""
        self.lines(["", self.style(title, "bold")])

    def facts(self, rows: Iterable[Sequence[str]], width: int) -> None:
        """Write pairs of a name and a value; escape the values."""
        for name, value in rows:
            self.line(f"{self.style(f'{name:<{width}}', 'bold')}  {text.printable(value)}")

    def style(self, words: str, style: str) -> str:
        """Style a text, if stdout is a terminal that shows styles."""
        return _styled(words, style, sys.stdout)

    # ------------------------------------------------------------------------------------- notes
    def note(self, message: str) -> None:
        """Write a note to stderr, unless ``--quiet`` is given; escape the note."""
        self._note("", message)

    def warn(self, message: str) -> None:
        """Write a warning to stderr, unless ``--quiet`` is given; escape the warning."""
        self._note(_styled("warning: ", "yellow", sys.stderr), message)

    def _note(self, label: str, message: str) -> None:
        if not self.quiet:
            sys.stdout.flush()
            sys.stderr.write(f"{label}{text.printable(message)}\n")

    @contextmanager
    def status_line(self) -> Iterator[Callable[[str], None]]:
        """Show a line if stderr is a terminal; yield a function that replaces the line."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda line: None
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True, highlight=False).status("") as status:
            yield lambda line: status.update(Text(line))

    @contextmanager
    def progress(
        self, what: str, *, in_bytes: bool = False, beside_data: bool = False
    ) -> Iterator[Progress | None]:
        """Show a progress bar on stderr while the block runs.

        Yields None if there is no bar, because of ``--quiet`` or because stderr is no terminal.

        Args:
            in_bytes: whether the bar counts bytes, not items.
            beside_data: whether the command prints data to stdout during the block. If stdout is a
                terminal too, no bar is shown, because it would be mixed with the data.
        """
        is_hidden = self.quiet or not sys.stderr.isatty()
        if is_hidden or (beside_data and sys.stdout.isatty()):
            yield None
            return
        shown = _ProgressBar(what, in_bytes=in_bytes)
        try:
            yield shown
        finally:
            shown.close()


class _ProgressBar:
    # The bar appears only after 0.4 s, so short work shows no bar.

    def __init__(self, what: str, *, in_bytes: bool) -> None:
        self._what = what
        self._in_bytes = in_bytes
        self._due = time.monotonic() + _PROGRESS_AFTER_SECONDS
        self._shown: rich_progress.Progress | None = None
        self._task: rich_progress.TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._shown is None:
            if time.monotonic() < self._due:
                return
            self._shown = self._make()
            self._task = self._shown.add_task(self._what, total=total)
            self._shown.start()
        assert self._task is not None
        self._shown.update(self._task, completed=done, total=total)

    def _make(self) -> rich_progress.Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True) if self._in_bytes else MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()


def _printable(cells: Sequence[object]) -> list[str]:
    found = list(map(str, cells))
    return found if all(map(str.isprintable, found)) else list(map(text.printable, found))


def encoded(lines: Iterable[str]) -> Iterator[bytes]:
    """Encode lines of JSON as UTF-8 with line ends, about 1 MiB at a time."""
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
        # If a file name is not UTF-8, Python represents each invalid byte by a lone surrogate. JSON
        # can escape lone surrogates.
        return _with_names(text).encode("utf-8", "backslashreplace")


def _with_names(text: str) -> str:
    # In some locales, Python does not decode file names as UTF-8.
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text


def error(message: str) -> None:
    """Write an error of one or several lines to stderr; escape the lines."""
    lines = map(text.printable, message.split("\n"))
    sys.stderr.write(_styled("error: ", "red", sys.stderr) + "\n".join(lines) + "\n")


def step(line: str) -> None:
    """Write the next step after an error to stderr."""
    sys.stderr.write(line + "\n")


def _styled(words: str, style: str, stream: TextIO) -> str:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return words
    return f"\x1b[{_STYLES[style]}m{words}\x1b[0m"


class _Handler(logging.Handler):
    # Names from a store can be hostile, so the handler escapes all text.

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        colour = "red" if record.levelno >= logging.ERROR else "yellow"
        message = text.printable(record.getMessage())
        sys.stderr.write(f"{_styled(f'{level}: ', colour, sys.stderr)}{message}\n")


_HANDLER = _Handler()


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Write the package's log records to stderr while the block runs."""
    logger = logging.getLogger("logquarry")
    logger.addHandler(_HANDLER)
    try:
        yield
    finally:
        logger.removeHandler(_HANDLER)
