"""The report of a store: one HTML file with charts, tables and the script that draws the charts.

All text from a store is escaped, in the HTML and in the script's JSON. The content security policy
forbids the page to load other files.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from logquarry.arguments import Bars
from logquarry.disk.config_file import delay_offsets
from logquarry.errors import MissingExtra
from logquarry.format import properties as props
from logquarry.repair.findings import VerifyReport
from logquarry.repair.verification import verify_store
from logquarry.report.survey import Survey, survey
from logquarry.store.message_store import MessageStore
from logquarry.store.overview import Overview, overview
from logquarry.text import count_text, duration_text, plural, printable, size_text, time_text

if TYPE_CHECKING:
    from logquarry.report.charts import Figure

MOST_ROWS: Final = 500

# Vega compiles expressions, so the policy must allow unsafe-eval. Vega also adds styles to the
# page.
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)

_NUMBER_WITH_UNIT: Final = re.compile(r"(\d) (ms|s|min|h|d|[KMGTP]?i?B)\b")

_DRAW: Final = """
(function () {
  var specs = JSON.parse(document.getElementById("figures").textContent);
  var options = {renderer: "svg", actions: false, mode: "vega-lite", tooltip: {theme: "light"}};
  Promise.all(specs.map(function (spec, number) {
    return vegaEmbed("#chart-" + number, spec, options);
  })).then(function () { document.documentElement.dataset.drawn = "yes"; }, function (error) {
    var place = document.getElementById("trouble");
    place.textContent = "The charts could not be drawn: " + error.message;
  });
})();
"""


@dataclass(frozen=True)
class Tile:
    """One number at the top of the page."""

    name: str
    value: str
    detail: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the page. ``numbers`` are the indexes of the columns of numbers. ``words`` are the
    indexes of the columns of short text, which stays on one line.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    words: frozenset[int] = frozenset()
    empty: str = "Nothing."


def render(
    title: str,
    subtitle: str,
    tiles: Sequence[Tile],
    figures: Sequence[Figure],
    tables: Sequence[Table],
    notes: Sequence[str],
) -> str:
    """Render a page with these contents as one HTML document; escape all texts."""
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{_text(title)}</title>",
        f"<style>{files('logquarry.report').joinpath('page.css').read_text('utf-8')}</style>",
        "</head>",
        "<body>",
        f"<header><h1>{_text(title)}</h1>",
        f'<p class="soft">{_text(subtitle)}</p></header>',
        '<dl class="tiles">',
        *(_tile(tile) for tile in tiles),
        "</dl>",
        *(f'<p class="note">{_text(note)}</p>' for note in notes),
        *_figures(figures),
        *(line for table in tables for line in _table(table)),
        *_scripts(figures),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _tile(tile: Tile) -> str:
    kind = ' class="bad"' if tile.bad else ""
    detail = f"<small>{_text(tile.detail)}</small>" if tile.detail else ""
    return f"<div{kind}><dt>{_text(tile.name)}</dt><dd>{_text(tile.value)}{detail}</dd></div>"


def _figures(figures: Sequence[Figure]) -> Iterable[str]:
    if not figures:
        return
    yield "<h2>What is in the log</h2>"
    yield "<noscript><p>The charts need JavaScript; the tables below do not.</p></noscript>"
    yield '<p class="note" id="trouble"></p>'
    yield '<div class="figures">'
    for number, figure in enumerate(figures):
        yield '<figure class="wide">' if figure.wide else "<figure>"
        yield f"<h3>{_text(figure.title)}</h3>"
        name = f'id="chart-{number}" role="img" aria-label="{_text(figure.title)}"'
        yield f'<div class="chart" {name}></div>'
        yield f"<figcaption>{_text(figure.caption)}</figcaption></figure>"
    yield "</div>"


def _table(table: Table) -> Iterable[str]:
    yield f"<h2>{_text(table.title)}</h2>"
    if not table.rows:
        yield f"<p>{_text(table.empty)}</p>"
        return
    yield '<div class="scroll"><table><thead><tr>'
    for column, name in enumerate(table.header):
        kind = ' class="number"' if column in table.numbers else ""
        yield f'<th scope="col"{kind}>{_text(name)}</th>'
    yield "</tr></thead><tbody>"
    for row in table.rows[:MOST_ROWS]:
        cells = []
        for column, cell in enumerate(row):
            kind = ' class="number"' if column in table.numbers else ""
            if column in table.words:
                kind = f' class="word{" damage" if cell == "damage" else ""}"'
            cells.append(f"<td{kind}>{_text(cell)}</td>")
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if len(table.rows) > MOST_ROWS:
        yield f'<p class="note">The first {MOST_ROWS} of {len(table.rows):,} rows.</p>'


def _scripts(figures: Sequence[Figure]) -> Iterable[str]:
    if not figures:
        return
    import vl_convert

    specs = [figure.spec for figure in figures]
    yield f'<script type="application/json" id="figures">{script_json(specs)}</script>'
    library: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the stub is wrong
    # Text in the script must not end the script element.
    library = library.replace("</script", "<\\/script").replace("<!--", "\\x3c!--")
    yield f"<script>{library}</script>"
    yield f"<script>{_DRAW}</script>"


def script_json(value: Any) -> str:
    """Return a value as JSON that cannot end the script element around it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _text(text: str) -> str:
    # Use a no-break space, so that a number and its unit stay on one line.
    text = _NUMBER_WITH_UNIT.sub("\\1\u00a0\\2", printable(text))
    return html.escape(text, quote=True)


# ------------------------------------------------------------------------------ the page of a store

_STATES: Final = {
    "closed": "shut down cleanly",
    "live": "open",
    "crashed": "not shut down cleanly",
}


def store_report(
    store: MessageStore,
    *,
    watch: Bars | None = None,
    notes: Sequence[str] = (),
    title: str | None = None,
    checked: Callable[[VerifyReport], None] = lambda report: None,
) -> str:
    """Make the HTML page about a store.

    Args:
        notes: sentences that the page shows below the numbers at its top.
        title: the page's title; None for the store's path.
        checked: called with the result of the verification of the store.

    Raises:
        MissingExtra: if Altair or vl-convert is not installed.
    """
    try:
        import altair as _altair  # noqa: F401
        import vl_convert as _vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"a report needs {error.name}, which is not installed: pip install 'logquarry[report]'"
        ) from error
    from logquarry.report.charts import figures

    step = watch or (lambda what: nullcontext(None))
    glance = overview(store)
    with step("counting") as progress:
        found = survey(store, (glance.first_time, glance.last_time), progress)
    with step("checking") as progress:
        report = verify_store(store.layout, progress=progress)
    checked(report)
    if glance.hint is not None:
        reason = glance.hint.partition(";")[0]
        notes = [*notes, f"Messages and bytes by queue are unknown: {reason}."]
    return render(
        title=f"Store {store.root}" if title is None else title,
        subtitle=_subtitle(store, glance),
        tiles=_tiles(found, glance, report),
        figures=figures(found, _pending(store)),
        tables=[_queue_table(glance), _finding_table(report)],
        notes=notes,
    )


def _subtitle(store: MessageStore, glance: Overview) -> str:
    now = datetime.now(UTC)
    return (
        f"{store.broker}, {_STATES[glance.state]}; offsets "
        f"{count_text(glance.min_offset)} to {count_text(glance.max_offset)}; "
        f"logquarry, {now:%Y-%m-%d %H:%M} UTC"
    )


def _tiles(found: Survey, glance: Overview, report: VerifyReport) -> list[Tile]:
    span = (found.last_time or 0) - (found.first_time or 0)
    damage = report.damage_count
    notes = len(report.findings) - damage
    queues = sum(len(topic.queues) for topic in glance.topics)
    files = found.files
    first_time = time_text(found.first_time).replace("T", " ").partition(".")[0]
    return [
        Tile(
            "Messages",
            count_text(found.total),
            f"{plural(len(found.messages), 'topic')}, {plural(queues, 'queue')}",
        ),
        Tile(
            "In the log",
            size_text(sum(found.bytes.values())),
            f"{plural(len(files), 'file')} of {size_text(files[0].room) if files else '0 B'}",
        ),
        Tile(
            "Time span",
            duration_text(span) if found.total else "-",
            f"from {first_time} UTC" if found.total else "",
        ),
        Tile(
            "Born to stored",
            duration_text(found.latency_ms(99)) if found.has_latencies else "-",
            "for 99% of messages",
        ),
        Tile(
            "Damage",
            count_text(damage) if damage else "none",
            f"{plural(notes, 'note')}; {size_text(sum(file.blank for file in files))} of blanks",
            bad=damage > 0,
        ),
    ]


def _queue_table(glance: Overview) -> Table:
    rows = [
        [
            queue.topic,
            str(queue.queue_id),
            count_text(queue.min_offset),
            count_text(queue.max_offset),
            count_text(queue.messages),
            size_text(queue.bytes),
        ]
        for topic in glance.topics
        for queue in topic.queues
    ]
    header = ["Topic", "Queue", "Min offset", "Max offset", "Messages in the log", "Bytes"]
    return Table("Queues", header, rows, frozenset(range(1, 6)), empty="The store has no queues.")


def _finding_table(report: VerifyReport) -> Table:
    ranked = sorted(report.findings, key=lambda finding: finding.severity != "damage")
    rows = [
        [
            finding.severity,
            finding.kind,
            finding.file,
            count_text(finding.offset),
            count_text(finding.length or None),
            finding.reason,
        ]
        for finding in ranked
    ]
    counts = report.counts
    looked = (
        f"No findings: {plural(counts['messages'], 'message')}, "
        f"{plural(counts['queue_entries'], 'queue entry', 'queue entries')} and "
        f"{plural(counts['index_entries'], 'index entry', 'index entries')} are sound."
    )
    header = ["Severity", "Kind", "File", "Offset", "Bytes", "What is wrong"]
    return Table("Findings", header, rows, frozenset({3, 4}), frozenset({0, 1}), empty=looked)


def _pending(store: MessageStore) -> dict[int, int]:
    # delayOffset.json has, for each delay level, the queue offset of the next message to deliver.
    delivered = delay_offsets(store.layout)
    if delivered is None:
        return {}
    waiting: dict[int, int] = {}
    for topic, queue_id in store.queues():
        if topic == props.SCHEDULE_TOPIC:
            least, most = store.queue_offsets(topic, queue_id)
            level = queue_id + 1
            waiting[level] = most - min(most, max(least, delivered.get(level, 0)))
    return waiting
