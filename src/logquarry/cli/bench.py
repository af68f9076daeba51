"""``logquarry bench``: timings on a real store on disk."""

from __future__ import annotations

import re
from pathlib import Path

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.bench_store import STORE_COMMANDS
from logquarry.cli.output import Output
from logquarry.errors import UsageError
from logquarry.values import byte_count

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
    from logquarry.testing import scan_bench

    with out.progress("making the store") as progress:
        scan_bench.ensure_store(
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
        found = scan_bench.bench_scan(folder, warmup=warmup, rounds=rounds, progress=progress)
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
