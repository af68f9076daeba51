"""The end of a command: its exit code, the next step that it prints, and the queues that it could
not read.

docs/command-line.md has a table of the exit codes. The next step is a command line with the path
and options of the command that the user typed.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from logquarry import errors, text
from logquarry.cli import options, output
from logquarry.errors import (
    CorruptFrame,
    CorruptStore,
    LogquarryError,
    StoreNotFound,
    StoreUnavailable,
    UnreadableFile,
    UnsupportedStore,
    UsageError,
)
from logquarry.systems import Held, held

if TYPE_CHECKING:
    from logquarry.cli.output import Output
    from logquarry.config import StoreConfig
    from logquarry.read.log_queues import QueueKey
    from logquarry.repair.findings import VerifyReport
    from logquarry.repair.recover.plan import RecoveryMode
    from logquarry.store.message_store import MessageStore, StoreWriter

_T = TypeVar("_T")


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    CLEAN = 0
    FINDINGS = 1
    USAGE = 2
    UNREADABLE = 3
    REFUSED = 4
    FAULT = 70
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


_OF_ERRORS: Final[tuple[tuple[type[BaseException], ExitCode], ...]] = (
    (errors.UsageError, ExitCode.USAGE),
    (errors.StoreNotFound, ExitCode.UNREADABLE),
    (errors.StoreUnavailable, ExitCode.REFUSED),
    (errors.ReplicationError, ExitCode.REFUSED),
    (errors.CorruptStore, ExitCode.FINDINGS),
    (errors.BadRow, ExitCode.FINDINGS),
    (errors.MessageNotFound, ExitCode.FINDINGS),
    (errors.LogquarryError, ExitCode.UNREADABLE),
    # An OSError means, for example, that the user lacks a permission, or that the disk fails.
    (OSError, ExitCode.UNREADABLE),
)


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error means that the disk is full, or that the user's quota or the limit of
    a file's size is reached.
    """
    return isinstance(error, OSError) and error.errno in output.FULL


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the process lacks memory, for example for a new thread."""
    is_thread = any(words in str(error) for words in _NO_THREAD)
    # Without memory, Python and extension modules also raise other errors, for example a
    # SystemError.
    return is_thread or isinstance(error, MemoryError) or _is_unloaded(error) or lacks_memory()


def lacks_memory() -> bool:
    """Return whether the system refuses this process 32 MiB more memory."""
    try:
        mmap.mmap(-1, _PROBED_BYTES).close()
    except (OSError, MemoryError):
        return True
    return False


def _is_unloaded(error: BaseException | None) -> bool:
    # The dynamic loader could not map a shared library into memory. NumPy replaces the loader's
    # error by its own, so search all causes.
    while error is not None:
        if isinstance(error, ImportError) and any(words in str(error) for words in _UNLOADED):
            return True
        error = error.__cause__ or error.__context__
    return False


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code of a command that ended with this error."""
    if is_full_disk(error) or errors.is_at_limit(error):
        return ExitCode.REFUSED
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), ExitCode.FAULT)


_PROBED_BYTES: Final = 32 << 20
_UNLOADED: Final = ("failed to map segment", "annot allocate memory", "Out of memory")
"""Texts of the dynamic loaders of glibc and musl, if the process lacks memory for a library."""
_NO_THREAD: Final = ("can't start new thread", "Failed to launch worker thread")
"""Texts of Python and pyarrow, if the system starts no more threads."""
_WORDS: Final = "logquarry.words"
_READERS: Final = ("messages", "export")
"""Commands with the option ``--on-damage``."""


def remember_words(ctx: click.Context, words: Sequence[str]) -> None:
    """Keep the words of the user's command line for :func:`after_error`."""
    ctx.meta[_WORDS] = list(words)


def words(ctx: click.Context) -> list[str]:
    """Return the words of the user's command line; empty if they are unknown."""
    found: list[str] = ctx.meta.get(_WORDS, [])
    return found


def line(*words: str, before: str = "", config: str | None = None) -> str:
    """Format the line ``next: COMMAND``. ``before`` describes what the user must do first."""
    command = options.command_line(*words, config=config)
    return f"next: {before}, then: {command}" if before else f"next: {command}"


def after_verify(report: VerifyReport, store: str, config: str | None) -> str | None:
    """Return the next step after a verification; None if there is nothing to do."""
    from logquarry.read import features
    from logquarry.repair.findings import next_step

    found = next_step(report)
    if found is None:
        return None
    if refused := _refused(found.words, store, config):
        if is_convertible(store, config):
            return line("convert", store, "--into", "DIR", config=config)
        files = [one for one in report.findings if one.kind != "abort_file"]
        other = next_step(dataclasses.replace(report, findings=files))
        rebuilds = other is not None and other.words[0] == "rebuild"
        if other is not None and rebuilds and not _refused(other.words, store, config):
            # The broker recovers the store, but does not repair its queues and its index.
            command, *rest = other.words
            before = text.printable(other.before)
            return line(command, store, *rest, before=before, config=config)
        is_whole = not report.has_damage
        if is_whole and refused.feature not in (features.ROCKSDB_QUEUES, features.ROCKSDB_STORE):
            before = "start the broker on the store, which recovers the store, and stop the broker"
            return line("verify", store, before=before, config=config)
        before = text.printable(found.before)
        return line("salvage", store, "--into", "DIR", before=before, config=config)
    command, *rest = found.words
    return line(command, store, *rest, before=text.printable(found.before), config=config)


def _refused(words: Sequence[str], store: str, config: str | None) -> UnsupportedStore | None:
    """Return the error with which a command refuses a store; None if it accepts the store."""
    from logquarry.log.layout import StoreLayout
    from logquarry.read.fence import Action, refusal

    queues, index = Action.REBUILD_QUEUES, Action.REBUILD_INDEX
    actions: tuple[Action, ...] = ()
    if words[0] == "recover":
        actions = (Action.RECOVER,)
    elif words[0] == "rebuild":
        actions = tuple(
            action
            for action, option in ((queues, "--queues"), (index, "--index"))
            if option in words or not {"--queues", "--index"}.intersection(words)
        )
    try:
        layout = StoreLayout.open(store, options.store_config(config)).by_content()
        return next(filter(None, (refusal(layout, action) for action in actions)), None)
    except LogquarryError:
        # The command reports this error.
        return None


def after_error(error: BaseException, ctx: click.Context) -> str | None:
    """Return the next step after an error; None if the error's text already has a next step."""
    from logquarry.log.store_files import BrokenLink

    typed = words(ctx)
    store, config = store_of(ctx), ctx.meta.get("logquarry.config")
    if not typed:
        return None
    if errors.is_at_limit(error):
        return line(*typed, before="do what the error says")
    if isinstance(error, CorruptFrame) and typed[0] in _READERS and "--on-damage" not in typed:
        return line(*typed, "--on-damage", "skip")
    if isinstance(error, NotShutDownCleanly):
        return line("recover", error.store, "--apply", config=config)
    if isinstance(error, CorruptStore):
        if store is None or typed[0] == "verify":
            return None
        return line("verify", store, config=config)
    if isinstance(error, StoreNotFound) and error.suggestion is not None:
        wrong, right = map(_absolute, error.suggestion)
        if not any(_absolute(word) == wrong for word in typed):
            return None
        right = error.suggestion[1] if error.suggestion[0] in typed else right
        return line(*(right if _absolute(word) == wrong else word for word in typed))
    if isinstance(error, StoreNotFound) and isinstance(error.__cause__, PermissionError):
        return line(*typed, before="become a user who may read the store's files")
    if isinstance(error, UnsupportedStore) and store is not None and is_convertible(store, config):
        return line("convert", store, "--into", "DIR", config=config)
    if isinstance(error, UnsupportedStore) and not is_log_place(error):
        if store is None or typed[0] == "salvage":
            return None
        if typed[0] == "recover":
            return _after_refused_recovery(error, store, config)
        return line("salvage", store, "--into", "DIR", config=config)
    if is_full_disk(error):
        is_limit = isinstance(error, OSError) and error.errno == errno.EFBIG
        advice = "raise the limit of a file's size (ulimit -f)" if is_limit else "free some space"
        return line(*typed, before=advice)
    if store is not None and "--into" not in typed and _is_fixed(error):
        kept = typed if typed[0] == "rebuild" else ("rebuild", store)
        kept = [word for word in kept if word not in ("--in-place", "--apply")]
        return line(*kept, "--into", "DIR")
    if isinstance(error, (StoreUnavailable, BrokenLink)):
        return line(*typed, before="do what the error says")
    return None


def _is_fixed(error: BaseException) -> bool:
    """Return whether an error means that the system does not rename a folder of the store."""
    from logquarry.repair.rebuild.in_place import FixedFolder

    return isinstance(error, FixedFolder)


class NotShutDownCleanly(StoreUnavailable):
    """A command has closed its store, but not cleanly, so the store needs a recovery."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"{store}: not shut down cleanly: {problem}")
        self.store = store


@contextmanager
def writing(store: str, config: StoreConfig | None) -> Iterator[tuple[Held, StoreWriter]]:
    """Context manager: open a store for writing, hold back interrupts, and close the store; see
    :func:`clean_end`.
    """
    from logquarry.store.message_store import StoreWriter

    known: StoreWriter | None = None
    # An interrupt that arrives while the store closes is raised after the close. So the outermost
    # context manager must report a shutdown that was not clean.
    with (
        clean_end(store, lambda: None if known is None else known.close_problem),
        held() as waiting,
        StoreWriter.start(store, config=config) as opened,
    ):
        known = opened
        yield waiting, opened


@contextmanager
def clean_end(store: str, problem: Callable[[], str | None]) -> Iterator[None]:
    """Context manager: raise NotShutDownCleanly if the block could not shut a store down cleanly.

    If the block raises an error, raise only this error, because it is usually the cause. But if the
    block ends with Ctrl-C or a signal, raise NotShutDownCleanly.

    Args:
        problem: returns why the shutdown was not clean, or None.
    """
    ended: BaseException | None = None
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        ended = error
    if (found := problem()) is not None:
        raise NotShutDownCleanly(store, found)
    if ended is not None:
        raise ended


def after_refusal(command: str, store: str, mode: RecoveryMode, config: str | None) -> str:
    """Return the next step if a command's plan shows that the command cannot repair the store."""
    from logquarry.log.layout import StoreLayout
    from logquarry.read.fence import Action, refusal

    layout = StoreLayout.open(store, options.store_config(config)).by_content()
    found = refusal(layout, Action.RECOVER, mode=mode)
    if found is not None and layout.log_folders.feature is not None:
        return line("convert", store, "--into", "DIR", config=config)
    if found is not None and not is_log_place(found):
        return _after_refused_recovery(found, store, config)
    return line(command, store, before="do what the first line of the plan says", config=config)


def after_rebuild(store: str, config: str | None) -> str:
    """Return the next step after a rebuild of a store that was not shut down cleanly."""
    refused = _refused(("recover",), store, config)
    if refused is not None:
        return _after_refused_recovery(refused, store, config)
    return line("recover", store, config=config)


def _after_refused_recovery(error: UnsupportedStore, store: str, config: str | None) -> str:
    """Return the next step if a feature of a store forbids a recovery.

    A broker can recover a store with one of the features below, but ends the log at damage. So the
    next step is ``verify``, which finds out whether the log has damage. After that, ``verify``
    prints its own next step: start the broker, or salvage the store.
    """
    from logquarry.read import features

    by_broker = (features.COMPACTION, features.CONTROLLER, features.QUEUE_EXT, features.TIERED)
    if error.feature in by_broker:
        return line("verify", store, config=config)
    return line("salvage", store, "--into", "DIR", config=config)


def is_convertible(store: str, config: str | None) -> bool:
    """Return whether ``convert`` can copy the log.

    The command ``convert`` copies a readable log whose files are not all in ``commitlog/``.
    """
    from logquarry.log.layout import StoreLayout

    try:
        layout = StoreLayout.open(store, options.store_config(config))
    except LogquarryError:
        return False
    return layout.log_folders.feature is not None


def is_log_place(error: UnsupportedStore) -> bool:
    """Return whether an error is about a log outside of ``commitlog/``."""
    from logquarry.log import log_place

    places = (log_place.DLEDGER, log_place.SEVERAL_LOG_PATHS, log_place.LOG_ELSEWHERE)
    return error.feature in places


def _absolute(word: str) -> str:
    from logquarry.log.location import absolute

    try:
        return absolute(word)
    except UsageError:
        # The word is not a path; it is for example a filter.
        return word


def store_of(ctx: click.Context) -> str | None:
    """Return the command's store; None if the command has several stores, or none."""
    one: str | None = ctx.meta.get("logquarry.store")
    several: tuple[str, ...] = ctx.meta.get("logquarry.stores") or ()
    if one is None and len(several) == 1:
        return several[0]
    return one


# ------------------------------------------------------------------------- unreadable queues
def read_store(
    store: str, settings: StoreConfig | None, read: Callable[[MessageStore], _T]
) -> tuple[_T, Mapping[QueueKey, str]]:
    """Open a store and call ``read`` with it; leave out queues that cannot be read from the disk.

    Returns:
        The result of ``read``, and for each queue that was left out, the reason.
    """
    from logquarry.read.batch_queue import unreadable_queues
    from logquarry.store.message_store import MessageStore

    left_out: Mapping[QueueKey, str] = {}
    with MessageStore.open(store, config=settings) as opened:
        try:
            return read(opened), left_out
        except UnreadableFile:
            left_out = unreadable_queues(opened.layout)
            if not left_out:
                raise
    with MessageStore.open(store, config=settings) as opened:
        opened.layout.left_out = left_out
        return read(opened), left_out


def queue_list(queues: Mapping[QueueKey, str]) -> list[dict[str, Any]]:
    """Make the JSON list of the queues that were left out (docs/json.md)."""
    return [
        {"topic": topic, "queue_id": queue_id, "reason": reason}
        for (topic, queue_id), reason in sorted(queues.items())
    ]


def end_incomplete(out: Output, left_out: Mapping[QueueKey, str]) -> None:
    """Warn of each omitted queue; if any queue was omitted, exit with the code for findings."""
    for (topic, queue_id), reason in sorted(left_out.items()):
        out.warn(f"left out: {topic} queue {queue_id}: {reason}")
    if left_out:
        click.get_current_context().exit(ExitCode.FINDINGS)
