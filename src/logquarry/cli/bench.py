"""``logquarry bench``: measure puts, gets, scans and recovery on a real store on disk."""

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

_DEFAULT_SIZE: Final = "2g"
_HELP: Final = {
    "put": "Measure single puts; making the messages is included.",
    "put-batch": "Measure puts of batches in RocketMQ's wire form.",
    "put-many": "Measure puts of Arrow record batches.",
    "get": "Measure gets of 32 messages.",
    "consume": "Measure a consumer, and its CPU use while it waits.",
    "recover": "Measure opening a store, clean and after a crash.",
    "rebuild": "Measure opening a store without queues and index.",
    "verify": "Measure verify on a sound store.",
}
_BATCH: Final = {"put": 1, "put-batch": 32, "put-many": 10_000, "get": 10_000, "consume": 10_000}

_SHARED: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--dir",
        "folder",
        metavar="DIR",
        type=options.LocalFolder(),
        default=Path("bench-store"),
        show_default=True,
        help="Folder for the store; the store is deleted at the end.",
    ),
    click.option(
        "--n",
        "count",
        type=click.IntRange(min=1),
        metavar="N",
        default=1_000_000,
        show_default=True,
        help="Messages to measure.",
    ),
    click.option(
        "--body",
        type=click.IntRange(min=0),
        metavar="B",
        default=256,
        show_default=True,
        help="Bytes of a body.",
    ),
    click.option(
        "--topics",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        help="Number of topics.",
    ),
    click.option(
        "--queues",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        help="Queues of each topic.",
    ),
    click.option(
        "--keys",
        type=click.IntRange(0, 2),
        default=1,
        show_default=True,
        help="Index keys of each message: 1 is KEYS, 2 also UNIQ_KEY.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Threads that put messages.",
    ),
    click.option(
        "--flush",
        type=click.Choice(["async", "sync"]),
        default="async",
        show_default=True,
        help="sync: each put waits until its message is on the disk.",
    ),
    click.option(
        "--transient", is_flag=True, help="Write through a pool of buffers (transientStorePool)."
    ),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        metavar="W",
        help="Messages before the measurement.  [default: N/4, at least 200,000; with sync at most "
        "2,000]",
    ),
    options.as_json,
    options.quiet,
)
_BESIDE = click.option(
    "--beside",
    type=click.Choice(["lmdb", "rocksdict", "sqlite3"]),
    multiple=True,
    help="Measure this store too, if it is installed; can be repeated.",
)
_BESIDE_KINDS: Final = ("put", "put-batch", "put-many")
_OWN: dict[str, Callable[[Any], Any]] = {
    "put": click.option(
        "--outstanding",
        type=click.IntRange(min=0),
        metavar="K",
        default=0,
        show_default=True,
        help="Pending put_async calls of each thread; 0: put() waits for each message.",
    ),
    "put-many": click.option(
        "--as-messages",
        is_flag=True,
        help="Put Message objects, and include making them.  [default: record batches]",
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
    beside = given.get("beside", ())
    if beside and (load.threads > 1 or load.outstanding or load.is_sync):
        raise UsageError("--beside needs --threads 1, and no --outstanding or --flush sync")
    found = bench_store(kind, given["folder"], load, beside)
    if given["as_json"]:
        stated = {name: getattr(load, name) for name in ("body", "topics", "queues", "keys")}
        stated |= {"threads": load.threads, "outstanding": load.outstanding, "batch": load.batch}
        stated |= {"flush": given["flush"], "transient": load.is_transient}
        out.json({"bench": kind, **stated, **found})
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
                help="Messages in one call.",
            )
        )
    if kind in _OWN:
        decorators.append(_OWN[kind])
    if kind in _BESIDE_KINDS:
        decorators.append(_BESIDE)
    for decorate in reversed(decorators):
        command = decorate(command)
    made: click.Command = click.command(kind, help=_help(kind))(command)
    return made


def _help(kind: str) -> str:
    return f"{_HELP[kind]}\n\nExample: logquarry bench {kind} --n 1000000"


def _recovery_command(kind: str) -> click.Command:
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
        help="Recovery rules: safe keeps every sound message; rocketmq recovers as RocketMQ does.",
    )
    for decorate in [*(shared[name] for name in reversed(names)), mode]:
        command = decorate(command)
    made: click.Command = click.command(kind, help=_help(kind))(command)
    return made


def decorator_name(decorate: Callable[[Any], Any]) -> str:
    """Return the name of the parameter that an option's decorator sets."""

    def probe() -> None:
        pass

    decorate(probe)
    return str(probe.__dict__["__click_params__"][0].name)


STORE_COMMANDS: Final = (
    *map(_command, _BATCH),
    *map(_recovery_command, ("recover", "rebuild", "verify")),
)
"""All commands of the group ``bench``, except ``scan``."""


# -------------------------------------------------------------------------------- group and scan
@click.group()
def bench() -> None:
    """Measure this machine: puts, gets, scans, recovery.

    Each kind makes a store with RocketMQ's file sizes in --dir (default: bench-store).

    Example: logquarry bench put --n 1000000 --json
    """


for _store_command in STORE_COMMANDS:
    bench.add_command(_store_command)


@bench.command()
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=options.LocalFolder(),
    default=Path("bench-store"),
    show_default=True,
    help="The store. If it does not exist, scan makes it, and keeps it.",
)
@click.option(
    "--n",
    "count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Messages of a new store.  [default: as many as --size needs]",
)
@click.option(
    "--size", metavar="SIZE", help=f"Bytes of log of a new store: 512m.  [default: {_DEFAULT_SIZE}]"
)
@click.option(
    "--body",
    default="256-1024",
    show_default=True,
    metavar="B",
    help="Bytes of a body, or a range of them.",
)
@click.option(
    "--topics", type=click.IntRange(min=1), default=4, show_default=True, help="Number of topics."
)
@click.option(
    "--queues",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Queues of each topic.",
)
@click.option(
    "--keys",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Words in KEYS of each message.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Rounds before the measurement.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Rounds to measure; the result is the fastest round.",
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
    """Measure reading the log into Arrow columns, on one thread.

    Example: logquarry bench scan --size 512m
    """
    out = Output(quiet=quiet)
    if count is not None and size is not None:
        raise UsageError("--n and --size both set the size of the store: pass one of them")
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
    """Parse ``256-1024`` or ``256`` into the smallest and the largest body size.

    Raises:
        UsageError: if the text is not a range, or exceeds 4 MiB.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", word, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not least <= most < 1 << 22:
        raise UsageError(f"--body takes bytes below 4 MiB, 256, or a range, 256-1024, not {word!r}")
    return least, most
