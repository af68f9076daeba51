"""One HTML file that needs nothing else: charts, tables, and the script that draws the charts.

Everything a store says is escaped: text in the markup, JSON in the script. A content security
policy forbids the page to load anything, whatever stands in it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

from logquarry.report.drawing import Figure

MOST_ROWS: Final = 500

# Vega makes functions of its expressions, and styles of its own.
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
    """One number at the top."""

    name: str
    value: str
    detail: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        title: its heading.
        header: names of the columns.
        rows: cells as text, which is escaped here.
        numbers: columns that hold numbers.
        words: columns that hold single words, which are not broken.
        empty: what stands there instead if there are no rows.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    words: frozenset[int] = frozenset()
    empty: str = "Nothing."


@dataclass(frozen=True)
class Page:
    """A page before it is HTML."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    figures: Sequence[Figure]
    tables: Sequence[Table] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)


def render(page: Page) -> str:
    """The page as one HTML document."""
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{_text(page.title)}</title>",
        f"<style>{_style()}</style>",
        "</head>",
        "<body>",
        f"<header><h1>{_text(page.title)}</h1>",
        f'<p class="soft">{_text(page.subtitle)}</p></header>',
        '<dl class="tiles">',
        *(_tile(tile) for tile in page.tiles),
        "</dl>",
        *(f'<p class="note">{_text(note)}</p>' for note in page.notes),
        *_figures(page.figures),
        *(line for table in page.tables for line in _table(table)),
        *_scripts(page.figures),
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
        cells = [
            f"<td{_cell_kind(table, column, cell)}>{_text(cell)}</td>"
            for column, cell in enumerate(row)
        ]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if len(table.rows) > MOST_ROWS:
        yield f'<p class="note">The first {MOST_ROWS} of {len(table.rows):,} rows.</p>'


def _cell_kind(table: Table, column: int, cell: str) -> str:
    if column in table.numbers:
        return ' class="number"'
    if column in table.words:
        return f' class="word{" damage" if cell == "damage" else ""}"'
    return ""


def _scripts(figures: Sequence[Figure]) -> Iterable[str]:
    if not figures:
        return
    specs = [figure.spec for figure in figures]
    yield f'<script type="application/json" id="figures">{script_json(specs)}</script>'
    yield f"<script>{_library()}</script>"
    yield f"<script>{_DRAW}</script>"


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _library() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    script: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the stub is wrong
    # It must not end its own element.
    return script.replace("</script", "<\\/script").replace("<!--", "\\x3c!--")


def _style() -> str:
    return files("logquarry.report").joinpath("page.css").read_text("utf-8")


def _text(text: str) -> str:
    # A number and its unit stay on one line.
    text = _NUMBER_WITH_UNIT.sub("\\1\u00a0\\2", text)
    return html.escape(text, quote=True)
