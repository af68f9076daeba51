"""The entry point, and the one place where exceptions become exit codes.

0 clean, 1 findings, 2 usage, 3 unreadable, 4 refused, 130 interrupted.

click, and not typer: typer 0.29 imports pydantic for the first argument that it converts, 0.15 s
that ``info`` has not got.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from logquarry import __version__, text
from logquarry.cli import output
from logquarry.errors import (
    BadRow,
    CorruptStore,
    LogquarryError,
    MessageNotFound,
    ReplicationError,
    StoreNotFound,
    StoreUnavailable,
    UsageError,
)

CLEAN, FINDINGS, USAGE, UNREADABLE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 130
_TERMINATED: Final = 143

_EXIT_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, USAGE),
    (StoreNotFound, UNREADABLE),
    (StoreUnavailable, REFUSED),
    (ReplicationError, REFUSED),
    (CorruptStore, FINDINGS),
    (BadRow, FINDINGS),
    (MessageNotFound, FINDINGS),
    (LogquarryError, UNREADABLE),
    # Folders that may not be entered, disks that fail or are full.
    (OSError, UNREADABLE),
)

_COMMANDS: Final = (
    *("info", "messages", "verify", "diff", "recover", "rebuild", "salvage", "retain"),
    *("export", "import", "compact", "stats", "report", "serve-master", "replicate"),
    *("demo", "bench"),
)
"""Each is a module here, with the command by the same name in it; a Python keyword has a ``_``, and
so has what is no name to Python."""


class _Commands(click.Group):
    """All commands, each imported when it is needed. What they raise ends here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command = getattr(import_module(f"logquarry.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with output.logging_to_stderr():
            try:
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
            except BrokenPipeError:
                _close_stdout()
                ctx.exit(CLEAN)
            except KeyboardInterrupt:
                output.error("interrupted")
                ctx.exit(INTERRUPTED)
            except (LogquarryError, OSError) as error:
                lines = _message(error).split("\n")
                output.error("\n".join(map(text.printable, lines)))
                ctx.exit(_exit_code(error))


@click.command(
    cls=_Commands,
    name="logquarry",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Read, check, mend, export and import what an Apache RocketMQ 4.9 broker wrote, without one.

    Exit codes: 0 clean, 1 findings (damage), 2 usage, 3 unreadable, 4 refused, 130 interrupted.
    """


def main() -> None:
    """Run the command line of this process."""
    # Nothing here multiplies matrices, and the threads that NumPy would start for that take 60 ms.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A caller may have closed them; then there is nobody to tell.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # File names need not be text; what cannot be written is escaped, and never an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # As an exception, so that half-written files are removed.
    signal.signal(signal.SIGTERM, _terminated)
    app(prog_name="logquarry")


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(_TERMINATED)


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _exit_code(error: BaseException) -> int:
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def _close_stdout() -> None:
    """Nobody reads any more: what is still buffered must not raise when Python ends."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
