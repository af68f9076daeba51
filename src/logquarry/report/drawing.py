"""What all charts share: colours, looks, and bars with their numbers behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from logquarry.text import printable

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

MOST_BARS: Final = 15
BAR_HEIGHT: Final = 22


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


def largest(counted: Counter[Any], what: str) -> list[dict[str, Any]]:
    """The largest of some counts as rows, and one for all others."""
    top = counted.most_common(MOST_BARS if len(counted) > MOST_BARS + 1 else MOST_BARS + 1)
    rows: list[dict[str, Any]] = [{"name": printable(name), "value": value} for name, value in top]
    others = sum(counted.values()) - sum(value for _, value in top)
    if others:
        rows.append({"name": f"({len(counted) - len(top)} other {what})", "value": others})
    for order, row in enumerate(rows):
        row["order"] = order
    return rows


def share(part: float) -> str:
    """A part of one as whole percents."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def bars(rows: Sequence[Mapping[str, Any]], what: str) -> Mapping[str, Any]:
    """Horizontal bars with their numbers, largest first."""
    import altair as alt

    most = max((row["value"] for row in rows), default=1)
    longest = max((len(row["text"]) for row in rows), default=1)
    # Room for the number behind the longest bar; with the numbers there, an axis says no more.
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
    """A chart of some rows, which become part of it."""
    import altair as alt

    return alt.Chart(alt.InlineData(values=list(rows)))


def finished(chart: Any) -> Mapping[str, Any]:
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
