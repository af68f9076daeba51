"""``logquarry bench``: measure puts, gets, scans and recovery on a real store on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output
from logquarry.errors import UsageError
from logquarry.text import byte_count

_Option = Callable[[Any], Any]

_DEFAULT_SIZE: Final = "2g"
_MOST_TOPICS: Final = 10_000
_MOST_QUEUES: Final = 1_000
_HELP: Final = {
    "put": "Measure single puts, with the time to make the messages.",
    "put-batch": "Measure puts of batches in RocketMQ's wire form.",
    "put-many": "Measure puts of Arrow record batches.",
    "get": "Measure gets of 32 messages.",
    "consume": "Measure a consumer, and its CPU use while it waits.",
    "recover": "Measure opening a store: after a clean shutdown, and after a crash.",
    "rebuild": "Measure opening a store without queues and index.",
    "verify": "Measure verify on a sound store.",
}
_BATCH: Final = {"put": 1, "put-batch": 32, "put-many": 10_000, "get": 10_000, "consume": 10_000}


def _number(flag: str, help: str, default: int | None = None, **given: Any) -> _Option:
    kind = click.IntRange(given.pop("least", 1), given.pop("most", None))
    names = [flag, given.pop("name")] if "name" in given else [flag]
    return click.option(*names, type=kind, default=default, help=help, **given)


def _folder(help: str) -> _Option:
    return click.option(
        "--dir",
        "folder",
        metavar="DIR",
        type=options.LocalFolder(),
        default=Path("bench-store"),
        help=help,
    )


_TOPICS: Final = _number("--topics", "Number of topics.", 4, most=_MOST_TOPICS)
_QUEUES: Final = _number("--queues", "Queues of each topic.", 4, most=_MOST_QUEUES)
_LOAD: Final = (
    _folder("Folder for the store; the store is deleted at the end."),
    _number("--n", "Messages to measure.", 1_000_000, metavar="N"),
    _number("--body", "Bytes of a body.", 256, least=0, most=(1 << 22) - 1, metavar="B"),
    _TOPICS,
    _QUEUES,
    _number(
        "--keys", "Index keys of each message: 1 is KEYS, 2 also UNIQ_KEY.", 1, least=0, most=2
    ),
)
_PUTS: Final = (
    _number("--threads", "Threads that put messages.", 1),
    click.option(
        "--flush",
        type=click.Choice(["async", "sync"]),
        default="async",
        help="sync: each put waits until its message is on the disk.",
    ),
    click.option(
        "--transient", is_flag=True, help="Write through a pool of buffers (transientStorePool)."
    ),
    _number(
        "--warmup",
        "Messages before the measurement.  [default: N/4, but at least 200,000 or 1 GiB, "
        "whichever is less; with --flush sync: N, but at most 2,000]",
        least=0,
        metavar="W",
    ),
    _number(
        "--prime",
        "GiB of memory to use and free just before the measurement. In a virtual machine, the "
        "first use of memory may be slow.",
        0,
        least=0,
        metavar="GIB",
    ),
)
_MODE: Final = click.option(
    "--mode",
    "recovery",
    type=click.Choice(["safe", "rocketmq"]),
    default="safe",
    help="Recovery rules: safe keeps every sound message; rocketmq recovers as RocketMQ does.",
)
_BESIDE: Final = click.option(
    "--beside",
    type=click.Choice(["lmdb", "rocksdict", "sqlite3"]),
    multiple=True,
    help="Also measure this store, if it is installed; can be repeated.",
)
_OWN: Final[dict[str, tuple[_Option, ...]]] = {
    "put": (
        _number(
            "--outstanding",
            "Pending put_async calls of each thread; 0: put() waits for each message.",
            0,
            least=0,
            metavar="K",
        ),
        _BESIDE,
    ),
    "put-batch": (_BESIDE,),
    "put-many": (
        click.option(
            "--as-messages",
            is_flag=True,
            help="Put Message objects; the time includes making them.  [default: record batches]",
        ),
        _BESIDE,
    ),
}


def _run(
    kind: str, folder: Path, flush: str, transient: bool, beside: Sequence[str] = (), **given: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    from logquarry.bench.store import Load, bench_store

    shown = ("body", "topics", "queues", "keys", "threads", "outstanding", "batch")
    load = Load(**{"batch": 1, **given}, is_sync=flush == "sync", is_transient=transient)
    if beside and (load.threads > 1 or load.outstanding or load.is_sync):
        raise UsageError("--beside needs --threads 1, and no --outstanding or --flush sync")
    found = bench_store(kind, folder, load, beside)
    stated = {name: getattr(load, name) for name in shown}
    return {"bench": kind, **stated, "flush": flush, "transient": transient}, dict(found)


def _run_recovery(
    kind: str, folder: Path, n: int, recovery: str, **given: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    from logquarry.bench.scan import bench_recovery
    from logquarry.bench.store import LARGEST_BATCH, Load

    fitting = max(1, LARGEST_BATCH // max(1, given["body"]))
    load = Load(n=n, batch=min(n, _BATCH["put-many"], fitting), **given)
    found = bench_recovery(kind, folder, load, recovery)
    return {"bench": kind, "recovery": recovery, **given}, found


def _show(out: Output, as_json: bool, stated: dict[str, Any], found: dict[str, Any]) -> None:
    if as_json:
        out.json({**stated, **found})
        return
    rows = []
    for name, value in found.items():
        values = value if isinstance(value, list) else [value]
        shown = (text.count_text(round(v)) if v > 100 else f"{v:.3f}" for v in values)
        rows.append([name.replace("_", " "), ", ".join(shown)])
    out.table(["", ""], rows)


def _command(kind: str) -> click.Command:
    is_recovery = kind not in _BATCH
    run = partial(_run_recovery if is_recovery else _run, kind)

    def command(as_json: bool, out: Output, **given: Any) -> None:
        _show(out, as_json, *run(**given))

    own = [_MODE] if is_recovery else [*_PUTS, *_OWN.get(kind, ())]
    if kind in _BATCH and kind != "put":
        own.append(_number("--batch", "Messages in one call.", _BATCH[kind], metavar="N"))
    made: Any = command
    for decorate in reversed([*_LOAD, *own, options.as_json, options.quiet]):
        made = decorate(made)
    found: click.Command = click.command(
        kind, help=f"{_HELP[kind]}\n\nExample: logquarry bench {kind} --n 1000000"
    )(made)
    return found


# -------------------------------------------------------------------------------- group and scan
@click.group()
def bench() -> None:
    """Measure puts, gets, scans and recovery on this machine.

    Each subcommand makes a store with RocketMQ's file sizes in the folder --dir (default:
    bench-store).

    Example: logquarry bench put --n 1000000 --json
    """


for _kind in _HELP:
    bench.add_command(_command(_kind))


@bench.command()
@_folder("The store. If it does not exist, scan makes it, and keeps it.")
@_number(
    "--n",
    "Messages of a new store.  [default: as many as --size needs]",
    name="count",
    metavar="N",
)
@click.option(
    "--size", metavar="SIZE", help=f"Bytes of log of a new store: 512m.  [default: {_DEFAULT_SIZE}]"
)
@click.option(
    "--body",
    default="256-1024",
    metavar="B",
    help="Bytes of a body, or a range of them.",
)
@_TOPICS
@_QUEUES
@_number("--keys", "Words in KEYS of each message.", 1, least=0)
@_number("--warmup", "Rounds before the measurement.", 1, least=0)
@_number("--rounds", "Rounds to measure; the result is the fastest round.", 3)
@options.as_json
@options.quiet
def scan(
    folder: Path,
    count: int | None,
    size: str | None,
    body: str,
    warmup: int,
    rounds: int,
    as_json: bool,
    out: Output,
    **given: int,
) -> None:
    """Measure how fast one thread reads the log into Arrow columns.

    Example: logquarry bench scan --size 512m
    """
    if count is not None and size is not None:
        raise UsageError("--n and --size both set the size of the store: pass one of them")
    total = options.parsed("--size", size or (_DEFAULT_SIZE if count is None else None), byte_count)
    lengths = parse_range(body)
    from logquarry.bench import scan

    with out.progress("making the store") as progress:
        scan.ensure_store(
            folder, count=count, total_bytes=total, body=lengths, progress=progress, **given
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


def parse_range(word: str) -> tuple[int, int]:
    """Parse ``256-1024`` or ``256`` to the smallest and the largest body size."""
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", word, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not least <= most < 1 << 22:
        raise UsageError(
            f"--body takes bytes below 4 MiB, e.g. 256, or a range, e.g. 256-1024, not {word!r}"
        )
    return least, most
