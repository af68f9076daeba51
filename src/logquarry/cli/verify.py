"""``logquarry verify``: is all of a store sound?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.repair.verify import VerifyReport

_FINDINGS = 1


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True)
@options.spark_master
@options.as_json
@options.config
@options.quiet
def verify(
    stores: tuple[str, ...],
    spark_master: str | None,
    as_json: bool,
    config: str | None,
    quiet: bool,
) -> None:
    """Check every frame, blank, queue entry, index chain and the checkpoint.

    STORE is a folder or a URL; a glob names several.

    Exit code 1 if there is damage, 0 if there is none; notes are worth knowing and no damage.
    """
    out = Output(quiet=quiet)
    settings = options.store_config(config)
    if spark_master is None:
        reports = _alone(out, stores, settings)
    else:
        from logquarry.cli import spark as with_spark
        from logquarry.spark.repair import verify_stores

        with (
            with_spark.session(spark_master) as session,
            out.progress("checking", in_bytes=True) as progress,
        ):
            reports = verify_stores(session, stores, config=settings, progress=progress)
    if as_json:
        documents = [report.to_json() for report in reports]
        out.json(documents[0] if len(documents) == 1 else {"stores": documents})
    else:
        for number, report in enumerate(reports):
            if len(reports) > 1:
                out.line(f"{chr(10) if number else ''}{out.style(report.store, 'bold')}")
            _show(out, report)
    if any(report.has_damage for report in reports):
        click.get_current_context().exit(_FINDINGS)


def _alone(out: Output, stores: Sequence[str], settings: StoreConfig | None) -> list[VerifyReport]:
    from logquarry.log.layout import StoreLayout
    from logquarry.log.store_names import find_stores
    from logquarry.repair.verify import verify_store

    reports = []
    for location in find_stores(stores):
        layout = StoreLayout.open(location, settings)
        with out.progress("checking", in_bytes=True) as progress:
            reports.append(verify_store(layout, progress=progress))
    return reports


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
