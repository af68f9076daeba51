"""Hooks of MkDocs that make the pages of the site that are not files of docs/ (``make docs``).

- ARCHITECTURE.md and the other pages of the project's root;
- one tutorial for each script of examples/;
- the options of all commands, and the API, from the code;
- a diagram of each format in docs/formats.md, drawn from the tables in ``format/``;
- JavaScript packages from npm, copied into the site so that it needs no network: Mermaid, which
  draws the other diagrams, and iframe-worker, with which the search works on a site that is opened
  from files.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from logquarry.format.fields import Field, Layout  # noqa: E402  after the path is set
from tools.docs_tables import FORMATS  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "tests.md",
}
"""For each page in the project's root folder, its file name on the site."""

_MERMAID = "assets/mermaid.min.js"
SCRIPTS = {
    _MERMAID: ("mermaid@11.17.2", "dist/mermaid.min.js"),
    "assets/iframe-worker.js": ("iframe-worker@1.0.4", "shim/index.js"),
}
"""For each script on the site, the npm package and the path in the package. Without the copies, the
theme would load these scripts from another host.
"""

_ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):<code>(?:~[\w.]*\.)?")
_LITERAL_BLOCK = "<p>::</p>"
"""Marks of Sphinx in docstrings, which Markdown shows as text."""

_ROW_BYTES = 16
_BYTE_WIDTH = 40
_ROW_HEIGHT = 34
_MARGIN = 44


def generated() -> dict[str, str]:
    """Return each generated page of the site: its name and its Markdown text."""
    pages = {
        name: _with_site_links(source, (ROOT / source).read_text("utf-8"))
        for source, name in ROOT_PAGES.items()
    }
    for script in sorted((ROOT / "examples").glob("*.py")):
        pages[f"tutorials/{script.stem}.md"] = tutorial(script.read_text("utf-8"))
    pages["reference/commands.md"] = _COMMANDS
    pages["reference/python.md"] = _api("Python, all calls", "logquarry", _names("logquarry"))
    pages["reference/spark.md"] = _api(
        "Spark, all calls", "logquarry.spark", _names("logquarry/spark")
    )
    pages["reference/errors.md"] = (
        "# Exceptions\n\n::: logquarry.errors\n    options:\n      show_root_heading: false\n"
    )
    return pages


_COMMANDS = """# Options of the commands

This page is made from the commands' own help. [The commands](../command-line.md) explains what they
have in common, and the exit codes.

::: mkdocs-click
    :module: logquarry.cli.main
    :command: app
    :prog_name: logquarry
    :depth: 1
"""


def _api(title: str, module: str, names: list[str]) -> str:
    """Return a page of the API that shows the docstring of each name."""
    return f"# {title}\n\n" + "\n".join(f"::: {module}.{name}\n" for name in names)


def _names(package: str) -> list[str]:
    """Return the public names of a package without an import, which would need Spark."""
    text = (ROOT / "src" / package / "__init__.py").read_text("utf-8")
    listed = re.search(r"^__all__ = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed is not None
    names = re.findall(r'"(\w+)"', listed[1])
    return [name for name in names if name not in ("__version__", "errors")]


def tutorial(script: str) -> str:
    """Return a script with cells (``# %%``) as a page.

    A cell of Markdown becomes text, any other cell a block of code.
    """
    parts = []
    for cell in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            parts.append(re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE))
        else:
            code = re.sub(r"  # noqa.*$", "", body.strip("\n"), flags=re.MULTILINE)
            parts.append(f"```python\n{code}\n```")
    return "\n\n".join(parts) + "\n"


def _with_site_links(source: str, text: str) -> str:
    """Return a page of the project; change its links to lead to pages of the site."""
    folder = Path(source).parent

    def link(match: re.Match[str]) -> str:
        title, path, anchor = match[1], match[2], match[3] or ""
        name = (ROOT / folder / path).resolve().relative_to(ROOT).as_posix()
        if name in ROOT_PAGES:
            return f"[{title}]({ROOT_PAGES[name]}{anchor})"
        if name.startswith("docs/"):
            return f"[{title}]({name.removeprefix('docs/')}{anchor})"
        # The site has no page for the file that the link names.
        return title

    return re.sub(r"\[([^\]\[]*)\]\(([^)#:]+)(#[^)]*)?\)", link, text)


def diagram(layout: Layout) -> str:
    """Return a layout as SVG: rows of 16 bytes, each field as wide as its bytes."""
    boxes = []
    for field in layout.fields:
        boxes += _boxes(field, layout.offsets[field.name])
    rows = (layout.size + _ROW_BYTES - 1) // _ROW_BYTES
    places = [
        f'<text class="place" x="0" y="{row * _ROW_HEIGHT + 22}">{row * _ROW_BYTES}</text>'
        for row in range(rows)
    ]
    width = _MARGIN + _ROW_BYTES * _BYTE_WIDTH + 2
    return (
        f'<div class="format-map"><svg viewBox="0 0 {width} {rows * _ROW_HEIGHT + 2}" role="img" '
        f'aria-label="{escape(layout.name)}: {layout.size} bytes">{"".join(places + boxes)}'
        "</svg></div>"
    )


def _boxes(field: Field, offset: int) -> list[str]:
    """Return the boxes of one field, one box in each row; the widest box shows the name."""
    parts = []
    at, end = offset, offset + field.width
    while at < end:
        stop = min(end, (at // _ROW_BYTES + 1) * _ROW_BYTES)
        parts.append((at, stop - at))
        at = stop
    named = max(parts, key=lambda part: part[1])
    boxes = []
    for at, width in parts:
        x, y = _MARGIN + at % _ROW_BYTES * _BYTE_WIDTH, at // _ROW_BYTES * _ROW_HEIGHT + 1
        pixels = width * _BYTE_WIDTH
        boxes.append(
            f'<rect x="{x}" y="{y}" width="{pixels}" height="{_ROW_HEIGHT}">'
            f"<title>{escape(f'{field.name}: {field.meaning}')}</title></rect>"
        )
        if (at, width) == named:
            # Squeeze the letters of a name that is longer than its box.
            fit = f' textLength="{pixels - 4}" lengthAdjust="spacingAndGlyphs"'
            boxes.append(
                f'<text x="{x + pixels // 2}" y="{y + 21}"'
                f"{fit if len(field.name) * 7.3 > pixels - 4 else ''}>{escape(field.name)}</text>"
            )
    return boxes


def with_diagrams(text: str) -> str:
    """Return docs/formats.md with a diagram below the name of each layout."""
    for _, layouts, _ in FORMATS:
        for layout in layouts:
            line = f"**{layout.name}**, {layout.size} bytes\n"
            assert line in text, line
            text = text.replace(line, f"{line}\n{diagram(layout)}\n", 1)
    return text


def npm_script(package: str, path: str) -> bytes:
    """Return a file of an npm package; the first call downloads the package into ``build/``.

    Raises:
        PluginError: if npm is missing or fails.
    """
    from mkdocs.exceptions import PluginError

    folder = ROOT / "build"
    packed = folder / f"{package.replace('@', '-')}.tgz"
    if not packed.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise PluginError(f"the site needs {package}: install npm, which downloads it")
        folder.mkdir(exist_ok=True)
        # Rename the file at the end, so that an interrupted download does not stay under the final
        # name.
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            command = [npm, "pack", "--silent", "--pack-destination", draft, package]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PluginError(f"npm could not download {package}: {done.stderr.strip()}")
            (Path(draft) / packed.name).replace(packed)
    with tarfile.open(packed) as archive:
        script = archive.extractfile(f"package/{path}")
        assert script is not None
        return script.read()


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    for name, (package, path) in SCRIPTS.items():
        files.append(File.generated(config, name, content=npm_script(package, path)))
    return files


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """Drop Sphinx's marks; on pages with diagrams, load Mermaid's script (a hook of MkDocs)."""
    if page.file.src_uri.startswith("reference/"):
        html = _ROLE.sub("<code>", html).replace(_LITERAL_BLOCK, "")
    if '<pre class="mermaid">' not in html:
        return html
    from mkdocs.utils import get_relative_url

    return f'{html}<script src="{get_relative_url(_MERMAID, page.url)}"></script>'


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str | None:
    """Add diagrams to the formats, and point links to pages of the site (a hook of MkDocs)."""
    if page.file.src_uri == "formats.md":
        return with_diagrams(markdown)
    for source, name in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown
