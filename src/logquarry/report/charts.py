"""The charts of a report, as Vega-Lite through Altair. Titles say what one sees.

Data are a few rows each, so that a page stays small however large the store is. Names from the
store are data and never part of a specification's expressions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
    import altair as alt

# Okabe and Ito's colours: told apart with any kind of colour blindness, and in print by lightness.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#56b4e9",
    "#cc79a7",
)
GREY, LIGHT = "#8a8f98", "#e4e7eb"
_TOPIC_COLOURS: Final = (BLUE, ORANGE, GREEN, SKY, PURPLE, RED)

MOST_BARS: Final = 15
MOST_FILES: Final = 60
_MOST_LINES: Final = 5
_BAR_HEIGHT: Final = 22
_MOST_MARKS: Final = 1_000
_NO_TAG: Final = "(no tag)"
_DELIVERED: Final = "delivered"
_WAITING: Final = "not by delayOffset.json"


@dataclass(frozen=True)
class Figure:
    """One chart with its words.

    Attributes:
        title: what one sees.
        caption: how to read it.
        spec: Vega-Lite, for ``vegaEmbed``.
        wide: whether it takes the whole width of the page.
    """

    title: str
    caption: str
    spec: Mapping[str, Any]
    wide: bool = False


def figures(found: Survey, pending: Mapping[int, int] | None = None) -> list[Figure]:
    """The charts of what a survey found; those without anything to show are left out.

    Args:
        found: the survey.
        pending: messages that wait for their delivery, by delay level, if that is known.
    """
    if not found.total:
        made = [_file_map(found)]
    else:
        made = [
            _bytes_per_topic(found),
            _messages_per_topic(found),
            _over_time(found),
            _body_sizes(found),
            _latencies(found),
            _tags(found),
            _delays(found, pending or {}),
            _file_map(found),
        ]
    return [figure for figure in made if figure is not None]


# ------------------------------------------------------------------------------------ per topic
def _bytes_per_topic(found: Survey) -> Figure:
    rows = _largest(found.bytes, "topics")
    total = sum(found.bytes.values())
    name, most = found.bytes.most_common(1)[0]
    for row in rows:
        row["text"] = f"{size_text(row['value'])} ({row['value'] / total:.0%})"
    title = f"{shown(name)} takes {most / total:.0%} of {size_text(total)}"
    if len(found.bytes) == 1:
        title = f"One topic takes all {size_text(total)}"
    return Figure(
        title, "Bytes of the log that the messages of each topic take.", _bars(rows, "bytes")
    )


def _messages_per_topic(found: Survey) -> Figure:
    rows = _largest(found.messages, "topics")
    for row in rows:
        row["text"] = count_text(row["value"])
    name, most = found.messages.most_common(1)[0]
    title = f"{shown(name)} has {most / found.total:.0%} of {plural(found.total, 'message')}"
    if len(found.messages) == 1:
        title = f"{plural(found.total, 'message')} in one topic"
    return Figure(
        title,
        "Messages in the log per topic, those of the broker's own topics too.",
        _bars(rows, "messages"),
    )


def _largest(counted: Counter[Any], what: str) -> list[dict[str, Any]]:
    """The largest of some counts as rows, and one for all others."""
    top = counted.most_common(MOST_BARS if len(counted) > MOST_BARS + 1 else MOST_BARS + 1)
    rows: list[dict[str, Any]] = [{"name": printable(name), "value": value} for name, value in top]
    others = sum(counted.values()) - sum(value for _, value in top)
    if others:
        rows.append({"name": f"({len(counted) - len(top)} other {what})", "value": others})
    for order, row in enumerate(rows):
        row["order"] = order
    return rows


def _bars(rows: Sequence[Mapping[str, Any]], what: str) -> Mapping[str, Any]:
    """Horizontal bars with their numbers, largest first."""
    import altair as alt

    most = max((row["value"] for row in rows), default=1)
    longest = max((len(row["text"]) for row in rows), default=1)
    # Room for the number behind the longest bar; with the numbers there, an axis says no more.
    room = most * (1.12 + longest / 40)
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        y=alt.Y("name:N", sort=alt.EncodingSortField("order"), title=None),
        x=alt.X("value:Q", axis=None, scale=alt.Scale(domain=[0, room or 1], nice=False)),
        tooltip=[alt.Tooltip("name:N", title=" "), alt.Tooltip("text:N", title=what)],
    )
    bars = base.mark_bar(color=BLUE, cornerRadiusEnd=2)
    numbers = base.mark_text(align="left", dx=4, color="#333").encode(text="text:N")
    return _spec((bars + numbers).properties(height=alt.Step(_BAR_HEIGHT)))


# ------------------------------------------------------------------------------------ over time
def _over_time(found: Survey) -> Figure:
    import altair as alt

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
        alt.Chart(alt.Data(values=rows))
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
                legend=alt.Legend(title=None, orient="top", columns=0),
            ),
            tooltip=[alt.Tooltip("when:N", title="from"), "topic:N", "messages:Q"],
        )
        .properties(height=220)
    )
    title = f"{plural(found.total, 'message')} within {duration_text(span)}, at most "
    title += f"{count_text(busiest)} per {unit}"
    return Figure(title, "Messages by store time and topic.", _spec(chart), wide=True)


def _stacked(
    series: Mapping[str, Any], first_bin: int, bin_ms: int
) -> list[dict[str, str | int]]:
    """Counts by name and bin as rectangles on top of each other."""
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
    """How times on an axis are written that is this long."""
    if span_ms < 5_000:
        return "%H:%M:%S.%L"
    if span_ms < 600_000:
        return "%H:%M:%S"
    return "%H:%M" if span_ms < 43_200_000 else "%b %d %H:%M" if span_ms < 10**9 else "%Y-%m-%d"


# ------------------------------------------------------------------------------ distributions
def _body_sizes(found: Survey) -> Figure:
    import altair as alt

    used = found.body_sizes.nonzero()[0]
    rows = []
    # One empty size at each side: a single bar would fill the chart.
    for bits in range(max(0, int(used[0]) - 1), min(len(found.body_sizes), int(used[-1]) + 2)):
        count = int(found.body_sizes[bits])
        rows.append(
            {
                "order": bits,
                "size": "empty" if bits == 0 else _size_range(bits),
                "messages": count,
                "text": f"{count / found.total:.0%}" if count else "",
            }
        )
    common = max(rows, key=lambda row: int(str(row["messages"])))
    share = int(str(common["messages"])) / found.total
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "size:N",
            sort=alt.EncodingSortField("order"),
            title="Bytes of body, as stored",
            axis=alt.Axis(labelAngle=-40 if len(rows) > MOST_BARS // 2 else 0),
        ),
        y=alt.Y("messages:Q", title="Messages", axis=alt.Axis(format="~s", tickCount=5)),
        tooltip=["size:N", alt.Tooltip("messages:Q", format=",")],
    )
    bars = base.mark_bar(color=BLUE, cornerRadiusEnd=2)
    labels = base.mark_text(dy=-6, color="#333").encode(text="text:N")
    what = "are empty" if common["size"] == "empty" else f"are of {common['size']} bytes"
    return Figure(
        f"{share:.0%} of bodies {what}",
        "Sizes of bodies as stored, compressed ones as compressed.",
        _spec((bars + labels).properties(height=220)),
    )


def _size_range(bits: int) -> str:
    low, high = 1 << (bits - 1), 1 << bits
    if high - low == 1:
        return str(low)
    for unit, name in ((1 << 20, " Mi"), (1 << 10, " Ki")):
        if low >= unit:
            return f"{low // unit}–{high // unit}{name}"
    return f"{low}–{high - 1}"


def _latencies(found: Survey) -> Figure | None:
    import altair as alt

    if not found.has_latencies:
        return None
    rows = []
    for order, percentile in enumerate(PERCENTILES):
        value = found.latency_ms(percentile)
        name = "slowest" if percentile >= 100 else f"{percentile:g}%"
        rows.append(
            {"order": order, "name": name, "value": max(value, 0.5), "text": duration_text(value)}
        )
    base = alt.Chart(alt.Data(values=rows)).encode(
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
    bars = base.mark_bar(color=BLUE, cornerRadiusEnd=2).encode(x2=alt.datum(0.5))
    texts = base.mark_text(align="left", dx=4, color="#333").encode(text="text:N")
    half, most = found.latency_ms(50), found.latency_ms(99)
    caption = "From the producer's clock to the broker's. Delayed and retried messages keep their "
    caption += "born time, so that their wait is in it."
    if found.ahead:
        caption += f" {plural(found.ahead, 'message')} from clocks that were ahead are left out."
    return Figure(
        f"Half of all messages are stored within {duration_text(half)}, 99% within "
        f"{duration_text(most)}",
        caption,
        _spec((bars + texts).properties(height=alt.Step(_BAR_HEIGHT + 10))),
    )


def _tags(found: Survey) -> Figure | None:
    named = Counter({tag: count for tag, count in found.tags.items() if tag is not None})
    if not named:
        return None
    counted = Counter({tag or _NO_TAG: count for tag, count in found.tags.items()})
    rows = _largest(counted, "tags")
    for row in rows:
        row["text"] = f"{count_text(row['value'])} ({row['value'] / found.total:.0%})"
    name, most = named.most_common(1)[0]
    cut = " Only the first 10,000 tags that were met are counted." if found.tags_cut else ""
    return Figure(
        f"{shown(name)} is the most frequent of {plural(len(named), 'tag')}, on "
        f"{most / found.total:.0%} of messages",
        f"Messages per tag, over all topics.{cut}",
        _bars(rows, "messages"),
    )


def _delays(found: Survey, pending: Mapping[int, int]) -> Figure | None:
    import altair as alt

    if not found.delay_levels:
        return None
    rows = []
    for level, count in sorted(found.delay_levels.items()):
        waiting = min(count, pending.get(level, 0))
        for name, value in ((_DELIVERED, count - waiting), (_WAITING, waiting)):
            if value:
                rows.append({"level": level, "state": name, "messages": value})
    waiting = sum(row["messages"] for row in rows if row["state"] == _WAITING)
    chart = (
        alt.Chart(alt.Data(values=rows))
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
        title += f", {count_text(waiting)} of them not known to be delivered"
    return Figure(
        title,
        "Messages in the schedule topic by delay level. What is delivered stands in "
        "delayOffset.json, which a broker writes every ten seconds: it may be behind.",
        _spec(chart),
    )


# ------------------------------------------------------------------------------------ file map
_USES: Final = (
    ("messages", BLUE),
    ("blank", SKY),
    ("damaged", RED),
    ("unused", LIGHT),
)


def _file_map(found: Survey) -> Figure | None:
    import altair as alt

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
    tips = ["file:N", "use:N", alt.Tooltip("text:N", title="bytes")]
    layers: list[Any] = [
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.72})
        .encode(
            y=y,
            x=alt.X(
                "from:Q",
                title="Place in the file",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", tickCount=5),
            ),
            x2="to:Q",
            color=colour,
            tooltip=tips,
        )
    ]
    if harm:
        places = alt.Chart(alt.Data(values=harm)).encode(y=y, x="from:Q", tooltip=tips)
        # A hundred bytes of a gigabyte are no pixel: a line of two, and a sign above it.
        layers += [
            places.mark_bar(height={"band": 0.72}, color=RED, stroke=RED, strokeWidth=2).encode(
                x2="to:Q"
            ),
            places.mark_point(
                shape="triangle-down", color=RED, filled=True, size=70, opacity=1, yOffset=-13
            ),
        ]
    chart = alt.layer(*layers).properties(height=alt.Step(_BAR_HEIGHT + 10))
    return Figure(_file_title(found), _file_caption(found, files), _spec(chart), wide=True)


def _spans_of(file: FileUse) -> list[dict[str, Any]]:
    """Where in a file messages stand, then nothing yet, then its blank."""
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
    """All files, or of many those with damage and the last ones."""
    if len(files) <= MOST_FILES:
        return files
    damaged = [file for file in files if file.damaged][:MOST_FILES]
    kept = {file.base for file in [*damaged, *files[-(MOST_FILES - len(damaged)) or len(files) :]]}
    return [file for file in files if file.base in kept]


def _file_label(file: FileUse) -> str:
    return printable(file.path.rpartition("/")[2])


def _file_title(found: Survey) -> str:
    blank = sum(file.blank for file in found.files)
    waste = f"{size_text(blank)} lost to blanks" if blank else "none of it lost to blanks"
    damaged = sum(file.damaged for file in found.files)
    harm = "no damage"
    if found.damage:
        harm = f"{plural(len(found.damage), 'damaged place')}, {size_text(damaged)}"
    return f"{plural(len(found.files), 'log file')}: {waste}, {harm}"


def _file_caption(found: Survey, files: Sequence[FileUse]) -> str:
    text = "Each bar is one file of the commit log, from its first byte to its last."
    if found.damage:
        text += " Triangles point at damage."
    if len(files) < len(found.files):
        text += f" {len(files)} of {len(found.files)} files are shown: damaged ones and the last."
    return text


def _spec(chart: alt.Chart | alt.LayerChart) -> Mapping[str, Any]:
    """A chart's Vega-Lite with the looks that all share."""
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
