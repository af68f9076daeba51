"""The documentation says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import docs_tables

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", sorted(docs_tables.PAGES))
def test_tables_of_the_docs_are_those_of_the_code(name: str) -> None:
    """If this fails: ``python -m tools.docs_tables``."""
    assert (docs_tables.DOCS / name).read_text("utf-8") == docs_tables.PAGES[name]()


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(ROOT.glob("docs/*.md"))], ids=str
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []
