"""``logquarry verify``: is all of a store sound?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output

if TYPE_CHECKING:
    from logquarry.verify import VerifyReport

_FINDINGS = 1


@click.command()
@options.store
@options.as_json
@options.config
@options.quiet
def verify(store: str, as_json: bool, config: str | None, quiet: bool) -> None:
    """Check every frame, blank, queue entry, index chain and the checkpoint.

    Exit code 1 if there is damage, 0 if there is none; notes are worth knowing and no damage.
    """
    out = Output(quiet=quiet)
    settings = options.store_config(config)
    from logquarry.files.layout import StoreLayout
    from logquarry.verify import verify_store

    layout = StoreLayout.open(store, settings)
    with out.progress("checking", in_bytes=True) as progress:
        report = verify_store(layout, progress=progress)
    if as_json:
        out.json(report.to_json())
    else:
        _show(out, report)
    if report.has_damage:
        click.get_current_context().exit(_FINDINGS)


def _show(out: Output, report: VerifyReport) -> None:
    if report.findings:
        rows = [
            [
                finding.severity,
                finding.kind,
                text.printable(finding.file),
                str(finding.offset),
                str(finding.length) if finding.length else "-",
                text.printable(finding.reason),
            ]
            for finding in report.findings
        ]
        header = ["severity", "kind", "file", "offset", "length", "reason"]
        out.table(header, rows, right="offset length")
        out.line()
    damage = sum(finding.severity == "damage" for finding in report.findings)
    notes = len(report.findings) - damage
    verdict = text.plural(damage, "damage finding") if damage else "no damage"
    counts = report.counts
    looked = (
        f"{text.plural(counts.get('messages', 0), 'message')}, "
        f"{text.plural(counts.get('queue_entries', 0), 'queue entry', 'queue entries')}, "
        f"{text.plural(counts.get('index_entries', 0), 'index entry', 'index entries')}"
    )
    verdict = out.style(verdict, "red" if damage else "green")
    out.line(f"{verdict}, {text.plural(notes, 'note')}; looked at {looked}")
