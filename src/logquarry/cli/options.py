"""Options that several commands share, and the parsers of their values."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from logquarry import text
from logquarry.cli.output import Output
from logquarry.errors import UsageError, reason_of
from logquarry.systems import READ_ONLY, opened

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.log.batches import MessageFilter

logger = logging.getLogger(__name__)

_Command = TypeVar("_Command", bound=Callable[..., Any])

_Value = TypeVar("_Value")

_MOST_DIGITS: Final = 100
"""Maximum digits of a number. No valid number has more, and Python raises an error from 4,301
digits on.
"""
_LEAST_PLAUSIBLE_MS: Final = 10**11
"""A time in March 1973, in milliseconds. A lower number is probably a time in seconds."""


def _remember(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    # After an error, outcome.py prints the command to run next, which contains this value.
    ctx.meta[f"logquarry.{parameter.name}"] = value
    return value


store = click.argument("store", metavar="STORE", callback=_remember)
stores = click.argument("stores", metavar="STORE...", nargs=-1, required=True, callback=_remember)
config = click.option(
    "--config",
    metavar="FILE",
    callback=_remember,
    help="The broker's broker.conf, or JSON with the names of MessageStoreConfig.  [default: infer "
    "the settings from the files]",
)
spark_master = click.option(
    "--spark-master",
    metavar="URL",
    help="Run in parallel on Spark: local[*], or a cluster's URL.  [default: run in this process]",
)
quiet = click.option(
    "--quiet",
    "-q",
    "out",
    is_flag=True,
    callback=lambda ctx, parameter, value: Output(quiet=value),
    help="Print no notes and no progress (stderr).",
)
"""The option ``--quiet``; a command gets its :class:`Output` as the argument ``out``."""
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
on_damage = click.option(
    "--on-damage",
    type=click.Choice(["stop", "skip", "fail"]),
    callback=lambda ctx, parameter, value: value or "default",
    help="At damage: stop reading, skip and report the damage, or fail.  [default: a torn tail "
    "ends the log, other damage fails]",
)
decompress = click.option(
    "--decompress", is_flag=True, help="Decompress bodies.  [default: bodies as stored]"
)
redact = click.option(
    "--redact",
    metavar="body,properties,hosts",
    help="Leave out these fields and every field derived from them (null in JSON).",
)

_FILTERS = (
    click.option("--topic", multiple=True, metavar="TOPICS", help="Only these topics: a,b."),
    click.option("--queue", multiple=True, metavar="IDS", help="Only these queue ids: 0,1."),
    click.option(
        "--queue-offset",
        metavar="A:B",
        help="Only queue offsets from A to B, without B. A or B may be empty; A alone "
        "selects one message.",
    ),
    click.option(
        "--key",
        multiple=True,
        metavar="KEY",
        help="Only messages with this word in KEYS, or with this UNIQ_KEY.",
    ),
    click.option(
        "--tag", multiple=True, metavar="TAGS", help="Only messages with these tags: 'a || b'."
    ),
    click.option(
        "--since",
        metavar="TIME",
        help="Only messages stored at or after TIME: milliseconds since 1970, or ISO 8601 (UTC if "
        "TIME has no zone).",
    ),
    click.option("--until", metavar="TIME", help="Only messages stored before TIME."),
    click.option(
        "--grep",
        metavar="REGEX",
        help="Only messages with a match of REGEX in the body as stored, or with --decompress in "
        "the decompressed body.",
    ),
    click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most N messages."),
)


def into(text: str) -> Callable[[_Command], _Command]:
    """Make the option ``--into`` with the given help."""
    return click.option("--into", metavar="DIR", type=LocalFolder(), help=text)


class LocalFolder(click.ParamType):  # type: ignore[type-arg]
    """The type of an option whose value is a local folder to write."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path as the user wrote it; raise UsageError for a URL."""
        from logquarry.log.location import local_folder, path_or_url

        local_folder(value)
        return Path(path_or_url(os.fsdecode(value)))


class LocalPath(click.ParamType):  # type: ignore[type-arg]
    """The type of an option whose value is the path of a local file or folder to read."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; raise UsageError if no file can have this path."""
        from logquarry import arguments

        option = "path" if param is None else param.opts[0]
        return Path(arguments.path(value, option, may_be_long=True))


class Filters(NamedTuple):
    """The values of the options that :func:`filters` adds, as the user typed them."""

    topic: tuple[str, ...] = ()
    queue: tuple[str, ...] = ()
    queue_offset: str | None = None
    key: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    grep: str | None = None
    limit: int | None = None

    def message_filter(self) -> MessageFilter:
        """Parse all values except ``limit``."""
        from logquarry.format.properties import TAG_SEPARATOR
        from logquarry.log import batches as scan_filters

        queues = scan_filters.names(_parts(self.queue), "--queue")
        since = _time_ms("--since", self.since)
        until = _time_ms("--until", self.until)
        if since is not None and until is not None and since > until:
            raise UsageError(f"--since {self.since} is later than --until {self.until}")
        return scan_filters.MessageFilter(
            topics=scan_filters.names(_parts(self.topic), "--topic"),
            queue_ids=None if queues is None else frozenset(map(_queue_id, queues)),
            queue_offsets=None if self.queue_offset is None else offset_range(self.queue_offset),
            keys=scan_filters.names(self.key or None, "--key"),
            tags=scan_filters.tag_expression(
                TAG_SEPARATOR.join(self.tag) if self.tag else None, "--tag"
            ),
            since_ms=since,
            until_ms=until,
            grep=self.grep,
        )


def bundle(
    argument: str, kind: Callable[..., Any], added: Sequence[Callable[[Any], Any]]
) -> Callable[[_Command], Callable[..., Any]]:
    """Make a decorator that adds options to a command, and passes all their values as one argument.

    Args:
        kind: the class or function that makes the argument's value; its parameters have the same
            names as the options.
    """
    names = inspect.signature(kind).parameters

    def decorate(command: _Command) -> Callable[..., Any]:
        @functools.wraps(command)
        def bundled(**arguments: Any) -> Any:
            own = kind(**{name: arguments.pop(name) for name in names})
            return command(**{argument: own}, **arguments)

        for option in reversed(added):
            bundled = option(bundled)
        return bundled

    return decorate


filters = bundle("filters", Filters, _FILTERS)
"""Decorator that adds the filter options to a command, and passes their values as the argument
``filters``.
"""


def parsed(option: str, word: str | None, parse: Callable[[str], _Value]) -> _Value | None:
    """Parse an option's value; None stays None.

    The text of an error begins with the option's name.
    """
    try:
        return None if word is None else parse(word)
    except UsageError as error:
        raise UsageError(f"{option} {error}") from None


def command_line(*words: str, config: str | None = None) -> str:
    """Return a logquarry command line, quoted for a shell.

    `config` is the value of the option ``--config``; None omits the option.
    """
    stated = [] if config is None else ["--config", config]
    return " ".join(map(_quoted, ["logquarry", *words, *stated]))


def _quoted(word: str) -> str:
    # A file name can contain characters that a terminal must not receive, and bytes that are not
    # UTF-8. Bash and zsh read $'\x1b' as the byte 1b.
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    try:
        found = os.fsencode(character)
    except UnicodeEncodeError:
        return text.printable(character)
    return "".join(f"\\x{byte:02x}" for byte in found)


@contextmanager
def reading_tls(files: Mapping[str, str | None]) -> Iterator[None]:
    """Convert an error of ``ssl`` to UsageError, which names a file that cannot be read.

    The files must not be opened before ``ssl`` opens them: a file can be a named pipe, whose writer
    writes only once.

    Args:
        files: maps each option to its file, or to None.
    """
    from logquarry import arguments

    for option, file in files.items():
        arguments.optional(arguments.path, file, option, may_be_long=True)
    try:
        yield
    except (OSError, ValueError) as error:
        for option, file in files.items():
            if file is not None:
                _require_readable(file, option)
        raise UsageError(f"TLS: {error}") from error


def _require_readable(file: str, option: str) -> None:
    try:
        # A pipe can have no bytes.
        with suppress(BlockingIOError), opened(file, READ_ONLY) as descriptor:
            os.read(descriptor, 1)
    except OSError as error:
        raise UsageError(f"{option}: {file}: cannot be read: {reason_of(error)}") from error


def store_config(path: str | None) -> StoreConfig | None:
    """Read the configuration of ``--config``; None without the option."""
    from logquarry.config import StoreConfig

    return None if path is None else StoreConfig.from_file(path)


def _parts(values: tuple[str, ...]) -> list[str] | None:
    return [part for value in values for part in value.split(",")] if values else None


def _queue_id(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"--queue takes numbers, not {word!r}") from None


def offset_range(word: str) -> tuple[int, int]:
    """Parse ``A:B``, ``A:``, ``:B`` or ``A`` as a half-open range of queue offsets."""
    from logquarry.format import java

    match = re.fullmatch(rf"(\d{{0,{_MOST_DIGITS}}})(:?)(\d{{0,{_MOST_DIGITS}}})", word, re.ASCII)
    if match is None or not (match[1] or match[3]):
        raise UsageError(f"--queue-offset takes A:B, two queue offsets, not {word!r}")
    first = min(int(match[1] or 0), java.LONG_MAX)
    if not match[2]:
        return first, first + 1
    stop = min(int(match[3]), java.LONG_MAX) if match[3] else java.LONG_MAX
    if first > stop:
        raise UsageError(f"--queue-offset {word}: the start is above the end")
    return first, stop


def _time_ms(option: str, word: str | None) -> int | None:
    # A digit string below _LEAST_PLAUSIBLE_MS is probably a time in seconds.
    found = parsed(option, word, text.time_ms)
    if found and word and word.isdigit() and found < _LEAST_PLAUSIBLE_MS:
        year = datetime.fromtimestamp(found / 1000, UTC).year
        logger.warning(
            "%s %s is a time in the year %d. Pass milliseconds, not seconds", option, word, year
        )
    return found
