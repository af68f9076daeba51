"""``logquarry bench put``, ``get``, ``consume`` and so on: timings of a store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import UsageError
from logquarry.text import byte_count

_HELP = {
    "put": "Single puts. Each message is made within the clock.",
    "put-batch": "Batches of one topic and queue, in wire form.",
    "put-many": "Record batches of any topics and queues.",
    "get": "Gets of 32: body, queue offset, store time and tags of each; and frames alone.",
    "consume": "A consumer with a tag filter; then what it costs while it waits.",
}
_BATCH = {"put": 1, "put-batch": 32, "put-many": 10_000, "get": 10_000, "consume": 10_000}

_SHARED: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--dir",
        "folder",
        metavar="DIR",
        type=options.LocalFolder(),
        default=Path("bench-store"),
        show_default=True,
        help="Where the store is made; it is deleted afterwards.",
    ),
    click.option(
        "--n",
        "count",
        type=click.IntRange(min=1),
        metavar="N",
        default=1_000_000,
        show_default=True,
        help="Messages within the clock.",
    ),
    click.option(
        "--body",
        type=click.IntRange(min=0),
        metavar="B",
        default=256,
        show_default=True,
        help="Bytes of a body.",
    ),
    click.option("--topics", type=click.IntRange(min=1), default=4, show_default=True),
    click.option("--queues", type=click.IntRange(min=1), default=4, show_default=True),
    click.option("--keys", type=click.IntRange(0, 2), default=1, show_default=True),
    click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True),
    click.option(
        "--flush", type=click.Choice(["async", "sync"]), default="async", show_default=True
    ),
    click.option("--transient", is_flag=True, help="Write to a pool of buffers first."),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        metavar="W",
        help="Messages before the clock (a quarter of N, 200,000 at least).",
    ),
    options.as_json,
    options.quiet,
)
_OWN: dict[str, Callable[[Any], Any]] = {
    "put": click.option(
        "--outstanding",
        type=click.IntRange(min=0),
        metavar="K",
        default=0,
        help="Unresolved futures that each thread keeps; 0 waits for each put.",
    ),
    "put-many": click.option(
        "--as-messages",
        is_flag=True,
        help="Messages, made within the clock, and no record batches.",
    ),
}


def _run(kind: str, **given: Any) -> None:
    from logquarry.bench.store import Load, bench_store

    out = Output(quiet=given["quiet"])
    load = Load(
        n=given["count"],
        **{name: given[name] for name in ("body", "topics", "queues", "keys", "threads")},
        outstanding=given.get("outstanding", 0),
        batch=given.get("batch", 1),
        is_sync=given["flush"] == "sync",
        is_transient=given["transient"],
        as_messages=given.get("as_messages", False),
        warmup=given["warmup"],
    )
    found = bench_store(kind, given["folder"], load)
    if given["as_json"]:
        said = {name: getattr(load, name) for name in ("body", "topics", "queues", "keys")}
        said |= {"threads": load.threads, "outstanding": load.outstanding, "batch": load.batch}
        said |= {"flush": given["flush"], "transient": load.is_transient}
        out.json({"bench": kind, **said, **found})
        return
    out.table(
        ["", ""],
        [
            [
                name.replace("_", " "),
                text.count_text(round(value)) if value > 100 else f"{value:.3f}",
            ]
            for name, value in found.items()
        ],
    )


def _command(kind: str) -> click.Command:
    def run(**given: Any) -> None:
        _run(kind, **given)

    command: Any = run
    decorators = list(_SHARED)
    if kind != "put":
        decorators.append(
            click.option(
                "--batch",
                type=click.IntRange(min=1),
                metavar="N",
                default=_BATCH[kind],
                show_default=True,
                help="Messages of one call.",
            )
        )
    if kind in _OWN:
        decorators.append(_OWN[kind])
    for decorate in reversed(decorators):
        command = decorate(command)
    made: click.Command = click.command(kind, help=_HELP[kind])(command)
    return made


def _recovery_command(kind: str, help_text: str) -> click.Command:
    def run(
        folder: Path, count: int, recovery: str, as_json: bool, quiet: bool, **given: Any
    ) -> None:
        from logquarry.bench.scan import bench_recovery
        from logquarry.bench.store import Load

        load = Load(n=count, batch=min(count, _BATCH["put-many"]), **given)
        found = bench_recovery(kind, folder, load, recovery)
        out = Output(quiet=quiet)
        if as_json:
            out.json({"bench": kind, "recovery": recovery, **given, **found})
            return
        rows = []
        for name, value in found.items():
            values = value if isinstance(value, list) else [value]
            shown = (text.count_text(round(v)) if v > 100 else f"{v:.3f}" for v in values)
            rows.append([name.replace("_", " "), ", ".join(shown)])
        out.table(["", ""], rows)

    command: Any = run
    names = ("folder", "count", "body", "topics", "queues", "keys", "as_json", "quiet")
    shared = {decorator_name(decorate): decorate for decorate in _SHARED}
    mode = click.option(
        "--mode",
        "recovery",
        type=click.Choice(["safe", "rocketmq"]),
        default="safe",
        show_default=True,
        help="Whose rules.",
    )
    for decorate in [*(shared[name] for name in reversed(names)), mode]:
        command = decorate(command)
    made: click.Command = click.command(kind, help=help_text)(command)
    return made


def decorator_name(decorate: Callable[[Any], Any]) -> str:
    """The parameter that an option is for."""

    def probe() -> None:
        pass

    decorate(probe)
    return str(probe.__dict__["__click_params__"][0].name)


STORE_COMMANDS: Final = (
    *map(_command, _HELP),
    _recovery_command("recover", "Opening a store of N messages: closed in order, and not."),
    _recovery_command("rebuild", "Opening one whose queues and index are gone."),
    _recovery_command("verify", "Checking one that is sound."),
)
"""The timings of a store, for the group of them all."""


# --------------------------------------------------------------------------------------------------
# ``logquarry bench``: timings on a real store on disk.

_DEFAULT_SIZE = "2g"


@click.group()
def bench() -> None:
    """Timings on a real store on disk, one JSON document with --json."""


for _command in STORE_COMMANDS:
    bench.add_command(_command)


@bench.command()
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=options.LocalFolder(),
    default=Path("bench-store"),
    show_default=True,
    help="The store; it is made first if there is none.",
)
@click.option("--n", "count", type=click.IntRange(min=1), metavar="N", help="Messages to make.")
@click.option("--size", metavar="SIZE", help=f"Or bytes of log to make: 512m, {_DEFAULT_SIZE}.")
@click.option(
    "--body", default="256-1024", show_default=True, metavar="B", help="Bytes of a body, or B-C."
)
@click.option("--topics", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--queues", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--keys", type=click.IntRange(min=0), default=1, show_default=True)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Rounds before."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="The best counts."
)
@options.as_json
@options.quiet
def scan(
    folder: Path,
    count: int | None,
    size: str | None,
    body: str,
    topics: int,
    queues: int,
    keys: int,
    warmup: int,
    rounds: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Walk the log and make Arrow columns of it, on one thread."""
    out = Output(quiet=quiet)
    if count is not None and size is not None:
        raise UsageError("--n and --size both say how much to make: one of them will do")
    total = None if count is not None else _bytes(size or _DEFAULT_SIZE)
    lengths = parse_range(body)
    from logquarry.bench import scan

    with out.progress("making the store") as progress:
        scan.ensure_store(
            folder,
            count=count,
            total_bytes=total,
            body=lengths,
            topics=topics,
            queues=queues,
            keys=keys,
            progress=progress,
        )
    with out.progress("reading") as progress:
        found = scan.bench_scan(folder, warmup=warmup, rounds=rounds, progress=progress)
    if as_json:
        out.json({kind: timing._asdict() for kind, timing in found.items()})
        return
    rows = [
        [
            kind,
            f"{timing.bytes_per_s / 1e9:.2f} GB/s",
            f"{timing.messages_per_s / 1e6:.2f} M",
            f"{timing.seconds:.3f} s",
            text.count_text(timing.n),
        ]
        for kind, timing in found.items()
    ]
    out.table(
        ["kind", "speed", "messages/s", "seconds", "messages"],
        rows,
        right="speed messages/s seconds messages",
    )


def _bytes(word: str) -> int:
    try:
        return byte_count(word)
    except UsageError as error:
        raise UsageError(f"--size {error}") from None


def parse_range(word: str) -> tuple[int, int]:
    """The least and the most of ``256-1024``, or of ``256``.

    Raises:
        UsageError: if it is no range.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", word, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not least <= most < 1 << 22:
        raise UsageError(f"not a body size: {word!r} (256, or 256-1024; less than 4 MiB)")
    return least, most
