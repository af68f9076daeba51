"""``logquarry bench put``, ``get``, ``consume`` and so on: timings of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output

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
    from logquarry.testing.store_bench import Load, bench_store

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
        from logquarry.testing.recovery_bench import bench_recovery
        from logquarry.testing.store_bench import Load

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
