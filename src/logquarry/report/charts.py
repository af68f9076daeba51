"""The charts of a report, made with Altair as Vega-Lite. The title of a chart states its main
result.

A chart contains only a few rows of data, so the page stays small. A name from the store is always
data of a chart, and never part of an expression. So the page never runs code that a name contains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from logquarry.report.survey import PERCENTILES, FileUse, Survey
from logquarry.text import (
    bin_text,
    count_text,
    duration_text,
    plural,
    printable,
    shown,
    size_text,
    time_text,
)

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
    rows = [row for file in files for row in file.spans()]
    harm = _damage_of(found, files)
    y = alt.Y(
        "file:N",
        sort=[file.label for file in files],
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


def _damage_of(found: Survey, files: Sequence[FileUse]) -> list[dict[str, Any]]:
    rows = []
    for span in found.damage[:_MOST_MARKS]:
        for file in files:
            if file.base <= span.offset < file.base + file.room:
                row = file.span("damaged", span.offset - file.base, span.length)
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


_TOPIC_COLOURS: Final = (BLUE, ORANGE, GREEN, SKY, PURPLE, RED)

_MOST_LINES: Final = 5
_NO_TAG: Final = "(no tag)"
_DELIVERED: Final = "delivered"
_WAITING: Final = "not delivered (delayOffset.json)"


def figures(found: Survey, pending: Mapping[int, int] | None = None) -> list[Figure]:
    """Return the charts of a survey. A chart without data is left out."""
    if not found.total:
        made = [file_map(found)]
    else:
        made = [
            _bytes_per_topic(found),
            _messages_per_topic(found),
            _over_time(found),
            _body_sizes(found),
            _latencies(found),
            _tags(found),
            _delays(found, pending or {}),
            file_map(found),
        ]
    return [figure for figure in made if figure is not None]


# ------------------------------------------------------------------------------------ per topic
def _bytes_per_topic(found: Survey) -> Figure:
    total = sum(found.bytes.values())
    name, most = found.bytes.most_common(1)[0]
    rows = largest(found.bytes, "topics", lambda n: f"{size_text(n)} ({share(n / total)})")
    title = f"{shown(name)} takes {most / total:.0%} of {size_text(total)}"
    if len(found.bytes) == 1:
        title = f"One topic takes all {size_text(total)}"
    return Figure(
        title, "Bytes of the log that the messages of each topic take.", bars(rows, "bytes")
    )


def _messages_per_topic(found: Survey) -> Figure:
    rows = largest(found.messages, "topics", count_text)
    name, most = found.messages.most_common(1)[0]
    title = f"{shown(name)} has {most / found.total:.0%} of {plural(found.total, 'message')}"
    if len(found.messages) == 1:
        title = f"{plural(found.total, 'message')} in one topic"
    return Figure(
        title,
        "Messages in the log per topic, with the broker's system topics.",
        bars(rows, "messages"),
    )


# ------------------------------------------------------------------------------------ over time
def _over_time(found: Survey) -> Figure:
    top = [name for name, _ in found.messages.most_common(_MOST_LINES)]
    series: dict[str, Any] = {printable(name): found.over_time[name] for name in top}
    rest = [line for name, line in found.over_time.items() if name not in top]
    if rest:
        series[f"({plural(len(rest), 'other topic')})"] = sum(rest)
    totals: Any = sum(found.over_time.values())
    busiest = int(totals.max())
    rows = _stacked(series, found.first_bin, found.bin_ms)
    unit = bin_text(found.bin_ms)
    span = (found.last_time or 0) - (found.first_time or 0)
    end = found.first_bin + len(totals) * found.bin_ms
    chart = (
        chart_of(rows)
        .mark_rect(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X(
                "start:T",
                title="Store time (UTC)",
                scale=alt.Scale(type="utc", domain=[found.first_bin, end], nice=False),
                axis=alt.Axis(format=_time_format(span), tickCount=8, labelOverlap=True),
            ),
            x2="end:T",
            y=alt.Y(
                "low:Q",
                title=f"Messages per {unit}",
                scale=alt.Scale(domain=[0, busiest * 1.06]),
                axis=alt.Axis(format="~s", tickMinStep=1, tickCount=5),
            ),
            y2="high:Q",
            color=alt.Color(
                "topic:N",
                scale=alt.Scale(
                    domain=list(series),
                    range=[*_TOPIC_COLOURS[: len(top)], GREY][: len(series)],
                ),
                legend=alt.Legend(title=None, orient="top", columns=3),
            ),
            tooltip=[alt.Tooltip("when:N", title="from"), "topic:N", "messages:Q"],
        )
        .properties(height=220)
    )
    title = f"{plural(found.total, 'message')} in {duration_text(span)}, at most "
    title += f"{count_text(busiest)} per {unit}"
    return Figure(title, "Messages by store time and topic.", finished(chart), wide=True)


def _stacked(series: Mapping[str, Any], first_bin: int, bin_ms: int) -> list[dict[str, str | int]]:
    # One row for each rectangle of a stacked chart.
    rows: list[dict[str, str | int]] = []
    heights: dict[int, int] = {}
    for name, line in series.items():
        for number in line.nonzero()[0].tolist():
            count, low = int(line[number]), heights.get(number, 0)
            start = first_bin + number * bin_ms
            heights[number] = low + count
            rows.append(
                {
                    "start": start,
                    "end": start + bin_ms,
                    "low": low,
                    "high": low + count,
                    "topic": name,
                    "messages": count,
                    "when": time_text(start),
                }
            )
    return rows


def _time_format(span_ms: int) -> str:
    if span_ms < 5_000:
        return "%H:%M:%S.%L"
    if span_ms < 600_000:
        return "%H:%M:%S"
    return "%H:%M" if span_ms < 43_200_000 else "%b %d %H:%M" if span_ms < 10**9 else "%Y-%m-%d"


# ------------------------------------------------------------------------------ distributions
def _body_sizes(found: Survey) -> Figure:
    used = found.body_sizes.nonzero()[0]
    rows: list[dict[str, Any]] = []
    # Add an empty bin at each end: otherwise, a single bar would be as wide as the whole chart.
    for bits in range(max(0, int(used[0]) - 1), min(len(found.body_sizes), int(used[-1]) + 2)):
        count = int(found.body_sizes[bits])
        rows.append(
            {
                "order": bits,
                "size": "empty" if bits == 0 else _size_range(bits),
                "messages": count,
                "text": share(count / found.total) if count else "",
            }
        )
    common = max(rows, key=lambda row: row["messages"])
    base = chart_of(rows).encode(
        x=alt.X(
            "size:N",
            sort=alt.EncodingSortField("order"),
            title="Bytes of body, as stored",
            axis=alt.Axis(labelAngle=-40 if len(rows) > MOST_BARS // 2 else 0),
        ),
        y=alt.Y("messages:Q", title="Messages", axis=alt.Axis(format="~s", tickCount=5)),
        tooltip=["size:N", alt.Tooltip("messages:Q", format=",")],
    )
    drawn = base.mark_bar(color=BLUE, cornerRadiusEnd=2)
    labels = base.mark_text(dy=-6, color="#333").encode(text="text:N")
    what = "are empty" if common["size"] == "empty" else f"have {_bytes(common['size'])}"
    return Figure(
        f"{share(common['messages'] / found.total)} of bodies {what}",
        "Sizes of bodies as stored: the size of a compressed body is its compressed size.",
        finished((drawn + labels).properties(height=220)),
    )


def _bytes(size: str) -> str:
    return f"{size} byte" if size == "1" else f"{size} bytes"


def _size_range(bits: int) -> str:
    low, high = 1 << (bits - 1), 1 << bits
    if high - low == 1:
        return str(low)
    for unit, name in ((1 << 20, " Mi"), (1 << 10, " Ki")):
        if low >= unit:
            return f"{low // unit}–{high // unit}{name}"
    return f"{low}–{high - 1}"


def _latencies(found: Survey) -> Figure | None:
    if not found.has_latencies:
        return None
    rows = []
    for order, percentile in enumerate(PERCENTILES):
        value = found.latency_ms(percentile)
        name = "slowest" if percentile >= 100 else f"{percentile:g}%"
        rows.append(
            {"order": order, "name": name, "value": max(value, 0.5), "text": duration_text(value)}
        )
    base = chart_of(rows).encode(
        y=alt.Y("name:N", sort=alt.EncodingSortField("order"), title="Of messages, within"),
        x=alt.X(
            "value:Q",
            title="Store time minus born time, log scale",
            scale=alt.Scale(
                type="log", domain=[0.5, max(10.0, float(str(rows[-1]["value"])) * 12)], nice=False
            ),
            axis=alt.Axis(labels=False, ticks=False, grid=False),
        ),
        tooltip=[alt.Tooltip("name:N", title="of messages"), alt.Tooltip("text:N", title="within")],
    )
    drawn = base.mark_bar(color=BLUE, cornerRadiusEnd=2).encode(x2=alt.datum(0.5))
    texts = base.mark_text(align="left", dx=4, color="#333").encode(text="text:N")
    half, most = found.latency_ms(50), found.latency_ms(99)
    caption = "Store time (broker's clock) minus born time (producer's clock). Delayed and retried "
    caption += "messages keep their born time, so the time includes their wait."
    if found.ahead:
        ahead = plural(found.ahead, "message")
        caption += f" Not counted: {ahead} whose producer's clock was ahead of the broker's."
    title = f"99% of messages are stored within {duration_text(most)}"
    if half != most:
        title = f"Half of all messages are stored within {duration_text(half)}, 99% within "
        title += duration_text(most)
    return Figure(
        title,
        caption,
        finished((drawn + texts).properties(height=alt.Step(BAR_HEIGHT + 10))),
    )


def _tags(found: Survey) -> Figure | None:
    named = Counter({tag: count for tag, count in found.tags.items() if tag is not None})
    if not named:
        return None
    counted = Counter({tag or _NO_TAG: count for tag, count in found.tags.items()})
    rows = largest(counted, "tags", lambda n: f"{count_text(n)} ({share(n / found.total)})")
    name, most = named.most_common(1)[0]
    cut = " Only the first 10,000 tags in the log are counted." if found.tags_cut else ""
    title = f"{shown(name)} is the most frequent of {plural(len(named), 'tag')}"
    if len(named) == 1:
        title = f"{shown(name)} is the only tag"
    return Figure(
        f"{title}, on {share(most / found.total)} of messages",
        f"Messages per tag, over all topics.{cut}",
        bars(rows, "messages"),
    )


def _delays(found: Survey, pending: Mapping[int, int]) -> Figure | None:
    if not found.delay_levels:
        return None
    rows: list[dict[str, Any]] = []
    for level, count in sorted(found.delay_levels.items()):
        waiting = min(count, pending.get(level, 0))
        for name, value in ((_DELIVERED, count - waiting), (_WAITING, waiting)):
            if value:
                rows.append({"level": level, "state": name, "messages": value})
    waiting = sum(row["messages"] for row in rows if row["state"] == _WAITING)
    chart = (
        chart_of(rows)
        .mark_bar(cornerRadiusEnd=2, size=26)
        .encode(
            x=alt.X("level:O", title="Delay level", axis=alt.Axis(labelAngle=0)),
            y=alt.Y(
                "messages:Q",
                title="Messages",
                stack="zero",
                axis=alt.Axis(format="~s", tickMinStep=1),
            ),
            color=alt.Color(
                "state:N",
                scale=alt.Scale(domain=[_DELIVERED, _WAITING], range=[BLUE, ORANGE]),
                legend=alt.Legend(title=None, orient="top"),
            ),
            tooltip=["level:O", "state:N", "messages:Q"],
        )
        .properties(height=200)
    )
    total = sum(found.delay_levels.values())
    title = f"{plural(total, 'delayed message')}"
    if waiting:
        title += f", {count_text(waiting)} of them not delivered (delayOffset.json)"
    return Figure(
        title,
        "Messages in the schedule topic by delay level. delayOffset.json shows which of them are "
        "delivered; a broker writes this file every ten seconds, so it may be behind.",
        finished(chart),
    )
