"""Options that several commands share, and what their values mean."""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from logquarry import text
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.log.batches import OnDamage
    from logquarry.log.filters import MessageFilter

logger = logging.getLogger(__name__)

_Command = TypeVar("_Command", bound=Callable[..., Any])

_LEAST_PLAUSIBLE_MS: Final = 10**11
"""Times below it, before 1973, are mostly seconds that somebody took for milliseconds."""

store = click.argument("store", metavar="STORE")
config = click.option(
    "--config",
    metavar="FILE",
    help="A broker.conf, or JSON with MessageStoreConfig's names, for what files cannot tell.",
)
spark_master = click.option(
    "--spark-master",
    metavar="URL",
    help="Work on Spark, in parallel: local[*], or a cluster's URL.",
)
quiet = click.option("--quiet", "-q", is_flag=True, help="No notes and no progress on stderr.")
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document.")
on_damage = click.option(
    "--on-damage",
    type=click.Choice(["stop", "skip", "fail"]),
    help="Where bytes are no frames: stop there, skip them and count, or fail. By default a torn "
    "tail ends the log, and anything else fails.",
)
decompress = click.option(
    "--decompress", is_flag=True, help="Bodies as they were sent, not as they are stored."
)
redact = click.option(
    "--redact",
    metavar="body,properties,hosts",
    help="Leave these out, and what tells of them (null in JSON).",
)

_FILTERS = (
    click.option("--topic", multiple=True, metavar="TOPICS", help="Of these topics: a,b."),
    click.option("--queue", multiple=True, metavar="IDS", help="Of these queues: 0,1."),
    click.option(
        "--queue-offset",
        metavar="A:B",
        help="With queue offsets from A up to, not including, B. Either may be left out.",
    ),
    click.option(
        "--key", multiple=True, metavar="KEY", help="With this word in KEYS, or this UNIQ_KEY."
    ),
    click.option("--tag", multiple=True, metavar="TAGS", help="With one of these tags: 'a || b'."),
    click.option(
        "--since",
        metavar="TIME",
        help="Stored at or after: milliseconds, or ISO 8601 (UTC if it names no zone).",
    ),
    click.option("--until", metavar="TIME", help="Stored before."),
    click.option(
        "--grep",
        metavar="REGEX",
        help="With a body in which this is found (its content with --decompress).",
    ),
    click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most this many."),
)


class LocalFolder(click.ParamType):  # type: ignore[type-arg]
    """A folder that is written, which has to be on a disk; shown as it was given."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Its path.

        Raises:
            UsageError: if it is a URL.
        """
        from logquarry.log.filesystem import local_folder, without_file_scheme

        local_folder(value)
        return Path(without_file_scheme(os.fsdecode(value)))


class Filters(NamedTuple):
    """What the options of :func:`filters` say, word for word."""

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
        """What they mean together, but for the limit.

        Raises:
            UsageError: if one makes no sense.
        """
        from logquarry.format.properties import TAG_SEPARATOR
        from logquarry.log import filters as scan_filters

        queues = scan_filters.names(_parts(self.queue), "--queue")
        since = None if self.since is None else time_ms("--since", self.since)
        until = None if self.until is None else time_ms("--until", self.until)
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


def filters(command: _Command) -> Callable[..., Any]:
    """Give a command the filters of messages, as its argument ``filters``."""

    @functools.wraps(command)
    def bundled(**arguments: Any) -> Any:
        own = Filters(**{name: arguments.pop(name) for name in Filters._fields})
        return command(filters=own, **arguments)

    for option in reversed(_FILTERS):
        bundled = option(bundled)
    return bundled


def command_line(*words: str, config: str | None = None) -> str:
    """A command of ours to be typed, for a shell; with the configuration that this one got."""
    stated = [] if config is None else ["--config", config]
    return text.printable(shlex.join(["logquarry", *words, *stated]))


def store_config(path: str | None) -> StoreConfig | None:
    """What ``--config`` says."""
    from logquarry.config import StoreConfig

    return None if path is None else StoreConfig.from_file(path)


def damage_policy(word: str | None) -> OnDamage:
    """What ``--on-damage`` says."""
    from logquarry.log.batches import check_policy

    return check_policy(word or "default")


def _parts(values: tuple[str, ...]) -> list[str] | None:
    return [part for value in values for part in value.split(",")] if values else None


def _queue_id(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"--queue takes numbers, not {word!r}") from None


def offset_range(word: str) -> tuple[int, int]:
    """The half-open range of ``A:B``, ``A:``, ``:B`` or ``A`` alone.

    Raises:
        UsageError: if it is none.
    """
    from logquarry.format import java

    match = re.fullmatch(r"(\d*)(:?)(\d*)", word, re.ASCII)
    if match is None or not (match[1] or match[3]):
        raise UsageError(f"--queue-offset takes A:B, two queue offsets, not {word!r}")
    first = min(int(match[1] or 0), java.LONG_MAX)
    if not match[2]:
        return first, first + 1
    stop = min(int(match[3]), java.LONG_MAX) if match[3] else java.LONG_MAX
    if first > stop:
        raise UsageError(f"--queue-offset {word}: the first is beyond the last")
    return first, stop


def time_ms(option: str, word: str) -> int:
    """The time that an option says, in milliseconds; what is probably meant as seconds is told.

    Raises:
        UsageError: if it is none.
    """
    try:
        found = text.time_ms(word)
    except UsageError as error:
        raise UsageError(f"{option} {error}") from None
    if word.isdigit() and 0 < found < _LEAST_PLAUSIBLE_MS:
        year = datetime.fromtimestamp(found / 1000, UTC).year
        logger.warning("%s is taken as milliseconds, a time in %d", word, year)
    return found
