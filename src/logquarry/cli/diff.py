"""``logquarry diff``: where two stores part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output

if TYPE_CHECKING:
    from logquarry.repair.diff.store_diff import Place, StoreDiff

_FINDINGS = 1
_MOST_TOLD = 40


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options.as_json
@options.config
@options.quiet
def diff(a: str, b: str, as_json: bool, config: str | None, quiet: bool) -> None:
    """Say where two stores part: a master and its slave, or a store and its copy.

    Logs are compared byte by byte where both have them, then the consume queues. A store that
    begins later or ends earlier has not diverged. Exit code 1 if they have; 0 if they are equal,
    or one goes on where the other ends.
    """
    out = Output(quiet=quiet)
    settings = options.store_config(config)
    from logquarry.log.layout import StoreLayout
    from logquarry.repair.diff.diff import compare_stores

    layouts = [StoreLayout.open(store, settings) for store in (a, b)]
    with out.progress("comparing", in_bytes=True) as progress:
        found = compare_stores(*layouts, progress=progress)
    if as_json:
        out.json(found.to_json())
    else:
        _show(out, found, a, b, config)
    if found.has_diverged:
        click.get_current_context().exit(_FINDINGS)


def _show(out: Output, found: StoreDiff, a: str, b: str, config: str | None) -> None:
    out.line(_verdict(out, found))
    out.line()
    out.line(f"  a  {text.printable(a)}: {found.log_a.min_offset} to {found.log_a.max_offset}")
    out.line(f"  b  {text.printable(b)}: {found.log_b.min_offset} to {found.log_b.max_offset}")
    for note in found.notes:
        out.line(f"  {text.printable(note)}")
    _show_divergence(out, found)
    _show_parts(out, found)
    _show_queues(out, found)
    different = [name for name, state in found.config.items() if state != "equal"]
    if different:
        out.line()
        out.line(
            f"  config/ differs, which decides nothing: {text.printable(', '.join(different))}"
        )
    _show_next(out, found, a, b, config)


def _verdict(out: Output, found: StoreDiff) -> str:
    compared = text.size_text(max(0, found.end - found.start))
    if found.verdict == "equal":
        return f"{out.style('equal', 'green')}: {compared} of log, {_queue_count(found)}"
    if found.verdict == "prefix":
        words = out.style("equal as far as both go", "green")
        return f"{words}: {compared} of log, {_queue_count(found)}"
    if found.verdict == "disjoint":
        words = out.style("nothing in common", "red")
        return f"{words}: one log ends before the other begins, and nothing can be told"
    if found.divergence is not None:
        words = out.style(f"diverged at {found.divergence.offset} of the log", "red")
        before = text.size_text(found.divergence.offset - found.start)
        return f"{words}: the {before} before it are equal"
    count = sum(queue.state == "differs" for queue in found.queues)
    words = out.style(f"{text.plural(count, 'queue')} differ", "red")
    return f"{words}: the logs are equal as far as both go, {compared}"


def _queue_count(found: StoreDiff) -> str:
    return text.plural(len(found.queues), "queue")


def _show_divergence(out: Output, found: StoreDiff) -> None:
    if found.divergence is None:
        return
    out.line()
    out.line(out.style(f"what stands at {found.divergence.offset}", "bold"))
    for name, place in (("a", found.divergence.a), ("b", found.divergence.b)):
        out.line(f"  {name}  {_place(place)}")
        out.line(f"     in {text.printable(place.file)}")


def _place(place: Place) -> str:
    words = f"{place.what} at {place.offset}"
    if place.size:
        words += f", {text.plural(place.size, 'byte')}"
    if place.topic is not None:
        words += (
            f": {text.shown(place.topic)}, queue {place.queue_id} offset {place.queue_offset}, "
            f"stored {text.time_text(place.store_timestamp)}"
        )
    if place.reason is not None:
        words += f": {text.printable(place.reason)}"
    return words


def _show_parts(out: Output, found: StoreDiff) -> None:
    differing = [part for part in found.parts if part.first_difference is not None]
    if not differing:
        return
    out.line()
    rows = [
        [
            text.printable(part.file),
            str(part.offset),
            str(part.length),
            f"not in {part.missing_in}" if part.missing_in else str(part.different_bytes),
            str(part.first_difference),
        ]
        for part in differing[:_MOST_TOLD]
    ]
    header = ["log file", "from", "compared", "different", "first"]
    out.table(header, rows, right="from compared different first")
    same = len(found.parts) - len(differing)
    rest = len(differing) - len(rows)
    if rest:
        out.line(f"and {rest} more that differ; --json has all")
    if same:
        out.line(f"equal in {text.plural(same, 'other file')}")


def _show_queues(out: Output, found: StoreDiff) -> None:
    differing = [queue for queue in found.queues if queue.state == "differs"]
    if not differing:
        return
    out.line()
    rows = []
    for queue in differing[:_MOST_TOLD]:
        ends = ["-" if side is None else str(side.max_offset) for side in (queue.a, queue.b)]
        name = text.shown(queue.topic)
        rows.append([name, str(queue.queue_id), *ends, text.printable(queue.reason)])
    out.table(["topic", "queue", "end in a", "end in b", "difference"], rows, right="queue")
    rest = len(differing) - len(rows)
    if rest:
        out.line(f"and {rest} more; --json has all")


def _show_next(out: Output, found: StoreDiff, a: str, b: str, config: str | None) -> None:
    if not found.has_diverged or found.verdict == "disjoint":
        return
    divergence = found.divergence
    suspects = [a, b]
    if divergence is not None:
        harmed = [
            store
            for store, place in ((a, divergence.a), (b, divergence.b))
            if place.what in ("damage", "nothing")
        ]
        suspects = harmed or suspects
    out.line()
    for store in suspects:
        out.line(f"next: {options.command_line('verify', store, config=config)}")
