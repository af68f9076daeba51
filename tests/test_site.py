"""The site of the docs: each page has a place, and the generated parts are drawn from the code."""

from __future__ import annotations

import io
import re
import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from logquarry.format import checkpoint, frame, index
from logquarry.format.fields import Layout
from tools import docs_site

ROOT = Path(__file__).parent.parent


def test_each_page_has_its_place() -> None:
    """Each page is in the navigation, which is on every page: two clicks from the start at most."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"^ +- .*: (\S+\.md)$", nav, re.MULTILINE)
    written = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == written | set(docs_site.generated())
    assert max(len(line) - len(line.lstrip()) for line in nav.splitlines()) == 6, "a third level"


def test_the_start_page_leads_to_a_page_for_each_task() -> None:
    start = (ROOT / "docs/index.md").read_text("utf-8")
    assert re.findall(r"^## (.*)$", start, re.MULTILINE) == [
        "Operator",
        "Data engineer",
        "Python developer",
    ]


@pytest.mark.parametrize("layout", [frame.HEAD, index.HEADER, checkpoint.LAYOUT])
def test_a_diagram_shows_each_field(layout: Layout) -> None:
    root = ElementTree.fromstring(docs_site.diagram(layout))
    assert [text.text for text in root.iter("text") if "class" not in text.attrib] == [
        field.name for field in layout.fields
    ]
    bytes_drawn = sum(int(box.attrib["width"]) for box in root.iter("rect")) // 40
    assert bytes_drawn == layout.size


def test_a_script_becomes_a_page() -> None:
    page = docs_site.tutorial("# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1  # noqa: X\n")
    assert page == "# Title\n\nText.\n\n```python\nx = 1\n```\n"


def test_links_of_the_project_lead_to_pages_of_the_site() -> None:
    text = docs_site.generated()["architecture.md"]
    targets = re.findall(r"\]\(([^)#:]+)", text)
    assert "glossary.md" in targets
    known = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert set(targets) <= known | set(docs_site.generated())


def test_example_of_a_broken_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/broken_store.py"))
    assert (tmp_path / "example-broken/new-store/commitlog").is_dir()


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: a link that leads nowhere fails."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    formats = (tmp_path / "site/formats.html").read_text("utf-8")
    assert formats.count("<svg viewBox") >= 12
    for name in ("index", "reference/python", "reference/commands", "tutorials/broken_store"):
        assert (tmp_path / f"site/{name}.html").stat().st_size > 10_000
    # Without a network: no page loads anything from another host.
    loaded = re.compile(r'<(?:script|img|iframe|link rel="stylesheet")\b[^>]*?"(?:https?:)?//')
    pages = list((tmp_path / "site").rglob("*.html"))
    assert [page.name for page in pages if loaded.search(page.read_text("utf-8"))] == []
    drawn = [page for page in pages if 'class="mermaid"' in page.read_text("utf-8")]
    assert {page.name for page in drawn} == {"architecture.html", "replicate.html"}
    for page in drawn:
        assert 'src="assets/mermaid.min.js"' in page.read_text("utf-8")
    assert (tmp_path / "site/assets/mermaid.min.js").stat().st_size > 1_000_000


def test_an_interrupted_download_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = True

    def pack(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """As npm: half of the archive is there at an interrupt."""
        target = Path(command[command.index("--pack-destination") + 1]) / "thing-1.0.tgz"
        if fails:
            target.write_bytes(b"half")
            raise KeyboardInterrupt
        with tarfile.open(target, "w:gz") as archive:
            member = tarfile.TarInfo("package/x.js")
            member.size = 2
            archive.addfile(member, io.BytesIO(b"js"))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", pack)
    with pytest.raises(KeyboardInterrupt):
        docs_site.npm_script("thing@1.0", "x.js")
    assert list((tmp_path / "build").iterdir()) == []
    fails = False
    assert docs_site.npm_script("thing@1.0", "x.js") == b"js"
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["thing-1.0.tgz"]
