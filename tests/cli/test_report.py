"""``report``: one complete page with correct counts, and hostile names escaped."""

from __future__ import annotations

import html
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.report.charts import figures
from logquarry.report.page import Table, Tile, render, script_json
from logquarry.report.survey import MOST_BINS, PERCENTILES, Survey, bin_size, survey
from logquarry.store.message_store import MessageStore
from logquarry.store.overview import overview
from logquarry.text import printable
from tests.helpers.command import expected_messages, run
from tests.helpers.hostile_store import HOSTILE
from tests.helpers.store_maker import StoreMaker

MOST_BYTES = 1_500_000


def survey_of(store: Path) -> Survey:
    with MessageStore.open(store) as opened:
        glance = overview(opened)
        return survey(opened, (glance.first_time, glance.last_time))


@pytest.mark.parametrize("name", ["real-broker", "single", "delay", "sysflags", "rollover"])
def test_survey_counts_what_is_there(golden: Path, name: str) -> None:
    found, expected = survey_of(golden / name / "store"), expected_messages(golden / name)
    assert found.messages == Counter(m["topic"] for m in expected)
    sizes: Counter[str] = Counter()
    for message in expected:
        sizes[message["topic"]] += message["size"]
    assert found.bytes == sizes
    assert found.tags == Counter(m["tags"] for m in expected)
    assert {topic: int(line.sum()) for topic, line in found.over_time.items()} == found.messages
    assert found.body_sizes.sum() == found.total
    waits = sorted(m["store_timestamp"] - m["born_timestamp"] for m in expected)
    behind = [wait for wait in waits if wait >= 0]
    assert found.ahead == len(waits) - len(behind)
    for percentile in PERCENTILES:
        at = max(0, -int(-len(behind) * percentile // 100) - 1)
        assert found.latency_ms(percentile) == pytest.approx(behind[at], rel=0.012, abs=0.5)
    room = sum(file.room for file in found.files)
    assert sum(f.messages + f.blank + f.damaged + f.unused for f in found.files) == room


def test_survey_of_a_damaged_store(damaged_store: Path) -> None:
    found = survey_of(damaged_store)
    assert found.total == 39 and len(found.damage) == 1
    assert found.files[0].damaged == found.damage[0].length > 0


def test_bins_are_few() -> None:
    for span in (0, 1, 999, 60_000, 3_600_000, 86_400_000, 400 * 86_400_000, 30_000_000_000_000):
        assert span // bin_size(span) <= 1_000
    assert bin_size(90 * 60_000) == 60_000


@pytest.mark.parametrize(
    "times", [(0, 2**62), (-(2**63), 2**63 - 1), (2**63 - 2, 2**63 - 1), (1_700_000_000_000, 2**62)]
)
def test_hostile_store_times(tmp_path: Path, times: tuple[int, int]) -> None:
    assert bin_size(times[1] - times[0]) * MOST_BINS >= times[1] - times[0]
    maker = StoreMaker()
    for time in times:
        maker.put(body=b"x", time=time)
    store = maker.write(tmp_path / "store")
    with MessageStore.open(store) as opened:
        found = survey(opened, times)
    line = found.over_time["orders"]
    assert len(line) <= MOST_BINS + 2
    assert line.sum() == 2 and line[0] and line[-1]
    run("report", store, "--html", tmp_path / "page.html")


def test_times_and_queues_at_the_limits_of_their_fields(tmp_path: Path) -> None:
    """Damaged numbers: no CRC covers them."""
    maker = StoreMaker()
    for stored, born in ((2**63 - 1, -(2**63)), (-(2**63), 2**63 - 1), (5, 2)):
        maker.put(body=b"x", time=stored, born=born)
    maker.put(SCHEDULE_TOPIC, 2**31 - 1, time=5, born=5)
    with MessageStore.open(maker.write(tmp_path / "store")) as opened:
        found = survey(opened, (5, 5))
    assert (found.ahead, found.latency_ms(0), found.latency_ms(100)) == (1, 0, 2**64 - 1)
    assert found.delay_levels == {2**31: 1}


@pytest.mark.parametrize(
    "store",
    [
        "real-broker/store",
        "unclean/crc-middle/store",
        "unclean/last-log-gone/store",
        "single/store",
    ],
)
def test_page(golden: Path, tmp_path: Path, store: str) -> None:
    target = tmp_path / "page" / "report.html"
    result = run("report", golden / store, "--html", target)
    assert not result.stdout and str(target) in result.stderr
    page = target.read_text("utf-8")
    assert len(page.encode()) < MOST_BYTES
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=|@import|url\(", markup)
    assert "default-src 'none'" in markup
    assert page.count("<script") == page.count("</script>")
    for line in markup.splitlines():
        assert "None" not in line and "nan" not in line.lower().split()
    if store == "unclean/crc-middle/store":
        assert "bad_body_crc" in page and "<dd>173" in page and "<td>UnC</td>" in page
        assert re.search(r"1 damaged place", page)


def test_charts_can_be_drawn(golden: Path) -> None:
    vl_convert = pytest.importorskip("vl_convert")
    drawn = figures(survey_of(golden / "real-broker" / "store"), {1: 8})
    assert len(drawn) == 8
    for figure in drawn:
        svg = vl_convert.vegalite_to_svg({**figure.spec, "width": 400})
        assert svg.startswith("<svg") and "NaN" not in svg
        assert figure.title and figure.caption
    assert "MainTopic takes 41% of" in drawn[0].title
    assert "8 of them" in next(f.title for f in drawn if "delayed" in f.title)


def test_charts_of_many_things_stay_small() -> None:
    found = Survey(1_000, 0)
    for number in range(3_000):
        found.messages[f"topic-{number}"] = found.bytes[f"topic-{number}"] = number + 1
        found.tags[f"tag-{number}"] = 1
        found.over_time[f"topic-{number}"] = found.body_sizes[:1] + 1
    found.body_sizes[5] = found.total
    found.first_time = found.last_time = 0
    for figure in figures(found):
        assert len(json.dumps(figure.spec)) < 50_000
    assert "2985 other topics" in json.dumps(figures(found)[0].spec)


def test_hostile_text_is_escaped(small_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    run("report", small_store, "--html", target, "--quiet")
    page = target.read_text("utf-8")
    assert not set(page) & {"\x1b", "\x07", "\x7f", "\x9b", "\u202e"}
    specs = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert specs is not None
    assert any("</script>" in json.dumps(spec) for spec in json.loads(specs[1]))
    assert page.count("</script>") == 3

    evil = f"<img src=x onerror=alert(1)>{HOSTILE}'\""
    table = Table(evil, [evil], [[evil]], empty=evil)
    page = render(evil, evil, [Tile(evil, evil, evil)], [], [table], [evil])
    assert "<img" not in page and "</script>" not in page
    assert page.count(html.escape(printable(evil), quote=True)) == 10


def test_script_json() -> None:
    value: Any = {"a": "</script><!-- & \u2028"}
    assert json.loads(script_json(value)) == value
    assert not set(script_json(value)) & set("<>&\u2028")


def test_without_the_extra(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    target = tmp_path / "report.html"
    result = run("report", golden / "single" / "store", "--html", target, code=2)
    assert "logquarry[report]" in result.stderr and not target.exists()
