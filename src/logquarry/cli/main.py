"""The entry point of ``logquarry``: runs a command; turns errors into exit codes and next steps.

The commands use click and not typer: typer 0.29 imports pydantic as soon as a command has an
argument. This import adds 0.15 s to each start.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, TextIO

import click

from logquarry import __version__, compiled, standard_streams
from logquarry.cli import interrupts, outcome, output
from logquarry.cli.outcome import ExitCode, exit_code
from logquarry.errors import LIMITS, LogquarryError, reason_of
from logquarry.systems import cache_folder, raise_file_limit

_MODULES: Final = {
    "info": "info",
    "messages": "messages",
    "verify": "check",
    "diff": "check",
    "recover": "repair",
    "rebuild": "repair",
    "salvage": "salvage",
    "retain": "repair",
    "convert": "salvage",
    "export": "export",
    "import": "import_",
    "compact": "export",
    "stats": "info",
    "report": "check",
    "serve-master": "replication",
    "replicate": "replication",
    "broker": "broker",
    "demo": "check",
    "bench": "bench",
}
"""For each command, the module of this package that defines it."""


class _Commands(click.Group):
    # Imports the module of a command only if the user calls the command.

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command = getattr(import_module(f"logquarry.cli.{_MODULES[cmd_name]}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        outcome.remember_words(ctx, args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with output.logging_to_stderr(), interrupts.raising():
            try:
                return self._flushed(ctx)
            except BrokenPipeError:
                _close_stdout()
                ctx.exit(ExitCode.CLEAN)
            except KeyboardInterrupt as error:
                _interrupted(ctx, error)
            except (LogquarryError, OSError) as error:
                _show(_message(error), error)
                step = outcome.after_error(error, ctx)
                if _is_done(ctx, error):
                    output.error("the command has done its work, and only its output is missing")
                    step = None
                if step is not None:
                    output.step(step)
                try:
                    sys.stdout.flush()
                except OSError:
                    _close_stdout()
                ctx.exit(exit_code(error))
            except ModuleNotFoundError as error:
                name = (error.name or "").partition(".")[0]
                if name in ("", "logquarry") or name in sys.stdlib_module_names:
                    raise
                # A required package is missing: pip did not install it, or a user removed it.
                output.error(
                    f"the command needs {name}, which is not installed: pip install {name}"
                )
                ctx.exit(ExitCode.USAGE)
            except Exception as error:
                # After Ctrl-C, this error can be a KeyboardInterrupt that an extension module has
                # turned into another exception.
                if not interrupts.has_arrived() or isinstance(error, click.exceptions.Exit):
                    raise
                _interrupted(ctx, error)

    def _flushed(self, ctx: click.Context) -> Any:
        # Flush now: if Python's own flush at the exit fails, the exit code is 120.
        try:
            result = super().invoke(ctx)
        except click.exceptions.Exit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return result


def _version(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given:
        click.echo(f"{ctx.info_name} {__version__}")
        if ctx.params["verbose"]:
            click.echo(compiled.description())
        ctx.exit()


@click.command(
    cls=_Commands,
    name="logquarry",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_version,
    help="Show the version; with -v also whether single puts run compiled.",
)
@click.option("-v", "--verbose", is_flag=True, is_eager=True, hidden=True)
def app(verbose: bool) -> None:
    """Read, check, repair, export and import the message store of an Apache RocketMQ broker.

    No broker is needed. STORE is the folder that contains commitlog/ (the broker's
    storePathRootDir), or its URL. A broker may have the store open during info, messages, verify,
    diff, stats, report and export.

    Exit codes: 0 clean, 1 findings (for example damage), 2 usage, 3 unreadable, 4 refused, 70 a
    fault of logquarry, 129 hung up, 130 interrupted, 143 terminated.

    Example: logquarry info /data/store
    """


STANDARD_OUTPUT: Final = "standard output"
_PRINTS_LAST: Final = ("recover", "rebuild", "salvage", "convert", "retain")
"""Commands that print only after they have changed or made a store. With several stores, a command
prints after each store.
"""


def main() -> None:
    """Run the command line of this process."""
    # Prevent OpenBLAS, NumPy's library for linear algebra, from starting threads. Starting them
    # takes 60 ms, and no command needs them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    standard_streams.reserve()
    _give_home()
    # Python sets stdout or stderr to None if the calling process closed it.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stdout = _checked(sys.stdout, STANDARD_OUTPUT)
    sys.stderr = _checked(sys.stderr, None)
    # Raise the limit of open files: in a store that is open for writing, the files of all queues
    # stay open.
    raise_file_limit()
    # Turn SIGTERM and SIGHUP into an exception, so that a command can remove its half-written
    # files, and close its store.
    ending = _Ending()
    signal.signal(signal.SIGTERM, ending.terminate)
    # The program nohup starts a command with SIGHUP ignored.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, ending.hang_up)
    try:
        app(prog_name="logquarry")
    except interrupts.Terminated as ended:
        name = "SIGHUP" if ended.code == ExitCode.HUNG_UP else "SIGTERM"
        _show(f"ended by {name}", ended)
        raise
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # A panic of an extension module in Rust, for example vl_convert, is no Exception.
        if outcome.is_out_of_memory(error):
            cause = (
                "the process could not get more memory, or could not start another thread: free "
                "memory, or raise its limit (ulimit -v, ulimit -u, or the limits of the container)"
            )
            _show(cause, error)
            if outcome.lacks_memory():
                _exit_at_once(ExitCode.REFUSED)
            sys.exit(ExitCode.REFUSED)
        if isinstance(error, OSError) and error.filename == STANDARD_OUTPUT:
            # `--help` and `--version` of the program print before a command runs.
            output.error(_message(error))
            _close_stdout()
            sys.exit(ExitCode.REFUSED)
        # Without this handler, Python would exit with code 1, but here code 1 means findings.
        traceback.print_exc()
        output.error(f"a fault of logquarry itself: {error!r}. Report it with the lines above")
        sys.exit(ExitCode.FAULT)


def _give_home() -> None:
    # A container can run with a user id that has no account and so no home. Altair and other
    # packages cannot be imported without a home.
    if os.path.expanduser("~") == "~":  # noqa: PTH111
        with suppress(OSError):
            os.environ["HOME"] = str(cache_folder())


def _exit_at_once(code: ExitCode) -> NoReturn:
    # A library that could be loaded only partly, for example libarrow, can crash with SIGSEGV in
    # its own code at the exit. The exit code would then be 139.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


class _Checked(io.BufferedWriter):
    # Standard output or standard error, which can be a file on a full disk, or a closed pipe. If a
    # write to standard output fails, the error names the stream. If a write to standard error
    # fails, ignore it, so that the exit code is that of the command.
    #
    # Keep Python's own raw stream. A `write` in Python could be interrupted after the system has
    # written the bytes. Python would then write the same bytes again at the exit.

    def __init__(self, stream: TextIO, name: str | None) -> None:
        super().__init__(getattr(stream.buffer, "raw", stream.buffer))
        self._stream = stream  # The descriptor stays open while this object exists.
        self._name = name

    def write(self, data: Any, /) -> int:
        with self._checked():
            super().write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        with self._checked():
            super().flush()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not _only_prints():
                self._name = None  # Also ignore the error of the flush at the exit.
            if self._name is not None:
                raise OSError(error.errno, error.strerror, self._name) from error


def _only_prints() -> bool:
    # If the reader of a pipe closes the pipe, a command that prints messages ends. The other
    # commands continue without output, because their exit code is a result too.
    ctx = click.get_current_context(silent=True)
    return ctx is None or outcome.words(ctx)[:1] in (["messages"], ["export"])


def _checked(stream: TextIO, name: str | None) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return io.TextIOWrapper(
        _Checked(stream, name),
        encoding=stream.encoding,
        # If the encoding lacks a character, for example of a file name, write an escape sequence.
        errors="backslashreplace",
        line_buffering=name is None or stream.isatty() or stream.write_through,
    )


class _Ending:
    # The handlers of SIGTERM and SIGHUP. After another signal, SIGHUP has no effect, so that it
    # does not interrupt the cleanup. If a terminal closes, a process can get SIGHUP twice: from the
    # shell, and when the shell ends. With SendSIGHUP, systemd sends SIGTERM and SIGHUP.

    def __init__(self) -> None:
        self._has_begun = False

    def terminate(self, number: int, frame: FrameType | None) -> None:
        self._has_begun = True
        raise interrupts.Terminated(ExitCode.TERMINATED)

    def hang_up(self, number: int, frame: FrameType | None) -> None:
        if not self._has_begun and not interrupts.has_arrived():
            self._has_begun = True
            raise interrupts.Terminated(ExitCode.HUNG_UP)


def _is_done(ctx: click.Context, error: BaseException) -> bool:
    """Return whether a command has changed or made a store, but could not print its result."""
    words = outcome.words(ctx)
    is_output = isinstance(error, OSError) and error.filename == STANDARD_OUTPUT
    changes = any(word.startswith(("--apply", "--into")) for word in words)
    return is_output and changes and words[0] in _PRINTS_LAST and outcome.store_of(ctx) is not None


def _interrupted(ctx: click.Context, error: BaseException) -> NoReturn:
    _show("interrupted", error)
    ctx.exit(ExitCode.INTERRUPTED)


def _show(cause: str, error: BaseException) -> None:
    # Print the cause first, because the notes of an error describe its consequences.
    output.error(cause)
    for note in getattr(error, "__notes__", ()):
        output.error(note)


def _message(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return str(error)
    reason = reason_of(error) if error.errno in LIMITS else error.strerror
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    return str(reason) if error.errno in LIMITS else str(error)


def _close_stdout() -> None:
    # The pipe at stdout has no reader, or the disk of stdout is full. Python's flush at the exit
    # would raise an error, so send the remaining output to /dev/null.
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    main()
