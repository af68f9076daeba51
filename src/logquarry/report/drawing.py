"""Parts of the charts: colours, styles, horizontal bars, and the map of the log's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from logquarry.report.survey import FileUse, Survey
from logquarry.text import plural, printable, size_text

# The colours of Okabe and Ito. Colour-blind readers can distinguish these colours, and so can
# readers of a grey print.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#cc79a7",
)
GREY, LIGHT = "#8a8f98", "#e4e7eb"

MOST_BARS: Final = 15
BAR_HEIGHT: Final = 22


@dataclass(frozen=True)
class Figure:
    """One chart with its title and caption. ``spec`` is a Vega-Lite specification."""

    title: str
    caption: str
    spec: Mapping[str, Any]
    wide: bool = False


def largest(counted: Counter[Any], what: str, text: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return a row for each of the largest counts, and a row for the sum of all other counts."""
    top = counted.most_common(MOST_BARS if len(counted) > MOST_BARS + 1 else MOST_BARS + 1)
    rows: list[dict[str, Any]] = [{"name": printable(name), "value": value} for name, value in top]
    others = sum(counted.values()) - sum(value for _, value in top)
    if others:
        rows.append({"name": f"({len(counted) - len(top)} other {what})", "value": others})
    return [{**row, "order": order, "text": text(row["value"])} for order, row in enumerate(rows)]


def share(part: float) -> str:
    """Return a share (0 to 1) as text, rounded to whole percent."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def bars(rows: Sequence[Mapping[str, Any]], what: str) -> Mapping[str, Any]:
    """Return a chart with a horizontal bar and a number for each row."""
    most = max((row["value"] for row in rows), default=1)
    longest = max((len(row["text"]) for row in rows), default=1)
    # Leave room for the number after the longest bar.
    room = most * (1.12 + longest / 40)
    base = chart_of(rows).encode(
        y=alt.Y("name:N", sort=alt.EncodingSortField("order"), title=None),
        x=alt.X("value:Q", axis=None, scale=alt.Scale(domain=[0, room or 1], nice=False)),
        tooltip=[alt.Tooltip("name:N", title=" "), alt.Tooltip("text:N", title=what)],
    )
    drawn = base.mark_bar(color=BLUE, cornerRadiusEnd=2)
    numbers = base.mark_text(align="left", dx=4, color="#333").encode(text="text:N")
    return finished((drawn + numbers).properties(height=alt.Step(BAR_HEIGHT)))


def chart_of(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """Return a chart with its data in the specification, so that the page loads no other file."""
    return alt.Chart(alt.InlineData(values=list(rows)))


def finished(chart: Any) -> Mapping[str, Any]:
    """Return the Vega-Lite specification of a chart, with the style that all charts share."""
    text = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    made = chart.properties(width="container").configure(
        font="system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        axis={
            **text,
            "labelColor": "#333",
            "titleColor": "#333",
            "gridColor": "#eceef1",
            "domainColor": "#b4bac2",
            "tickColor": "#b4bac2",
            "labelLimit": 220,
        },
        legend={"labelFontSize": 12, "symbolType": "square", "labelLimit": 280},
        view={"stroke": None},
        text={"fontSize": 12},
        bar={"stroke": None},
    )
    spec: Mapping[str, Any] = made.to_dict()
    return spec


# ------------------------------------------------------------------------------- map of the files
MOST_FILES: Final = 60
_MOST_MARKS: Final = 1_000
_USES: Final = (
    ("messages", BLUE),
    ("blank", SKY),
    ("damaged", RED),
    ("unused", LIGHT),
)


def file_map(found: Survey) -> Figure | None:
    """Return a chart that shows what each log file contains; None for a store without log files."""
    if not found.files:
        return None
    files = _shown_files(found.files)
    rows = [row for file in files for row in _spans_of(file)]
    harm = _damage_of(found, files)
    y = alt.Y(
        "file:N",
        sort=[_file_label(file) for file in files],
        title=None,
        axis=alt.Axis(labelFont="monospace"),
    )
    colour = alt.Color(
        "use:N",
        scale=alt.Scale(domain=[use for use, _ in _USES], range=[colour for _, colour in _USES]),
        legend=alt.Legend(title=None, orient="top"),
    )
    tips: list[Any] = ["file:N", "use:N", alt.Tooltip("text:N", title="bytes")]
    layers: list[Any] = [
        chart_of(rows)
        .mark_bar(height={"band": 0.72})
        .encode(
            y=y,
            x=alt.X(
                "from:Q",
                title="Position in the file",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", tickCount=5),
            ),
            x2="to:Q",
            color=colour,
            tooltip=tips,
        )
    ]
    if harm:
        places = chart_of(harm).encode(y=y, x="from:Q", tooltip=tips)
        # A damaged part can be far narrower than a pixel. So add a border and a triangle.
        layers += [
            places.mark_bar(height={"band": 0.72}, color=RED, stroke=RED, strokeWidth=2).encode(
                x2="to:Q"
            ),
            places.mark_point(
                shape="triangle-down", color=RED, filled=True, size=70, opacity=1, yOffset=-13
            ),
        ]
    chart = alt.layer(*layers).properties(height=alt.Step(BAR_HEIGHT + 10))
    return Figure(_file_title(found), _file_caption(found, files), finished(chart), wide=True)


def _spans_of(file: FileUse) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    at = 0
    for use, length in (
        ("messages", file.messages + file.damaged),
        ("unused", file.unused),
        ("blank", file.blank),
    ):
        if length:
            rows.append(_span(file, use, at, length))
        at += length
    return rows


def _span(file: FileUse, use: str, at: int, length: int) -> dict[str, Any]:
    room = max(1, file.room)
    return {
        "file": _file_label(file),
        "use": use,
        "from": at / room,
        "to": min(1.0, (at + length) / room),
        "text": f"{size_text(length)} ({length / room:.2%})",
    }


def _damage_of(found: Survey, files: Sequence[FileUse]) -> list[dict[str, Any]]:
    rows = []
    for span in found.damage[:_MOST_MARKS]:
        for file in files:
            if file.base <= span.offset < file.base + file.room:
                row = _span(file, "damaged", span.offset - file.base, span.length)
                text = f"{span.kind} at {span.offset}, {plural(span.length, 'byte')}"
                rows.append({**row, "text": printable(text)})
    return rows


def _shown_files(files: Sequence[FileUse]) -> Sequence[FileUse]:
    # If there are too many files, show only the damaged files and the last files.
    if len(files) <= MOST_FILES:
        return files
    damaged = [file for file in files if file.damaged][:MOST_FILES]
    kept = {file.base for file in [*damaged, *files[-(MOST_FILES - len(damaged)) or len(files) :]]}
    return [file for file in files if file.base in kept]


def _file_label(file: FileUse) -> str:
    return printable(file.path.rpartition("/")[2])


def _file_title(found: Survey) -> str:
    blank = sum(file.blank for file in found.files)
    waste = f"{size_text(blank)} of blanks" if blank else "no blanks"
    damaged = sum(file.damaged for file in found.files)
    harm = "no damage"
    if found.damage:
        harm = f"{plural(len(found.damage), 'damaged place')}, {size_text(damaged)}"
    return f"{plural(len(found.files), 'log file')}: {waste}, {harm}"


def _file_caption(found: Survey, files: Sequence[FileUse]) -> str:
    text = "Each bar is one file of the commit log, from its first byte to its last."
    if found.damage:
        text += " Triangles mark damage."
    if len(files) < len(found.files):
        are = "is" if len(files) == 1 else "are"
        text += f" {len(files)} of {len(found.files)} files {are} shown: damaged ones and the last."
    return text
