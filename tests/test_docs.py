"""Pages agree with the code: tables, links, diagrams, commands and examples."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from logquarry.protocol import ha_messages as ha
from logquarry.protocol import remoting_header
from tests.conformance import test_append_vectors
from tests.helpers.command import run
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


def test_the_diagrams_and_tables_of_replication_are_those_of_the_code() -> None:
    page = (ROOT / "docs/replicate.md").read_text("utf-8")
    for table in (ha.MASTER, ha.SLAVE):
        assert f"```mermaid\n{table.diagram()}\n```" in page
    for layout in (ha.REPORT, ha.HEADER, remoting_header.PREFIX):
        assert layout.markdown() in page


def test_each_difference_from_rocketmq_has_its_test() -> None:
    text = (ROOT / "docs/embed.md").read_text("utf-8")
    table = text[text.index("## Where it differs from RocketMQ") :]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    vectors = {int(number) for number in re.findall(r"\((\d+)\) \|", table)}
    assert vectors == test_append_vectors.REFUSED.keys()
    for row in rows:
        # A folder stands before the name of a file that exists twice.
        named = re.search(r"`((?:\w+/)?test_\w+\.py)::(test_\w+)` \|$", row)
        assert named is not None, row
        (path,) = (ROOT / "tests").rglob(named[1])
        assert f"\ndef {named[2]}(" in path.read_text("utf-8"), row


def run_session(page: str, block: str) -> None:
    """The commands of a session, whose output must be what stands below each.

    ``...`` stands for anything, also for several lines; ``# exit code N`` for the exit code.
    """
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        found = re.search(r"# exit code (\d+)", command)
        code = int(found[1]) if found else 0
        words = shlex.split(command, comments=True)
        if words[0] == "logquarry":
            output = run(*words[1:], code=code).stdout
        else:
            result = subprocess.run(words, capture_output=True, text=True, check=False)
            assert result.returncode == code, (page, command, result)
            output = result.stdout
        pattern = ".*?".join(map(re.escape, expected.split("...")))
        assert re.fullmatch(pattern, output, re.DOTALL), f"{page}: {command}\n{output}"


@pytest.mark.parametrize(
    "page",
    [
        "api.md",
        "broker.md",
        "consumers.md",
        "dialect-3.1.md",
        "embed.md",
        "import.md",
        "recovery.md",
        "replicate.md",
        "retention.md",
        "salvage.md",
        "services.md",
        "testing.md",
    ],
)
def test_the_examples_of_pages_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, in one folder: what one puts the next one finds."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text("utf-8")
    examples = list(re.finditer(r"```(python|sh|shell-session)\n(.*?)```", text, re.DOTALL))
    assert len(examples) > 1
    names: dict[str, object] = {}
    for example in examples:
        if example[1] == "sh":
            for command in example[2].splitlines():
                name, *arguments = shlex.split(command)
                assert name == "logquarry"
                run(*arguments)
            continue
        if example[1] == "shell-session":
            run_session(page, example[2])
            continue
        line = text[: example.start()].count("\n") + 1
        # With its own line numbers, so that a failure names the line of the page.
        code = "\n" * line + example[2]
        exec(compile(code, f"docs/{page}", "exec"), names)
