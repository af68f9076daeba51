"""References in docs, docstrings and comments lead somewhere.

Checked are names of files, dotted names that begin with the package or with `lq`, Sphinx roles,
names of tests, links to sections, and citations of a page's rule or section. Names are looked up in
the source, without an import.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.source_code import comments, statements

ROOT = Path(__file__).parent.parent
PACKAGE = "logquarry"
FOREIGN_FILES = frozenset({"mailer.py", "structured_kafka_wordcount.py", "test_mailer.py"})
"""Files of other projects that the texts name, and those that a reader of the tutorial writes."""

_FILE = re.compile(r"(?<![\w./*<>{}$-])[\w./-]+\.(?:py|md)(?![\w/*{<-])")
_DOTTED = re.compile(r"(?<![\w./-])((?:logquarry|lq)(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
_ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`([^`]+)`")
# A test that an example defines is not a reference.
_TEST = re.compile(r"(?<![\w/.])(?<!def )((?:test_\w+\.py::)?test_\w+)(?!\.py|[\w*/])")
_LINK = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
_RULE = re.compile(r"\b([\w-]+\.md)(?:,|'s)\s+rule\s+(\d+)")
_SECTION = re.compile(r'\b([\w-]+\.md),\s+(?:section\s+)?"?([A-Z][\w-]*(?:\s[\w-]+)?)')


@dataclass(frozen=True)
class Text:
    """Prose of a file: a page, a docstring or a run of comments."""

    path: Path
    line: int
    text: str

    def at(self, offset: int) -> str:
        """Where an offset of the text stands."""
        line = self.line + self.text.count("\n", 0, offset)
        return f"{self.path.relative_to(ROOT)}:{line}"


@dataclass
class Scope:
    """The names that a module or a class binds."""

    names: dict[str, ast.AST | None] = field(default_factory=dict)

    def add(self, name: str, node: ast.AST | None = None) -> None:
        if self.names.get(name) is None:
            self.names[name] = node


@pytest.fixture(scope="module", autouse=True)
def sources_in_memory() -> Iterator[None]:
    """Neither this file's tests nor later ones let the garbage collector visit all the sources."""
    gc.disable()
    try:
        yield
    finally:
        for kept in (texts, tree_of, scope_of_module, members, resolve_in, resolve, homes):
            kept.cache_clear()
        gc.enable()


# --------------------------------------------------------------------------------------- the texts
@cache
def files() -> tuple[Path, ...]:
    """All files of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found = (ROOT / name for name in listed.stdout.split("\0") if name)
    return tuple(path for path in found if path.is_file())


@cache
def pages() -> tuple[Path, ...]:
    return tuple(path for path in files() if path.suffix == ".md")


@cache
def sources() -> tuple[Path, ...]:
    return tuple(path for path in files() if path.suffix == ".py")


def prose_of(path: Path) -> Iterator[Text]:
    """The docstrings and comments of a module; comments below one another are one text."""
    source = path.read_text("utf-8")
    for node in statements(source):
        # A string that stands alone describes what is above it.
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Text(path, node.lineno, text)
    block: list[str] = []
    begin = end = 0
    for line, comment in comments(source):
        if block and line != end + 1:
            yield Text(path, begin, "\n".join(block))
            block = []
        if not block:
            begin = line
        block.append(comment.lstrip("#:").strip())
        end = line
    if block:
        yield Text(path, begin, "\n".join(block))


@cache
def texts() -> tuple[Text, ...]:
    found = [Text(page, 1, page.read_text("utf-8")) for page in pages()]
    for path in sources():
        found += prose_of(path)
    return tuple(found)


# ---------------------------------------------------------------------------- the names of modules
@cache
def modules() -> dict[str, Path]:
    """Files of modules by their dotted names."""
    found = {}
    for path in sources():
        relative = path.relative_to(ROOT)
        parts = relative.with_suffix("").parts
        if parts[0] == "src":
            parts = parts[1:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def modules_by_path() -> dict[Path, str]:
    return {path: name for name, path in modules().items()}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text("utf-8"))


@cache
def scope_of_module(module: str) -> Scope:
    scope = Scope()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                scope.add((alias.asname or alias.name).partition(".")[0], node)
    _bind(tree_of(module).body, scope)
    if module == PACKAGE:
        # What `__getattr__` imports is listed for type checkers, and so bound above.
        scope.add("__version__")
    return scope


def _bind(body: list[ast.stmt], scope: Scope) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope.names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        scope.add(name.id, node)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for inner in ast.iter_child_nodes(node):
                if isinstance(inner, ast.stmt):
                    _bind([inner], scope)
                elif isinstance(inner, ast.ExceptHandler):
                    _bind(inner.body, scope)


@cache
def members(module: str, node: ast.ClassDef) -> tuple[Scope, bool]:
    """What a class and its bases bind, and whether there is a base of another project."""
    scope, is_open = Scope(), False
    _bind(node.body, scope)
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            scope.add(inner.attr)
    for base in node.bases:
        home = resolve_in(module, ast.unparse(base).partition("[")[0])
        if home is None or not isinstance(home[1], ast.ClassDef):
            # Of another project: what it binds is not known, unless it binds nothing of interest.
            is_open |= home is None or home[0].partition(".")[0] not in ("abc", "typing")
            continue
        above, above_is_open = members(home[0], home[1])
        for name, found in above.names.items():
            scope.add(name, found)
        is_open |= above_is_open
    return scope, is_open


@cache
def resolve_in(module: str, name: str, depth: int = 0) -> tuple[str, ast.AST | None] | None:
    """A dotted name as code of a module would find it: its module and definition."""
    first, _, rest = name.partition(".")
    scope = scope_of_module(module)
    if first not in scope.names or depth > 8:
        return None
    node = scope.names[first]
    if isinstance(node, ast.ImportFrom):
        alias = next((a for a in node.names if (a.asname or a.name) == first), None)
        if alias is not None and node.module is not None and not node.level:
            return resolve(f"{node.module}.{alias.name}{'.' + rest if rest else ''}", depth + 1)
    if isinstance(node, ast.Import):
        alias = next(a for a in node.names if (a.asname or a.name).partition(".")[0] == first)
        target = alias.name if alias.asname else first
        return resolve(f"{target}{'.' + rest if rest else ''}", depth + 1)
    if not rest:
        return module, node
    if isinstance(node, ast.ClassDef):
        scope, is_open = members(module, node)
        inner = rest.partition(".")[0]
        return (module, scope.names.get(inner)) if inner in scope.names or is_open else None
    # An attribute of a value: its type is not known here.
    return module, None


@cache
def resolve(name: str, depth: int = 0) -> tuple[str, ast.AST | None] | None:
    """A name from the top; one of another package counts if that package is there."""
    parts = name.split(".")
    if parts[0] not in (PACKAGE, "pyspark_logquarry", "tests", "tools", "benchmarks"):
        try:
            return (name, None) if importlib.util.find_spec(parts[0]) else None
        except ValueError:
            return None
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in modules():
            rest = ".".join(parts[length:])
            return resolve_in(module, rest, depth) if rest else (module, None)
        if length == len(parts) and (ROOT / "src" / Path(*parts)).is_dir():
            return module, None
    return None


def is_known_role(text: Text, target: str) -> bool:
    """Whether a role's target is there: dotted from the top, relative, or of the module itself."""
    target = target.rpartition("<")[2].rstrip(">").lstrip("~").removesuffix("()")
    if text.path.suffix != ".py":
        return resolve(target) is not None
    module = modules_by_path()[text.path]
    if target.startswith("."):
        level = len(target) - len(target.lstrip("."))
        is_package = text.path.name == "__init__.py"
        parts = module.split(".")
        base = parts[: len(parts) - level + is_package]
        return resolve(".".join([*base, target.lstrip(".")])) is not None
    if resolve_in(module, target) is not None or resolve(target) is not None:
        return True
    # A member of a class of this module, or of one that it imports.
    for name in scope_of_module(module).names:
        home = resolve_in(module, name)
        if home is not None and isinstance(home[1], ast.ClassDef):
            scope, _ = members(home[0], home[1])
            if target in scope.names:
                return True
    # A search for the name finds it elsewhere in the package.
    return any(resolve_in(home, target) for home in homes().get(target.partition(".")[0], ()))


@cache
def homes() -> dict[str, list[str]]:
    """By name, the modules of the package that define it."""
    found: dict[str, list[str]] = {}
    for module in modules():
        if module.startswith(PACKAGE):
            for name, node in scope_of_module(module).names.items():
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found.setdefault(name, []).append(module)
    return found


@cache
def literals() -> frozenset[str]:
    """The strings of the source: a dotted name may be a key that the code writes."""
    return frozenset(
        node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
        for module in modules()
        if module.startswith(PACKAGE)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


# -------------------------------------------------------------------------------------- the checks
def is_known_file(text: Text, name: str) -> bool:
    if name in FOREIGN_FILES or (text.path.parent / name).exists():
        return True
    return "/".join(part for part in Path(name).parts if part not in (".", "..")) in ends()


@cache
def ends() -> frozenset[str]:
    """The ends of all paths: a reference need not begin at the root."""
    return frozenset(
        "/".join(path.parts[place:])
        for path in (file.relative_to(ROOT) for file in files())
        for place in range(len(path.parts))
    )


def missing_files(text: Text) -> Iterator[tuple[int, str]]:
    for found in _FILE.finditer(text.text):
        before = text.text[: found.start()].rpartition("\n")[2]
        if not re.search(r"https?:\S*$", before) and not is_known_file(text, found[0]):
            yield found.start(), f"no file {found[0]}"


def missing_names(text: Text) -> Iterator[tuple[int, str]]:
    for found in _DOTTED.finditer(text.text):
        name = re.sub(r"^lq\.", f"{PACKAGE}.", found[1])
        if name.endswith((".py", ".md")) or text.text[: found.start()].endswith("://"):
            continue
        if resolve(name) is None and name not in literals():
            yield found.start(), f"no name {found[1]}"


def missing_roles(text: Text) -> Iterator[tuple[int, str]]:
    for found in _ROLE.finditer(text.text):
        if not is_known_role(text, found[1]):
            yield found.start(), f"no target of {found[0]}"


@cache
def defined_in_tests() -> dict[str, set[str]]:
    """The names of test functions and fixtures by the name of their file."""
    found: dict[str, set[str]] = {}
    for path in sources():
        if path.is_relative_to(ROOT / "tests"):
            names = re.findall(r"^\s*(?:async )?def (\w+)", path.read_text("utf-8"), re.MULTILINE)
            found.setdefault(path.name, set()).update(names)
    return found


@cache
def known_tests() -> frozenset[str]:
    """Names of tests, and of their files without the suffix."""
    found = defined_in_tests()
    return frozenset().union(*found.values(), (Path(name).stem for name in found))


def missing_tests(text: Text) -> Iterator[tuple[int, str]]:
    for found in _TEST.finditer(text.text):
        file, _, name = found[1].rpartition("::")
        there = defined_in_tests().get(file, frozenset()) if file else known_tests()
        if name not in there:
            yield found.start(), f"no test {found[1]}"


def headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [title.strip() for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]


def anchor(title: str) -> str:
    """As GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.lower()))
    return kept.replace(" ", "-")


def rules_of(page: Path) -> set[int]:
    """The numbers below a heading that speaks of rules, or of headings such as "Rule 3"."""
    text = page.read_text("utf-8")
    found = {int(number) for number in re.findall(r"^#+ .*\b[Rr]ule (\d+)", text, re.MULTILINE)}
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        if "rules" in title.lower():
            found |= {int(number) for number in re.findall(r"^(\d+)\. ", body, re.MULTILINE)}
    return found


def page_named(name: str) -> Path | None:
    return next((page for page in pages() if page.name == name), None)


def missing_sections(text: Text) -> Iterator[tuple[int, str]]:
    if text.path.suffix == ".md":
        for found in _LINK.finditer(text.text):
            page = text.path.parent / found[1] if found[1] else text.path
            if "://" in found[1] or page.suffix != ".md" or not page.exists():
                continue
            if found[2] not in map(anchor, headings(page)):
                yield found.start(), f"no section {found[1]}#{found[2]}"
    for found in _RULE.finditer(text.text):
        page_of_rules = page_named(found[1])
        if page_of_rules is None:
            continue
        if int(found[2]) not in rules_of(page_of_rules):
            yield found.start(), f"no rule {found[2]} in {found[1]}"
    for found in _SECTION.finditer(text.text):
        cited = page_named(found[1])
        title = " ".join(found[2].split()).lower()
        if cited is not None and not any(
            heading.lower().startswith((title, title.partition(" ")[0]))
            for heading in headings(cited)
        ):
            yield found.start(), f"no section {' '.join(found[2].split())} in {found[1]}"


@pytest.mark.parametrize(
    "check", [missing_files, missing_names, missing_roles, missing_tests, missing_sections]
)
def test_references_lead_somewhere(check: object) -> None:
    assert callable(check)
    missing = [f"{text.at(at)}: {what}" for text in texts() for at, what in check(text)]
    assert missing == [], "\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("check", "prose", "what"),
    [
        (missing_files, "See `no_such_module.py`.", "no file no_such_module.py"),
        (missing_names, "Call logquarry.scan.no_such().", "no name logquarry.scan.no_such"),
        (missing_names, "Call lq.MessageStore.no_such.", "no name lq.MessageStore.no_such"),
        (missing_roles, ":mod:`logquarry.no_such`", "no target of :mod:`logquarry.no_such`"),
        (missing_tests, "`test_no_such_test` shows it.", "no test test_no_such_test"),
        (missing_sections, "(reliability.md, rule 99)", "no rule 99 in reliability.md"),
        (missing_sections, "[x](docs/verify.md#no-such)", "no section docs/verify.md#no-such"),
    ],
)
def test_a_reference_that_leads_nowhere_is_found(check: object, prose: str, what: str) -> None:
    assert callable(check)
    assert [found for _, found in check(Text(ROOT / "README.md", 1, prose))] == [what]
