"""The targets of the Makefile that collect only the files of one marker miss no test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
MARKED = re.compile(r"mark\.(?:java|root|cluster)\b")
NEEDS_SPARK = re.compile(r"\bspark: ")


def test_markers_are_in_the_files_of_their_tests() -> None:
    """The Makefile searches the text of these files for the marker, or for the fixture `spark`."""
    assert MARKED.search((TESTS / "conformance" / "test_live.py").read_text("utf-8"))
    shared = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")]
    assert [path for path in shared if MARKED.search(path.read_text("utf-8"))] == []
    # A test that gets the session only through another fixture would be missed.
    conftests = [path for path in shared if path.name == "conftest.py"]
    assert [path for path in conftests if NEEDS_SPARK.search(path.read_text("utf-8"))] == []
