"""The exit codes of all commands: one table for the code, the help and the docs."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from logquarry import errors


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    CLEAN = 0
    FINDINGS = 1
    USAGE = 2
    UNREADABLE = 3
    REFUSED = 4
    FAULT = 70
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: Final[Mapping[ExitCode, tuple[str, str]]] = {
    ExitCode.CLEAN: (
        "the command did everything, and found nothing wrong",
        "-",
    ),
    ExitCode.FINDINGS: (
        "the command ran and reports one of these: damage, lost messages, a store that needs a "
        "recovery, stores that diverge, no message at the given place, or a row that cannot be "
        "imported",
        "read the output; its last line has the next command",
    ),
    ExitCode.USAGE: (
        "usage: an unknown option or setting, an invalid value, or a target that is not empty",
        "`logquarry COMMAND --help`",
    ),
    ExitCode.UNREADABLE: (
        "unreadable: there is no store at this path, a link in the store leads to a missing "
        "folder, you have no permission to read the store, or the disk fails",
        "give the folder that contains `commitlog/`, mount the disk to which the link leads, or "
        "run the command as the store's owner",
    ),
    ExitCode.REFUSED: (
        "refused: a process has the store open, the store has a feature that the command would "
        "harm ([rocketmq-5.md](rocketmq-5.md)), the command cannot change the store safely, the "
        "disk is full, or the replication between master and slave cannot continue",
        "do what the error says, and type the same command again",
    ),
    ExitCode.FAULT: (
        "a fault of logquarry itself, with a traceback",
        "report the traceback",
    ),
    ExitCode.INTERRUPTED: (
        "you pressed Ctrl-C",
        "type the same command again; `import` prints which option to add",
    ),
    ExitCode.TERMINATED: (
        "SIGTERM ended the command",
        "type the same command again; `import` prints which option to add",
    ),
}
"""For each code: its meaning, and the user's next step."""

_OF_ERRORS: Final[tuple[tuple[type[BaseException], ExitCode], ...]] = (
    (errors.UsageError, ExitCode.USAGE),
    (errors.StoreNotFound, ExitCode.UNREADABLE),
    (errors.StoreUnavailable, ExitCode.REFUSED),
    (errors.ReplicationError, ExitCode.REFUSED),
    (errors.CorruptStore, ExitCode.FINDINGS),
    (errors.BadRow, ExitCode.FINDINGS),
    (errors.MessageNotFound, ExitCode.FINDINGS),
    (errors.LogquarryError, ExitCode.UNREADABLE),
    # A folder without permission, or a failing disk.
    (OSError, ExitCode.UNREADABLE),
)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full_disk(error: BaseException) -> bool:
    """Return whether the cause of an error is a full disk or an exhausted quota."""
    return isinstance(error, OSError) and error.errno in _FULL


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code of a command that ended with this error."""
    if is_full_disk(error):
        return ExitCode.REFUSED
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), ExitCode.FAULT)


def markdown() -> str:
    """Return the table of the exit codes for the documentation."""
    lines = ["| exit code | meaning | what to do |", "|---|---|---|"]
    lines += [f"| {code:d} | {meaning} | {todo} |" for code, (meaning, todo) in MEANINGS.items()]
    return "\n".join(lines)
